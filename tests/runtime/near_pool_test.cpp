#include "runtime/near_pool.hpp"

#include "tests/support/catch.hpp"

using sluice::runtime::NearPool;
using sluice::runtime::SlotOwner;

namespace {

SlotOwner page(std::uint32_t index) { return {.head = nullptr, .page = index}; }

}  // namespace

TEST_CASE("the victim is the least recently used slot", "[near_pool]") {
  NearPool pool(3);
  REQUIRE_FALSE(pool.victim());
  for (std::uint32_t i = 0; i < 3; ++i) REQUIRE(pool.take(page(i)) == i);
  REQUIRE_FALSE(pool.take(page(9)));
  REQUIRE(pool.victim() == 0u);
  pool.touch(0);
  REQUIRE(pool.victim() == 1u);
  pool.drop(1);
  REQUIRE(pool.victim() == 2u);
  REQUIRE(pool.take(page(7)) == 1u);
  REQUIRE(pool.owner(1).page == 7);
}

TEST_CASE("a pinned slot is never a victim, however often it was pinned", "[near_pool]") {
  NearPool pool(2);
  (void)pool.take(page(0));
  (void)pool.take(page(1));
  pool.pin(0);
  pool.pin(0);
  REQUIRE(pool.victim() == 1u);
  pool.pin(1);
  REQUIRE_FALSE(pool.victim());
  pool.unpin(0);
  REQUIRE_FALSE(pool.victim());
  pool.unpin(0);
  REQUIRE(pool.victim() == 0u);
  pool.touch(1);
  REQUIRE(pool.pinned(1));
  pool.drop(1);
  REQUIRE(pool.free_slots() == 1);
  pool.drop(0);
  REQUIRE(pool.free_slots() == 2);
  REQUIRE_FALSE(pool.victim());
}

TEST_CASE("the pool behaves like a list kept in order of use", "[near_pool]") {
  const std::uint32_t seed = GENERATE(1u, 2u, 3u);
  CAPTURE(seed);
  NearPool pool(8);
  std::vector<std::uint32_t> order;  // Unpinned slots, least recent first.
  std::uint32_t state = seed;
  const auto next = [&](std::uint32_t bound) {
    state = state * 1664525u + 1013904223u;
    return (state >> 16) % bound;
  };
  for (int i = 0; i < 2'000; ++i) {
    switch (next(3)) {
      case 0:
        if (const auto slot = pool.take(page(0))) order.push_back(*slot);
        break;
      case 1:
        if (!order.empty()) {
          const auto at = order.begin() + next(static_cast<std::uint32_t>(order.size()));
          const std::uint32_t slot = *at;
          order.erase(at);
          order.push_back(slot);
          pool.touch(slot);
        }
        break;
      default:
        if (const auto slot = pool.victim()) {
          REQUIRE(*slot == order.front());
          order.erase(order.begin());
          pool.drop(*slot);
        }
    }
    REQUIRE(pool.free_slots() == 8 - order.size());
  }
}
