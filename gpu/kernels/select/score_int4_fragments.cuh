#pragma once

#include "gpu/kernels/select/score_int4.cuh"

/// Queries and 4-bit copies of keys as fragments of tensor cores: codes are bytes, queries integers of 23 bits, whose
/// three digits, signed bytes, are columns of a matrix. So sums are exact, rounded once, and codes cost three
/// instructions for eight of them: what a lane reads of a row, 16 bytes at head_dim 128, is its share of matrix
/// fragments once it is masked (see Int4Layout). Keys are the rows of the product: all digits of a score come to the
/// same lane, so that none has to ask another one.
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

/// The queries as B fragments. Fragment f has the high and middle digits of heads 4f to 4f + 3 in neighbouring columns,
/// the last one the low digits of heads 0 to 3 in its even columns, of heads 4 to 7 in its odd ones: a lane, which gets
/// columns 2t and 2t + 1 of a product, has all digits of heads 4f + t.
template <std::uint32_t kHeadDim, std::uint32_t kFragments>
struct QueryFragments {
  static constexpr std::uint32_t kWords = kHeadDim / 32;  ///< of a lane, of a row of codes
  static constexpr std::uint32_t kTiles = kFragments + 1;
  /// As mma has them: registers (w, 0) are for the codes that lie in the lower halves of the bytes of word w, (w, 1)
  /// for those in the upper halves.
  std::uint32_t columns[kTiles][kWords][2];

  __device__ __forceinline__ void load(const Shared<kHeadDim>& s) {
    constexpr std::uint32_t kRowWords = kHeadDim / 8;
    const std::uint32_t g = threadIdx.x % kWarp / 4;
    const std::uint32_t t = threadIdx.x % 4;
#pragma unroll
    for (std::uint32_t tile = 0; tile < kTiles; ++tile) {
      const bool low = tile == kFragments;
      const std::uint32_t head = g / 2 + kTileHeads * (low ? g % 2 : tile);
#pragma unroll
      for (std::uint32_t w = 0; w < kWords; ++w) {
#pragma unroll
        for (std::uint32_t i = 0; i < 2; ++i) {
          std::uint32_t bytes = 0;
#pragma unroll
          for (std::uint32_t byte = 0; byte < 4; ++byte) {
            const Digits digits(s.q[head][(2 * byte + i) * kRowWords + t * kWords + w]);
            const std::int32_t digit = low ? digits.low : g % 2 == 0 ? digits.high : digits.middle;
            bytes |= static_cast<std::uint32_t>(digit & 0xff) << 8 * byte;
          }
          columns[tile][w][i] = head < kFragments * kTileHeads ? bytes : 0;
        }
      }
    }
  }
};

/// Where a lane's part of row g of an octet at the first copy lies: of its codes, and its scale and zero.
template <std::uint32_t kHeadDim>
struct LaneRow {
  std::uint64_t codes, params;

  __device__ __forceinline__ explicit LaneRow(const std::byte* copies) {
    const std::uint32_t g = threadIdx.x % kWarp / 4;
    const std::uint32_t t = threadIdx.x % 4;
    const auto first = static_cast<std::uint64_t>(__cvta_generic_to_global(copies));
    // Known before the loop, and not, as the compiler would have it, added up again in each turn.
    asm("add.u64 %0, %1, %2;" : "=l"(codes) : "l"(first), "l"(std::uint64_t{g * (kHeadDim / 2) + t * (kHeadDim / 8)}));
    asm("add.u64 %0, %1, %2;" : "=l"(params) : "l"(first), "l"(std::uint64_t{g * Int4Layout::kParamBytes}));
  }
};

/// What a lane reads of four octets: its share of the codes of row g of each, and scale and zero of row g of octet t.
template <std::uint32_t kHeadDim>
struct WarpRows {
  static constexpr std::uint32_t kWords = kHeadDim / 32;
  std::uint32_t words[kWarpOctets][kWords];
  std::uint32_t params;

  /// From the octet with that number among the block's on; if not `valid`, nothing, without a branch around it that
  /// would keep what was read before. What is read of rows that are not there says nothing.
  __device__ __forceinline__ void load(const Shared<kHeadDim>& s, const LaneRow<kHeadDim>& row, std::uint32_t number,
                                       bool valid) {
    static_assert(kWarpOctets == 4, "of each octet one of four lanes has scale and zero");
    const Places places = s.codes[number / kWarpOctets];
    const std::uint32_t params_place = s.params[number + threadIdx.x % 4];
#pragma unroll
    for (std::uint32_t o = 0; o < kWarpOctets; ++o)
      load_words(words[o], row.codes + std::uint64_t{places.codes[o]} * kUnit, valid);
    load_word(params, row.params + std::uint64_t{params_place} * kUnit, valid);
  }

 private:
  __device__ __forceinline__ static void load_word(std::uint32_t& word, std::uint64_t from, bool valid) {
    asm volatile(
        "{\n .reg .pred p;\n setp.ne.u32 p, %2, 0;\n"
        " @p ld.global.nc.L1::no_allocate.u32 %0, [%1];\n}"
        : "=r"(word)
        : "l"(from), "r"(static_cast<std::uint32_t>(valid)));
  }
  __device__ __forceinline__ static void load_words(std::uint32_t (&words)[kWords], std::uint64_t codes, bool valid) {
    if constexpr (kWords % 4 == 0) {
#pragma unroll
      for (std::uint32_t w = 0; w < kWords; w += 4) {
        asm volatile(
            "{\n .reg .pred p;\n setp.ne.u32 p, %5, 0;\n"
            " @p ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];\n}"
            : "=r"(words[w]), "=r"(words[w + 1]), "=r"(words[w + 2]), "=r"(words[w + 3])
            : "l"(codes + w * 4), "r"(static_cast<std::uint32_t>(valid)));
      }
    } else if constexpr (kWords % 2 == 0) {
#pragma unroll
      for (std::uint32_t w = 0; w < kWords; w += 2) {
        asm volatile(
            "{\n .reg .pred p;\n setp.ne.u32 p, %3, 0;\n"
            " @p ld.global.nc.L1::no_allocate.v2.u32 {%0, %1}, [%2];\n}"
            : "=r"(words[w]), "=r"(words[w + 1])
            : "l"(codes + w * 4), "r"(static_cast<std::uint32_t>(valid)));
      }
    } else {  // A lane's 12 bytes are aligned to 4.
#pragma unroll
      for (std::uint32_t w = 0; w < kWords; ++w) load_word(words[w], codes + w * 4, valid);
    }
  }
};

/// The same as A fragments, of two octets each. In registers of their own: the next rows' come to those read from.
template <std::uint32_t kHeadDim>
struct KeyFragments {
  static constexpr std::uint32_t kWords = kHeadDim / 32;
  std::uint32_t rows[kPairs][kWords][4];
  std::uint32_t params;

  __device__ __forceinline__ explicit KeyFragments(const WarpRows<kHeadDim>& from) : params(from.params) {
    constexpr std::uint32_t kHalves = 0x0f0f'0f0fu;
#pragma unroll
    for (std::uint32_t pair = 0; pair < kPairs; ++pair) {
#pragma unroll
      for (std::uint32_t w = 0; w < kWords; ++w) {
        const std::uint32_t a = from.words[2 * pair][w];
        const std::uint32_t b = from.words[2 * pair + 1][w];
        rows[pair][w][0] = a & kHalves;
        rows[pair][w][1] = b & kHalves;
        rows[pair][w][2] = a >> 4 & kHalves;
        rows[pair][w][3] = b >> 4 & kHalves;
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
template <std::uint32_t kHeadDim, std::uint32_t kFragments>
struct Products {
  static constexpr std::uint32_t kTiles = kFragments + 1;
  std::int32_t sums[kPairs][kTiles][4] = {};

  __device__ __forceinline__ Products(const KeyFragments<kHeadDim>& keys,
                                      const QueryFragments<kHeadDim, kFragments>& q) {
#pragma unroll
    for (std::uint32_t w = 0; w < kHeadDim / 32; ++w) {
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
