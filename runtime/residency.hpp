#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "runtime/near_pool.hpp"
#include "runtime/sequence.hpp"
#include "runtime/transfer_engine.hpp"
#include "sluice/plan.hpp"

namespace sluice::runtime {

/// Decides which pages are near, and moves them there. Every decision is made on the caller's thread at a
/// fixed point of a step, so the near set, and with it the output, does not depend on timing.
class Residency {
 public:
  /// `memory` [slots, page] is device memory.
  Residency(std::uint32_t slots, std::byte* memory, std::uint32_t page_tokens, PlacementMode mode, TransferEngine& link);

  [[nodiscard]] const NearPool& pool() const noexcept { return pool_; }
  [[nodiscard]] NearPool& pool() noexcept { return pool_; }
  [[nodiscard]] std::byte* memory() const noexcept { return memory_; }

  /// Slots that one KV head of a sequence must have whatever its length: sinks, recent window, open page.
  [[nodiscard]] std::uint32_t forced_pages(const PolicySpec& spec) const noexcept;
  /// Slots that one KV head may hold when the sequence has `pages` pages.
  [[nodiscard]] std::uint32_t quota(const PolicySpec& spec, std::uint32_t pages) const noexcept;

  /// Waits for promotions of the layer that are in flight: near, or far again if their copy failed.
  void settle(Sequence& sequence, LayerState& layer, Deadline deadline);
  /// Makes near what must be near when `tokens` tokens are visible, and waits for it. A page from
  /// `fresh_page` on holds no finished token yet and needs no copy.
  /// @throws Error{Errc::out_of_capacity} if pinned pages leave no slot.
  void force(Sequence& sequence, LayerState& layer, std::uint32_t tokens, std::uint32_t fresh_page, Deadline deadline);
  /// Uses what is left of the quota: hot pages first, then the newest. Waits for nothing.
  void fill(Sequence& sequence, LayerState& layer);
  /// Follows the forecast: hot pages that are near become recent, at most `limit` that are far are promoted.
  void promote(Sequence& sequence, LayerState& layer, std::uint32_t limit);
  /// A slot where queued work finds a page.
  struct Seat {
    std::uint32_t slot = 0;
    bool empty = false;  ///< the page has yet to be brought there
  };
  /// A pinned slot for a page of the layer that progressive attention is about to read: the one it has, or else the
  /// least recent of the head, if that has its share, or of anybody. Nothing if all are pinned. A seat that was not
  /// empty is to be released; one that was stays pinned until the transfer of its page is settled.
  [[nodiscard]] std::optional<Seat> seat(Sequence& sequence, LayerState& layer, std::uint32_t kv_head,
                                         std::uint32_t page);
  void release_seat(std::uint32_t slot) noexcept { pool_.unpin(slot); }
  /// Queues the copies of pages whose seats are empty. Unlike promotions they do not wait for the device: the caller
  /// sees to it that nobody reads these slots any more.
  void bring(Sequence& sequence, LayerState& layer, std::vector<PageMove> moves);
  /// Settles the layer's oldest transfer, and no other.
  void settle_oldest(Sequence& sequence, LayerState& layer, Deadline deadline);
  /// Gives all slots of a layer back. Promotions must have been settled.
  void release(LayerState& layer);

 private:
  /// A slot for a page: free, else the head's own least recent page if it is at its quota, else anybody's.
  [[nodiscard]] bool claim(Sequence& sequence, HeadPages& head, std::uint32_t page, std::uint32_t quota);
  void evict(Sequence& sequence, std::uint32_t slot);
  void land(Sequence& sequence, const Transfer& transfer, Deadline deadline);
  /// The head's least recently used slot that is not pinned. Looks at the held pages once for several victims.
  [[nodiscard]] std::optional<std::uint32_t> own_victim(const HeadPages& head);
  /// Queues copies of pages that were just claimed.
  void send(Sequence& sequence, LayerState& layer, std::vector<PageMove> moves);
  /// Far again: pages whose copies could not be queued.
  void give_back(std::span<const PageMove> moves) noexcept;

  struct Victim {
    std::uint64_t last_use = 0;
    std::uint32_t slot = 0;
  };

  NearPool pool_;
  std::vector<Victim> victims_;  // the oldest slots of the head that claims, youngest first
  std::byte* memory_;
  std::uint32_t page_tokens_;
  PlacementMode mode_;
  TransferEngine& link_;
};

}  // namespace sluice::runtime
