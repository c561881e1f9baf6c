#include "runtime/residency.hpp"

#include <algorithm>
#include <cmath>
#include <string>
#include <utility>

#include "runtime/wait.hpp"
#include "sluice/error.hpp"

namespace sluice::runtime {

namespace {

/// Before a page is claimed: one that is on no list would stay on its way for ever.
void make_room(std::vector<PageMove>& moves) {
  if (moves.size() == moves.capacity()) moves.reserve(2 * moves.size() + 16);
}

}  // namespace

Residency::Residency(std::uint32_t slots, std::byte* memory, std::uint32_t page_tokens, PlacementMode mode,
                     TransferEngine& link)
    : pool_(slots), memory_(memory), page_tokens_(page_tokens), mode_(mode), link_(link) {}

std::uint32_t Residency::forced_pages(const PolicySpec& spec) const noexcept {
  const auto sinks = div_up(spec.near.sink_tokens, page_tokens_);
  // A window of r tokens that ends anywhere in a page touches one page more than r fills.
  const auto recent = div_up(spec.near.recent_tokens, page_tokens_) + 1;
  return static_cast<std::uint32_t>(sinks + recent);
}

std::uint32_t Residency::quota(const PolicySpec& spec, std::uint32_t pages) const noexcept {
  if (mode_ == PlacementMode::near) return pages;
  const auto share = static_cast<std::uint32_t>(std::ceil(static_cast<double>(spec.near.share) * pages));
  return std::min(pages, std::max(share, forced_pages(spec)));
}

void Residency::settle(Sequence& sequence, LayerState& layer, Deadline deadline) {
  for (const Transfer& transfer : layer.arriving) land(sequence, transfer, deadline);
  layer.arriving.clear();
}

void Residency::settle_oldest(Sequence& sequence, LayerState& layer, Deadline deadline) {
  land(sequence, layer.arriving.front(), deadline);
  layer.arriving.erase(layer.arriving.begin());
}

void Residency::land(Sequence& sequence, const Transfer& transfer, Deadline deadline) {
  if (!wait_until([&] { return transfer.landed->state() != Event::State::pending; }, deadline)) {
    throw Error(Errc::timeout, "pages promoted over the link did not arrive in time; raise the timeout");
  }
  const bool failed = transfer.landed->state() == Event::State::failed;
  for (const PageMove& move : transfer.moves) {
    const SlotOwner owner = pool_.owner(move.slot);
    // The generation was taken when the copy was queued; a page that is somebody else's by now is dropped.
    if (failed || owner.head->refs[owner.page] != move.page) {
      pool_.drop(owner.head->leave(owner.page));
      ++sequence.stats.failed_promotions;
    } else {
      owner.head->arrive(owner.page);
      pool_.unpin(move.slot);
    }
  }
}

void Residency::force(Sequence& sequence, LayerState& layer, std::uint32_t tokens, std::uint32_t fresh_page,
                      Deadline deadline) {
  const std::uint32_t pages = layer.pages();
  const bool all = mode_ == PlacementMode::near;
  const std::uint32_t sink_end = all ? pages : static_cast<std::uint32_t>(div_up(sequence.spec.near.sink_tokens, page_tokens_));
  const std::uint32_t recent = std::min(tokens, std::max(sequence.spec.near.recent_tokens, 1u));
  const std::uint32_t recent_begin = (tokens - recent) / page_tokens_;

  const auto must = [&](std::uint32_t page) { return page < sink_end || page >= recent_begin; };

  std::vector<PageMove> moves;
  bool full = false;
  for (HeadPages& head : layer.heads) {
    victims_.clear();
    std::erase_if(head.forced, [&](std::uint32_t page) {
      if (must(page)) return false;
      pool_.unpin(head.slots[page]);
      head.is_forced[page] = 0;
      return true;
    });
    const auto require = [&](std::uint32_t page) {
      if (full || head.is_forced[page] != 0) return;
      make_room(moves);
      if (head.residence[page] == Residence::far) {
        full = !claim(sequence, head, page, pages);
        if (full) return;
        if (page >= fresh_page) {
          head.arrive(page);
          pool_.unpin(head.slots[page]);
        } else {
          moves.push_back({.page = head.refs[page], .slot = head.slots[page]});
        }
      }
      head.forced.push_back(page);
      head.is_forced[page] = 1;
      pool_.pin(head.slots[page]);
    };
    for (std::uint32_t page = 0; page < std::min(sink_end, pages); ++page) require(page);
    for (std::uint32_t page = recent_begin; page < pages; ++page) require(page);
  }
  const std::uint64_t failed_before = sequence.stats.failed_promotions;
  send(sequence, layer, std::move(moves));
  settle(sequence, layer, deadline);
  if (full) {
    throw Error(Errc::out_of_capacity,
                "the near pool of " + std::to_string(pool_.slots()) + " pages cannot hold what must be near" +
                    (all ? " (placement near keeps every page there)" : " (sinks, recent window and open pages)") +
                    "; raise near_bytes, shrink the window, or end a sequence");
  }
  if (sequence.stats.failed_promotions != failed_before) {
    throw Error(Errc::device, "a page that must be near could not be copied to the device; the step may be repeated");
  }
}

bool Residency::claim(Sequence& sequence, HeadPages& head, std::uint32_t page, std::uint32_t quota) {
  if (head.held.size() >= quota) {
    const std::optional<std::uint32_t> own = own_victim(head);
    if (!own) return false;
    evict(sequence, *own);
  }
  std::optional<std::uint32_t> slot = pool_.take({.head = &head, .page = page});
  if (!slot) {
    const std::optional<std::uint32_t> victim = pool_.victim();
    if (!victim) return false;
    evict(sequence, *victim);
    slot = pool_.take({.head = &head, .page = page});
  }
  head.promote(page, *slot);
  pool_.pin(*slot);  // Until the copy has landed.
  return true;
}

void Residency::evict(Sequence& sequence, std::uint32_t slot) {
  const SlotOwner owner = pool_.owner(slot);
  pool_.drop(owner.head->leave(owner.page));
  ++sequence.stats.evictions;
}

std::optional<std::uint32_t> Residency::own_victim(const HeadPages& head) {
  constexpr std::size_t kBatch = 16;
  for (int round = 0; round < 2; ++round) {
    while (!victims_.empty()) {
      const Victim victim = victims_.back();
      victims_.pop_back();
      // Only what is as it was when the list was made; a slot that was used or given away since is not oldest.
      const SlotOwner& owner = pool_.owner(victim.slot);
      if (owner.head == &head && head.slots[owner.page] == victim.slot && !pool_.pinned(victim.slot) &&
          pool_.last_use(victim.slot) == victim.last_use) {
        return victim.slot;
      }
    }
    for (const std::uint32_t page : head.held) {
      const std::uint32_t slot = head.slots[page];
      if (!pool_.pinned(slot)) victims_.push_back({.last_use = pool_.last_use(slot), .slot = slot});
    }
    const auto older = [](const Victim& a, const Victim& b) { return a.last_use < b.last_use; };
    const auto keep = victims_.begin() + static_cast<std::ptrdiff_t>(std::min(kBatch, victims_.size()));
    std::partial_sort(victims_.begin(), keep, victims_.end(), older);
    victims_.erase(keep, victims_.end());
    std::reverse(victims_.begin(), victims_.end());
    if (victims_.empty()) break;
  }
  return std::nullopt;
}

void Residency::send(Sequence& sequence, LayerState& layer, std::vector<PageMove> moves) {
  if (moves.empty()) return;
  try {
    link_.wait_for_device();
  } catch (...) {
    give_back(moves);
    throw;
  }
  bring(sequence, layer, std::move(moves));
}

void Residency::give_back(std::span<const PageMove> moves) noexcept {
  for (const PageMove& move : moves) {
    const SlotOwner owner = pool_.owner(move.slot);
    pool_.drop(owner.head->leave(owner.page));
  }
}

std::optional<Residency::Seat> Residency::seat(Sequence& sequence, LayerState& layer, std::uint32_t kv_head,
                                               std::uint32_t page) {
  HeadPages& head = layer.heads[kv_head];
  if (head.residence[page] == Residence::near) {
    pool_.pin(head.slots[page]);
    return Seat{.slot = head.slots[page]};
  }
  if (head.residence[page] == Residence::promoting) return std::nullopt;
  // Without a share of its own the pool is a cache for all: what is near is attended only if it is visited.
  const std::uint32_t limit = sequence.spec.near.share > 0.f ? quota(sequence.spec, layer.pages()) : layer.pages();
  if (!claim(sequence, head, page, limit)) return std::nullopt;
  return Seat{.slot = head.slots[page], .empty = true};
}

void Residency::bring(Sequence& sequence, LayerState& layer, std::vector<PageMove> moves) {
  if (moves.empty()) return;
  try {
    layer.arriving.reserve(layer.arriving.size() + 1);  // What is on its way must be on the list.
    layer.arriving.push_back(link_.promote(moves, memory_));
  } catch (...) {
    give_back(moves);  // Or they would stay on their way for ever.
    throw;
  }
  sequence.stats.promotions += moves.size();
  sequence.stats.h2d_bytes += moves.size() * link_.page_bytes();
}

void Residency::fill(Sequence& sequence, LayerState& layer) {
  const std::uint32_t pages = layer.pages();
  const std::uint32_t limit = quota(sequence.spec, pages);
  if (sequence.spec.near.share <= 0.f) return;
  std::vector<PageMove> moves;
  for (std::size_t h = 0; h < layer.heads.size(); ++h) {
    HeadPages& head = layer.heads[h];
    victims_.clear();
    const auto add = [&](std::uint32_t page) {
      if (head.residence[page] != Residence::far || head.held.size() >= limit || pool_.free_slots() == 0) return;
      make_room(moves);
      if (claim(sequence, head, page, limit)) moves.push_back({.page = head.refs[page], .slot = head.slots[page]});
    };
    for (const scheduler::HotPage& hot : layer.hot[h]) {
      if (hot.page < pages) add(hot.page);
    }
    for (std::uint32_t page = pages; page-- > 0;) add(page);
  }
  send(sequence, layer, std::move(moves));
}

void Residency::promote(Sequence& sequence, LayerState& layer, std::uint32_t limit) {
  if (sequence.spec.near.share <= 0.f || mode_ == PlacementMode::near) return;
  const std::uint32_t pages = layer.pages();
  const std::uint32_t quota_pages = quota(sequence.spec, pages);
  std::vector<PageMove> moves;
  for (std::size_t h = 0; h < layer.heads.size(); ++h) {
    HeadPages& head = layer.heads[h];
    victims_.clear();
    const auto& hot = layer.hot[h];
    for (std::size_t i = hot.size(); i-- > 0;) {  // Hottest last, so that it ends up most recent.
      if (hot[i].page < pages && head.residence[hot[i].page] == Residence::near) pool_.touch(head.slots[hot[i].page]);
    }
    std::uint32_t sent = 0;
    for (const scheduler::HotPage& page : hot) {
      if (sent == limit) break;
      if (page.page >= pages || head.residence[page.page] != Residence::far) continue;
      make_room(moves);
      if (!claim(sequence, head, page.page, quota_pages)) break;
      moves.push_back({.page = head.refs[page.page], .slot = head.slots[page.page]});
      ++sent;
    }
  }
  send(sequence, layer, std::move(moves));
}

void Residency::release(LayerState& layer) {
  for (HeadPages& head : layer.heads) {
    while (!head.held.empty()) {
      pool_.drop(head.leave(head.held.back()));
    }
  }
}

}  // namespace sluice::runtime
