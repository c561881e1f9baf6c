#pragma once

#include <cstdint>

#include "gpu/kernels/index/int4.hpp"
#include "gpu/kernels/mma.cuh"

/// Queries and 4-bit copies of keys as fragments of tensor cores: codes are exact in f16, queries are sums of two f16.
/// What a lane reads of a row, 16 bytes at head_dim 128, is its share of a matrix fragment once it is masked (see
/// Int4Layout), so that copies are read as fast as memory gives them.
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
inline constexpr std::uint32_t kMaxSlice = 16 * kBlockTokens;  ///< tokens of one thread block at most
/// Query heads of a fragment, and rows of a half of one: these lie in one page, as page_tokens is a multiple.
inline constexpr std::uint32_t kHeads = 8;
inline constexpr std::uint32_t kRows = 8;
static_assert(kWarps == kHeads, "every warp stages one head");

template <std::uint32_t kHeadDim>
struct Shared {
  ScoreInt4Task task;
  float q[kHeads][kHeadDim];  ///< divided by a power of two, so that all are below 1
  float unit[kHeads];         ///< what a product has to be multiplied by
  float sum[kHeads];          ///< over the channels, scaled
  float least[kHeads];        ///< scores from here on are candidates
  std::uint32_t frames[kMaxSlice / kRows + 1];
  std::uint32_t runs[kMaxSlice / kRows + 1];  ///< rows of that page that are there: the first, and the end << 16
};

/// What one thread block scores: tokens [begin, end) of a row of pages laid end to end; or the tail of these heads.
struct Part {
  std::uint32_t first_head, heads;
  std::uint32_t count;   ///< tokens of the row's pages
  std::uint32_t stride;  ///< values of the row
  std::uint32_t begin, end;
};

__device__ __forceinline__ Part part_of(const ScoreInt4Task& task, std::uint32_t group, std::uint32_t page_tokens,
                                        std::uint32_t slice) {
  const bool lists = task.lists != nullptr;
  Part part{.first_head = lists ? blockIdx.z : 0,
            .heads = lists ? 1 : group,
            .count = task.estimates(page_tokens),
            .stride = task.row(page_tokens),
            .begin = blockIdx.x * slice,
            .end = 0};
  if (!lists && blockIdx.z != 0) part.heads = part.count = 0;
  part.end = min(part.begin + slice, part.count);
  return part;
}

/// The pages of a part, and which rows of each are there.
template <std::uint32_t kHeadDim>
__device__ void stage_pages(Shared<kHeadDim>& s, const Part& part, std::uint32_t page_tokens) {
  const std::uint32_t first = part.begin / page_tokens;
  const std::uint32_t pages = (part.end - 1) / page_tokens - first + 1;
  for (std::uint32_t i = threadIdx.x; i < pages; i += kThreads) {
    const PageRun run = s.task.run(part.first_head, first + i, page_tokens);
    s.runs[i] = run.begin | std::uint32_t{run.end} << 16;
    s.frames[i] = run.begin < run.end ? s.task.frames[run.page] : 0;
  }
}

/// Warp h stages head first + h; heads beyond the last are 0. Returns the length of its query.
template <std::uint32_t kHeadDim>
__device__ float stage_queries(Shared<kHeadDim>& s, std::uint32_t first, std::uint32_t heads) {
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
  const float down = __int_as_float((127 - exponent) << 23);
#pragma unroll
  for (std::uint32_t i = 0; i < kHeadDim / kWarp; ++i) s.q[head][i * kWarp + lane] = values[i] * down;
  if (lane == 0) {
    const float scale = 1.f / sqrtf(static_cast<float>(kHeadDim));
    s.unit[head] = __int_as_float((127 + exponent) << 23) * scale;
    s.sum[head] = sum * scale;
  }
  return sqrtf(squares);
}

/// The queries as B fragments: register j is for the j-th pair of channels of a lane's codes.
template <std::uint32_t kHeadDim>
struct QueryFragments {
  static constexpr std::uint32_t kPairs = kHeadDim / 8;
  std::uint32_t high[kPairs];
  std::uint32_t low[kPairs];

  __device__ __forceinline__ void load(const Shared<kHeadDim>& s) {
    constexpr std::uint32_t kWords = kHeadDim / 8;  // of a row
    const std::uint32_t g = threadIdx.x % kWarp / 4;
    const std::uint32_t t = threadIdx.x % 4;
#pragma unroll
    for (std::uint32_t j = 0; j < kPairs; ++j) {
      const std::uint32_t word = t * (kWords / 4) + j / 4;
      const std::uint32_t n = j % 4;  // Codes n and n + 4 of a word are in the same place of its halves.
      const auto terms = detail::split<__half>(s.q[g][n * kWords + word], s.q[g][(n + 4) * kWords + word]);
      high[j] = terms.high;
      low[j] = terms.low;
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

  __device__ __forceinline__ void load(const Shared<kHeadDim>& s, const Part& part, std::uint32_t token,
                                       const Int4Layout& layout) {
    const std::uint32_t g = threadIdx.x % kWarp / 4;
    const std::uint32_t t = threadIdx.x % 4;
    const std::uint32_t page = token / layout.page_tokens;
    const std::uint32_t row = token - page * layout.page_tokens + g;
    const std::uint32_t staged = page - part.begin / layout.page_tokens;
    const std::uint32_t run = s.runs[staged];
    visible = token + g < part.end && row >= (run & 0xffffu) && row < run >> 16;
    params = __half2half2(__ushort_as_half(0));
#pragma unroll
    for (std::uint32_t w = 0; w < kWords; ++w) words[w] = 0;
    if (!visible) return;
    const std::byte* const copy = s.task.copies + s.frames[staged] * layout.page_bytes();
    const std::byte* const codes = copy + row * (kHeadDim / 2) + t * (kWords * 4);
    params = *reinterpret_cast<const __half2*>(copy + layout.params_offset() + row * Int4Layout::kParamBytes);
    if constexpr (kWords == 4) {
      asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                   : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
                   : "l"(codes));
    } else {
      asm volatile("ld.global.nc.L1::no_allocate.v2.u32 {%0, %1}, [%2];" : "=r"(words[0]), "=r"(words[1]) : "l"(codes));
    }
  }
};

/// What a warp multiplies at a time.
template <std::uint32_t kHeadDim>
struct WarpRows {
  RowShare<kHeadDim> halves[kTiles * 2];  ///< of tiles

  /// From token `at` on; instead of what lies behind the part its last rows.
  __device__ __forceinline__ void load(const Shared<kHeadDim>& s, const Part& part, std::uint32_t at,
                                       const Int4Layout& layout) {
#pragma unroll
    for (std::uint32_t u = 0; u < kTiles * 2; ++u)
      halves[u].load(s, part, min(at + u * kRows, (part.end - 1) / kRows * kRows), layout);
  }
};

/// Codes n and n + 4 of a word as two f16: in the last bits of 1024 they are themselves.
__device__ __forceinline__ std::uint32_t code_pair(std::uint32_t word, std::uint32_t n) {
  const std::uint32_t bits = ((word >> (4 * n)) & 0x000f'000fu) | 0x6400'6400u;
  const __half2 codes = __hsub2(reinterpret_cast<const __half2&>(bits), __half2half2(__ushort_as_half(0x6400)));
  return reinterpret_cast<const std::uint32_t&>(codes);
}

template <std::uint32_t kHeadDim>
__device__ __forceinline__ void multiply(const RowShare<kHeadDim>& upper, const RowShare<kHeadDim>& lower,
                                         const QueryFragments<kHeadDim>& q, float (&sums)[4]) {
#pragma unroll
  for (std::uint32_t j = 0; j < QueryFragments<kHeadDim>::kPairs; j += 2) {
    const std::uint32_t a[4] = {code_pair(upper.words[j / 4], j % 4), code_pair(lower.words[j / 4], j % 4),
                                code_pair(upper.words[j / 4], j % 4 + 1), code_pair(lower.words[j / 4], j % 4 + 1)};
    detail::mma<__half>(sums, a, q.high[j], q.high[j + 1]);
    detail::mma<__half>(sums, a, q.low[j], q.low[j + 1]);
  }
}

}  // namespace sluice::gpu::score_int4
