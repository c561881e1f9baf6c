#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "sluice/units.hpp"

namespace sluice::runtime {

struct HeadPages;

/// Who lives in a near slot. The pool never follows the pointer; it hands it to whoever evicts.
struct SlotOwner {
  HeadPages* head = nullptr;
  std::uint32_t page = 0;
  friend bool operator==(const SlotOwner&, const SlotOwner&) = default;
};

/// Consecutive slots.
struct SlotRun {
  std::uint32_t first = 0;
  std::uint32_t slots = 0;
};

/// Book-keeping of the near tier: one pool of equal slots shared by all sequences, layers and heads,
/// in LRU order. It moves no bytes: because every token has a host copy, eviction is free.
///
///   free --take--> listed --drop--> free          listed: in the LRU list, may be chosen as a victim
///                  listed <--pin/unpin--> pinned  pinned: referenced by queued work, or must be near
///                  pinned --drop--> free
///   free --borrow--> lent --give_back--> free      lent: memory for something else than pages
///
/// Pins are counted.  Thread safety: none; the pipeline mutates it on the caller's thread only.
class NearPool {
 public:
  explicit NearPool(std::uint32_t slots);

  [[nodiscard]] std::uint32_t slots() const noexcept { return static_cast<std::uint32_t>(entries_.size()); }
  [[nodiscard]] std::uint32_t free_slots() const noexcept { return static_cast<std::uint32_t>(free_.size()); }

  /// A free slot for `owner`, as the most recently used; empty if none is free.
  [[nodiscard]] std::optional<std::uint32_t> take(const SlotOwner& owner);
  /// The least recently used slot that is not pinned; empty if all are pinned.
  [[nodiscard]] std::optional<std::uint32_t> victim() const noexcept {
    return oldest_ == kNone ? std::nullopt : std::optional(oldest_);
  }
  /// Returns a slot to the free list, whatever its pins.
  void drop(std::uint32_t slot) noexcept;

  /// The longest run of free slots, which are not free until it is given back. Empty if none is free.
  [[nodiscard]] SlotRun borrow();
  void give_back(SlotRun run) noexcept;

  /// Makes a slot the most recently used.
  void touch(std::uint32_t slot) noexcept;
  void pin(std::uint32_t slot) noexcept;
  /// The last unpin makes the slot the most recently used.
  void unpin(std::uint32_t slot) noexcept;
  [[nodiscard]] bool pinned(std::uint32_t slot) const noexcept { return entries_[slot].pins != 0; }
  [[nodiscard]] const SlotOwner& owner(std::uint32_t slot) const noexcept { return entries_[slot].owner; }
  /// Larger is more recent; comparable between slots.
  [[nodiscard]] std::uint64_t last_use(std::uint32_t slot) const noexcept { return entries_[slot].last_use; }

 private:
  struct Entry {
    SlotOwner owner;
    std::uint64_t last_use = 0;
    std::uint32_t pins = 0;
    std::uint32_t older = kNone;  ///< LRU list; meaningful while listed
    std::uint32_t newer = kNone;
  };
  void unlink(std::uint32_t slot) noexcept;
  void link_newest(std::uint32_t slot) noexcept;

  std::vector<Entry> entries_;
  std::vector<std::uint32_t> free_;
  std::uint32_t oldest_ = kNone;
  std::uint32_t newest_ = kNone;
  std::uint64_t clock_ = 0;
};

}  // namespace sluice::runtime
