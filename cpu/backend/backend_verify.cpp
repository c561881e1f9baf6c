#include <algorithm>
#include <atomic>

#include "cpu/backend/backend.hpp"
#include "cpu/backend/verbs.hpp"

namespace sluice::cpu {
namespace {

/// Whether every head of the group has attended enough.
bool verify_group(const ProgressTask& task, std::uint32_t group) noexcept {
  float least = 1.f;
  for (std::uint32_t head = 0; head < group; ++head) {
    ProgressState state = task.first ? ProgressState{} : task.states[head];
    if (task.extra != nullptr) add_mass(state, task.extra[head]);
    add_pages(state, task.rule, {.first = task.masses + head, .pages = task.pages, .full = task.full, .stride = group});
    state.share = progress_share(state, task.left, task.bounds == nullptr ? kEmptyLse : task.bounds[head]);
    least = std::min(least, state.share);
    task.states[head] = state;
  }
  return passes(least, task.mass, task.left);
}

}  // namespace

void Backend::verify(std::span<const ProgressTask> tasks, const AttentionShape& shape, Stream*) {
  if (tasks.empty()) return;
  check("verify", shape);
  for (const ProgressTask& task : tasks) {  // A few numbers each: waking other threads would take longer.
    const std::uint64_t word = verdict_word(task.tag, verify_group(task, shape.group()));
    std::atomic_ref(*task.verdict).store(word, std::memory_order_release);
  }
}

}  // namespace sluice::cpu
