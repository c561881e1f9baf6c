#pragma once

#include <atomic>
#include <cstdint>
#include <span>
#include <vector>

#include "runtime/kv/block_table.hpp"
#include "sluice/units.hpp"

namespace sluice::runtime {

/// Where a sequence is among the pages that are known: behind `pages` of them, the last of which lies in `block`.
struct PrefixPlace {
  std::uint64_t salt = 0;  ///< sequences with different ones have nothing in common
  std::uint32_t pages = 0;
  std::uint32_t block = kNone;  ///< kNone: before the first page
  std::uint64_t serial = 0;     ///< of that page
};

/// Mixes the ids of a page into the hash of all that comes before it. For tests to replace by weaker ones.
using PageHash = std::uint64_t (*)(std::uint64_t before, std::span<const std::int32_t> ids) noexcept;
[[nodiscard]] std::uint64_t hash_page(std::uint64_t before, std::span<const std::int32_t> ids) noexcept;

/// Full pages whose token ids are known, as a tree: a page continues the one before it. A page is found by that page
/// and its ids, all of which are compared, so that no collision of hashes gives a sequence keys and values of
/// other tokens.
///
/// The blocks of known pages are kept by the BlockTable. Those that no sequence holds can be given up: those that have
/// been idle for the longest time first, but never before what continues them. As sequences let go of their last page
/// first, what is oldest has no continuation, unless sequences with the same tokens had blocks of their own.
///
/// Allocates when it is built and never again. Each call takes a time that does not depend on how many pages there are,
/// beyond those that it is about.
class PrefixCache {
 public:
  /// `most_idle`: blocks that no sequence holds.
  /// `stacks`: of layers, which have a block each for a page.
  PrefixCache(BlockTable& table, std::uint32_t page_tokens, std::uint32_t most_idle, std::uint64_t seed,
              PageHash hash = hash_page, std::uint32_t stacks = 1);

  /// One page further, if a page with these ids, a page's worth of them, is known to come there; else `place` itself.
  [[nodiscard]] PrefixPlace next(const PrefixPlace& place, std::span<const std::int32_t> ids) const noexcept;
  /// Whether a place is still what it was.
  [[nodiscard]] bool knows(const PrefixPlace& place) const noexcept {
    return place.block == kNone || entries_[place.block].serial == place.serial;
  }
  /// The place behind the first `pages` of the pages of a place that is known.
  [[nodiscard]] PrefixPlace up(PrefixPlace place, std::uint32_t pages) const noexcept;

  /// A page becomes known that does not come there yet. Its block is held, and not kept.
  PrefixPlace add(const PrefixPlace& place, std::span<const std::int32_t> ids, std::uint32_t block) noexcept;
  /// The block in which another stack of layers has a known page is kept, too, if that page has none there yet and the
  /// block is no other page's. It can be given up before the page is.
  void add_other(std::uint32_t page, std::uint32_t stack, std::uint32_t block) noexcept;
  /// Whether all stacks have a known page.
  [[nodiscard]] bool has_others(std::uint32_t page) const noexcept;
  /// A known page in a stack of layers; kNone: it is not there any more.
  [[nodiscard]] std::uint32_t block_of(std::uint32_t page, std::uint32_t stack) const noexcept {
    return stack == 0 ? page : others_[std::uint64_t{page} * (stacks_ - 1) + stack - 1];
  }
  /// A kept block's page is not known any more, nor is what continues it; of a stack that is not the first, the page is
  /// not known there.
  void forget(std::uint32_t block) noexcept;
  /// Frees a block; one must be idle.
  void evict() noexcept;
  /// Until no more blocks are idle than may.
  void trim() noexcept {
    while (table_.idle() > most_idle_) evict();
  }

  [[nodiscard]] std::uint64_t evicted() const noexcept {
    return evicted_.load(std::memory_order_relaxed);
  }
  [[nodiscard]] std::uint64_t heap_bytes() const noexcept {
    return entries_.capacity() * sizeof(Entry) +
           (ids_.capacity() + buckets_.capacity() + others_.capacity() + owners_.capacity()) * sizeof(std::uint32_t);
  }

 private:
  /// The page in a block that is kept.
  struct Entry {
    std::uint64_t serial = 0;  ///< no two pages ever have the same; 0: there is none
    std::uint64_t hash = 0;    ///< of its ids and all before them
    std::uint64_t salt = 0;
    std::uint32_t parent = kNone;  ///< the page that it continues
    std::uint32_t child = kNone;   ///< the newest page that continues it
    std::uint32_t elder = kNone;   ///< continuations of the same page: the next older one
    std::uint32_t younger = kNone;
    std::uint32_t chain = kNone;  ///< the next one in its bucket
  };

  [[nodiscard]] std::uint64_t hash_at(const PrefixPlace& place, std::span<const std::int32_t> ids) const noexcept;
  [[nodiscard]] std::uint32_t& bucket(std::uint64_t hash) noexcept { return buckets_[hash & (buckets_.size() - 1)]; }
  [[nodiscard]] const std::int32_t* ids_of(std::uint32_t block) const noexcept {
    return ids_.data() + std::uint64_t{block} * page_tokens_;
  }
  /// A page under this one that nothing continues, or itself.
  [[nodiscard]] std::uint32_t leaf_under(std::uint32_t block) const noexcept;
  /// Of a page that nothing continues. Returns the one that it continued.
  std::uint32_t remove(std::uint32_t block) noexcept;

  [[nodiscard]] std::uint32_t& other(std::uint32_t page, std::uint32_t stack) noexcept {
    return others_[std::uint64_t{page} * (stacks_ - 1) + stack - 1];
  }
  /// A block of a stack that is not the first is not kept any more.
  void drop_other(std::uint32_t block) noexcept;

  BlockTable& table_;
  std::uint32_t page_tokens_;
  std::uint32_t most_idle_;
  std::uint64_t seed_;
  PageHash hash_;
  std::vector<Entry> entries_;          ///< [blocks]
  std::vector<std::int32_t> ids_;       ///< [blocks, page_tokens]
  std::uint32_t stacks_;
  std::vector<std::uint32_t> others_;   ///< [blocks, stacks - 1] where other stacks have the page, or kNone
  std::vector<std::uint32_t> owners_;   ///< [blocks] the page, in the first stack, that a block of another one is of
  std::vector<std::uint32_t> buckets_;  ///< newest page of each, kNone: none; a power of two of them
  std::uint64_t serials_ = 0;
  std::atomic<std::uint64_t> evicted_{0};
};

}  // namespace sluice::runtime
