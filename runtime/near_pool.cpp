#include "runtime/near_pool.hpp"

#include <algorithm>
#include <functional>

namespace sluice::runtime {

NearPool::NearPool(std::uint32_t slots) : entries_(slots) {
  free_.reserve(slots);
  for (std::uint32_t slot = slots; slot-- > 0;) free_.push_back(slot);  // Lowest slot first.
}

std::optional<std::uint32_t> NearPool::take(const SlotOwner& owner) {
  if (free_.empty()) return std::nullopt;
  const std::uint32_t slot = free_.back();
  free_.pop_back();
  entries_[slot].owner = owner;
  entries_[slot].pins = 0;
  link_newest(slot);
  return slot;
}

void NearPool::drop(std::uint32_t slot) noexcept {
  if (!pinned(slot)) unlink(slot);
  entries_[slot].pins = 0;
  free_.push_back(slot);
}

SlotRun NearPool::borrow() {
  std::sort(free_.begin(), free_.end(), std::greater<>());  // Lowest slot last, as it is taken first.
  SlotRun best;
  for (std::size_t at = free_.size(); at != 0;) {
    SlotRun run{.first = free_[at - 1], .slots = 0};
    while (at != 0 && free_[at - 1] == run.first + run.slots) {
      ++run.slots;
      --at;
    }
    if (run.slots > best.slots) best = run;
  }
  std::erase_if(free_, [&](std::uint32_t slot) { return slot - best.first < best.slots; });
  return best;
}

void NearPool::give_back(SlotRun run) noexcept {
  for (std::uint32_t slot = run.first + run.slots; slot-- > run.first;) free_.push_back(slot);  // The room is reserved.
}

void NearPool::touch(std::uint32_t slot) noexcept {
  entries_[slot].last_use = ++clock_;
  if (pinned(slot)) return;
  unlink(slot);
  link_newest(slot);
}

void NearPool::pin(std::uint32_t slot) noexcept {
  if (entries_[slot].pins++ == 0) unlink(slot);
}

void NearPool::unpin(std::uint32_t slot) noexcept {
  if (--entries_[slot].pins == 0) link_newest(slot);
}

void NearPool::unlink(std::uint32_t slot) noexcept {
  Entry& entry = entries_[slot];
  (entry.older == kNone ? oldest_ : entries_[entry.older].newer) = entry.newer;
  (entry.newer == kNone ? newest_ : entries_[entry.newer].older) = entry.older;
}

void NearPool::link_newest(std::uint32_t slot) noexcept {
  Entry& entry = entries_[slot];
  entry.last_use = ++clock_;
  entry.older = newest_;
  entry.newer = kNone;
  (newest_ == kNone ? oldest_ : entries_[newest_].newer) = slot;
  newest_ = slot;
}

}  // namespace sluice::runtime
