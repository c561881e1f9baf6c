#pragma once

#include "gpu/kernels/elements.cuh"
#include "gpu/kernels/forward/forward.hpp"
#include "sluice/step/forward_tasks.hpp"

/// What the kernels behind `append` need to know of rows that choose, by one thread.
namespace sluice::gpu::forward {

__device__ inline float load_any(const std::byte* row, std::uint32_t channel, DType dtype) {
  switch (dtype) {
    case DType::f32: return detail::load_element<DType::f32>(row + 4 * channel);
    case DType::f16: return detail::load_element<DType::f16>(row + 2 * channel);
    case DType::bf16: return detail::load_element<DType::bf16>(row + 2 * channel);
    case DType::fp8_e4m3: break;  // No tensor has it.
  }
  return 0.f;
}

/// Elements 4 * word and on of a row, by one load if they lie as one wants them.
__device__ inline float4 load_four(const std::byte* row, std::uint32_t word, DType dtype) {
  const std::byte* const from = row + 4 * word * (dtype == DType::f32 ? 4 : 2);
  const auto lies = [&](std::uint32_t bytes) { return (reinterpret_cast<std::uintptr_t>(from) & (bytes - 1)) == 0; };
  if (dtype == DType::f32 && lies(16)) return *reinterpret_cast<const float4*>(from);
  if (dtype != DType::f32 && lies(8)) {
    const uint2 packed = *reinterpret_cast<const uint2*>(from);
    const auto* const four = reinterpret_cast<const std::byte*>(&packed);
    return {load_any(four, 0, dtype), load_any(four, 1, dtype), load_any(four, 2, dtype), load_any(four, 3, dtype)};
  }
  return {load_any(from, 0, dtype), load_any(from, 1, dtype), load_any(from, 2, dtype), load_any(from, 3, dtype)};
}

/// What the kernels that rank pages read of a row that chooses and a KV head.
__device__ inline void describe_pages(const ForwardMemory& m, const ForwardScratch& scratch, const ForwardRow& row,
                                      std::uint32_t list, std::uint32_t plane) {
  const ScorePagesTask task = rank_task(m, row, list, plane);
  scratch.page_tasks[list] = task;
  std::uint32_t* const ranked = m.ranked_of(list, row.asks != 0);
  for (std::uint32_t h = 0; h < m.shape.group(); ++h) {
    scratch.page_rows[list * m.shape.group() + h] = {.values = task.out + std::uint64_t{h} * row.pages,
                                                     .out = ranked + std::uint64_t{h} * row.page_picks,
                                                     .count = row.pages,
                                                     .k = row.page_picks};
  }
}

/// What the kernels behind this one read of a row that chooses and a KV head.
__device__ inline void describe(const ForwardMemory& m, const ForwardScratch& scratch, const ForwardRow& row,
                                std::uint32_t index, std::uint32_t head, std::uint32_t plane) {
  const std::uint32_t group = m.shape.group();
  const std::uint32_t list = index * m.shape.kv_heads + head;
  const std::uint32_t first = list * group;
  if (m.bucket.pages) describe_pages(m, scratch, row, list, plane);
  const ScoreInt4Task task = estimate_task(m, row, list, plane);
  scratch.score_tasks[list] = copies_task(m, row, list, plane);
  const bool ranks = task.tokens != 0;
  const std::uint32_t values = task.row(m.layout.page_tokens);
  const ForwardCandidates candidates = candidates_of(m, row);
  for (std::uint32_t h = 0; h < group && m.bucket.unbounded; ++h) {
    scratch.top_p_rows[first + h] = {.values = task.out + std::uint64_t{h} * values,
                                     .mask = m.masks + std::uint64_t{first + h} * m.mask_words(),
                                     .count = ranks && row.mass > 0.f && row.microbatch == 0 ? values : 0,
                                     .begin = candidates.begin,
                                     .end = candidates.end,
                                     .most = row.most,
                                     .p = row.mass,
                                     .softcap = softcap_of(m, row)};
  }
  if (scratch.page_choices != nullptr && m.takes_pages(m.bucket)) {
    ChoosePagesTask choice = pages_task(m, row, list, plane);
    choice.scratch = scratch.page_room + list * ChoosePagesTask::scratch_words(group, m.max_pages);
    scratch.page_choices[list] = choice;
  }
  if (scratch.cluster_tasks != nullptr && m.bucket.unbounded) {
    ChooseClustersTask choice = clusters_task(m, row, list, plane);
    choice.scratch = scratch.cluster_room + first * scratch.cluster_words * sizeof(std::uint32_t);
    scratch.cluster_tasks[list] = choice;
  }
  for (std::uint32_t h = 0; h < group && m.bucket.top_k && m.bucket.pages; ++h) {
    scratch.top_k_rows[first + h] = {.values = task.out + std::uint64_t{h} * values + candidates.begin,
                                     .out = m.picks + std::uint64_t{first + h} * m.max_picks,
                                     .count = candidates.end - candidates.begin,
                                     .k = ranks && row.in_pages() ? row.picks : 0};
  }
}

}  // namespace sluice::gpu::forward
