#pragma once

#include <cstdint>

#include "gpu/kernels/index/int4.hpp"
#include "gpu/kernels/mma.cuh"

/// Queries and 4-bit copies of keys as fragments of tensor cores: codes are bytes, queries integers of 24 bits, of
/// which three products take a byte each. So a product is exact, and codes cost two instructions for eight of them:
/// what a lane reads of a row, 16 bytes at head_dim 128, is its share of matrix fragments once it is masked (see
/// Int4Layout).
namespace sluice::gpu::score_int4 {

inline constexpr std::uint32_t kWarp = 32;
inline constexpr std::uint32_t kThreads = 256;
inline constexpr std::uint32_t kWarps = kThreads / kWarp;
inline constexpr std::uint32_t kBlocksPerSm = 2;
/// Tokens of a fragment; a warp has kTiles of them in flight.
inline constexpr std::uint32_t kTile = 16;
inline constexpr std::uint32_t kTiles = 2;
inline constexpr std::uint32_t kWarpTokens = kTile * kTiles;
inline constexpr std::uint32_t kBlockTokens = kWarps * kWarpTokens;
inline constexpr std::uint32_t kMostChunks = 16;  ///< of as many tokens, of one thread block
/// Query heads of a fragment, and rows of a half of one, an octet: these lie in one page, as page_tokens is a multiple.
inline constexpr std::uint32_t kHeads = 8;
inline constexpr std::uint32_t kRows = 8;
inline constexpr std::uint32_t kOctets = kBlockTokens / kRows;  ///< of a chunk
static_assert(kWarps == kHeads, "every warp stages one head");
inline constexpr int kQueryBits = 23;  ///< of a query's numbers, beside the sign

/// Eight rows of a page, and which of them are there.
struct Octet {
  std::uint16_t row = 0;  ///< of the page: the first
  std::uint8_t begin = 0;
  std::uint8_t end = 0;
};

template <std::uint32_t kHeadDim>
struct Shared {
  ScoreInt4Task task;
  std::int32_t q[kHeads][kHeadDim];  ///< in [-2^23, 2^23)
  float unit[kHeads];                ///< what a product has to be multiplied by
  float sum[kHeads];                 ///< over the channels, scaled
  float least[kHeads];               ///< scores from here on are candidates
  /// Of each octet of the block's chunks: its page, and where it lies there.
  std::uint32_t frames[kMostChunks * kOctets];
  Octet octets[kMostChunks * kOctets];
};

/// How the rows of a launch are cut: thread block i of `blocks` has chunks of kBlockTokens tokens, at most `chunks`.
/// Blocks take them in turn, as what will be chosen is often close together, and candidates of a block that finds many
/// would keep all others waiting.
struct Cut {
  std::uint32_t blocks;
  std::uint32_t chunks;
};

/// What one thread block scores of a row of pages laid end to end; or the tail of these heads.
struct Part {
  std::uint32_t first_head, heads;
  std::uint32_t count;   ///< tokens of the row's pages
  std::uint32_t stride;  ///< values of the row
  std::uint32_t blocks;  ///< that share its chunks

  [[nodiscard]] __device__ std::uint32_t chunk(std::uint32_t i) const { return blockIdx.x + i * blocks; }
  /// Of a warp in turn `i`: its first token, and its first octet among the block's.
  [[nodiscard]] __device__ std::uint32_t first(std::uint32_t i) const {
    return chunk(i) * kBlockTokens + threadIdx.x / kWarp * kWarpTokens;
  }
  [[nodiscard]] __device__ std::uint32_t octet(std::uint32_t i) const {
    return i * kOctets + threadIdx.x / kWarp * (kWarpTokens / kRows);
  }
};

__device__ __forceinline__ Part part_of(const ScoreInt4Task& task, std::uint32_t group, std::uint32_t page_tokens,
                                        const Cut& cut) {
  const bool lists = task.lists != nullptr;
  Part part{.first_head = lists ? blockIdx.z : 0,
            .heads = lists ? 1 : group,
            .count = task.estimates(page_tokens),
            .stride = task.row(page_tokens),
            .blocks = cut.blocks};
  if (!lists && blockIdx.z != 0) part.heads = part.count = 0;
  return part;
}

/// Where the octets of a part lie, one chunk's behind the other's: the loop over them divides by nothing.
template <std::uint32_t kHeadDim>
__device__ void stage_octets(Shared<kHeadDim>& s, const Part& part, std::uint32_t page_tokens, std::uint32_t chunks) {
  for (std::uint32_t i = threadIdx.x; i < chunks * kOctets; i += kThreads) {
    const std::uint32_t token = part.chunk(i / kOctets) * kBlockTokens + i % kOctets * kRows;
    Octet octet;
    std::uint32_t frame = 0;
    if (token < part.count) {
      const std::uint32_t page = token / page_tokens;
      const std::uint32_t row = token - page * page_tokens;
      const PageRun run = s.task.run(part.first_head, page, page_tokens);
      const auto in_octet = [&](std::uint32_t at) { return static_cast<std::uint8_t>(min(max(at, row) - row, kRows)); };
      octet = {.row = static_cast<std::uint16_t>(row), .begin = in_octet(run.begin), .end = in_octet(run.end)};
      if (octet.begin < octet.end) frame = s.task.frames[run.page];
    }
    s.octets[i] = octet;
    s.frames[i] = frame;
  }
}

/// Warp h stages head first + h; heads beyond the last are 0. Returns the length of its query.
template <std::uint32_t kHeadDim>
__device__ float stage_queries(Shared<kHeadDim>& s, std::uint32_t first, std::uint32_t heads, float scale) {
  const std::uint32_t head = threadIdx.x / kWarp;
  const std::uint32_t lane = threadIdx.x % kWarp;
  const float* const q = s.task.q + std::uint64_t{first + head} * kHeadDim;
  float values[kHeadDim / kWarp];
  float most = 0.f;
  float sum = 0.f;
  float squares = 0.f;
#pragma unroll
  for (std::uint32_t i = 0; i < kHeadDim / kWarp; ++i) {
    values[i] = head < heads ? q[i * kWarp + lane] : 0.f;
    most = fmaxf(most, fabsf(values[i]));
    sum += values[i];
    squares += values[i] * values[i];
  }
#pragma unroll
  for (int step = kWarp / 2; step > 0; step /= 2) {
    most = fmaxf(most, __shfl_xor_sync(detail::kAllLanes, most, step));
    sum += __shfl_xor_sync(detail::kAllLanes, sum, step);
    squares += __shfl_xor_sync(detail::kAllLanes, squares, step);
  }
  const int exponent = min(max(static_cast<int>(__float_as_uint(most) >> 23) - 126, -100), 100);
  // All are below 1 by this power of two, and what is left of one behind 23 bits is a rounding error of float.
  const float up = __int_as_float((127 + kQueryBits - exponent) << 23);
  constexpr auto kMost = static_cast<float>((1 << kQueryBits) - 1);
#pragma unroll
  for (std::uint32_t i = 0; i < kHeadDim / kWarp; ++i)
    s.q[head][i * kWarp + lane] = __float2int_rn(fminf(fmaxf(values[i] * up, -kMost), kMost));
  if (lane == 0) {
    s.unit[head] = __int_as_float((127 + exponent - kQueryBits) << 23) * scale;
    s.sum[head] = sum * scale;
  }
  return sqrtf(squares);
}

/// The queries as B fragments, a byte of each number in a register of its own: register (w, i) is for the codes that
/// lie in the lower (i = 0) or upper halves of the bytes of a lane's word w.
template <std::uint32_t kHeadDim>
struct QueryFragments {
  static constexpr std::uint32_t kWords = kHeadDim / 32;  ///< of a lane
  std::uint32_t high[kWords][2];                          ///< signed
  std::uint32_t middle[kWords][2];
  std::uint32_t low[kWords][2];

  __device__ __forceinline__ void load(const Shared<kHeadDim>& s) {
    constexpr std::uint32_t kRowWords = kHeadDim / 8;
    const std::uint32_t g = threadIdx.x % kWarp / 4;
    const std::uint32_t t = threadIdx.x % 4;
#pragma unroll
    for (std::uint32_t w = 0; w < kWords; ++w) {
#pragma unroll
      for (std::uint32_t i = 0; i < 2; ++i) {
        high[w][i] = middle[w][i] = low[w][i] = 0;
#pragma unroll
        for (std::uint32_t byte = 0; byte < 4; ++byte) {
          const std::uint32_t channel = (2 * byte + i) * kRowWords + t * kWords + w;
          const auto q = static_cast<std::uint32_t>(s.q[g][channel]);
          high[w][i] |= (q >> 16 & 0xffu) << 8 * byte;
          middle[w][i] |= (q >> 8 & 0xffu) << 8 * byte;
          low[w][i] |= (q & 0xffu) << 8 * byte;
        }
      }
    }
  }
};

/// A lane's share of one row: codes, scale and zero.
template <std::uint32_t kHeadDim>
struct RowShare {
  static constexpr std::uint32_t kWords = kHeadDim / 32;
  std::uint32_t words[kWords];
  __half2 params;
  bool visible;

  /// Of the octet with that number among the block's.
  __device__ __forceinline__ void load(const Shared<kHeadDim>& s, std::uint32_t number, const Int4Layout& layout) {
    const std::uint32_t g = threadIdx.x % kWarp / 4;
    const std::uint32_t t = threadIdx.x % 4;
    const Octet octet = s.octets[number];
    const std::uint32_t row = octet.row + g;
    visible = g >= octet.begin && g < octet.end;
    params = __half2half2(__ushort_as_half(0));
#pragma unroll
    for (std::uint32_t w = 0; w < kWords; ++w) words[w] = 0;
    if (!visible) return;
    const std::byte* const copy = s.task.copies + s.frames[number] * layout.page_bytes();
    const std::byte* const codes = copy + row * (kHeadDim / 2) + t * (kWords * 4);
    params = *reinterpret_cast<const __half2*>(copy + layout.params_offset() + row * Int4Layout::kParamBytes);
    if constexpr (kWords == 4) {
      asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                   : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
                   : "l"(codes));
    } else if constexpr (kWords == 2) {
      asm volatile("ld.global.nc.L1::no_allocate.v2.u32 {%0, %1}, [%2];" : "=r"(words[0]), "=r"(words[1]) : "l"(codes));
    } else if constexpr (kWords == 8) {
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

/// What a warp multiplies at a time.
template <std::uint32_t kHeadDim>
struct WarpRows {
  RowShare<kHeadDim> halves[kTiles * 2];  ///< of tiles

  /// From the octet with that number on.
  __device__ __forceinline__ void load(const Shared<kHeadDim>& s, std::uint32_t number, const Int4Layout& layout) {
#pragma unroll
    for (std::uint32_t u = 0; u < kTiles * 2; ++u) halves[u].load(s, number + u, layout);
  }
};

/// The products of 16 rows of codes with 8 queries, as the fragment C of mma has them.
template <std::uint32_t kHeadDim>
__device__ __forceinline__ void multiply(const RowShare<kHeadDim>& upper, const RowShare<kHeadDim>& lower,
                                         const QueryFragments<kHeadDim>& q, float (&products)[4]) {
  std::int32_t high[4] = {};
  std::int32_t middle[4] = {};
  std::int32_t low[4] = {};
#pragma unroll
  for (std::uint32_t w = 0; w < QueryFragments<kHeadDim>::kWords; ++w) {
    constexpr std::uint32_t kHalves = 0x0f0f'0f0fu;
    const std::uint32_t a[4] = {upper.words[w] & kHalves, lower.words[w] & kHalves, upper.words[w] >> 4 & kHalves,
                                lower.words[w] >> 4 & kHalves};
    detail::mma_bytes<true>(high, a, q.high[w][0], q.high[w][1]);
    detail::mma_bytes<false>(middle, a, q.middle[w][0], q.middle[w][1]);
    detail::mma_bytes<false>(low, a, q.low[w][0], q.low[w][1]);
  }
  // Of 256 channels at most, so that neither sum leaves its 32 bits.
#pragma unroll
  for (std::uint32_t c = 0; c < 4; ++c)
    products[c] = fmaf(static_cast<float>(high[c]), 65536.f, static_cast<float>(256 * middle[c] + low[c]));
}

}  // namespace sluice::gpu::score_int4
