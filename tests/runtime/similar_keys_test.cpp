// Policies that look for keys like the query, clusters and hash tables, through the whole runtime.

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
