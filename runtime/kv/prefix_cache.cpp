#include "runtime/kv/prefix_cache.hpp"

#include <algorithm>
#include <bit>

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
                         PageHash hash)
    : table_(table),
      page_tokens_(page_tokens),
      most_idle_(most_idle),
      seed_(seed),
      hash_(hash),
      entries_(table.blocks()),
      ids_(std::uint64_t{table.blocks()} * page_tokens),
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
  table_.drop(block);
  return parent;
}

void PrefixCache::forget(std::uint32_t block) noexcept {
  for (std::uint32_t page = leaf_under(block); page != block;) page = leaf_under(remove(page));
  (void)remove(block);
}

void PrefixCache::evict() noexcept {
  // What continues it may be held by a sequence that had the same tokens in blocks of its own: nobody could find that.
  std::uint32_t page = leaf_under(table_.oldest_idle());
  while (table_.holders(page) != 0) page = leaf_under(remove(page));
  (void)remove(page);
  evicted_.fetch_add(1, std::memory_order_relaxed);
}

}  // namespace sluice::runtime
