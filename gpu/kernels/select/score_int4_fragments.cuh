#pragma once

#include "gpu/kernels/select/score_int4.cuh"

/// Queries and 4-bit copies of keys as fragments of tensor cores: codes are bytes, queries integers of 23 bits, whose
/// three digits, signed bytes, are rows of a matrix. So sums are exact, rounded once, and codes cost two instructions
/// for eight of them: what a lane reads of a row, 16 bytes at head_dim 128, is its share of matrix fragments once it is
/// masked (see Int4Layout).
namespace sluice::gpu::score_int4 {

/// A query's number as signed bytes: 65,536 high + 256 middle + low.
struct Digits {
  std::int32_t low, middle, high;
  __device__ __forceinline__ explicit Digits(std::int32_t q)
      : low(static_cast<std::int8_t>(q)),
        middle(static_cast<std::int8_t>(q - low >> 8)),
        high((q - low >> 8) - middle >> 8) {}
};

/// The queries as A fragments. Rows 0 to 3 of a fragment have the high digits of four heads, 4 to 7 their middle ones,
/// 8 to 11 their low ones: a lane has rows g and g + 8.
template <std::uint32_t kHeadDim, std::uint32_t kFragments>
struct QueryFragments {
  static constexpr std::uint32_t kWords = kHeadDim / 32;  ///< of a lane, of a row of codes
  /// As mma has them: registers (w, 0) and (w, 1) are for the codes that lie in the lower halves of the bytes of word
  /// w, the others for those in the upper halves.
  std::uint32_t rows[kFragments][kWords][4];

  __device__ __forceinline__ void load(const Shared<kHeadDim>& s) {
    constexpr std::uint32_t kRowWords = kHeadDim / 8;
    const std::uint32_t g = threadIdx.x % kWarp / 4;
    const std::uint32_t t = threadIdx.x % 4;
    const bool high = g < kRowHeads;
#pragma unroll
    for (std::uint32_t f = 0; f < kFragments; ++f) {
#pragma unroll
      for (std::uint32_t w = 0; w < kWords; ++w) {
#pragma unroll
        for (std::uint32_t i = 0; i < 2; ++i) {
          rows[f][w][2 * i] = rows[f][w][2 * i + 1] = 0;
#pragma unroll
          for (std::uint32_t byte = 0; byte < 4; ++byte) {
            const std::uint32_t channel = (2 * byte + i) * kRowWords + t * kWords + w;
            const Digits digits(s.q[f * kRowHeads + g % kRowHeads][channel]);
            rows[f][w][2 * i] |= static_cast<std::uint32_t>((high ? digits.high : digits.middle) & 0xff) << 8 * byte;
            rows[f][w][2 * i + 1] |= high ? static_cast<std::uint32_t>(digits.low & 0xff) << 8 * byte : 0;
          }
        }
      }
    }
  }
};

/// What a lane reads of four octets: its share of the codes of key g of each, and scale and zero of keys 2t and 2t + 1
/// of the two whose scores it will have.
template <std::uint32_t kHeadDim>
struct WarpRows {
  static constexpr std::uint32_t kWords = kHeadDim / 32;
  std::uint32_t words[kWarpOctets][kWords];
  uint2 params[kPairs];

  /// From the octet with that number among the block's on. What is read of rows that are not there says nothing.
  __device__ __forceinline__ void load(const Shared<kHeadDim>& s, const std::byte* copies, std::uint32_t number) {
    const std::uint32_t g = threadIdx.x % kWarp / 4;
    const std::uint32_t t = threadIdx.x % 4;
    const Places places = s.codes[number / kWarpOctets];
    const std::byte* const codes = copies + g * (kHeadDim / 2) + t * (kWords * 4);
#pragma unroll
    for (std::uint32_t o = 0; o < kWarpOctets; ++o)
      load_words(words[o], codes + std::uint64_t{places.codes[o]} * kUnit);
#pragma unroll
    for (std::uint32_t pair = 0; pair < kPairs; ++pair) {
      const std::byte* const row =
          copies + std::uint64_t{s.params[number + 2 * pair + g / kRowHeads]} * kUnit + 2 * t * Int4Layout::kParamBytes;
      params[pair] = *reinterpret_cast<const uint2*>(row);
    }
  }
  [[nodiscard]] __device__ __forceinline__ float2 scale_and_zero(std::uint32_t pair, std::uint32_t key) const {
    const std::uint32_t bits = key == 0 ? params[pair].x : params[pair].y;
    return __half22float2(*reinterpret_cast<const __half2*>(&bits));
  }

 private:
  __device__ __forceinline__ static void load_words(std::uint32_t (&words)[kWords], const std::byte* codes) {
    if constexpr (kWords % 4 == 0) {
#pragma unroll
      for (std::uint32_t w = 0; w < kWords; w += 4) {
        asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(words[w]), "=r"(words[w + 1]), "=r"(words[w + 2]), "=r"(words[w + 3])
                     : "l"(codes + w * 4));
      }
    } else if constexpr (kWords % 2 == 0) {
#pragma unroll
      for (std::uint32_t w = 0; w < kWords; w += 2) {
        asm volatile("ld.global.nc.L1::no_allocate.v2.u32 {%0, %1}, [%2];"
                     : "=r"(words[w]), "=r"(words[w + 1])
                     : "l"(codes + w * 4));
      }
    } else {  // A lane's 12 bytes are aligned to 4.
#pragma unroll
      for (std::uint32_t w = 0; w < kWords; ++w)
        asm volatile("ld.global.nc.L1::no_allocate.u32 %0, [%1];" : "=r"(words[w]) : "l"(codes + w * 4));
    }
  }
};

/// The products of four queries with the keys of a pair of octets: a lane gets those of query g % 4 with keys 2t and
/// 2t + 1, of the first octet in the lower half of a warp, of the second one in the upper half.
template <std::uint32_t kHeadDim, std::uint32_t kFragments>
__device__ __forceinline__ void multiply(const WarpRows<kHeadDim>& rows, std::uint32_t pair,
                                         const QueryFragments<kHeadDim, kFragments>& q, std::uint32_t fragment,
                                         float (&products)[2]) {
  constexpr std::uint32_t kWords = kHeadDim / 32;
  constexpr std::uint32_t kHalves = 0x0f0f'0f0fu;
  std::int32_t first[4] = {};
  std::int32_t second[4] = {};
#pragma unroll
  for (std::uint32_t w = 0; w < kWords; ++w) {
    const std::uint32_t a = rows.words[2 * pair][w];
    const std::uint32_t b = rows.words[2 * pair + 1][w];
    detail::mma_bytes(first, q.rows[fragment][w], a & kHalves, a >> 4 & kHalves);
    detail::mma_bytes(second, q.rows[fragment][w], b & kHalves, b >> 4 & kHalves);
  }
  // The lower half of the warp has high and low digits of both, the upper half middle ones: each gives the other what
  // that lacks of its octet.
  const bool lower = threadIdx.x % kWarp < kWarp / 2;
#pragma unroll
  for (std::uint32_t key = 0; key < 2; ++key) {
    const std::int32_t given =
        __shfl_xor_sync(detail::kAllLanes, lower ? second[key] : first[key], static_cast<int>(kWarp / 2));
    const std::int32_t given_low = __shfl_xor_sync(detail::kAllLanes, second[2 + key], static_cast<int>(kWarp / 2));
    const std::int32_t high = lower ? first[key] : given;
    const std::int32_t middle = lower ? given : second[key];
    const std::int32_t low = lower ? first[2 + key] : given_low;
    // Of 256 channels at most, so that neither sum leaves its 32 bits.
    products[key] = fmaf(static_cast<float>(high), 65536.f, static_cast<float>(256 * middle + low));
  }
}

}  // namespace sluice::gpu::score_int4
