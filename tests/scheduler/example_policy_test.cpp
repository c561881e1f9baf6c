// A policy of one's own in one file, which docs/policies.md shows: each query head attends the tokens whose softmax
// weight is at least a share of its largest one. That cut neither counts tokens nor sums weights.

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "tests/scheduler/policy_step.hpp"

using namespace sluice;
using namespace sluice::scheduler;
using namespace sluice::scheduler::test;

namespace {

class MinPPolicy final : public LayerPolicy {
 public:
  /// @param share  of the largest weight, (0, 1]
  MinPPolicy(const AttentionShape& shape, float share) : group_(shape.group()), log_share_(std::log(share)) {}

  // Nothing is made of the prompt or learnt. A policy that keeps something between steps keeps it for each KV
  // head, says how much by heap_bytes, and takes it back in truncate.
  void begin(const PromptContext&) override {}
  void observe(std::uint32_t, KvReader&) override {}
  [[nodiscard]] std::unique_ptr<LayerPolicy> clone() const override { return std::make_unique<MinPPolicy>(*this); }

  void select(const HeadContext& context, SelectionRow& row, Bypass& bypass, SelectCounters& counters) override {
    bypass.heads = 0;
    // Scratch of the thread: KV heads may be driven by several threads at once.
    thread_local std::vector<std::uint32_t> tokens;
    thread_local std::vector<float> scores;  // [tokens, group]
    tokens.resize(context.tokens);
    std::iota(tokens.begin(), tokens.end(), 0u);
    scores.resize(tokens.size() * group_);
    context.kv->score(context.q, tokens, scores.data());  // Every key is read once for the whole group.
    counters.scored += tokens.size();
    counters.candidates += tokens.size();
    counters.expanded_per_head += tokens.size() * group_;

    // Near tokens count like all others: what is selected must not depend on what lies near.
    std::vector<float> least(group_, -std::numeric_limits<float>::infinity());
    for (std::size_t i = 0; i < scores.size(); ++i) least[i % group_] = std::fmax(least[i % group_], scores[i]);
    for (float& score : least) score += log_share_;
    for (const std::uint32_t token : tokens) {
      const float* const of_token = scores.data() + std::size_t{token} * group_;
      std::uint32_t heads = 0;
      for (std::uint32_t h = 0; h < group_; ++h) heads |= (of_token[h] >= least[h] ? 1u : 0u) << h;  // NaN is not.
      if (heads == 0 || context.near->contains(token)) continue;
      row.tokens.push_back(token);
      row.members.push_back(heads);
      row.scores.insert(row.scores.end(), of_token, of_token + group_);  // So that attending need not read K again.
    }
  }

 private:
  std::uint32_t group_;
  float log_share_;
};

/// Tokens that a head attends beyond the near set, by the definition, in float64.
std::vector<std::uint32_t> expected(const Step& step, const NearSet& near, std::uint32_t h, float share) {
  double largest = -std::numeric_limits<double>::infinity();
  for (std::uint32_t t = 0; t < step.n; ++t) largest = std::max(largest, step.logit(h)(t));
  std::vector<std::uint32_t> tokens;
  for (std::uint32_t t = 0; t < step.n; ++t) {
    if (!near.contains(t) && std::exp(step.logit(h)(t) - largest) >= static_cast<double>(share)) tokens.push_back(t);
  }
  return tokens;
}

}  // namespace

TEST_CASE("the example keeps what weighs at least a share of the largest", "[example_policy]") {
  const std::uint32_t n = GENERATE(1u, 5u, 100u, 777u);
  const float share = GENERATE(1.f, 0.3f, 0.01f, 1e-30f);
  CAPTURE(n, share);
  Step step("topk", n);  // Its keys and queries; outliers and ties are among them.
  step.policy = std::make_unique<MinPPolicy>(kShape, share);
  const FakeNear near(n, 4, 8);
  step.select(near.set);
  for (std::uint32_t h = 0; h < kGroup; ++h) REQUIRE(attended_by(step.row, h) == expected(step, near.set, h, share));
}

TEST_CASE("with next to no share the example attends everything but NaN", "[example_policy]") {
  Step step("topk", 200);
  std::fill_n(step.kv.k.begin() + 50 * kDim, kDim, std::numeric_limits<float>::quiet_NaN());
  MinPPolicy policy(kShape, 1e-30f);
  const FakeNear near(200, 4, 0);
  SelectionRow row;
  policy.select({.kv_head = 0, .tokens = 200, .q = step.q.data(), .near = &near.set, .kv = &step.kv}, row, step.bypass,
                step.counters);
  REQUIRE(row.tokens.size() == 195);
  REQUIRE(std::find(row.tokens.begin(), row.tokens.end(), 50u) == row.tokens.end());
}
