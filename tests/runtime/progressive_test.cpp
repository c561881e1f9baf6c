// Progressive attention through the runtime: by the CPU in place (hybrid), and by the device, microbatch by microbatch,
// while the link brings the next (stream).
#include <algorithm>
#include <cmath>
#include <utility>

#include "cpu/host_device.hpp"
#include "cpu/topology.hpp"
#include "sluice/error.hpp"
#include "tests/runtime/toy.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/sanitized.hpp"

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
  const Drive drive = GENERATE(Drive::waiting, Drive::queued);
  CAPTURE(to_string(drive));
  const auto mode = GENERATE(PlacementMode::hybrid, PlacementMode::stream);
  const auto near_pages = GENERATE(16u, 40u, 400u);  // Forced pages alone, a few more, all.
  const auto microbatch = std::to_string(GENERATE(1, 4, 50));
  const std::string window = kWindows[kSanitized ? 1 : GENERATE(0, 1, 2)];
  CAPTURE(to_string(mode), near_pages, microbatch, window);
  const Toy toy(kShape, kTokens, 5);
  Runtime runtime(options_of(mode, near_pages), device_of(drive));
  const SequenceId id = runtime.begin(parse_policy("pages:quest | progressive=1,microbatch=" + microbatch + window));
  REQUIRE(worst_error(decode(runtime, id, toy, kPrompt, drive), toy, kPrompt) < 2e-5);
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

TEST_CASE("progressive: on the device, every page visited is a hit or a miss, and a pool that holds all misses once",
          "[progressive]") {
  const Toy toy(kShape, kTokens, 7);
  const auto near_pages = GENERATE(20u, 60u, 400u);
  CAPTURE(near_pages);
  Runtime runtime(options_of(PlacementMode::stream, near_pages));
  const SequenceId id =
      runtime.begin(parse_policy("pages:quest | progressive=0.9,microbatch=2 | near=0,sinks=0,recent=0"));
  decode(runtime, id, toy, kPrompt);
  const Stats stats = runtime.stats(id);
  REQUIRE(stats.pool_hits + stats.pool_misses > 0);
  REQUIRE(stats.far_tokens == 0);
  REQUIRE(stats.attended_tokens == stats.near_tokens + stats.fetched_tokens);
  REQUIRE(stats.attended_tokens < stats.dense_tokens);
  REQUIRE(stats.fetched_tokens == stats.pool_misses * 16);
  REQUIRE(stats.overshoot_pages <= stats.pool_hits + stats.pool_misses);
  REQUIRE(stats.overshoot_pages <= 2 * stats.progressive_iterations);
  REQUIRE(stats.progressive_iterations >= (stats.pool_hits + stats.pool_misses) / 2);
  // Beyond what it needed a head visits one microbatch or half as many pages, whichever is more.
  const std::uint64_t turns_in_flight = std::uint64_t{kTokens - kPrompt} * kShape.layers * kShape.kv_heads;
  REQUIRE(stats.overshoot_pages <= 2 * turns_in_flight + (stats.pool_hits + stats.pool_misses) / 3);
  if (near_pages == 400) {
    REQUIRE(stats.evictions == 0);
    REQUIRE(stats.pool_misses <= 4 * (kTokens / 16));
    REQUIRE(stats.pool_hits > stats.pool_misses);
  }
  runtime.end(id);
  REQUIRE(runtime.info().near_slots_free == runtime.info().near_slots);
}

TEST_CASE("progressive: sequences of one batch do not disturb each other", "[progressive]") {
  const Toy toy(kShape, kTokens, 8);
  const Toy other(kShape, kTokens, 9);
  const char* const policy = "pages:quest | progressive=0.8,microbatch=3 | near=0,sinks=4,recent=20";
  const auto alone = [&](const Toy& one) {
    Runtime runtime(options_of(PlacementMode::stream, 50));
    return decode(runtime, runtime.begin(parse_policy(policy)), one, kPrompt);
  };
  const std::vector<float> want[] = {alone(toy), alone(other)};

  Runtime runtime(options_of(PlacementMode::stream, 100));
  const SequenceId ids[] = {runtime.begin(parse_policy(policy)), runtime.begin(parse_policy("full")),
                            runtime.begin(parse_policy(policy))};
  const Toy* const toys[] = {&toy, &toy, &other};
  for (int i = 0; i < 3; ++i) prefill(runtime, ids[i], *toys[i], kPrompt, 64);
  const std::size_t q_size = std::size_t{kShape.q_heads} * kShape.head_dim;
  const std::size_t kv_size = std::size_t{kShape.kv_heads} * kShape.head_dim;
  std::size_t at = 0;
  for (std::uint32_t token = kPrompt; token < kTokens; ++token) {
    for (std::uint32_t layer = 0; layer < kShape.layers; ++layer, at += q_size) {
      std::vector<float> q;
      std::vector<float> k;
      std::vector<float> v;
      std::vector<float> out(3 * q_size);
      for (const Toy* each : toys) {
        const auto add = [](std::vector<float>& to, const TensorView& from, std::size_t size) {
          const auto* row = reinterpret_cast<const float*>(from.row(0, 0));
          to.insert(to.end(), row, row + size);
        };
        add(q, each->q(layer, token, 1), q_size);
        add(k, each->k(layer, token, 1), kv_size);
        add(v, each->v(layer, token, 1), kv_size);
      }
      runtime.step({.layer = LayerId{layer},
                    .sequences = ids,
                    .q = dense_view(std::as_const(q).data(), DType::f32, 3, kShape.q_heads, kShape.head_dim),
                    .k = dense_view(std::as_const(k).data(), DType::f32, 3, kShape.kv_heads, kShape.head_dim),
                    .v = dense_view(std::as_const(v).data(), DType::f32, 3, kShape.kv_heads, kShape.head_dim),
                    .out = dense_view(out.data(), DType::f32, 3, kShape.q_heads, kShape.head_dim)});
      const std::vector<double> dense = toy.dense(layer, token);
      for (std::size_t i = 0; i < q_size; ++i) {
        REQUIRE(std::abs(out[i] - want[0][at + i]) < 1e-5f);
        REQUIRE(std::abs(out[q_size + i] - dense[i]) < 2e-5);
        REQUIRE(std::abs(out[2 * q_size + i] - want[1][at + i]) < 1e-5f);
      }
    }
  }
}
