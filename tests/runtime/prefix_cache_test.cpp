// The cache of prefixes against a model of it that searches through everything, whatever hashes are worth.
#include "runtime/kv/prefix_cache.hpp"

#include <algorithm>
#include <map>
#include <vector>

#include "tests/support/catch.hpp"
#include "tests/support/random.hpp"
#include "tests/support/sanitized.hpp"

using namespace sluice;
using namespace sluice::runtime;
using sluice::test::kSanitized;
using sluice::test::Random;

namespace {

constexpr std::uint32_t kPageTokens = 2;
constexpr std::uint32_t kBlocks = 24;

std::uint64_t same_hash(std::uint64_t, std::span<const std::int32_t>) noexcept { return 7; }
/// Without what comes before.
std::uint64_t page_alone(std::uint64_t, std::span<const std::int32_t> ids) noexcept {
  return static_cast<std::uint64_t>(ids[0]);
}

using Ids = std::vector<std::int32_t>;  ///< of whole pages, the salt first

std::span<const std::int32_t> page(const Ids& ids, std::uint32_t index) {
  return std::span(ids).subspan(1 + index * kPageTokens, kPageTokens);
}
std::uint32_t pages_of(const Ids& ids) { return static_cast<std::uint32_t>((ids.size() - 1) / kPageTokens); }
bool begins_with(const Ids& ids, const Ids& prefix) {
  return ids.size() >= prefix.size() && std::equal(prefix.begin(), prefix.end(), ids.begin());
}

struct Sequence {
  Ids ids;
  std::vector<std::uint32_t> blocks;
};

class World {
 public:
  World(PageHash hash, std::uint64_t seed) : cache_(table_, kPageTokens, kBlocks, 5, hash), random_(seed) {}

  void turn() {
    const std::uint32_t what = random_.below(10);
    if (what < 5 && sequences_.size() < 7) begin();
    if (sequences_.empty()) return;
    Sequence& sequence = sequences_[random_.below(static_cast<std::uint32_t>(sequences_.size()))];
    if (what == 5) let_go(sequence, random_.below(pages_of(sequence.ids) + 1));
    if (what == 6) publish(sequence);
    if (what == 7 && !known_.empty()) forget();
    if (what > 7) {
      let_go(sequence, 0);
      std::swap(sequence, sequences_.back());
      sequences_.pop_back();
    }
  }

  void check() const {
    std::uint32_t held = 0;
    for (std::uint32_t block = 0; block < kBlocks; ++block) held += table_.holders(block) != 0 ? 1 : 0;
    REQUIRE(table_.free() + table_.idle() + held == kBlocks);
    REQUIRE(table_.idle() == idle_.size());
    for (const auto& [ids, block] : known_) REQUIRE(find(ids).block == block);
    // Nothing else is.
    for (const auto& [ids, block] : known_) {
      Ids other = ids;
      other[1 + ids.size() / 2 % (ids.size() - 1)] += 1;
      if (!known_.contains(other)) REQUIRE(find(other).pages < pages_of(other));
    }
  }
  [[nodiscard]] std::uint64_t orphans() const { return orphans_; }
  [[nodiscard]] std::uint64_t evicted() const { return cache_.evicted(); }

 private:
  PrefixPlace find(const Ids& ids, std::uint32_t most = kNone) const {
    PrefixPlace place{.salt = static_cast<std::uint64_t>(ids[0])};
    while (place.pages < std::min(most, pages_of(ids))) {
      const PrefixPlace next = cache_.next(place, page(ids, place.pages));
      if (next.pages == place.pages) break;
      place = next;
    }
    return place;
  }
  static Ids prefix(const Ids& ids, std::uint32_t pages) {
    return {ids.begin(), ids.begin() + 1 + pages * kPageTokens};
  }

  void begin() {
    Sequence sequence;
    const std::uint32_t pages = 1 + random_.below(6);
    for (std::uint32_t i = 0; i < 1 + pages * kPageTokens; ++i)
      sequence.ids.push_back(static_cast<std::int32_t>(random_.below(i == 0 || i % kPageTokens == 0 ? 2 : 3)));
    // Some look up what there is, others have blocks of their own.
    for (const std::uint32_t most = random_.below(4) == 0 ? 0 : pages; sequence.blocks.size() < most;) {
      const auto at = static_cast<std::uint32_t>(sequence.blocks.size());
      const auto known = known_.find(prefix(sequence.ids, at + 1));
      REQUIRE(find(sequence.ids, at + 1).pages == at + (known != known_.end() ? 1 : 0));
      if (known == known_.end()) break;
      if (table_.holders(known->second) == 0) std::erase(idle_, known->second);
      table_.hold(known->second);
      sequence.blocks.push_back(known->second);
    }
    while (sequence.blocks.size() < pages && table_.free() + table_.idle() != 0) {
      if (table_.free() == 0) evict();
      sequence.blocks.push_back(table_.take());
    }
    sequence.ids = prefix(sequence.ids, static_cast<std::uint32_t>(sequence.blocks.size()));
    if (random_.below(3) != 0) publish(sequence);
    sequences_.push_back(std::move(sequence));
  }

  void publish(const Sequence& sequence) {
    PrefixPlace place{.salt = static_cast<std::uint64_t>(sequence.ids[0])};
    while (place.pages < pages_of(sequence.ids)) {
      const std::uint32_t block = sequence.blocks[place.pages];
      const bool known = known_.contains(prefix(sequence.ids, place.pages + 1));
      PrefixPlace next = cache_.next(place, page(sequence.ids, place.pages));
      REQUIRE((next.pages != place.pages) == known);
      if (!known) {
        REQUIRE(!table_.kept(block));
        known_[prefix(sequence.ids, place.pages + 1)] = block;
        next = cache_.add(place, page(sequence.ids, place.pages), block);
      }
      REQUIRE(cache_.knows(next));
      REQUIRE(cache_.up(next, place.pages).block == place.block);
      place = next;
    }
  }

  void let_go(Sequence& sequence, std::uint32_t pages) {
    for (; sequence.blocks.size() > pages; sequence.blocks.pop_back()) {
      const std::uint32_t block = sequence.blocks.back();
      table_.release(block);
      if (table_.holders(block) == 0 && table_.kept(block)) idle_.push_back(block);
    }
    sequence.ids = prefix(sequence.ids, pages);
  }

  void forget() {
    const Ids ids = std::next(known_.begin(), random_.below(static_cast<std::uint32_t>(known_.size())))->first;
    cache_.forget(known_[ids]);
    std::erase_if(known_, [&](const auto& each) { return begins_with(each.first, ids); });
    drop_lost_idle();
  }
  void drop_lost_idle() {
    std::erase_if(idle_, [&](std::uint32_t block) { return !table_.kept(block); });
  }

  void evict() {
    const std::uint32_t oldest = idle_.front();
    REQUIRE(table_.oldest_idle() == oldest);
    const auto of = [&](std::uint32_t block) {
      return std::ranges::find(known_, block, [](auto& e) { return e.second; });
    };
    const Ids ids = of(oldest)->first;
    const std::uint32_t free = table_.free();
    const auto known_before = known_;
    cache_.evict();
    REQUIRE(table_.free() == free + 1);
    // It, or what continues it; and leaves only.
    std::erase_if(known_, [&](const auto& each) { return !table_.kept(each.second); });
    for (const auto& [lost, block] : known_before) {
      if (known_.contains(lost)) continue;
      REQUIRE(begins_with(lost, ids));
      orphans_ += table_.holders(block) != 0 ? 1 : 0;
      for (const auto& [left, other] : known_) REQUIRE(!begins_with(left, lost));
    }
    const auto continued = [&](const auto& each) { return each.first != ids && begins_with(each.first, ids); };
    if (std::ranges::none_of(known_before, continued)) REQUIRE(!known_.contains(ids));
    drop_lost_idle();
  }

  BlockTable table_{kBlocks};
  PrefixCache cache_;
  Random random_;
  std::map<Ids, std::uint32_t> known_;
  std::vector<std::uint32_t> idle_;  ///< oldest first
  std::vector<Sequence> sequences_;
  std::uint64_t orphans_ = 0;
};

}  // namespace

TEST_CASE("prefixes are what a search through everything finds, also if all hashes collide", "[prefix]") {
  const PageHash hash = GENERATE(&hash_page, &same_hash, &page_alone);
  const std::uint64_t seeds = kSanitized ? 4 : 20;
  std::uint64_t orphans = 0;
  std::uint64_t evicted = 0;
  for (std::uint64_t seed = 0; seed < seeds; ++seed) {
    CAPTURE(seed);
    World world(hash, seed);
    for (int turn = 0; turn < 1000; ++turn) {
      world.turn();
      world.check();
    }
    orphans += world.orphans();
    evicted += world.evicted();
  }
  REQUIRE(evicted > 100 * seeds);
  REQUIRE(orphans > 0);  // Pages of living sequences behind blocks of others that were given up.
}

TEST_CASE("a page's hash depends on every id, its place and all before it", "[prefix]") {
  std::vector<std::uint64_t> hashes;
  Ids ids(16, 3);
  for (std::size_t i = 0; i < 16; ++i) {
    for (const std::int32_t id : {-1, 0, 1, 2, 4, 0x10000, 0x7fffffff}) {
      ids[i] = id;
      hashes.push_back(hash_page(1, ids));
      hashes.push_back(hash_page(2, ids));
    }
    ids[i] = 3;
  }
  std::ranges::sort(hashes);
  REQUIRE(std::ranges::adjacent_find(hashes) == hashes.end());
}

TEST_CASE("a block is idle from when its last sequence lets go of it until one takes it up", "[prefix]") {
  BlockTable table(4);
  PrefixCache cache(table, 1, 2, 0);
  std::vector<std::uint32_t> blocks;
  PrefixPlace place;
  for (const std::int32_t id : {1, 2, 3}) {
    blocks.push_back(table.take());
    place = cache.add(place, {&id, 1}, blocks.back());
    REQUIRE(table.shared(blocks.back()));
  }
  table.forget_freed();
  for (std::size_t i = 3; i-- > 0;) table.release(blocks[i]);
  REQUIRE(table.idle() == 3);
  REQUIRE(table.free() == 1);
  REQUIRE(std::vector<std::uint32_t>(table.freed().begin(), table.freed().end()) ==
          std::vector<std::uint32_t>{blocks[2], blocks[1], blocks[0]});
  table.hold(blocks[2]);
  REQUIRE(table.idle() == 2);
  REQUIRE(table.oldest_idle() == blocks[1]);
  // What is held can lose its name with what it continues; then it is free as soon as it is let go of.
  cache.evict();
  REQUIRE_FALSE(cache.knows(place));
  REQUIRE_FALSE(table.kept(blocks[2]));
  REQUIRE(table.free() == 2);
  REQUIRE(table.kept(blocks[0]));
  table.release(blocks[2]);
  REQUIRE(table.free() == 3);
  cache.trim();
  REQUIRE(table.idle() == 1);
  cache.forget(blocks[0]);
  REQUIRE(table.free() == 4);
  // What was known of a block does not speak for the page that it has now.
  const PrefixPlace old = cache.add({}, std::vector<std::int32_t>{1}, table.take());
  cache.forget(old.block);
  table.release(old.block);
  const PrefixPlace now = cache.add({}, std::vector<std::int32_t>{4}, table.take());
  REQUIRE(now.block == old.block);
  REQUIRE(cache.knows(now));
  REQUIRE_FALSE(cache.knows(old));
}
