#include "runtime/kv/prefix_cache.hpp"

#include <algorithm>
#include <bit>
#include <utility>

namespace sluice::runtime {

std::uint64_t hash_page(std::uint64_t before, std::span<const std::int32_t> ids) noexcept {
  // What is added to the low half gets to the high one by the product, and back by the shift.
  std::uint64_t hash = (before ^ before >> 32) * 0x94d0'49bb'1331'11ebu;
  for (const std::int32_t id : ids) {
    hash = (hash ^ static_cast<std::uint32_t>(id)) * 0x9e37'79b9'7f4a'7c15u;
    hash ^= hash >> 32;
  }
  hash = (hash ^ hash >> 29) * 0xbf58'476d'1ce4'e5b9u;
  return hash ^ hash >> 32;
}

PrefixCache::PrefixCache(BlockTable& table, std::uint32_t page_tokens, std::uint32_t most_idle, std::uint64_t seed,
                         PageHash hash, std::uint32_t stacks)
    : table_(table),
      page_tokens_(page_tokens),
      most_idle_(most_idle),
      seed_(seed),
      hash_(hash),
      entries_(table.blocks()),
      ids_(std::uint64_t{table.blocks()} * page_tokens),
      stacks_(stacks),
      others_(std::uint64_t{table.blocks()} * (stacks - 1), kNone),
      owners_(stacks == 1 ? 0 : table.blocks(), kNone),
      buckets_(std::bit_ceil(std::uint64_t{table.blocks()}), kNone) {}

std::uint64_t PrefixCache::hash_at(const PrefixPlace& place, std::span<const std::int32_t> ids) const noexcept {
  return hash_(place.block == kNone ? place.salt ^ seed_ : entries_[place.block].hash, ids);
}

PrefixPlace PrefixCache::next(const PrefixPlace& place, std::span<const std::int32_t> ids) const noexcept {
  const std::uint64_t hash = hash_at(place, ids);
  std::uint32_t block = buckets_[hash & (buckets_.size() - 1)];
  for (; block != kNone; block = entries_[block].chain) {
    const Entry& entry = entries_[block];
    if (entry.hash == hash && entry.parent == place.block && entry.salt == place.salt &&
        std::equal(ids.begin(), ids.end(), ids_of(block)))
      return {.salt = place.salt, .pages = place.pages + 1, .block = block, .serial = entry.serial};
  }
  return place;
}

PrefixPlace PrefixCache::up(PrefixPlace place, std::uint32_t pages) const noexcept {
  for (; place.pages > pages; --place.pages) place.block = entries_[place.block].parent;
  place.serial = place.block == kNone ? 0 : entries_[place.block].serial;
  return place;
}

PrefixPlace PrefixCache::add(const PrefixPlace& place, std::span<const std::int32_t> ids,
                             std::uint32_t block) noexcept {
  table_.keep(block);
  std::ranges::copy(ids, ids_.begin() + static_cast<std::ptrdiff_t>(std::uint64_t{block} * page_tokens_));
  Entry& entry = entries_[block];
  entry = {.serial = ++serials_, .hash = hash_at(place, ids), .salt = place.salt, .parent = place.block};
  if (place.block != kNone) {
    entry.elder = entries_[place.block].child;
    if (entry.elder != kNone) entries_[entry.elder].younger = block;
    entries_[place.block].child = block;
  }
  entry.chain = bucket(entry.hash);
  bucket(entry.hash) = block;
  return {.salt = place.salt, .pages = place.pages + 1, .block = block, .serial = entry.serial};
}

void PrefixCache::add_other(std::uint32_t page, std::uint32_t stack, std::uint32_t block) noexcept {
  if (block == kNone || other(page, stack) != kNone || table_.kept(block)) return;
  table_.keep(block);
  other(page, stack) = block;
  owners_[block] = page;
}

bool PrefixCache::has_others(std::uint32_t page) const noexcept {
  for (std::uint32_t stack = 1; stack < stacks_; ++stack) {
    if (block_of(page, stack) == kNone) return false;
  }
  return true;
}

void PrefixCache::drop_other(std::uint32_t block) noexcept {
  const std::uint32_t page = std::exchange(owners_[block], kNone);
  for (std::uint32_t stack = 1; stack < stacks_; ++stack) {
    if (block_of(page, stack) == block) other(page, stack) = kNone;
  }
  table_.drop(block);
}

std::uint32_t PrefixCache::leaf_under(std::uint32_t block) const noexcept {
  while (entries_[block].child != kNone) block = entries_[block].child;
  return block;
}

std::uint32_t PrefixCache::remove(std::uint32_t block) noexcept {
  Entry& entry = entries_[block];
  const std::uint32_t parent = entry.parent;
  std::uint32_t* link = &bucket(entry.hash);
  while (*link != block) link = &entries_[*link].chain;
  *link = entry.chain;
  if (entry.elder != kNone) entries_[entry.elder].younger = entry.younger;
  if (entry.younger != kNone) {
    entries_[entry.younger].elder = entry.elder;
  } else if (parent != kNone) {
    entries_[parent].child = entry.elder;
  }
  entry = {};
  for (std::uint32_t stack = 1; stack < stacks_; ++stack) {
    if (const std::uint32_t also = block_of(block, stack); also != kNone) drop_other(also);
  }
  table_.drop(block);
  return parent;
}

void PrefixCache::forget(std::uint32_t block) noexcept {
  if (!owners_.empty() && owners_[block] != kNone) return drop_other(block);
  for (std::uint32_t page = leaf_under(block); page != block;) page = leaf_under(remove(page));
  (void)remove(block);
}

void PrefixCache::evict() noexcept {
  evicted_.fetch_add(1, std::memory_order_relaxed);
  const std::uint32_t oldest = table_.oldest_idle();
  if (!owners_.empty() && owners_[oldest] != kNone) return drop_other(oldest);
  // What continues it may be held by a sequence that had the same tokens in blocks of its own: nobody could find that.
  std::uint32_t page = leaf_under(oldest);
  while (table_.holders(page) != 0) page = leaf_under(remove(page));
  (void)remove(page);
}

}  // namespace sluice::runtime
