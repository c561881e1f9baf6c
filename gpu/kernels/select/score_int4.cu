// Estimated logits from 4-bit copies, on tensor cores: codes are exact in f16, queries are sums of two f16. What a lane
// reads of a row, 16 bytes at head_dim 128, is its share of a matrix fragment once it is masked (see Int4Layout), so
// that the kernel is as fast as memory gives it the copies. The few keys of a tail are a thread block's of their own.

#include <algorithm>

#include "gpu/device/cuda_error.hpp"
#include "gpu/kernels/elements.cuh"
#include "gpu/kernels/index/int4.hpp"
#include "gpu/kernels/mma.cuh"

namespace sluice::gpu {
namespace {

constexpr std::uint32_t kWarp = 32;
constexpr std::uint32_t kThreads = 256;
constexpr std::uint32_t kWarps = kThreads / kWarp;
constexpr std::uint32_t kBlocksPerSm = 2;
/// Tokens of a fragment; a warp has kTiles of them in flight.
constexpr std::uint32_t kTile = 16;
constexpr std::uint32_t kTiles = 2;
constexpr std::uint32_t kWarpTokens = kTile * kTiles;
constexpr std::uint32_t kBlockTokens = kWarps * kWarpTokens;
constexpr std::uint32_t kMaxSlice = 16 * kBlockTokens;  ///< tokens of one thread block at most
/// Query heads of a fragment, and rows of a half of one: these lie in one page, as page_tokens is a multiple.
constexpr std::uint32_t kHeads = 8;
constexpr std::uint32_t kRows = 8;
static_assert(kWarps == kHeads, "every warp stages one head");

template <std::uint32_t kHeadDim>
struct Shared {
  ScoreInt4Task task;
  float q[kHeads][kHeadDim];  ///< divided by a power of two, so that all are below 1
  float unit[kHeads];         ///< what a product has to be multiplied by
  float sum[kHeads];          ///< over the channels, scaled
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

/// Warp h stages head first + h; heads beyond the last are 0.
template <std::uint32_t kHeadDim>
__device__ void stage_queries(Shared<kHeadDim>& s, std::uint32_t first, std::uint32_t heads) {
  const std::uint32_t head = threadIdx.x / kWarp;
  const std::uint32_t lane = threadIdx.x % kWarp;
  const float* const q = s.task.q + std::uint64_t{first + head} * kHeadDim;
  float values[kHeadDim / kWarp];
  float most = 0.f;
  float sum = 0.f;
#pragma unroll
  for (std::uint32_t i = 0; i < kHeadDim / kWarp; ++i) {
    values[i] = head < heads ? q[i * kWarp + lane] : 0.f;
    most = fmaxf(most, fabsf(values[i]));
    sum += values[i];
  }
#pragma unroll
  for (int step = kWarp / 2; step > 0; step /= 2) {
    most = fmaxf(most, __shfl_xor_sync(detail::kAllLanes, most, step));
    sum += __shfl_xor_sync(detail::kAllLanes, sum, step);
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

/// Codes n and n + 4 of a word as two f16: in the last bits of 1024 they are themselves.
__device__ __forceinline__ std::uint32_t code_pair(std::uint32_t word, std::uint32_t n) {
  const std::uint32_t bits = ((word >> (4 * n)) & 0x000f'000fu) | 0x6400'6400u;
  const __half2 codes = __hsub2(reinterpret_cast<const __half2&>(bits), __half2half2(__ushort_as_half(0x6400)));
  return reinterpret_cast<const std::uint32_t&>(codes);
}

template <std::uint32_t kHeadDim>
__device__ __forceinline__ void multiply(const RowShare<kHeadDim> (&rows)[2], const QueryFragments<kHeadDim>& q,
                                         float (&sums)[4]) {
#pragma unroll
  for (std::uint32_t j = 0; j < QueryFragments<kHeadDim>::kPairs; j += 2) {
    const std::uint32_t a[4] = {code_pair(rows[0].words[j / 4], j % 4), code_pair(rows[1].words[j / 4], j % 4),
                                code_pair(rows[0].words[j / 4], j % 4 + 1), code_pair(rows[1].words[j / 4], j % 4 + 1)};
    detail::mma<__half>(sums, a, q.high[j], q.high[j + 1]);
    detail::mma<__half>(sums, a, q.low[j], q.low[j + 1]);
  }
}

__device__ __forceinline__ float load_key(const std::byte* row, std::uint32_t channel, DType dtype) {
  switch (dtype) {
    case DType::f32: return detail::load_element<DType::f32>(row + 4 * channel);
    case DType::f16: return detail::load_element<DType::f16>(row + 2 * channel);
    case DType::bf16: return detail::load_element<DType::bf16>(row + 2 * channel);
  }
  return 0.f;
}

/// A warp takes every kWarps-th row, a lane neighbouring channels of it.
template <std::uint32_t kHeadDim>
__device__ void score_tail(const ScoreInt4Task& task, const Part& part, DType dtype) {
  constexpr std::uint32_t kChannels = kHeadDim / kWarp;
  constexpr std::uint32_t kHeadsAtOnce = 4;  // Their reductions overlap.
  const std::uint32_t lane = threadIdx.x % kWarp;
  const float scale = 1.f / sqrtf(static_cast<float>(kHeadDim));
  for (std::uint32_t row = threadIdx.x / kWarp; row < task.tail_rows; row += kWarps) {
    const std::byte* const key = task.tail + std::uint64_t{row} * kHeadDim * bytes_of(dtype);
    float k[kChannels];
#pragma unroll
    for (std::uint32_t c = 0; c < kChannels; ++c) k[c] = load_key(key, lane * kChannels + c, dtype);
    for (std::uint32_t first = 0; first < part.heads; first += kHeadsAtOnce) {
      float sums[kHeadsAtOnce] = {};
#pragma unroll
      for (std::uint32_t h = 0; h < kHeadsAtOnce; ++h) {
        const std::uint32_t head = part.first_head + min(first + h, part.heads - 1);
        const float* const q = task.q + std::uint64_t{head} * kHeadDim + lane * kChannels;
#pragma unroll
        for (std::uint32_t c = 0; c < kChannels; ++c) sums[h] += q[c] * k[c];
      }
#pragma unroll
      for (int step = kWarp / 2; step > 0; step /= 2) {
#pragma unroll
        for (std::uint32_t h = 0; h < kHeadsAtOnce; ++h) sums[h] += __shfl_xor_sync(detail::kAllLanes, sums[h], step);
      }
#pragma unroll
      for (std::uint32_t h = 0; h < kHeadsAtOnce; ++h) {
        if (lane != h || first + h >= part.heads) continue;
        task.out[std::uint64_t{part.first_head + first + h} * part.stride + part.count + row] = sums[h] * scale;
      }
    }
  }
}

/// How the grid is cut: slices (blockIdx.x), and behind them a tail, of tasks (blockIdx.y), and of their heads
/// (blockIdx.z) where each has a list.
struct Cut {
  std::uint32_t slices;
  std::uint32_t tokens;  ///< of a slice
};

template <std::uint32_t kHeadDim>
__global__ void __launch_bounds__(kThreads, kBlocksPerSm)
    score_int4_kernel(const __grid_constant__ TaskArray<ScoreInt4Task> tasks, const ScoreInt4Shape shape, Cut cut) {
  __shared__ Shared<kHeadDim> s;
  const std::uint32_t group = shape.group;
  const Int4Layout layout = shape.layout;
  if (threadIdx.x == 0) s.task = tasks[blockIdx.y];
  __syncthreads();
  const Part part = part_of(s.task, group, layout.page_tokens, cut.tokens);
  if (blockIdx.x == cut.slices) return score_tail<kHeadDim>(s.task, part, shape.dtype);
  if (part.begin >= part.count) return;
  stage_pages(s, part, layout.page_tokens);
  const std::uint32_t g = threadIdx.x % kWarp / 4;
  const std::uint32_t t = threadIdx.x % 4;
  for (std::uint32_t first = 0; first < part.heads; first += kHeads) {
    const std::uint32_t heads = min(kHeads, part.heads - first);
    if (first != 0) __syncthreads();  // The queries before these have been read.
    stage_queries(s, part.first_head + first, heads);
    __syncthreads();
    QueryFragments<kHeadDim> q;
    q.load(s);
    float* const out = s.task.out + std::uint64_t{part.first_head + first} * part.stride;
    for (std::uint32_t at = part.begin + threadIdx.x / kWarp * kWarpTokens; at < part.end; at += kBlockTokens) {
      RowShare<kHeadDim> rows[kTiles][2];
#pragma unroll
      for (std::uint32_t u = 0; u < kTiles * 2; ++u) {
        const std::uint32_t token = min(at + u * kRows, (part.end - 1) / kRows * kRows);
        rows[u / 2][u % 2].load(s, part, token, layout);
      }
#pragma unroll
      for (std::uint32_t tile = 0; tile < kTiles; ++tile) {
        float sums[4] = {};
        multiply(rows[tile], q, sums);
#pragma unroll
        for (std::uint32_t c = 0; c < 4; ++c) {
          const RowShare<kHeadDim>& row = rows[tile][c / 2];
          const std::uint32_t head = 2 * t + c % 2;
          const std::uint32_t token = at + tile * kTile + c / 2 * kRows + g;
          const float score =
              __low2float(row.params) * (sums[c] * s.unit[head]) + __high2float(row.params) * s.sum[head];
          if (head < heads && token < part.end) {
            out[std::uint64_t{head} * part.stride + token] = row.visible ? score : __int_as_float(0xff80'0000);
          }
        }
      }
    }
  }
}

/// For rows of `total` values together, the longest of `longest`.
Cut cut_of(std::uint64_t total, std::uint32_t longest, const ScoreInt4Shape& shape) {
  const std::uint64_t even = div_up(div_up(total, std::uint64_t{shape.multiprocessors} * kBlocksPerSm), kBlockTokens);
  const auto slice =
      static_cast<std::uint32_t>(std::clamp<std::uint64_t>(even * kBlockTokens, kBlockTokens, kMaxSlice));
  return {.slices = static_cast<std::uint32_t>(div_up(longest, slice)), .tokens = slice};
}

void launch(const TaskArray<ScoreInt4Task>& tasks, const ScoreInt4Shape& shape, const Cut& cut, const dim3& grid,
            cudaStream_t stream) {
  if (shape.layout.head_dim == 64) {
    score_int4_kernel<64><<<grid, kThreads, 0, stream>>>(tasks, shape, cut);
  } else {
    score_int4_kernel<128><<<grid, kThreads, 0, stream>>>(tasks, shape, cut);
  }
  check(cudaGetLastError(), "launch the score_int4 kernel");
}

}  // namespace

void launch_score_int4(const TaskArray<ScoreInt4Task>& tasks, const ScoreInt4Shape& shape, cudaStream_t stream) {
  std::uint64_t total = 0;
  std::uint32_t longest = 0;
  std::uint32_t heads = 1;
  bool tails = false;
  for (std::uint32_t i = 0; i < tasks.count; ++i) {
    const bool lists = tasks[i].lists != nullptr;
    const std::uint32_t row = tasks[i].estimates(shape.layout.page_tokens);
    tails |= tasks[i].tail_rows != 0;
    if (lists) heads = shape.group;
    total += std::uint64_t{row} * (lists ? shape.group : 1);
    longest = std::max(longest, row);
  }
  if (total == 0 && !tails) return;
  const Cut cut = cut_of(total, longest, shape);
  launch(tasks, shape, cut, dim3(cut.slices + (tails ? 1 : 0), tasks.count, heads), stream);
}

void launch_score_int4(const ScoreInt4Task* tasks, std::uint32_t count, std::uint32_t longest, bool lists,
                       const ScoreInt4Shape& shape, cudaStream_t stream) {
  if (count == 0 || longest == 0) return;
  TaskArray<ScoreInt4Task> array;
  array.queued = tasks;
  array.count = count;
  const Cut cut = cut_of(std::uint64_t{count} * longest, longest, shape);
  launch(array, shape, cut, dim3(cut.slices, count, lists ? shape.group : 1), stream);
}

void load_score_int4_kernels() {
  cudaFuncAttributes attributes;
  check(cudaFuncGetAttributes(&attributes, score_int4_kernel<64>), "load the score_int4 kernel for head_dim 64");
  check(cudaFuncGetAttributes(&attributes, score_int4_kernel<128>), "load the score_int4 kernel for head_dim 128");
}

}  // namespace sluice::gpu
