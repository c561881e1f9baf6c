#pragma once

#include "gpu/kernels/forward/page_mean.cuh"

/// The value that stands for what a row leaves, see ForwardRow::rest: the mean of some pages' means, which depends on
/// no query.
namespace sluice::gpu::forward {

/// What kThreads threads need for it.
template <std::uint32_t kThreads>
struct RestMeanShared {
  std::uint32_t blocks[kMostRestPages];
  float sums[kThreads * detail::kUnit];
};

/// Part `part` of `parts`, each of every so many pages, by all kThreads threads of a block.
template <std::uint32_t kThreads>
__device__ __forceinline__ void put_rest_mean(const ForwardMemory& m, const ForwardRow& row, std::uint32_t index,
                                              std::uint32_t plane, std::uint32_t part, std::uint32_t parts,
                                              RestMeanShared<kThreads>& s) {
  constexpr std::uint32_t kInFlight = 8;
  const std::uint32_t head_dim = m.shape.head_dim;
  const std::uint32_t units = head_dim / detail::kUnit;  // Of a page, a thread each.
  const std::uint32_t at_once = kThreads / units;
  const std::uint32_t pages = part < row.rest ? (row.rest - part - 1) / parts + 1 : 0;
  const std::uint32_t* const list = m.list_of(row.list);
#pragma unroll 1
  for (std::uint32_t i = threadIdx.x; i < pages; i += kThreads)
    s.blocks[i] = list[row.rest_page(part + i * parts, m.layout.page_tokens)];
  __syncthreads();
  const auto* const means = reinterpret_cast<const uint4*>(m.value_mean_of(plane, 0)) + threadIdx.x % units;
  const bool f16 = m.layout.dtype == DType::f16;
  const std::uint32_t first = threadIdx.x / units;
  float sum[detail::kUnit] = {};
#pragma unroll 1
  for (std::uint32_t base = first < at_once ? first : pages; base < pages; base += kInFlight * at_once) {
    uint4 words[kInFlight];
#pragma unroll
    for (std::uint32_t k = 0; k < kInFlight; ++k) {
      const std::uint32_t i = base + k * at_once;
      words[k] = i < pages ? means[std::uint64_t{s.blocks[i]} * units] : uint4{};
    }
#pragma unroll
    for (std::uint32_t k = 0; k < kInFlight; ++k) {
      float values[detail::kUnit];
      f16 ? detail::widen_unit<DType::f16>(words[k], values) : detail::widen_unit<DType::bf16>(words[k], values);
#pragma unroll
      for (std::uint32_t c = 0; c < detail::kUnit; ++c) sum[c] += values[c];
    }
  }
#pragma unroll
  for (std::uint32_t c = 0; c < detail::kUnit; ++c) s.sums[threadIdx.x * detail::kUnit + c] = sum[c];
  __syncthreads();
  for (std::uint32_t c = threadIdx.x; c < head_dim; c += kThreads) {
    float all = 0.f;
#pragma unroll 8
    for (std::uint32_t r = 0; r < at_once; ++r) all += s.sums[r * head_dim + c];
    m.rest_out_of(index)[part * head_dim + c] = all / static_cast<float>(row.rest);
  }
}

/// Of the only row of a forward and a KV head: its rest's value, and the mean of the page before one that its token
/// begins, which the rest may count as its last. A block of kThreads threads.
template <DType kType, std::uint32_t kThreads>
__device__ __noinline__ void put_means(const ForwardMemory& m, std::uint32_t layer, std::uint32_t head,
                                       RestMeanShared<kThreads>& s) {
  const ForwardStatus status = m.state->status;
  const ForwardToken token = m.tokens[0];
  const ForwardRow row = m.rows[0].in(layer, m.window);
  const std::uint32_t plane = m.plane(layer, head);
  if (status != ForwardStatus::running || token.list == kNone) return;
  // It is added up behind a barrier.
  if (threadIdx.x < 32) mean_of_page_before<kType>(m, token, plane);
  if (row.rest != 0) put_rest_mean<kThreads>(m, row, head, plane, 0, 1, s);
}

}  // namespace sluice::gpu::forward
