// Threads whose cores others take.
#include "runtime/far/presence.hpp"

#include "tests/support/catch.hpp"

using sluice::runtime::Presence;
using namespace std::chrono_literals;

namespace {

Presence::Time at(std::chrono::nanoseconds since) { return Presence::Time(1h + since); }

}  // namespace

TEST_CASE("a thread that is taken off its core again and again cannot be relied on", "[presence]") {
  Presence presence(7);
  presence.taken(7, at(0ms));
  presence.taken(7 + Presence::kMostAbsences, at(1ms));
  REQUIRE_FALSE(presence.unreliable());
  presence.taken(8 + Presence::kMostAbsences, at(2ms));
  REQUIRE(presence.unreliable());
  presence.stand_aside(at(2ms));
  REQUIRE_FALSE(presence.unreliable());
  presence.taken(1'000'000, at(3ms));
  REQUIRE(presence.unreliable());
}

TEST_CASE("a thread is missed where it did nothing but look at the clock", "[presence]") {
  Presence presence(0);
  const auto gap = Presence::kGap + 1us;
  auto now = at(0ms);
  presence.look(now, false);
  for (std::uint32_t i = 0; i < 10; ++i) presence.look(now += gap, false);  // It has worked meanwhile.
  for (std::uint32_t i = 0; i < 10; ++i) presence.look(now += Presence::kGap, true);
  REQUIRE_FALSE(presence.unreliable());
  for (std::uint32_t i = 0; i < Presence::kMostAbsences; ++i) presence.look(now += gap, true);
  REQUIRE_FALSE(presence.unreliable());
  presence.look(now += gap, true);
  REQUIRE(presence.unreliable());
}

TEST_CASE("absences far apart are accidents, one long absence is a suspended process", "[presence]") {
  Presence presence(0);
  auto now = at(0ms);
  for (std::uint64_t i = 1; i < 100; ++i) presence.taken(i, now += Presence::kWindow + 1ms);
  presence.look(now, false);
  presence.look(now += 1h, true);
  REQUIRE_FALSE(presence.unreliable());
}

TEST_CASE("a thread on probation may not be missed once", "[presence]") {
  Presence presence(0);
  const auto now = at(0ms);
  presence.taken(5, now);
  presence.begin_probation(9, now + 10s);  // What was missed before does not count, nor while it slept.
  presence.look(now + 10s, true);
  presence.taken(9, now + 10s);
  REQUIRE_FALSE(presence.was_missed());
  presence.taken(10, now + 10s + 1ms);
  REQUIRE(presence.was_missed());
  REQUIRE_FALSE(presence.unreliable());
  presence.begin_probation(10, now + 20s);
  presence.look(now + 20s + Presence::kGap, true);
  REQUIRE_FALSE(presence.was_missed());
  presence.look(now + 20s + 2 * Presence::kGap + 1us, true);
  REQUIRE(presence.was_missed());
}

TEST_CASE("pauses double, whether probation was passed or not, until there was none for a while", "[presence]") {
  Presence presence(0);
  auto now = at(0ms);
  auto expected = Presence::kFirstPause;
  for (int i = 0; i < 12; ++i) {
    presence.stand_aside(now);
    REQUIRE(presence.until() - now == expected);
    now = presence.until() + (i % 2 == 0 ? Presence::kProbation : Presence::kForgiven);
    expected = std::min(2 * expected, Presence::kMostPause);
  }
  presence.stand_aside(presence.until() + Presence::kForgiven + 1ms);
  now = presence.until();
  REQUIRE(now - at(0ms) > Presence::kForgiven);
  presence.stand_aside(now);
  REQUIRE(presence.until() - now == 2 * Presence::kFirstPause);
}
