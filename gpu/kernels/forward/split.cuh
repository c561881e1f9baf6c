#pragma once

#include <cuda/atomic>

#include "gpu/kernels/forward/list.cuh"

/// What kernels that split a layer's choice into near rows and far ones have in common.
namespace sluice::gpu::forward {

struct SplitShared {
  ChoiceShared choice;
  DrawnShared drawn;
  ListShared list;
};

/// What a thread block works on: of the cluster (y, z) row z and KV head y.
__device__ inline Work work_of(const ForwardMemory& m, const ForwardScratch& scratch, const ForwardRow& row,
                               std::uint32_t layer, std::uint32_t list_room) {
  const std::uint32_t index = blockIdx.z * m.shape.kv_heads + blockIdx.y;
  const std::uint64_t first = std::uint64_t{index} * list_room;
  const bool draws = row.draws.any();
  return {.row = row,
          .near_rows = m.near_lists + first,
          .far_rows = scratch.far_rows + first,
          .near_corrections = draws ? m.near_corrections_of(index) : nullptr,
          .far_corrections = draws ? scratch.far_corrections + std::uint64_t{index} * m.draw_room() : nullptr,
          .fetched = m.fetches() && row.asks == 0 ? scratch.fetched + first : nullptr,
          .index = index,
          .plane = m.plane(layer, blockIdx.y)};
}

/// What all thread blocks together have found in a layer.
struct Arrived {
  bool wanted = false;  ///< there is something for the workers, and this block, the last to get here, asks them
  std::uint32_t choices = 0;
};

/// What a cluster has `listed`, without those that are `fetched`, and `choices` are told by one of its blocks. Of each
/// block one thread, which sees what all blocks wrote if it is the last.
__device__ inline Arrived arrive(const ForwardMemory& m, const Listed& listed, std::uint32_t fetched,
                                 std::uint32_t choices) {
  using Sum = cuda::atomic_ref<std::uint64_t, cuda::thread_scope_device>;
  ForwardState& state = *m.state;
  if (listed.near != 0) Sum(state.near_tokens).fetch_add(listed.near, cuda::memory_order_relaxed);
  if (listed.far != 0) Sum(state.far_tokens).fetch_add(listed.far, cuda::memory_order_relaxed);
  if (fetched != 0) Sum(state.fetched_tokens).fetch_add(fetched, cuda::memory_order_relaxed);
  cuda::atomic_ref<std::uint32_t, cuda::thread_scope_device> total(state.layer_far_tokens);
  cuda::atomic_ref<std::uint32_t, cuda::thread_scope_device> arrived(state.arrived);
  cuda::atomic_ref<std::uint32_t, cuda::thread_scope_device> chosen(state.layer_choices);
  if (listed.far != 0) total.fetch_add(listed.far, cuda::memory_order_relaxed);
  if (choices != 0) chosen.fetch_add(choices, cuda::memory_order_relaxed);
  if (arrived.fetch_add(1, cuda::memory_order_acq_rel) != gridDim.x * gridDim.y * gridDim.z - 1) return {};
  Arrived all{.choices = chosen.load(cuda::memory_order_relaxed)};
  all.wanted = total.load(cuda::memory_order_relaxed) != 0 || all.choices != 0;
  state.layer_far_tokens = state.layer_choices = state.arrived = 0;
  return all;
}

/// By one thread, of whose block all have sent what belongs to the question. Its fence covers what all thread blocks
/// wrote.
__device__ inline void ask(const ForwardMemory& m, std::uint32_t layer, std::uint32_t choices) {
  ForwardState& state = *m.state;
  if (m.handover == Handover::stream) m.mailbox->gate.word = ForwardGate::closed(state.asked + 1);
  auto& question = m.mailbox->question;
  question.forward = state.forward;
  question.layer = layer;
  question.drafts = m.drafts;
  question.choices = choices;
  question.lists = gridDim.y * gridDim.z;
  // Behind it a release would wait for the link once more.
  cuda::atomic_thread_fence(cuda::memory_order_release, cuda::thread_scope_system);
  cuda::atomic_ref<std::uint64_t, cuda::thread_scope_system>(question.asked)
      .store(++state.asked, cuda::memory_order_relaxed);
}

/// What a cluster has listed, told by one thread of each of its blocks, once all of it has been sent. The only fence
/// across the link is the one of who asks: one by every warp takes longer than the rest of a layer. `takes_far`: the
/// blocks attend the list's far rows themselves.
__device__ inline void tell(const ForwardMemory& m, std::uint32_t layer, const Work& work, Listed listed,
                            bool takes_far = false) {
  const bool first = detail::cluster_rank() == 0;
  if (!first) listed = {};
  const std::uint32_t fetched = takes_far ? listed.far : fetched_of(m, work, listed.far);
  if (first) {
    m.near_counts[work.index] = listed.near;
    m.far_listed[work.index] = listed.far;
    m.far_counts[work.index] = (listed.far - fetched) | (work.far_corrections != nullptr ? kDrawnBit : 0);
    if (m.fetches()) m.fetch_heads[work.index] = fetched != 0 ? kAll : 0;
  }
  listed.far -= fetched;
  const Arrived all = arrive(m, listed, fetched, first && work.row.list != kNone ? work.row.asks : 0);
  if (all.wanted) ask(m, layer, all.choices);
}

}  // namespace sluice::gpu::forward
