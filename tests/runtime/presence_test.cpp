// Threads whose cores others take.
#include "runtime/far/presence.hpp"

#include "tests/support/catch.hpp"

using sluice::runtime::Presence;
using namespace std::chrono_literals;

namespace {

Presence::Time at(std::chrono::nanoseconds since) { return Presence::Time(1h + since); }

/// Stands aside at `now`, and says for how long.
auto pause(Presence& presence, Presence::Time now) {
  presence.stand_aside(now);
  return presence.until() - now;
}

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

TEST_CASE("pauses double while their thread is taken off its core, and are short again after a while", "[presence]") {
  Presence presence(0);
  auto now = at(0ms);
  auto expected = Presence::kFirstPause;
  for (int i = 0; i < 12; ++i) {
    REQUIRE(pause(presence, now) == expected);
    now = presence.until() + 25ms;
    expected = std::min(2 * expected, Presence::kMostPause);
  }
  REQUIRE(pause(presence, presence.until() + Presence::kForgiven + 1ms) == Presence::kFirstPause);
}
