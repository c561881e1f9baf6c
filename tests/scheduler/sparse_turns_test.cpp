// Policies that learn in every n-th step only: whose turn it is, also after steps of several tokens and after steps
// that were taken back.

#include "tests/scheduler/policy_step.hpp"
#include "tests/support/random.hpp"

using namespace sluice;
using namespace sluice::scheduler;
using namespace sluice::scheduler::test;

namespace {

/// A policy of one layer behind a prompt, step by step.
struct Turns {
  Turns(const std::string& text, std::uint32_t layer, std::uint32_t prompt)
      : step(text, 1000), policy(make_layer_policy(step.spec, kShape, kPageTokens, LayerId{layer})) {
    policy->begin({.kv_head = 0, .tokens = prompt, .queries = 40, .last_q = step.last_q, .kv = &step.kv});
    policy->forecast(0, prompt + 1);
  }
  void select(std::uint32_t n, const NearSet& near, std::span<const std::uint32_t> ranked = {}) {
    step.row.clear();
    policy->select(
        {.kv_head = 0, .tokens = n, .q = step.q.data(), .ranked_pages = ranked, .near = &near, .kv = &step.kv},
        step.row, step.bypass, step.counters);
  }
  /// The step after which there are n tokens.  @return whether the policy learnt from it
  bool observes(std::uint32_t n) {
    select(n, FakeNear(n, 4, 0).set);
    const bool wants = policy->wants_observation(0);
    if (wants) policy->observe(0, step.kv);
    return wants;
  }

  Step step;
  std::unique_ptr<LayerPolicy> policy;
};

}  // namespace

TEST_CASE("tables are fed in every n-th step only, layers in turn", "[policy]") {
  const std::uint32_t prompt = 989;
  const std::uint32_t layer = GENERATE(0u, 1u);
  Turns turns("lfps:bypass=0,observe_every=2", layer, prompt);
  for (std::uint32_t n = prompt + 1; n < prompt + 7; ++n) {
    turns.select(n, FakeNear(n, 4, 0).set);
    REQUIRE(turns.policy->wants_observation(0) == ((n + layer) % 2 == 0));
    REQUIRE(attended_by(turns.step.row, 0).size() >= 6);
    const std::size_t scored = turns.step.kv.rows_scored;
    turns.policy->observe(0, turns.step.kv);
    REQUIRE(turns.step.kv.rows_scored == scored);  // Read by select already.
    if (turns.policy->wants_observation(0)) turns.policy->forecast(0, n + 1);
  }
}

TEST_CASE("steps of several tokens do not miss the turn to feed the tables", "[policy]") {
  Turns turns("lfps:bypass=0,observe_every=4", 1, 800);
  // Layer 1 has its turn at 803, 807, ...
  REQUIRE_FALSE(turns.observes(802));
  REQUIRE(turns.observes(806));
  for (std::uint32_t n = 810; n < 850; n += 4) REQUIRE(turns.observes(n));
  REQUIRE(turns.observes(847));
  REQUIRE_FALSE(turns.observes(848));
  REQUIRE_FALSE(turns.observes(849));
  REQUIRE(turns.observes(870));
  // Taken back, it is as if the step had never been: it was not the one that had the turn.
  turns.policy->truncate(0, 869);
  REQUIRE(turns.observes(869));
  REQUIRE_FALSE(turns.observes(870));
}

TEST_CASE("steps of several tokens that are taken back do not change whose turn it is", "[policy]") {
  const std::uint32_t prompt = 800;
  // What later steps do after some that were taken back, or without these.
  const auto goes_on = [&](const std::vector<std::uint32_t>& steps, const std::vector<std::uint32_t>& taken_back,
                           std::uint32_t tokens, bool clones) {
    Turns turns("lfps:bypass=0,observe_every=4", 1, prompt);
    const auto observes = [&](std::uint32_t n) {
      const bool learnt = turns.observes(n);
      if (learnt) turns.policy->forecast(0, n + 1);
      return learnt;
    };
    for (const std::uint32_t n : steps) (void)observes(n);
    for (const std::uint32_t n : taken_back) (void)observes(n);
    if (clones) turns.policy = turns.policy->clone();
    REQUIRE(turns.policy->can_truncate(0, tokens));
    turns.policy->truncate(0, tokens);
    std::vector<bool> learnt;
    for (std::uint32_t n = tokens + 1; n < tokens + 20; n += 3) learnt.push_back(observes(n));
    return learnt;
  };
  sluice::test::Random random(9);
  for (int round = 0; round < 60; ++round) {
    std::vector<std::uint32_t> steps, taken_back;
    std::uint32_t n = prompt;
    for (std::uint32_t i = random.below(5); i != 0; --i) steps.push_back(n += 1 + random.below(5));
    const std::uint32_t tokens = n + random.below(3);
    n = tokens;
    while (n < tokens + 27) taken_back.push_back(n += 1 + random.below(5));
    const bool clones = random.below(2) == 0;
    CAPTURE(steps, tokens, taken_back, clones);
    REQUIRE(goes_on(steps, taken_back, tokens, clones) == goes_on(steps, {}, tokens, false));
  }
  // The one that had the turn was the first of two that were taken back.
  REQUIRE(goes_on({801}, {804, 806}, 803, false).front());
}

TEST_CASE("a repeated step selects the same when it observes and when it follows", "[policy]") {
  const std::uint32_t prompt = 989;
  Turns turns("history:share_group=on,observe_every=4+pages | top_k=all", 0, prompt);
  const std::vector<std::uint32_t> ranked = {4, 5, 6, 7};
  for (std::uint32_t n = prompt + 1; n <= 1000; ++n) {
    const FakeNear near(n, 4, 128);
    turns.select(n, near.set, ranked);
    const std::vector<std::uint32_t> first = turns.step.row.tokens;
    turns.select(n, near.set, ranked);
    REQUIRE(turns.step.row.tokens == first);
    REQUIRE(turns.policy->wants_observation(0) == (n % 4 == 0));
    if (!turns.policy->wants_observation(0)) continue;
    turns.policy->observe(0, turns.step.kv);
    turns.policy->forecast(0, n + 1);
  }
}
