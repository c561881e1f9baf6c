#include <algorithm>
#include <string>

#include "gpu/device/cuda_error.hpp"
#include "gpu/device/cuda_stream.hpp"
#include "gpu/device/driver.hpp"
#include "gpu/device/param_ring.hpp"
#include "gpu/kernels/prefill/prefill.hpp"
#include "gpu/stages/shapes.hpp"
#include "sluice/error.hpp"
#include "sluice/step/prefill_choice.hpp"
#include "tools/stages/copy_items.hpp"
#include "tools/stages/cuda_stages.hpp"

namespace sluice::tools {

using namespace gpu;  // whose kernels are launched

namespace {

constexpr std::size_t kMaxItems = 65535;  ///< the largest second or third dimension of a grid

std::uint32_t key_end(const PrefillTask& task) noexcept { return std::min(task.key_end, task.first + task.count); }

std::uint64_t pages_of(const PrefillTask& task) noexcept {
  const std::uint32_t end = key_end(task);
  return end <= task.key_begin ? 0 : div_up(end - task.key_begin, task.kv.layout.page_tokens);
}

std::uint64_t frames_bytes(const PrefillTask& task) noexcept { return div_up(pages_of(task), 4) * 16; }

/// Frames up to the last one that their page tables name.
std::uint64_t frames_of(std::span<const PrefillTask> tasks) {
  std::uint64_t frames = 0;
  for (const PrefillTask& task : tasks) {
    for (std::uint64_t page = 0; page < pages_of(task); ++page)
      frames = std::max(frames, std::uint64_t{task.kv.frames[page]} + 1);
  }
  return frames;
}

/// Tasks on their way to kernels of one kind.
class PrefillPlan {
 public:
  PrefillPlan(const PrefillShape& strides, const AttentionShape& shape, bool warpgroups)
      : strides_(strides), shape_(shape), warpgroups_(warpgroups) {}

  [[nodiscard]] PrefillVariant variant(const PrefillTask& task) const noexcept {
    return prefill_variant(shape_, task.kv.layout, strides_.q_dtype, warpgroups_);
  }
  /// Kernels without warpgroups mix the heads of a group in their rows, and masks differ between heads.
  [[nodiscard]] std::uint32_t items_of(const PrefillTask& task) const noexcept {
    return task.blocks != nullptr && !variant(task).warpgroups ? shape_.group() : 1;
  }
  [[nodiscard]] std::uint64_t bytes_of(const PrefillTask& task) const noexcept {
    return items_of(task) * sizeof(PrefillItem) + frames_bytes(task);
  }
  /// Tasks from the first on that go into one launch: of the same memory, as many as their descriptions have room for.
  [[nodiscard]] std::size_t launchable(std::span<const PrefillTask> tasks, std::uint64_t limit) const noexcept;
  void launch(std::span<const PrefillTask> tasks, CudaStream& stream) const;

 private:
  [[nodiscard]] PrefillItem describe(const PrefillTask& task, const std::uint32_t* frames, std::uint32_t head) const;
  const PrefillItem* pack(std::span<const PrefillTask> tasks, PrefillExtent& extent, CudaStream& stream) const;

  const PrefillShape& strides_;
  const AttentionShape& shape_;
  bool warpgroups_;
};

std::size_t PrefillPlan::launchable(std::span<const PrefillTask> tasks, std::uint64_t limit) const noexcept {
  std::uint64_t bytes = 0;
  std::size_t items = 0;
  std::size_t count = 0;
  for (; count < tasks.size(); ++count) {
    const PrefillTask& task = tasks[count];
    bytes += bytes_of(task);
    items += items_of(task);
    const bool same = task.kv.layout == tasks[0].kv.layout && task.kv.base == tasks[0].kv.base;
    if (!same || items > kMaxItems || bytes > limit) break;
  }
  return count;
}

/// The item of one head if the task's heads are items of their own, else of all heads, with `head` 0.
PrefillItem PrefillPlan::describe(const PrefillTask& task, const std::uint32_t* frames, std::uint32_t head) const {
  const std::uint32_t query_blocks = prefill_blocks(task.first, task.count);
  const std::uint32_t mask_words = prefill_mask_words(task.first + task.count);
  const std::uint64_t mask = std::uint64_t{head} * query_blocks * mask_words;
  return {.q = task.q + head * strides_.q_head_stride * sluice::bytes_of(strides_.q_dtype),
          .base = task.kv.base,
          .frames = frames,
          .out = task.out + head * strides_.out_head_stride * sluice::bytes_of(strides_.out_dtype),
          .blocks = task.blocks == nullptr ? nullptr : task.blocks + mask,
          .lse = task.lse == nullptr ? nullptr : task.lse + head,
          .so_far = task.so_far == nullptr ? nullptr : task.so_far + std::uint64_t{head} * shape_.head_dim,
          .first = task.first,
          .count = task.count,
          .heads = items_of(task) == 1 ? shape_.group() : 1,
          .key_begin = task.key_begin,
          .key_end = key_end(task),
          .page_tokens = task.kv.layout.page_tokens,
          .query_blocks = query_blocks,
          .mask_words = mask_words,
          .reach = task.reach,
          .first_window = task.first_window,
          .last_window = task.last_window};
}

/// Describes the tasks in pinned memory and has that copied to device memory. Returns the items there.
const PrefillItem* PrefillPlan::pack(std::span<const PrefillTask> tasks, PrefillExtent& extent,
                                     CudaStream& stream) const {
  std::uint64_t bytes = 0;
  for (const PrefillTask& task : tasks) {
    bytes += bytes_of(task);
    extent.items += items_of(task);
  }
  std::byte* const from = stream.params().take(bytes);
  std::byte* const to = stream.scratch().data() + CudaStream::kCounterBytes;
  auto* item = reinterpret_cast<PrefillItem*>(from);
  std::uint64_t used = extent.items * sizeof(PrefillItem);
  for (const PrefillTask& task : tasks) {
    std::copy_n(task.kv.frames, pages_of(task), reinterpret_cast<std::uint32_t*>(from + used));
    for (std::uint32_t head = 0; head < items_of(task); ++head) {
      *item = describe(task, reinterpret_cast<const std::uint32_t*>(to + used), head);
      const std::uint32_t lead = item->blocks == nullptr ? 0 : item->first % kPrefill.rows;
      extent.rows = std::max(extent.rows, lead + item->count * item->heads);
      extent.blocks = std::max(extent.blocks, item->query_blocks);
      ++item;
    }
    used += frames_bytes(task);
  }
  launch_copy_items(to, from, bytes, stream.handle());
  return reinterpret_cast<const PrefillItem*>(to);
}

void PrefillPlan::launch(std::span<const PrefillTask> tasks, CudaStream& stream) const {
  if (std::ranges::all_of(tasks, [](const PrefillTask& task) { return task.count == 0; })) return;
  const PrefillVariant kernel = variant(tasks.front());
  PrefillExtent extent;
  const PrefillArgs args{.items = pack(tasks, extent, stream),
                         .shape = strides_,
                         .group = shape_.group(),
                         .row_heads = shape_.group(),
                         .score_scale = shape_.score_scale(),
                         .softcap = shape_.softcap};
  if (kernel.warpgroups) {
    const CUtensorMap pages = map_pages(tasks.front().kv, kPrefillBlock, frames_of(tasks));
    launch_prefill_hopper(kernel, args, extent, pages, stream.handle());
  } else {
    launch_prefill(kernel, args, extent, stream.handle());
  }
}

void check_task(const PrefillTask& task) {
  const auto refuse = [](const std::string& what) { throw Error(Errc::invalid_argument, "prefill: " + what); };
  if (task.key_begin % task.kv.layout.page_tokens != 0) {
    refuse("key_begin is " + std::to_string(task.key_begin) + "; begin windows at a multiple of page_tokens, " +
           std::to_string(task.kv.layout.page_tokens));
  }
  if (task.first_window && task.last_window) return;
  if (task.so_far == nullptr || task.lse == nullptr) refuse("a window without so_far or lse; give it both");
  if (reinterpret_cast<std::uintptr_t>(task.so_far) % sizeof(float2) != 0)
    refuse("so_far is not 8-byte aligned; align it");
}

}  // namespace

void CudaStages::prefill(std::span<const PrefillTask> tasks, const PrefillShape& strides, const AttentionShape& shape,
                         Stream* stream) {
  if (tasks.empty()) return;
  CudaStream& queue = cuda_stream(stream, "prefill");
  const std::uint64_t limit = std::min(queue.params().largest(), CudaStream::kScratchBytes - CudaStream::kCounterBytes);
  const PrefillPlan plan(strides, shape, device_.limits().warpgroups);
  check_tensor_type("prefill", strides.q_dtype);
  check_tensor_type("prefill", strides.out_dtype);
  for (const PrefillTask& task : tasks) {
    check_supported("prefill", shape, task.kv.layout);
    check_task(task);
    if (plan.bytes_of(task) > limit) {
      throw Error(Errc::out_of_capacity,
                  "prefill: the page table of " + std::to_string(key_end(task) - task.key_begin) +
                      " tokens takes more than " + std::to_string(limit) + " bytes; use larger pages");
    }
  }
  while (!tasks.empty()) {
    const std::span<const PrefillTask> now = tasks.first(plan.launchable(tasks, limit));
    plan.launch(now, queue);
    tasks = tasks.subspan(now.size());
  }
}

}  // namespace sluice::tools
