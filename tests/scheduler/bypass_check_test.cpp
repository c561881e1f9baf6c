// A bypass that is checked: a head that rests on its sinks attends what was found for it, if that weighs too much.
#include <algorithm>
#include <cmath>
#include <limits>
#include <span>

#include "scheduler/policy/policies.hpp"
#include "scheduler/policy/scored_set.hpp"
#include "tests/scheduler/bypass_support.hpp"

using namespace sluice;
using namespace sluice::scheduler;
using namespace sluice::scheduler::test;

namespace {

constexpr std::uint32_t kGroup = 2, kTokens = 801, kFound = 300;
const AttentionShape kShape{.layers = 1, .q_heads = kGroup, .kv_heads = 1, .head_dim = kDim};

/// A step of a policy whose head 0 looks at the sinks, with four logits of 12, and perhaps at one key far behind them.
struct Step {
  explicit Step(const std::string& text, double found) {
    q.assign(last_q.end() - kGroup * kDim, last_q.end());
    for (float& x : q) x *= 0.3f;  // Flat logits: variance far below 6.
    aim_sinks(kv, q.data(), 12.0);
    policy = make_layer_policy(parse_policy(text), kShape, 16, LayerId{0});
    policy->begin({.kv_head = 0, .tokens = kTokens - 1, .queries = 3, .last_q = last_q, .kv = &kv});
    if (!std::isnan(found)) aim(kv, q.data(), kFound, kFound + 1, found);
    if (std::isnan(found)) kv.k[kFound * kDim] = std::numeric_limits<float>::quiet_NaN();
    const FakeNear near(kTokens, kSinks, 0);
    selected = select(*policy, kv, kTokens, q, near.set);
  }
  [[nodiscard]] std::vector<std::uint32_t> attended(std::uint32_t h) const { return attended_by(selected.row, h); }

  FakeKv kv = FakeKv::random(kTokens + 1, kDim, kGroup, 1);
  std::vector<float> last_q = random_queries(std::size_t{3} * kGroup, kDim, 8), q;
  std::unique_ptr<LayerPolicy> policy;
  Selected selected;
};

const std::string kTopK = "exact | top_k=8 | near=0%,sinks=4,recent=0 | bypass=sink:0.85";
const std::string kTopP = "exact | top_p=0.9 | near=0%,sinks=4,recent=0 | bypass=sink:0.85";

}  // namespace

TEST_CASE("a bypass that is checked bypasses whom nothing was found for", "[bypass]") {
  const std::string text = GENERATE(kTopK, kTopP);
  const Step unchecked(text, 0.0), checked(text + ",check=on", 0.0);
  REQUIRE(unchecked.selected.bypass.heads == 1u);
  REQUIRE(checked.selected.bypass.heads == 1u);
  REQUIRE(checked.selected.bypass.lse[0] == unchecked.selected.bypass.lse[0]);
  REQUIRE(checked.attended(0).empty());
  REQUIRE(checked.attended(1) == unchecked.attended(1));
  REQUIRE_FALSE(checked.attended(1).empty());
}

TEST_CASE("a bypass that is checked leaves a key attended that the estimate does not see", "[bypass]") {
  const std::string text = GENERATE(kTopK, kTopP);
  // As heavy as a sink: a fifth of the softmax, of which the sinks' estimated share knows nothing.
  const Step unchecked(text, 12.0), checked(text + ",check=on", 12.0);
  REQUIRE(unchecked.selected.bypass.heads == 1u);
  REQUIRE(unchecked.attended(0).empty());
  REQUIRE(checked.selected.bypass.heads == 0u);
  REQUIRE(std::ranges::count(checked.attended(0), kFound) == 1);
  const Step off(text.substr(0, text.rfind(" | ")), 12.0);
  REQUIRE(checked.attended(0) == off.attended(0));
  REQUIRE(checked.attended(1) == off.attended(1));
}

TEST_CASE("a bypass that is checked holds its threshold by what was found", "[bypass]") {
  // Four sinks of e^12 beside one key of e^x: 0.85 is crossed at x = 12 + log(4 * 0.15 / 0.85) = 11.65.
  REQUIRE(Step(kTopK + ",check=on", 11.5).selected.bypass.heads == 1u);
  REQUIRE(Step(kTopK + ",check=on", 11.8).selected.bypass.heads == 0u);
}

TEST_CASE("a bypass that is checked bypasses nobody where a score is no number", "[bypass]") {
  REQUIRE(Step(kTopK, std::numeric_limits<double>::quiet_NaN()).selected.bypass.heads == 1u);
  REQUIRE(Step(kTopK + ",check=on", std::numeric_limits<double>::quiet_NaN()).selected.bypass.heads == 0u);
}

TEST_CASE("a head is taken back by what a lone candidate weighs, be it no number, and by none if there is none",
          "[bypass]") {
  Step step(kTopK, 0.0);
  SinkBypass bypass(0.85f, kShape, kSinks, kLocal);
  bypass.begin({.kv_head = 0, .tokens = kTokens - 1, .queries = 3, .last_q = step.last_q, .kv = &step.kv});
  const FakeNear near(kTokens, kSinks, 0);
  const auto left = [&](const std::vector<float>& scores) {
    Bypass out = tested(bypass, step.kv, step.q, kTokens, near);
    REQUIRE(out.heads == 1u);
    bypass.confirm(0, scores, out);
    return out.heads;
  };
  REQUIRE(left({}) == 1u);
  REQUIRE(left({-std::numeric_limits<float>::infinity(), 40.f}) == 1u);  // What head 1 scores is not asked.
  REQUIRE(left({12.f, 0.f}) == 0u);
  REQUIRE(left({std::numeric_limits<float>::quiet_NaN(), 0.f}) == 0u);
}

TEST_CASE("a bypass that is checked looks at what was found by the queries of rows behind, too", "[bypass]") {
  const std::string text = GENERATE(kTopK, kTopP);
  const bool weighs = GENERATE(false, true);
  CAPTURE(text, weighs);
  Step step(text + ",check=on", 0.0);
  // A key that the first row's query knows nothing of, and the one behind looks at beside the sinks.
  std::vector<float> behind(step.q), other(step.q.begin() + kDim, step.q.begin() + 2 * kDim);
  double dot = 0.0, square = 0.0;
  for (std::uint32_t c = 0; c < kDim; ++c) {
    dot += static_cast<double>(step.q[c]) * other[c];
    square += static_cast<double>(step.q[c]) * step.q[c];
  }
  for (std::uint32_t c = 0; c < kDim; ++c) other[c] -= static_cast<float>(dot / square) * step.q[c];
  aim(step.kv, other.data(), kFound, kFound + 1, 12.0);
  for (std::uint32_t c = 0; c < kDim && weighs; ++c) behind[c] += other[c];
  const FakeNear near(kTokens, kSinks, 0);
  const auto heads_with = [&](std::span<const float> rows, const std::string& by) {
    const auto policy = make_layer_policy(parse_policy(by), kShape, 16, LayerId{0});
    policy->begin({.kv_head = 0, .tokens = kTokens - 1, .queries = 3, .last_q = step.last_q, .kv = &step.kv});
    Selected selected;
    policy->select(
        {.kv_head = 0, .tokens = kTokens, .q = step.q.data(), .behind = rows, .near = &near.set, .kv = &step.kv},
        selected.row, selected.bypass, selected.counters);
    return selected.bypass.heads;
  };
  REQUIRE(heads_with({}, text + ",check=on") == 1u);
  REQUIRE(heads_with(behind, text) == 1u);
  REQUIRE(heads_with(behind, text + ",check=on") == (weighs ? 0u : 1u));
}

TEST_CASE("whether a bypass is checked is said where it is read", "[bypass][policy_text]") {
  const PolicySpec spec = parse_policy(kTopK + ",check=on");
  REQUIRE(spec.bypass_checked);
  REQUIRE(parse_policy(to_string(spec)) == spec);
  REQUIRE(to_string(spec).ends_with("bypass=sink:0.85,check=on"));
  REQUIRE_FALSE(parse_policy(kTopK).bypass_checked);
  REQUIRE_FALSE(parse_policy("exact | top_k=8 | bypass=off,check=on").bypass_checked);
}
