// Policies that look for keys like the query, clusters and hash tables, through the whole runtime.

#include <chrono>
#include <cmath>

#include "scheduler/policy/policies.hpp"
#include "tests/runtime/toy.hpp"
#include "tests/support/catch.hpp"

using namespace sluice;
using namespace sluice::test;

namespace {

constexpr AttentionShape kShape{.layers = 2, .q_heads = 6, .kv_heads = 2, .head_dim = 64};
constexpr std::uint32_t kPrompt = 400;
constexpr std::uint32_t kTokens = 480;

PolicySpec tactic(float mass) {
  PolicySpec spec = scheduler::tactic_spec();
  spec.budget.mass = mass;
  spec.clusters.min_tokens = 100;
  spec.clusters.recluster_every = 64;
  return spec;
}

PolicySpec magicpig(std::uint32_t bits, std::uint32_t tables) {
  PolicySpec spec = scheduler::magicpig_spec();
  spec.dense_every = 0;
  spec.lsh.bits = bits;
  spec.lsh.tables = tables;
  return spec;
}

PlacementMode any_placement() {
  return GENERATE(PlacementMode::hybrid, PlacementMode::stream, PlacementMode::near, PlacementMode::automatic);
}

std::vector<float> decode_with(const PolicySpec& spec, PlacementMode placement, const Toy& toy) {
  RuntimeOptions options = toy_options(kShape, kTokens);
  options.placement = placement;
  Runtime runtime(options);
  return decode(runtime, runtime.begin(spec), toy, kPrompt);
}

}  // namespace

TEST_CASE("all of the clusters' mass is dense attention, before and after new tokens are clustered", "[runtime]") {
  const PlacementMode placement = any_placement();
  CAPTURE(to_string(placement));
  const Toy toy(kShape, kTokens, 51);
  REQUIRE(worst_error(decode_with(tactic(1.f), placement, toy), toy, kPrompt) < 2e-5);
}

TEST_CASE("a sample that nearly every key gets into is nearly dense attention", "[runtime]") {
  const PlacementMode placement = any_placement();
  CAPTURE(to_string(placement));
  const Toy toy(kShape, kTokens, 52);
  // One bit in 512 tables: a key stays out only if it points away from the query.
  REQUIRE(worst_error(decode_with(magicpig(1, 512), placement, toy), toy, kPrompt) < 1e-3);
}

TEST_CASE("clusters and samples are the same in every run, and are less than everything", "[runtime]") {
  const PolicySpec spec = GENERATE(true, false) ? tactic(0.6f) : magicpig(8, 75);
  CAPTURE(spec.name);
  const Toy toy(kShape, kTokens, 53);
  const std::vector<float> first = decode_with(spec, PlacementMode::hybrid, toy);
  REQUIRE(worst_difference(first, decode_with(spec, PlacementMode::hybrid, toy)) == 0.0);
  const double error = worst_error(first, toy, kPrompt);
  REQUIRE(error > 1e-3);
  REQUIRE(std::isfinite(error));
}

TEST_CASE("clusters that take longer than any wait may are no wait", "[runtime][similar_keys]") {
  constexpr AttentionShape kOne{.layers = 1, .q_heads = 1, .kv_heads = 1, .head_dim = 128};
  const Toy toy(kOne, 6001, 51);
  RuntimeOptions options = toy_options(kOne, 2 * toy.tokens());
  options.threads = 1;
  options.timeout = std::chrono::milliseconds(300);
  Runtime runtime(options);
  const SequenceId id = runtime.begin(parse_policy("clusters:size=4,iterations=100 | fitted=1 | near=30%"));
  prefill(runtime, id, toy, 6000, 64);
  const auto begin = std::chrono::steady_clock::now();
  const std::vector<float> out = step(runtime, id, toy, 6000);
  CHECK(std::chrono::steady_clock::now() - begin > options.timeout);  // Else this test says nothing.
  REQUIRE(worst_error(out, toy, 6000) < 2e-5);
}

TEST_CASE("where everything is near nothing is clustered, as nothing is selected", "[runtime][similar_keys]") {
  constexpr AttentionShape kOne{.layers = 1, .q_heads = 1, .kv_heads = 1, .head_dim = 128};
  const Toy toy(kOne, 6001, 52);
  const auto first_step = [&](PlacementMode mode) {
    RuntimeOptions options = toy_options(kOne, 2 * toy.tokens());
    options.threads = 1;
    options.placement = mode;
    Runtime runtime(options);
    const SequenceId id = runtime.begin(parse_policy("clusters:size=4,iterations=100 | fitted=1"));
    prefill(runtime, id, toy, 6000, 64);
    const auto begin = std::chrono::steady_clock::now();
    const std::vector<float> out = step(runtime, id, toy, 6000);
    const auto spent = std::chrono::steady_clock::now() - begin;
    CHECK(worst_error(out, toy, 6000) < 2e-5);
    return spent;
  };
  REQUIRE(4 * first_step(PlacementMode::near) < first_step(PlacementMode::hybrid));
}
