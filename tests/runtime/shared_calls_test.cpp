// Calls that threads do together.
#include "runtime/far/shared_calls.hpp"

#include <array>
#include <atomic>
#include <stdexcept>
#include <thread>
#include <vector>

#include "tests/support/catch.hpp"
#include "tests/support/sanitized.hpp"

using namespace sluice::runtime;

namespace {

/// Threads that do pieces of any caller's calls as long as this lives.
class Helpers {
 public:
  Helpers(SharedCalls& calls, std::size_t callers, int threads) {
    for (int i = 0; i < threads; ++i) {
      threads_.emplace_back([this, &calls, callers](const std::stop_token& stop) {
        while (!stop.stop_requested()) {
          for (std::size_t caller = 0; caller < callers; ++caller) {
            while (const SharedCalls::Claim claim = calls.claim(caller)) {
              claim.run();
              helped_ += claim.question().layer == caller ? 1 : 1'000'000;
              claim.finish();
            }
          }
          std::this_thread::yield();
        }
      });
    }
  }
  [[nodiscard]] int helped() const { return helped_; }

 private:
  std::atomic<int> helped_{0};
  std::vector<std::jthread> threads_;
};

}  // namespace

TEST_CASE("pieces of a call are done once each, and all of them before it returns", "[shared_calls]") {
  constexpr std::size_t kCallers = 3;
  constexpr int kCalls = sluice::test::kSanitized ? 300 : 3'000;
  SharedCalls calls(kCallers);
  std::array<std::uint64_t, kCallers> wrong{};
  {
    const Helpers helpers(calls, kCallers, 3);
    std::vector<std::jthread> callers;
    for (std::size_t caller = 0; caller < kCallers; ++caller) {
      callers.emplace_back([&, caller] {
        std::vector<std::uint32_t> done;  // By whoever does it; other memory for each call.
        for (std::uint32_t call = 0; call < kCalls; ++call) {
          const std::uint32_t pieces = (call * 7 + static_cast<std::uint32_t>(caller)) % 23;
          done.assign(pieces, 0);
          calls.run(caller, {.asked = call, .layer = static_cast<std::uint32_t>(caller)}, pieces,
                    [&](std::uint32_t i) { done[i] += i + call + 1; });
          for (std::uint32_t i = 0; i < pieces; ++i) wrong[caller] += done[i] != i + call + 1;
        }
      });
    }
  }
  REQUIRE(wrong == std::array<std::uint64_t, kCallers>{});
  REQUIRE(calls.shared() == kCallers * kCalls);
}

TEST_CASE("who has nothing else to do helps, and is told what for", "[shared_calls]") {
  SharedCalls calls(1);
  const Helpers helpers(calls, 1, 1);
  const std::thread::id caller = std::this_thread::get_id();
  std::atomic<bool> helped{false};
  // The caller's own piece waits for another thread's.
  calls.run(0, {}, 2, [&](std::uint32_t) {
    if (std::this_thread::get_id() != caller) helped = true;
    while (!helped) std::this_thread::yield();
  });
  REQUIRE(helpers.helped() >= 1);
}

TEST_CASE("a piece that fails fails the call when all are done", "[shared_calls]") {
  SharedCalls calls(1);
  const Helpers helpers(calls, 1, 2);
  for (std::uint32_t bad = 0; bad < 9; ++bad) {
    std::atomic<std::uint32_t> done{0};
    const auto piece = [&](std::uint32_t i) {
      ++done;
      if (i >= bad) throw std::runtime_error("piece");
    };
    REQUIRE_THROWS_WITH(calls.run(0, {}, 9, piece), "piece");
    REQUIRE(done == 9);
  }
  std::atomic<std::uint32_t> done{0};
  calls.run(0, {}, 9, [&](std::uint32_t) { ++done; });
  REQUIRE(done == 9);
}
