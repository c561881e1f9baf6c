#pragma once

#include "gpu/kernels/select/score_int4.cuh"

/// Queries and keys' copies as fragments of tensor cores: codes are bytes, queries integers of 23 bits, whose three
/// digits, signed bytes, are columns of a matrix. So sums are exact, rounded once, and eight codes cost three
/// instructions, of 3 bits five: what a lane reads of a row, at head_dim 128 16 bytes or 8 and 4, is its share of
/// matrix fragments once it is masked (see CodeLayout). Keys are the rows of the product: all digits of a score come to
/// the same lane, so that none has to ask another one.
namespace sluice::gpu::score_int4 {

/// c += a * b of bytes, by mma.m16n8k32 (see mma.cuh): those of a are not signed, those of b are.
__device__ __forceinline__ void multiply_bytes(std::int32_t (&c)[4], const std::uint32_t (&a)[4],
                                               const std::uint32_t (&b)[2]) {
  asm volatile("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
               : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

/// A query's number as signed bytes: 65,536 high + 256 middle + low.
struct Digits {
  std::int32_t low, middle, high;
  __device__ __forceinline__ explicit Digits(std::int32_t q)
      : low(static_cast<std::int8_t>(q)),
        middle(static_cast<std::int8_t>(q - low >> 8)),
        high((q - low >> 8) - middle >> 8) {}
};

/// Neighbouring bytes that a lane reads, in the largest pieces that they are aligned to.
template <std::uint32_t kBytes>
struct LaneBytes {
  static constexpr std::uint32_t kSize = kBytes % 4 == 0 ? 4 : kBytes % 2 == 0 ? 2 : 1;
  static constexpr std::uint32_t kPieces = kBytes / kSize;
  std::uint32_t pieces[kPieces];

  /// If not `valid`, nothing, without a branch around it that would keep what was read before.
  __device__ __forceinline__ void load(std::uint64_t from, bool valid) {
    if constexpr (kSize == 4 && kPieces % 4 == 0) {
#pragma unroll
      for (std::uint32_t w = 0; w < kPieces; w += 4) {
        asm volatile(
            "{\n .reg .pred p;\n setp.ne.u32 p, %5, 0;\n"
            " @p ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];\n}"
            : "=r"(pieces[w]), "=r"(pieces[w + 1]), "=r"(pieces[w + 2]), "=r"(pieces[w + 3])
            : "l"(from + w * 4), "r"(static_cast<std::uint32_t>(valid)));
      }
    } else if constexpr (kSize == 4 && kPieces % 2 == 0) {
#pragma unroll
      for (std::uint32_t w = 0; w < kPieces; w += 2) {
        asm volatile(
            "{\n .reg .pred p;\n setp.ne.u32 p, %3, 0;\n"
            " @p ld.global.nc.L1::no_allocate.v2.u32 {%0, %1}, [%2];\n}"
            : "=r"(pieces[w]), "=r"(pieces[w + 1])
            : "l"(from + w * 4), "r"(static_cast<std::uint32_t>(valid)));
      }
    } else {
#pragma unroll
      for (std::uint32_t w = 0; w < kPieces; ++w) load_piece(pieces[w], from + w * kSize, valid);
    }
  }
  /// Bytes [4 * w, 4 * w + 4), 0 where there are none.
  [[nodiscard]] __device__ __forceinline__ std::uint32_t word(std::uint32_t w) const {
    if constexpr (kSize == 4) return pieces[w];
    std::uint32_t bytes = 0;
#pragma unroll
    for (std::uint32_t i = 0; i < 4 / kSize; ++i) {
      const std::uint32_t piece = w * (4 / kSize) + i;
      if (piece < kPieces) bytes |= pieces[piece] << 8 * kSize * i;
    }
    return bytes;
  }

 private:
  __device__ __forceinline__ static void load_piece(std::uint32_t& piece, std::uint64_t from, bool valid) {
    if constexpr (kSize == 4) {
      asm volatile(
          "{\n .reg .pred p;\n setp.ne.u32 p, %2, 0;\n"
          " @p ld.global.nc.L1::no_allocate.u32 %0, [%1];\n}"
          : "=r"(piece)
          : "l"(from), "r"(static_cast<std::uint32_t>(valid)));
    } else if constexpr (kSize == 2) {
      asm volatile(
          "{\n .reg .pred p;\n setp.ne.u32 p, %2, 0;\n"
          " @p ld.global.nc.L1::no_allocate.u16 %0, [%1];\n}"
          : "=r"(piece)
          : "l"(from), "r"(static_cast<std::uint32_t>(valid)));
    } else {
      asm volatile(
          "{\n .reg .pred p;\n setp.ne.u32 p, %2, 0;\n"
          " @p ld.global.nc.L1::no_allocate.u8 %0, [%1];\n}"
          : "=r"(piece)
          : "l"(from), "r"(static_cast<std::uint32_t>(valid)));
    }
  }
};

/// A code of a lane's share of a row: which of the eight of which of the lane's units.
struct CodePlace {
  std::uint32_t unit, code;
};

/// A lane's share of the codes of a row, kHeadDim / 32 units, and the registers of bytes that they become: two of each
/// block of 32 channels that is multiplied at a time.
template <std::uint32_t kHeadDim, std::uint32_t kBits>
struct LaneCodes;

/// A unit is a word, of whose bytes one register has the lower halves, and the next one the upper halves.
template <std::uint32_t kHeadDim>
struct LaneCodes<kHeadDim, kCodeBits> {
  static constexpr std::uint32_t kUnits = kHeadDim / 32;
  static constexpr std::uint32_t kBlocks = kUnits;
  LaneBytes<4 * kUnits> words;

  [[nodiscard]] __device__ static constexpr CodePlace place(std::uint32_t i, std::uint32_t byte) {
    return {.unit = i / 2, .code = 2 * byte + i % 2};
  }
  __device__ __forceinline__ void load(std::uint64_t codes, std::uint64_t /*thirds*/, bool valid) {
    words.load(codes, valid);
  }
  [[nodiscard]] __device__ __forceinline__ std::uint32_t bytes(std::uint32_t i) const {
    constexpr std::uint32_t kHalves = 0x0f0f'0f0fu;
    return i % 2 == 0 ? words.word(i / 2) & kHalves : words.word(i / 2) >> 4 & kHalves;
  }
};

/// Of two units bytes a and b are a word, of four bytes c. Three registers come of each word of the former, and of a
/// word of the latter two, or one if it is no more than half full. Of what is not there, units from kUnits on, bytes
/// are whatever they are: those of the queries are 0.
template <std::uint32_t kHeadDim>
struct LaneCodes<kHeadDim, kFewCodeBits> {
  static constexpr std::uint32_t kUnits = kHeadDim / 32;
  static constexpr std::uint32_t kPairWords = (kUnits + 1) / 2;
  static constexpr std::uint32_t kRegisters = 3 * kPairWords + (kUnits + 1) / 4 * 2 + (kUnits % 4 % 3 != 0 ? 1 : 0);
  static_assert(kRegisters % 2 == 0);
  static constexpr std::uint32_t kBlocks = kRegisters / 2;
  LaneBytes<2 * kUnits> pairs;
  LaneBytes<kUnits> thirds;

  [[nodiscard]] __device__ static constexpr CodePlace place(std::uint32_t i, std::uint32_t byte) {
    if (i < 3 * kPairWords && i % 3 == 2) return {.unit = i / 3 * 2 + byte / 2, .code = 6 + byte % 2};
    if (i < 3 * kPairWords) return {.unit = i / 3 * 2 + byte / 2, .code = byte % 2 * 2 + i % 3};
    const std::uint32_t at = i - 3 * kPairWords;
    if (full(at / 2)) return {.unit = at / 2 * 4 + byte, .code = 4 + at % 2};
    return {.unit = at / 2 * 4 + byte % 2, .code = 4 + byte / 2};
  }
  __device__ __forceinline__ void load(std::uint64_t codes, std::uint64_t thirds_at, bool valid) {
    pairs.load(codes, valid);
    thirds.load(thirds_at, valid);
  }
  [[nodiscard]] __device__ __forceinline__ std::uint32_t bytes(std::uint32_t i) const {
    constexpr std::uint32_t kCodes = 0x0707'0707u;
    if (i < 3 * kPairWords) {
      const std::uint32_t word = pairs.word(i / 3);
      return i % 3 == 0 ? word & kCodes : i % 3 == 1 ? word >> 3 & kCodes : last_codes(word, i / 3);
    }
    const std::uint32_t at = i - 3 * kPairWords;
    const std::uint32_t word = thirds.word(at / 2);
    if (!full(at / 2)) return __byte_perm(word, word >> 4, 0x5410) & kCodes;
    return at % 2 == 0 ? word & kCodes : word >> 4 & kCodes;
  }

 private:
  /// Whether more than half of a word of bytes c is there.
  [[nodiscard]] __device__ static constexpr bool full(std::uint32_t word) { return kUnits - 4 * word > 2; }
  /// Codes 6 and 7 of a pair of units, the high bits of which are in bytes c.
  [[nodiscard]] __device__ __forceinline__ std::uint32_t last_codes(std::uint32_t word, std::uint32_t pair) const {
    const std::uint32_t c = thirds.word(pair / 2);
    const std::uint32_t high = __byte_perm(c >> 1, c >> 5, pair % 2 == 0 ? 0x5140 : 0x7362);
    return (word >> 6 & 0x0303'0303u) | (high & 0x0404'0404u);
  }
};

/// The queries as B fragments. Fragment f has the high and middle digits of heads 4f to 4f + 3 in neighbouring columns,
/// the last one the low digits of heads 0 to 3 in its even columns, of heads 4 to 7 in its odd ones: a lane, which gets
/// columns 2t and 2t + 1 of a product, has all digits of heads 4f + t.
template <std::uint32_t kHeadDim, std::uint32_t kBits, std::uint32_t kFragments>
struct QueryFragments {
  using Codes = LaneCodes<kHeadDim, kBits>;
  static constexpr std::uint32_t kTiles = kFragments + 1;
  /// As mma has them: registers (w, i) are for the codes of register 2w + i of LaneCodes.
  std::uint32_t columns[kTiles][Codes::kBlocks][2];

  __device__ __forceinline__ void load(const Shared<kHeadDim>& s) {
    constexpr std::uint32_t kRowUnits = kHeadDim / 8;
    const std::uint32_t g = threadIdx.x % kWarp / 4;
    const std::uint32_t t = threadIdx.x % 4;
#pragma unroll
    for (std::uint32_t tile = 0; tile < kTiles; ++tile) {
      const bool low = tile == kFragments;
      const std::uint32_t head = g / 2 + kTileHeads * (low ? g % 2 : tile);
#pragma unroll
      for (std::uint32_t w = 0; w < Codes::kBlocks; ++w) {
#pragma unroll
        for (std::uint32_t i = 0; i < 2; ++i) {
          std::uint32_t bytes = 0;
#pragma unroll
          for (std::uint32_t byte = 0; byte < 4; ++byte) {
            const CodePlace at = Codes::place(2 * w + i, byte);
            if (at.unit >= Codes::kUnits) continue;
            const Digits digits(s.q[head][at.code * kRowUnits + t * Codes::kUnits + at.unit]);
            const std::int32_t digit = low ? digits.low : g % 2 == 0 ? digits.high : digits.middle;
            bytes |= static_cast<std::uint32_t>(digit & 0xff) << 8 * byte;
          }
          columns[tile][w][i] = head < kFragments * kTileHeads ? bytes : 0;
        }
      }
    }
  }
};

/// Where a lane's part of row g of an octet at the first copy lies: of its codes, of 3 bits of their bytes c, too, and
/// its scale and zero.
template <std::uint32_t kHeadDim, std::uint32_t kBits>
struct LaneRow {
  std::uint64_t codes, thirds = 0, params;

  __device__ __forceinline__ explicit LaneRow(const std::byte* copies) {
    // Of words, or of bytes a and b.
    constexpr std::uint32_t kRowBytes = kBits == kCodeBits ? kHeadDim / 2 : kHeadDim / 4;
    const std::uint32_t g = threadIdx.x % kWarp / 4;
    const std::uint32_t t = threadIdx.x % 4;
    const auto first = static_cast<std::uint64_t>(__cvta_generic_to_global(copies));
    set(codes, first, g * kRowBytes + t * (kRowBytes / 4));
    if constexpr (kBits == kFewCodeBits)
      set(thirds, first, kRows * kRowBytes + g * (kHeadDim / 8) + t * (kHeadDim / 32));
    set(params, first, g * CodeLayout::kParamBytes);
  }

 private:
  /// Known before the loop, and not, as the compiler would have it, added up again in each turn.
  __device__ __forceinline__ static void set(std::uint64_t& address, std::uint64_t first, std::uint32_t behind) {
    asm("add.u64 %0, %1, %2;" : "=l"(address) : "l"(first), "l"(std::uint64_t{behind}));
  }
};

/// What a lane reads of four octets: its share of the codes of row g of each, and scale and zero of row g of octet t.
template <std::uint32_t kHeadDim, std::uint32_t kBits>
struct WarpRows {
  LaneCodes<kHeadDim, kBits> codes[kWarpOctets];
  LaneBytes<4> params;

  /// From the octet with that number among the block's on, see LaneBytes::load. What is read of rows that are not there
  /// says nothing.
  __device__ __forceinline__ void load(const Shared<kHeadDim>& s, const LaneRow<kHeadDim, kBits>& row,
                                       std::uint32_t number, bool valid) {
    static_assert(kWarpOctets == 4, "of each octet one of four lanes has scale and zero");
    const Places places = s.codes[number / kWarpOctets];
    const std::uint32_t params_place = s.params[number + threadIdx.x % 4];
#pragma unroll
    for (std::uint32_t o = 0; o < kWarpOctets; ++o) {
      const std::uint64_t behind = std::uint64_t{places.codes[o]} * kUnit;
      codes[o].load(row.codes + behind, row.thirds + behind, valid);
    }
    params.load(row.params + std::uint64_t{params_place} * kUnit, valid);
  }
};

/// The same as A fragments, of two octets each. In registers of their own: the next rows' come to those read from.
template <std::uint32_t kHeadDim, std::uint32_t kBits>
struct KeyFragments {
  static constexpr std::uint32_t kBlocks = LaneCodes<kHeadDim, kBits>::kBlocks;
  std::uint32_t rows[kPairs][kBlocks][4];
  std::uint32_t params;

  __device__ __forceinline__ explicit KeyFragments(const WarpRows<kHeadDim, kBits>& from)
      : params(from.params.word(0)) {
#pragma unroll
    for (std::uint32_t pair = 0; pair < kPairs; ++pair) {
#pragma unroll
      for (std::uint32_t w = 0; w < kBlocks; ++w) {
        rows[pair][w][0] = from.codes[2 * pair].bytes(2 * w);
        rows[pair][w][1] = from.codes[2 * pair + 1].bytes(2 * w);
        rows[pair][w][2] = from.codes[2 * pair].bytes(2 * w + 1);
        rows[pair][w][3] = from.codes[2 * pair + 1].bytes(2 * w + 1);
      }
    }
  }
  /// Scale and zero of row g of an octet, from the lane that has them. By all lanes.
  [[nodiscard]] __device__ __forceinline__ float2 scale_and_zero(std::uint32_t octet) const {
    const std::uint32_t lane = threadIdx.x % kWarp / 4 * 4 + octet;
    const std::uint32_t bits = __shfl_sync(detail::kAllLanes, params, static_cast<int>(lane));
    return __half22float2(*reinterpret_cast<const __half2*>(&bits));
  }
};

/// The products of a warp's keys with the queries. A lane gets those of row g of each octet with heads 4f + t.
template <std::uint32_t kHeadDim, std::uint32_t kBits, std::uint32_t kFragments>
struct Products {
  static constexpr std::uint32_t kTiles = kFragments + 1;
  std::int32_t sums[kPairs][kTiles][4] = {};

  __device__ __forceinline__ Products(const KeyFragments<kHeadDim, kBits>& keys,
                                      const QueryFragments<kHeadDim, kBits, kFragments>& q) {
#pragma unroll
    for (std::uint32_t w = 0; w < LaneCodes<kHeadDim, kBits>::kBlocks; ++w) {
#pragma unroll
      for (std::uint32_t pair = 0; pair < kPairs; ++pair) {
#pragma unroll
        for (std::uint32_t tile = 0; tile < kTiles; ++tile)
          multiply_bytes(sums[pair][tile], keys.rows[pair][w], q.columns[tile][w]);
      }
    }
  }
  [[nodiscard]] __device__ __forceinline__ float of(std::uint32_t fragment, std::uint32_t octet) const {
    const std::uint32_t row = octet % 2 * 2;
    const std::int32_t high = sums[octet / 2][fragment][row];
    const std::int32_t middle = sums[octet / 2][fragment][row + 1];
    const std::int32_t low = sums[octet / 2][kFragments][row + fragment];
    // Of 256 channels at most, so that neither sum leaves its 32 bits.
    return fmaf(static_cast<float>(high), 65536.f, static_cast<float>(256 * middle + low));
  }
};

}  // namespace sluice::gpu::score_int4
