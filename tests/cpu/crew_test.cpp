#include "cpu/threads/crew.hpp"

#include <atomic>
#include <memory>
#include <thread>

#include "tests/support/catch.hpp"

using namespace sluice::cpu;
using namespace std::chrono_literals;

namespace {

/// An owner whose threads do not come back before they are told to.
struct Owner final : Kept {
  struct Gate {
    std::atomic<bool> open{false};
    std::atomic<int> inside{0};
    std::atomic<bool> destroyed{false};
  };
  explicit Owner(std::shared_ptr<Gate> of, int threads) : gate(std::move(of)) {
    for (int i = 0; i < threads; ++i) {
      crew.add([this](const std::stop_token&) {
        ++gate->inside;
        while (!gate->open) std::this_thread::sleep_for(1ms);
        --gate->inside;
      });
    }
    while (gate->inside < threads) std::this_thread::yield();
  }
  ~Owner() override { gate->destroyed = true; }
  std::shared_ptr<Gate> gate;
  Crew crew;
};

}  // namespace

TEST_CASE("a crew that comes back is stopped in time", "[crew]") {
  Crew crew;
  std::atomic<int> ended{0};
  for (int i = 0; i < 3; ++i) {
    crew.add([&](const std::stop_token& stop) {
      while (!stop.stop_requested()) std::this_thread::sleep_for(1ms);
      ++ended;
    });
  }
  REQUIRE(crew.stop(20s));
  REQUIRE(ended == 3);
  REQUIRE(crew.stop(1ms));
}

TEST_CASE("a crew of which some do not come back goes with the last of them, and its owner", "[crew]") {
  const int threads = GENERATE(1, 3);
  const auto gate = std::make_shared<Owner::Gate>();
  auto owner = std::make_unique<Owner>(gate, threads);
  Crew& crew = owner->crew;
  REQUIRE_FALSE(crew.stop(5ms));
  crew.keep(std::move(owner));
  REQUIRE_FALSE(gate->destroyed);
  REQUIRE(gate->inside == threads);
  gate->open = true;
  while (gate.use_count() > 1) std::this_thread::sleep_for(1ms);
  REQUIRE(gate->destroyed);
}

TEST_CASE("an owner whose crew has come back meanwhile goes at once", "[crew]") {
  const auto gate = std::make_shared<Owner::Gate>();
  auto owner = std::make_unique<Owner>(gate, 2);
  Crew& crew = owner->crew;
  REQUIRE_FALSE(crew.stop(5ms));
  gate->open = true;
  REQUIRE(crew.stop(20s));
  crew.keep(std::move(owner));
  REQUIRE(gate->destroyed);
}
