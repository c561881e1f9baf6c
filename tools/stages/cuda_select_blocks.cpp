#include <algorithm>
#include <bit>
#include <string>

#include "gpu/device/cuda_error.hpp"
#include "gpu/device/cuda_stream.hpp"
#include "gpu/device/driver.hpp"
#include "gpu/device/param_ring.hpp"
#include "gpu/kernels/prefill/flex.hpp"
#include "gpu/stages/flex_room.hpp"
#include "gpu/stages/shapes.hpp"
#include "sluice/error.hpp"
#include "sluice/step/carver.hpp"
#include "sluice/step/prefill_choice.hpp"
#include "tools/stages/cuda_stages.hpp"

namespace sluice::tools {

using namespace gpu;  // whose kernels are launched

namespace {

constexpr std::size_t kMaxItems = 65535;  ///< the largest second dimension of a grid

/// The item without what its task points to.
FlexItem describe(std::uint32_t first, std::uint32_t count, std::uint32_t most_rows, const AttentionShape& shape,
                  Carver& scratch) {
  FlexItem item;
  item.set_chunk(first, count, most_rows);
  place_scratch(item, flex_room(item), shape, scratch);
  return item;
}

std::uint64_t pages_of(const SelectBlocksTask& task) noexcept {
  return div_up(std::uint64_t{task.first} + task.count, task.kv.layout.page_tokens);
}

/// Frames up to the last one that their page tables name.
std::uint64_t frames_of(std::span<const SelectBlocksTask> tasks) {
  std::uint64_t frames = 0;
  for (const SelectBlocksTask& task : tasks) {
    for (std::uint64_t page = 0; task.count != 0 && page < pages_of(task); ++page)
      frames = std::max(frames, std::uint64_t{task.kv.frames[page]} + 1);
  }
  return frames;
}

/// What of the stream's scratch memory the task's description takes: its item, and its page table.
std::uint64_t item_bytes(const SelectBlocksTask& task) noexcept {
  return task.count == 0 ? 0 : sizeof(FlexItem) + div_up(pages_of(task), 4) * 16;
}

/// Tasks from the first on that go into one launch: of the same memory, as many as their descriptions have room for.
std::size_t launchable(std::span<const SelectBlocksTask> tasks, std::uint64_t limit) noexcept {
  std::uint64_t bytes = 0;
  std::size_t count = 0;
  while (count < std::min(tasks.size(), kMaxItems) && tasks[count].kv.layout == tasks[0].kv.layout &&
         tasks[count].kv.base == tasks[0].kv.base) {
    bytes += item_bytes(tasks[count]);
    if (bytes > limit) break;
    ++count;
  }
  return count;
}

/// Describes the tasks in pinned memory and has that copied to device memory, where every thread block reads it again.
/// Returns the items there.
const FlexItem* pack(std::span<const SelectBlocksTask> tasks, std::uint32_t most_rows, const AttentionShape& shape,
                     FlexExtent& extent, CudaStream& stream) {
  std::uint64_t bytes = 0;
  for (const SelectBlocksTask& task : tasks) {
    bytes += item_bytes(task);
    if (task.count != 0) ++extent.items;
  }
  if (extent.items == 0) return nullptr;
  std::byte* const from = stream.params().take(bytes);
  std::byte* const to = stream.scratch().data() + CudaStream::kCounterBytes;
  auto* item = reinterpret_cast<FlexItem*>(from);
  std::uint64_t used = extent.items * sizeof(FlexItem);
  for (const SelectBlocksTask& task : tasks) {
    if (task.count == 0) continue;
    Carver scratch(task.scratch);
    *item = describe(task.first, task.count, most_rows, shape, scratch);
    item->q = task.q;
    item->base = task.kv.base;
    item->frames = reinterpret_cast<const std::uint32_t*>(to + used);
    item->blocks = task.blocks;
    item->choices = task.choices;
    item->page_tokens = task.kv.layout.page_tokens;
    std::copy_n(task.kv.frames, pages_of(task), reinterpret_cast<std::uint32_t*>(from + used));
    used += item_bytes(task) - sizeof(FlexItem);
    extent.splits = std::max(extent.splits, item->splits);
    extent.key_blocks = std::max(extent.key_blocks, item->key_blocks);
    extent.query_blocks = std::max(extent.query_blocks, item->query_blocks);
    ++item;
  }
  check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyHostToDevice, stream.handle()),
        "send the page tables of select_blocks");
  return reinterpret_cast<const FlexItem*>(to);
}

void check_task(const SelectBlocksTask& task, const AttentionShape& shape, std::uint64_t limit) {
  check_supported("select_blocks", shape, task.kv.layout);
  check_tuned("select_blocks", shape.head_dim, "prefill densely");
  if (shape.softcap != 0.f)
    throw Error(Errc::unsupported, "select_blocks: blocks are chosen by scores without a soft-cap; prefill densely");
  const std::uint64_t keys = std::uint64_t{task.first} + task.count;
  if (keys > kFlexMaxKeys) {
    throw Error(Errc::unsupported, "select_blocks: " + std::to_string(keys) + " keys (GPU kernels have up to " +
                                       std::to_string(kFlexMaxKeys) + "); prefill densely");
  }
  if (item_bytes(task) > limit) {
    throw Error(Errc::out_of_capacity, "select_blocks: the page table of " + std::to_string(keys) +
                                           " tokens takes more than " + std::to_string(limit) +
                                           " bytes; use larger pages");
  }
}

FlexArgs args_of(const SelectBlocksTask& task, const PrefillSpec& spec, const PrefillShape& strides,
                 const AttentionShape& shape) {
  FlexArgs args{.shape = strides,
                .dtype = task.kv.layout.dtype,
                .head_dim = shape.head_dim,
                .group = shape.group(),
                .score_scale = shape.score_scale()};
  args.set_spec(spec);
  return args;
}

}  // namespace

void CudaStages::select_blocks(std::span<const SelectBlocksTask> tasks, const PrefillSpec& spec,
                               const PrefillShape& strides, const AttentionShape& shape, Stream* stream) {
  if (tasks.empty()) return;
  CudaStream& queue = cuda_stream(stream, "select_blocks");
  const std::uint64_t limit = std::min(queue.params().largest(), CudaStream::kScratchBytes - CudaStream::kCounterBytes);
  check_tensor_type("select_blocks", strides.q_dtype);
  for (const SelectBlocksTask& task : tasks) check_task(task, shape, limit);
  if (spec.mode == PrefillMode::full)
    throw Error(Errc::invalid_argument, "select_blocks: the mode is full, which chooses nothing; name another one");
  if (spec.flex.flattened && looks_at(spec) == PromptLook::attention && spec.mode != PrefillMode::minference)
    throw Error(Errc::unsupported,
                "select_blocks: query blocks that choose together (flattened) are of the CPU alone; "
                "let each choose for itself");
  while (!tasks.empty()) {
    const std::span<const SelectBlocksTask> now = tasks.first(launchable(tasks, limit));
    tasks = tasks.subspan(now.size());
    FlexExtent extent;
    FlexArgs args = args_of(now.front(), spec, strides, shape);
    args.items = pack(now, representative_rows(spec.mode), shape, extent, queue);
    if (extent.items == 0) continue;
    // Boxes of the tensor copies hold whole tiles of pages, or pages whole tiles.
    const bool mapped = device_.limits().warpgroups && std::has_single_bit(now.front().kv.layout.page_tokens);
    const CUtensorMap pages = mapped ? map_pages(now.front().kv, kFlexTile, frames_of(now)) : CUtensorMap{};
    launch_select_blocks(args, extent, mapped ? &pages : nullptr, queue.handle());
  }
}

std::uint64_t CudaStages::select_blocks_scratch_bytes(std::uint32_t first, std::uint32_t count,
                                                      const AttentionShape& shape) const {
  if (count == 0) return 0;
  Carver scratch(nullptr);
  (void)describe(first, count, kFlexRows, shape, scratch);
  return scratch.used();
}

}  // namespace sluice::tools
