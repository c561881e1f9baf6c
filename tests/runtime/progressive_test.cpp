// Progressive attention through the runtime: by the CPU in place (hybrid), and by the device, microbatch by microbatch,
// while the link brings the next (stream).
#include <algorithm>
#include <cmath>

#include "cpu/host_device.hpp"
#include "cpu/topology.hpp"
#include "sluice/error.hpp"
#include "tests/runtime/toy.hpp"
#include "tests/support/catch.hpp"

using namespace sluice;
using namespace sluice::test;

namespace {

constexpr AttentionShape kShape{.layers = 2, .q_heads = 4, .kv_heads = 2, .head_dim = 16};
constexpr std::uint32_t kPrompt = 500;
constexpr std::uint32_t kTokens = 520;
constexpr const char* kWindows[] = {" | near=0,sinks=4,recent=20", " | near=0,sinks=0,recent=0",
                                    " | near=10%,sinks=4,recent=20"};

RuntimeOptions options_of(PlacementMode mode, std::uint32_t near_pages) {
  RuntimeOptions options = toy_options(kShape, 3 * kTokens);
  options.placement = mode;
  options.near_bytes = near_pages * options.layout().page_bytes();
  options.timeout = std::chrono::milliseconds(20'000);
  return options;
}

}  // namespace

TEST_CASE("progressive: all of the mass is dense attention, wherever it runs", "[progressive]") {
  const auto mode = GENERATE(PlacementMode::hybrid, PlacementMode::stream);
  const auto near_pages = GENERATE(16u, 40u, 400u);  // Forced pages alone, a few more, all.
  const auto microbatch = std::to_string(GENERATE(1, 4, 50));
  const std::string window = kWindows[GENERATE(0, 1, 2)];
  CAPTURE(to_string(mode), near_pages, microbatch, window);
  const Toy toy(kShape, kTokens, 5);
  Runtime runtime(options_of(mode, near_pages));
  const SequenceId id = runtime.begin(parse_policy("pages:quest | progressive=1,microbatch=" + microbatch + window));
  REQUIRE(worst_error(decode(runtime, id, toy, kPrompt), toy, kPrompt) < 2e-5);
  const Stats stats = runtime.stats(id);
  REQUIRE(stats.attended_tokens == stats.dense_tokens);
  REQUIRE(stats.attended_tokens == stats.near_tokens + stats.far_tokens + stats.fetched_tokens);
  REQUIRE(stats.progressive_iterations > 0);
  runtime.end(id);
  REQUIRE(runtime.info().near_slots_free == runtime.info().near_slots);
}

TEST_CASE("progressive: a certified share is covered in every step of every head", "[progressive]") {
  const auto mode = GENERATE(PlacementMode::hybrid, PlacementMode::stream);
  const std::string window = kWindows[GENERATE(0, 1, 2)];
  const double mass = GENERATE(0.5, 0.9);
  CAPTURE(to_string(mode), window, mass);
  const Toy toy(kShape, kTokens, 6);
  RuntimeOptions options = options_of(mode, 60);
  options.audit_every = 1;
  Runtime runtime(options);
  const SequenceId id = runtime.begin(
      parse_policy("pages:quest | progressive=" + std::to_string(mass) + ",rule=certified,microbatch=2" + window));
  decode(runtime, id, toy, kPrompt);
  REQUIRE(runtime.stats(id).coverage.count() == (kTokens - kPrompt) * kShape.layers * kShape.q_heads);
  REQUIRE(runtime.stats(id).coverage.min() >= mass - 1e-5);
}
