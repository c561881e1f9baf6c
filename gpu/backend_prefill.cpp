#include <algorithm>
#include <cmath>
#include <string>

#include "gpu/backend.hpp"
#include "gpu/cuda_error.hpp"
#include "gpu/cuda_stream.hpp"
#include "gpu/kernels/prefill.hpp"
#include "gpu/param_ring.hpp"
#include "gpu/verbs.hpp"
#include "sluice/error.hpp"

namespace sluice::gpu {
namespace {

constexpr std::size_t kMaxItems = 65535;  ///< the largest second dimension of a grid

std::uint64_t frames_bytes(const PrefillTask& task) noexcept {
  const std::uint64_t keys = std::uint64_t{task.first} + task.count;
  return div_up(div_up(keys, task.kv.layout.page_tokens), 4) * 16;
}

std::uint64_t item_bytes(const PrefillTask& task) noexcept { return sizeof(PrefillItem) + frames_bytes(task); }

/// Describes the tasks in pinned memory and has that copied to device memory, where every block of the kernel reads
/// the page tables again. Returns the items there.
const PrefillItem* pack(std::span<const PrefillTask> tasks, CudaStream& stream) {
  std::uint64_t bytes = 0;
  for (const PrefillTask& task : tasks) bytes += item_bytes(task);
  std::byte* const from = stream.params().take(bytes);
  std::byte* const to = stream.scratch().data() + CudaStream::kCounterBytes;
  auto* item = reinterpret_cast<PrefillItem*>(from);
  std::uint64_t used = tasks.size() * sizeof(PrefillItem);
  for (const PrefillTask& task : tasks) {
    const std::uint64_t pages = div_up(std::uint64_t{task.first} + task.count, task.kv.layout.page_tokens);
    std::copy_n(task.kv.frames, pages, reinterpret_cast<std::uint32_t*>(from + used));
    *item++ = {.q = task.q,
               .base = task.kv.base,
               .frames = reinterpret_cast<const std::uint32_t*>(to + used),
               .out = task.out,
               .first = task.first,
               .count = task.count,
               .page_tokens = task.kv.layout.page_tokens};
    used += frames_bytes(task);
  }
  check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyHostToDevice, stream.handle()), "send the page tables of a prefill");
  return reinterpret_cast<const PrefillItem*>(to);
}

/// Tasks from the first on that go into one launch: of one layout, as many as their descriptions have room for.
std::size_t launchable(std::span<const PrefillTask> tasks, std::uint64_t limit) noexcept {
  std::uint64_t bytes = 0;
  std::size_t count = 0;
  while (count < std::min(tasks.size(), kMaxItems) && tasks[count].kv.layout.dtype == tasks[0].kv.layout.dtype) {
    bytes += item_bytes(tasks[count]);
    if (bytes > limit) break;
    ++count;
  }
  return count;
}

}  // namespace

void Backend::prefill(std::span<const PrefillTask> tasks, const PrefillShape& strides, const AttentionShape& shape,
                      Stream* stream) {
  if (tasks.empty()) return;
  CudaStream& queue = cuda_stream(stream, "prefill");
  const std::uint64_t limit = std::min(queue.params().largest(), CudaStream::kScratchBytes - CudaStream::kCounterBytes);
  for (const PrefillTask& task : tasks) {
    check_supported("prefill", shape, task.kv.layout);
    if (item_bytes(task) > limit) {
      throw Error(Errc::out_of_capacity, "prefill: the page table of " + std::to_string(task.first + task.count) +
                                             " tokens takes more than " + std::to_string(limit) +
                                             " bytes; use larger pages");
    }
  }
  while (!tasks.empty()) {
    const std::span<const PrefillTask> now = tasks.first(launchable(tasks, limit));
    std::uint32_t tokens = 0;
    for (const PrefillTask& task : now) tokens = std::max(tokens, task.count);
    if (tokens != 0) {
      const PrefillArgs args{.items = pack(now, queue),
                             .shape = strides,
                             .group = shape.group(),
                             .score_scale = 1.f / std::sqrt(static_cast<float>(shape.head_dim))};
      launch_prefill(prefill_variant(shape, now.front().kv.layout, strides.q_dtype), args,
                     static_cast<std::uint32_t>(now.size()), tokens, queue.handle());
    }
    tasks = tasks.subspan(now.size());
  }
}

}  // namespace sluice::gpu
