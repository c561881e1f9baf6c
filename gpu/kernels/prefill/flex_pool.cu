// Before and after the scores of FlexPrefill: the representative queries and their mean, mean keys of blocks, and what
// columns and diagonals sum to over blocks.

#include "gpu/device/cuda_error.hpp"
#include "gpu/kernels/elements.cuh"
#include "gpu/kernels/load.hpp"
#include "gpu/kernels/mma.cuh"
#include "gpu/kernels/prefill/flex.hpp"
#include "gpu/kernels/prefill/flex_block.cuh"

namespace sluice::gpu {
namespace {

using namespace detail;

constexpr std::uint32_t kQueryThreads = 1024;
constexpr std::uint32_t kKeyThreads = 128;
constexpr std::uint32_t kSumThreads = 256;

/// Two elements of a query in the KV dtype. What float16 cannot hold is its largest number, but what is not finite
/// stays so: such a row shall count as absent.
template <class T>
__device__ std::uint32_t round_query(float a, float b) {
  if (fabsf(a) < INFINITY && fabsf(b) < INFINITY) return split<T>(a, b).high;
  return pack<T>(a, b);
}

/// Copies a head's representative rows, zeros where there are fewer, and adds them up: a thread has two elements of
/// every kRows-th row. blockIdx.x is the head.
template <class T, int kDim>
__global__ void __launch_bounds__(kQueryThreads) flex_queries_kernel(const __grid_constant__ FlexArgs args) {
  constexpr std::uint32_t kPairs = kDim / 2;
  constexpr std::uint32_t kRows = kQueryThreads / kPairs;
  __shared__ float2 sums[kRows][kPairs];
  const FlexItem& item = args.items[blockIdx.y];
  if (item.count == 0) return;
  const std::uint32_t head = blockIdx.x;
  const std::uint32_t pair = threadIdx.x % kPairs;
  const std::uint32_t turn = threadIdx.x / kPairs;
  auto* const words = reinterpret_cast<std::uint32_t*>(item.queries) + head * kFlexRows * kPairs;
  const std::uint32_t first = item.count - item.rows;
  float2 sum = make_float2(0.f, 0.f);
  with_queries(item, args.shape, head, [&](const auto& load) {
#pragma unroll
    for (std::uint32_t row = turn; row < kFlexRows; row += kRows) {
      const bool there = row < item.rows;
      const float a = there ? load(first + row, 2 * pair) : 0.f;
      const float b = there ? load(first + row, 2 * pair + 1) : 0.f;
      words[row * kPairs + pair] = round_query<T>(a, b);
      sum.x += a;
      sum.y += b;
    }
  });
  sums[turn][pair] = sum;
  __syncthreads();
  if (turn != 0) return;
  for (std::uint32_t i = 1; i < kRows; ++i) {
    sum.x += sums[i][pair].x;
    sum.y += sums[i][pair].y;
  }
  const auto rows = static_cast<float>(item.rows);
  float* const mean = item.mean_query + head * kDim + 2 * pair;
  mean[0] = sum.x / rows;
  mean[1] = sum.y / rows;
}

/// Mean of one block of keys, blockIdx.x: a thread has 16 bytes of every kRows-th row.
template <DType kType, int kDim>
__global__ void __launch_bounds__(kKeyThreads) flex_keys_kernel(const __grid_constant__ FlexArgs args) {
  constexpr std::uint32_t kPieces = kDim / kUnit;
  constexpr std::uint32_t kRows = kKeyThreads / kPieces;
  static_assert(kKeyThreads == kPrefillBlock && kKeyThreads >= kDim);
  __shared__ float sums[kRows][kDim];
  __shared__ std::uint32_t rows[kPrefillBlock];
  const FlexItem& item = args.items[blockIdx.y];
  if (blockIdx.x >= item.key_blocks) return;
  const std::uint32_t first = blockIdx.x * kPrefillBlock;
  const std::uint32_t count = min(kPrefillBlock, item.keys - first);
  if (threadIdx.x < count) {
    const std::uint32_t key = first + threadIdx.x;
    const std::uint32_t page = key / item.page_tokens;
    rows[threadIdx.x] = item.frames[page] * 2 * item.page_tokens + key - page * item.page_tokens;
  }
  __syncthreads();
  const std::uint32_t piece = threadIdx.x % kPieces;
  const std::uint32_t turn = threadIdx.x / kPieces;
  float sum[kUnit] = {};
#pragma unroll 4
  for (std::uint32_t row = turn; row < count; row += kRows) {
    float values[kUnit];
    load_unit<kType>(item.base + std::uint64_t{rows[row]} * (2 * kDim) + piece * 16, values);
#pragma unroll
    for (std::uint32_t i = 0; i < kUnit; ++i) sum[i] += values[i];
  }
#pragma unroll
  for (std::uint32_t i = 0; i < kUnit; ++i) sums[turn][piece * kUnit + i] = sum[i];
  __syncthreads();
  if (threadIdx.x >= kDim) return;
  float all = 0.f;
  for (std::uint32_t i = 0; i < kRows; ++i) all += sums[i][threadIdx.x];
  item.mean_keys[std::uint64_t{blockIdx.x} * kDim + threadIdx.x] = all / static_cast<float>(count);
}

/// The weight of a distance. Diagonals are counted from the last row's end: u = 127 is that of the first representative
/// row and key 0, and u rises with the key. A split wrote the u from its first key on, and its last 127 lie on top of
/// the next split's first.
__device__ float diagonal_weight(const FlexItem& item, const float* pieces, std::uint32_t distance) {
  const std::uint32_t u = item.keys - item.rows + (kFlexRows - 1) - distance;
  const std::uint32_t split = min(u / item.split_keys, item.splits - 1);
  const std::uint32_t at = u - split * item.split_keys;
  float weight = pieces[split * item.piece_length() + at];
  if (split != 0 && at < kFlexRows) weight += pieces[(split - 1) * item.piece_length() + at + item.split_keys];
  return weight;
}

/// A warp has one block of columns and the block of distances with the same index: it puts the distances together,
/// clears what lies behind the last line, and sums both up. blockIdx.y is the head.
__global__ void __launch_bounds__(kSumThreads) flex_sums_kernel(const __grid_constant__ FlexArgs args) {
  const FlexItem& item = args.items[blockIdx.z];
  const std::uint32_t head = blockIdx.y;
  const std::uint32_t block = (blockIdx.x * kSumThreads + threadIdx.x) / 32;
  if (block >= item.key_blocks) return;
  float* const columns = item.columns + head * item.lines();
  float* const diagonals = item.diagonals + head * item.lines();
  const float* const pieces = item.pieces + std::uint64_t{head} * item.splits * item.piece_length();
  float column_sum = 0.f;
  float diagonal_sum = 0.f;
#pragma unroll
  for (std::uint32_t i = 0; i < kPrefillBlock / 32; ++i) {
    const std::uint32_t at = block * kPrefillBlock + i * 32 + threadIdx.x % 32;
    const bool there = at < item.keys;
    const float diagonal = there ? diagonal_weight(item, pieces, at) : 0.f;
    diagonals[at] = diagonal;
    diagonal_sum += diagonal;
    if (there) {
      column_sum += columns[at];
    } else {
      columns[at] = 0.f;
    }
  }
  column_sum = over_lanes(column_sum);
  diagonal_sum = over_lanes(diagonal_sum);
  if (threadIdx.x % 32 != 0) return;
  item.column_blocks[std::uint64_t{head} * item.key_blocks + block] = column_sum;
  item.offset_blocks[std::uint64_t{head} * item.key_blocks + block] = diagonal_sum;
}

/// Calls `use` with the kernels of a type and head_dim.
template <DType kType, int kDim, class Use>
void with_dim(const Use& use) {
  use(flex_queries_kernel<Element<kType>, kDim>, flex_keys_kernel<kType, kDim>);
}
template <class Use>
void with_kernels(DType dtype, std::uint32_t head_dim, const Use& use) {
  if (dtype == DType::f16) {
    head_dim == 64 ? with_dim<DType::f16, 64>(use) : with_dim<DType::f16, 128>(use);
  } else {
    head_dim == 64 ? with_dim<DType::bf16, 64>(use) : with_dim<DType::bf16, 128>(use);
  }
}

}  // namespace

void launch_flex_pool(const FlexArgs& args, const FlexExtent& extent, cudaStream_t stream) {
  with_kernels(args.dtype, args.head_dim, [&](auto* queries, auto* keys) {
    queries<<<dim3(args.group, extent.items), kQueryThreads, 0, stream>>>(args);
    check(cudaGetLastError(), "launch the mean queries of select_blocks");
    keys<<<dim3(extent.key_blocks, extent.items), kKeyThreads, 0, stream>>>(args);
    check(cudaGetLastError(), "launch the mean keys of select_blocks");
  });
}

void launch_flex_sums(const FlexArgs& args, const FlexExtent& extent, cudaStream_t stream) {
  constexpr std::uint32_t kBlocks = kSumThreads / 32;
  const dim3 grid((extent.key_blocks + kBlocks - 1) / kBlocks, args.group, extent.items);
  flex_sums_kernel<<<grid, kSumThreads, 0, stream>>>(args);
  check(cudaGetLastError(), "launch the block sums of select_blocks");
}

void load_flex_pool_kernels() {
  const auto load = [](auto*... kernels) {
    (load_kernel(kernels, "load the pooling kernels of select_blocks"), ...);
  };
  load(flex_sums_kernel);
  for (const DType dtype : {DType::f16, DType::bf16}) {
    for (const std::uint32_t head_dim : {64u, 128u}) with_kernels(dtype, head_dim, load);
  }
}

}  // namespace sluice::gpu
