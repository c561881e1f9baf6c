// Costs of other policies than the default, told from forwards whose costs are known.
#include "tools/cli/plan/policy_costs.hpp"

#include "tests/support/catch.hpp"

using namespace sluice;
using namespace sluice::tools;
using scheduler::LaneRates;
using scheduler::StageCost;
using scheduler::StageCosts;

namespace {

constexpr std::size_t at(Stage stage) { return static_cast<std::size_t>(stage); }

/// 1 byte takes 1 ns on the device, 20 on the link, 10 on the CPU.
LaneRates default_rates() {
  LaneRates rates{.device_gbps = 1.0, .link_gbps = 0.05, .cpu_gbps = 0.1, .hand_over_us = 2.0};
  rates.stage(Stage::append) = {.fixed_us = 3.0};
  rates.stage(Stage::split) = {.fixed_us = 17.0};
  rates.stage(Stage::attend) = {.fixed_us = 1.0, .share = 0.5};
  rates.stage(Stage::merge) = {.fixed_us = 6.0};
  rates.stage(Stage::attend_far) = {.fixed_us = 4.0, .share = 0.5};
  return rates;
}

double us_of(const StageCost& cost, double bytes, double gbps) {
  return cost.fixed_us + bytes / (cost.share * gbps * 1e3);
}

void put(CaseTimes& times, Stage stage, double us, double bytes) {
  times.ran[at(stage)] = true;
  times.stage_us[at(stage)] = us;
  times.stage_bytes[at(stage)] = bytes;
}

constexpr StageCost kRank{.fixed_us = 7.0, .share = 0.25};
constexpr double kSplitUs = 12.0;

/// Pages are ranked, near rows attended in `split`; the CPU answers meanwhile.
CaseTimes pages(double ranked, double near, double far) {
  CaseTimes times;
  put(times, Stage::append, 3.5, 100.0);
  put(times, Stage::rank, us_of(kRank, ranked, 1.0), ranked);
  put(times, Stage::split, kSplitUs + us_of({.fixed_us = 1.0, .share = 0.5}, near, 1.0), 0.01 * near);
  put(times, Stage::attend, 0.0, near);
  put(times, Stage::merge, 8.0, 100.0);
  for (const double us : times.stage_us) times.layer_us += us;
  times.far_bytes = far;
  times.answer_us = us_of({.fixed_us = 5.0, .share = 0.8}, far, 0.1) - default_rates().hand_over_us;
  return times;
}

void require(const std::optional<StageCost>& cost, const StageCost& wanted) {
  REQUIRE(cost);
  REQUIRE(cost->fixed_us == Approx(wanted.fixed_us).margin(0.01));
  REQUIRE(cost->share == Approx(wanted.share).epsilon(0.01));
}

}  // namespace

TEST_CASE("policies of the device: what they rank, list and attend is told apart, and what the CPU takes", "[plan]") {
  PolicyCases cases{.policy = "quest"};
  cases.alone = {pages(4'000.0, 3'000.0, 500.0), pages(40'000.0, 5'000.0, 2'500.0)};
  // One that waits for most of its time: its stages say nothing, its answer does.
  CaseTimes waits = pages(80'000.0, 9'000.0, 9'000.0);
  waits.stage_us[at(Stage::rank)] = 1'000.0;
  waits.waited_us = 0.9 * waits.layer_us;
  cases.alone.push_back(waits);
  const PolicyCosts costs = policy_costs(cases, default_rates());
  require(costs.stages[at(Stage::rank)], kRank);
  require(costs.stages[at(Stage::attend_far)], {.fixed_us = 5.0, .share = 0.8});
  REQUIRE(costs.stages[at(Stage::split)]->fixed_us == Approx(kSplitUs));
  REQUIRE(costs.stages[at(Stage::merge)]->fixed_us == Approx(8.0).margin(0.2));
  require(costs.stages[at(Stage::attend)], {.fixed_us = 1.0, .share = 0.5});
  for (const auto& cost : costs.batch) REQUIRE_FALSE(cost);
}

TEST_CASE("where nothing is chosen, all beside the merge is attention", "[plan]") {
  PolicyCases cases{.policy = "full"};
  for (const double near : {10'000.0, 40'000.0}) {
    CaseTimes times = pages(0.0, 0.0, 0.0);
    times.ran[at(Stage::rank)] = false;
    put(times, Stage::split, 0.9 * us_of({.fixed_us = 9.0, .share = 0.8}, near, 1.0), 0.01 * near);
    put(times, Stage::attend, 0.1 * us_of({.fixed_us = 9.0, .share = 0.8}, near, 1.0), near);
    times.layer_us = 1'000.0;
    cases.alone.push_back(times);
  }
  const PolicyCosts costs = policy_costs(cases, default_rates());
  require(costs.stages[at(Stage::attend)], {.fixed_us = 9.0, .share = 0.8});
  REQUIRE_FALSE(costs.stages[at(Stage::rank)]);
}

TEST_CASE("where nothing is chosen, what the device does beside the CPU's answer is told by its wait", "[plan]") {
  // 11 us before the question, 7 us behind it.
  const LaneRates rates = default_rates();
  const auto timed = [&](double answer, double far) {
    CaseTimes times = pages(0.0, 0.0, far);
    times.ran[at(Stage::rank)] = false;
    put(times, Stage::split, 15.0, 10.0);
    put(times, Stage::attend, 3.0, 1'000.0);
    times.answer_us = answer;
    if (far > 0.0) times.waited_us = answer + rates.hand_over_us - 7.0;
    times.layer_us = 30.0 + times.waited_us;
    return times;
  };
  PolicyCases cases{.policy = "streaming"};
  cases.alone = {timed(0.0, 0.0), timed(9.0, 1'000.0), timed(90.0, 8'000.0)};
  const PolicyCosts costs = policy_costs(cases, rates);
  REQUIRE(costs.stages[at(Stage::split)]->fixed_us == Approx(11.0));
  REQUIRE(us_of(*costs.stages[at(Stage::attend)], 1'000.0, 1.0) == Approx(7.0));
  // A wait is for the answer beyond these 7 us, so that a short answer costs nothing.
  std::vector<WorkItem> layer{
      {.stage = Stage::split, .lane = Lane::device, .rows = 1, .read = 10},
      {.stage = Stage::attend_far, .lane = Lane::cpu, .rows = 1, .read = 1'000, .after = {0}},
      {.stage = Stage::attend, .lane = Lane::device, .rows = 1, .read = 1'000, .after = {0}},
  };
  const auto times = scheduler::estimate(layer, rates_for(parse_policy("streaming"), {&costs, 1}, rates));
  REQUIRE(times[1].begin_us == Approx(11.0).margin(0.05));
  REQUIRE(times[2].end_us == Approx(18.0).margin(0.05));
}

TEST_CASE("a policy whose attention was told with its list does not take the default's list as well", "[plan]") {
  PolicyCosts costs{.policy = "streaming"};
  costs.stages[at(Stage::attend)] = StageCost{.fixed_us = 18.0};
  LaneRates rates = default_rates();
  rates.batch_rows = 4;
  rates.batch_stage(Stage::split) = {.fixed_us = 30.0};
  const LaneRates found = rates_for(parse_policy("streaming"), {&costs, 1}, rates);
  REQUIRE(found.stages[at(Stage::split)] == StageCost{});
  REQUIRE_FALSE(found.batch[at(Stage::split)]);
  REQUIRE(found.stages[at(Stage::merge)] == rates.stages[at(Stage::merge)]);
}

TEST_CASE("policies of the CPU: where attending at the default's rate is longer than the answer, it is the answer",
          "[plan]") {
  const LaneRates rates = default_rates();
  constexpr StageCost kAnswer{.fixed_us = 20.0, .share = 0.7};  // The default's share is 0.5.
  PolicyCases cases{.policy = "tactic"};
  for (const double far : {9e3, 40e3}) {
    CaseTimes times{.scored_bytes = 0.1 * far};
    times.far_bytes = far;
    times.answer_us = us_of(kAnswer, far, 0.1) - rates.hand_over_us;
    cases.alone.push_back(times);
  }
  PolicyCosts costs = policy_costs(cases, rates);
  require(costs.stages[at(Stage::attend_far)], kAnswer);
  REQUIRE(us_of(*costs.stages[at(Stage::choose_far)], 4e3, 0.1) < 0.1);
  // One of them that is longer leaves it to the default, as do lists that its rate leaves time for: these say what
  // choosing takes.
  cases.alone.back().answer_us += 900.0;
  REQUIRE_FALSE(policy_costs(cases, rates).stages[at(Stage::attend_far)]);
  cases.alone.front().answer_us += 900.0;
  costs = policy_costs(cases, rates);
  REQUIRE_FALSE(costs.stages[at(Stage::attend_far)]);
  REQUIRE(costs.stages[at(Stage::choose_far)]->fixed_us > 500.0);
}

TEST_CASE("policies of the CPU: what choosing takes by what streams, and attending by what is left", "[plan]") {
  constexpr StageCost kChoose{.fixed_us = 40.0, .share = 0.3}, kAttend{.fixed_us = 10.0, .share = 2.0};
  constexpr StageCost kTogether{.fixed_us = 20.0, .share = 0.6};
  const LaneRates rates = default_rates();
  const auto timed = [&](const StageCost& choose, double scored, double far) {
    CaseTimes times{.scored_bytes = scored, .scored_share = 1e-5 * scored};
    times.far_bytes = far;
    times.answer_us = us_of(choose, scored, 0.1) + (far == 0.0 ? 0.0 : us_of(kAttend, far, 0.1)) - rates.hand_over_us;
    times.layer_us = 1e4;
    return times;
  };
  PolicyCases cases{.policy = "psa"};
  cases.streamed = {timed(kChoose, 1e3, 0.0), timed(kChoose, 1e4, 0.0)};
  cases.alone = {timed(kChoose, 1e3, 2e3), timed(kChoose, 1e4, 9e3)};
  cases.together = {timed(kTogether, 4e3, 8e3), timed(kTogether, 4e4, 3e4)};
  const PolicyCosts costs = policy_costs(cases, rates);
  require(costs.stages[at(Stage::choose_far)], kChoose);
  require(costs.stages[at(Stage::attend_far)], kAttend);
  require(costs.batch[at(Stage::choose_far)], kTogether);
  REQUIRE(costs.scored == Approx(0.1));
  REQUIRE_FALSE(costs.stages[at(Stage::split)]);
  // With nothing that streams, attending is the default's.
  cases.streamed.clear();
  REQUIRE_FALSE(policy_costs(cases, rates).stages[at(Stage::attend_far)]);
}

TEST_CASE("what is fetched takes what is left of layers that stream", "[plan]") {
  const LaneRates rates = default_rates();
  std::vector<CaseTimes> streamed;
  for (const double bytes : {500.0, 4'000.0}) {
    CaseTimes times;
    put(times, Stage::append, 0.0, 0.0);
    put(times, Stage::split, 0.0, 0.0);
    put(times, Stage::attend, 0.0, 1'000.0);
    put(times, Stage::fetch, 0.0, bytes);
    put(times, Stage::merge, 0.0, 0.0);
    times.apart_us = 5.0;
    times.waited_us = 300.0;
    times.layer_us = 300.0 + 5.0 + 3.0 + 17.0 + (1.0 + 2.0) + 6.0 + us_of({.fixed_us = 8.0, .share = 0.4}, bytes, 0.05);
    streamed.push_back(times);
  }
  require(fetch_cost(streamed, rates), {.fixed_us = 8.0, .share = 0.4});
  REQUIRE_FALSE(fetch_cost({}, rates));
}

TEST_CASE("costs hold for policies that choose alike, and beside the default's", "[plan]") {
  PolicyCosts quest{.policy = "quest"};
  quest.stages[at(Stage::rank)] = kRank;
  quest.stages[at(Stage::split)] = StageCost{.fixed_us = kSplitUs};
  LaneRates rates = default_rates();
  rates.batch_rows = 4;
  rates.batch_stage(Stage::split) = {.fixed_us = 30.0};
  rates.batch_stage(Stage::merge) = {.fixed_us = 9.0};
  const auto found = [&](const char* policy) { return rates_for(parse_policy(policy), {&quest, 1}, rates); };
  for (const char* const policy : {"quest", "arkvale", "quest:budget=8192 | dense=0"}) {
    CAPTURE(policy);
    const LaneRates with = found(policy);
    REQUIRE(with.stages[at(Stage::rank)] == kRank);
    REQUIRE(with.stages[at(Stage::split)]->fixed_us == kSplitUs);
    REQUIRE_FALSE(with.batch[at(Stage::split)]);  // The default's batch says nothing of another kernel.
    REQUIRE(with.batch[at(Stage::merge)]->fixed_us == 9.0);
    REQUIRE(with.stages[at(Stage::attend_far)] == rates.stages[at(Stage::attend_far)]);
  }
  for (const char* const policy : {"sluice", "twilight", "psa", "psa | int4", "full", "pages | int4 | top_k=64"}) {
    CAPTURE(policy);
    REQUIRE(found(policy).stages == rates.stages);
    REQUIRE(found(policy).batch == rates.batch);
  }
  // Of a policy that nobody measured, what comes nearest holds.
  PolicyCosts share{.policy = "exact | int4 | top_p=0.95"};
  share.stages[at(Stage::choose)] = StageCost{.fixed_us = 77.0};
  const auto nearest = [&](const char* policy) { return rates_for(parse_policy(policy), {&share, 1}, rates); };
  REQUIRE(nearest("psa | int4").stages[at(Stage::choose)]->fixed_us == 77.0);
  REQUIRE(nearest("psa").stages == rates.stages);
}
