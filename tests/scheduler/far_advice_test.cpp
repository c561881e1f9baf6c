// The budget of far tokens that the cost model advises.
#include "scheduler/plan/far_advice.hpp"

#include <string>
#include <vector>

#include "scheduler/plan/forward_rows.hpp"
#include "sluice/policy.hpp"
#include "tests/support/catch.hpp"

using namespace sluice;
using namespace sluice::scheduler;

namespace {

constexpr AttentionShape kModel{.layers = 4, .q_heads = 32, .kv_heads = 8, .head_dim = 128};
constexpr std::uint32_t kTokens = 131'072;
constexpr double kNear = 0.5;

WorkPlace place_of(const PolicySpec& policy, PlacementMode placement = PlacementMode::hybrid) {
  return {.shape = kModel,
          .layout = {.page_tokens = 16, .head_dim = 128},
          .placement = placement,
          .bucket = forward_needs(policy, kTokens, row_shape(kModel, 16)).bucket};
}

FarOptions advised(const std::string& text, const LaneRates& rates, std::uint32_t rows = 1,
                   PlacementMode placement = PlacementMode::hybrid) {
  const PolicySpec policy = parse_policy(text);
  return advised_far(rates, place_of(policy, placement), forward_row(policy, kTokens, row_shape(kModel, 16)), rows,
                     kNear);
}

/// By how much the CPU ends after what lies near is attended, in the first layer of such a forward.
double late_us(const std::string& text, const LaneRates& rates, std::uint32_t rows) {
  const PolicySpec policy = parse_policy(text);
  std::vector<ForwardRow> all(rows, forward_row(policy, kTokens, row_shape(kModel, 16)));
  for (ForwardRow& row : all) row.list = 0;
  // Of a KV head. What the CPU chooses is never near.
  const ForwardRow& row = all.front();
  const double window = row.sink_end + (row.tokens - row.recent_begin);
  const double chosen = 4.0 * (row.picks != 0 ? row.picks : row.most != kNone ? row.most : row.page_picks * 16);
  const double near = (window + (row.asks != 0 ? 0.0 : kNear * chosen)) / (window + chosen);
  const auto items = forward_work(place_of(policy), all, {}, {.near = near});
  const auto times = estimate(items, rates);
  double attend = 0.0, far = 0.0;
  for (std::size_t i = 0; i < items.size() && items[i].layer == 0; ++i) {
    if (items[i].stage == Stage::attend) attend = times[i].end_us;
    if (items[i].stage == Stage::attend_far) far = times[i].end_us;
  }
  return far - attend;
}

}  // namespace

TEST_CASE("as many far tokens are advised as the CPU attends in the time of near ones, and no more", "[plan][far]") {
  const std::string policy = GENERATE(
      "exact | int4 | top_k=5% | near=0,sinks=4,recent=8000", "exact | int4 | top_p=0.9 | near=0,sinks=4,recent=8000",
      "exact | top_k=5% | near=0,sinks=4,recent=8000", "pages:pages=5% | top_k=all | near=0,sinks=4,recent=8000");
  const std::uint32_t rows = GENERATE(1u, 8u);
  CAPTURE(policy, rows);
  const LaneRates rates{.device_gbps = 300.0, .link_gbps = 50.0, .cpu_gbps = 100.0};
  const FarOptions far = advised(policy, rates, rows);
  REQUIRE(far.share == 0.f);
  const bool pages = policy.compare(0, 5, "pages") == 0;
  const std::uint32_t unit = kModel.q_heads * (pages ? 16 : 1);
  REQUIRE(far.min_tokens % unit == 0);
  REQUIRE(far.min_tokens > kModel.q_heads * kLeastAdvised);
  const auto with = [&](std::uint32_t tokens) { return policy + " | far=" + std::to_string(tokens); };
  REQUIRE(late_us(with(far.min_tokens), rates, rows) <= 0.0);
  REQUIRE(late_us(with(far.min_tokens + unit), rates, rows) > 0.0);
}

TEST_CASE("a CPU that is faster is advised more, up to all, and a slow one a few tokens of each head", "[plan][far]") {
  LaneRates rates{.device_gbps = 300.0, .link_gbps = 50.0};
  const std::string policy = "exact | int4 | top_k=5% | near=0,sinks=4,recent=8000";
  std::uint64_t before = 0;
  for (const double gbps : {0.01, 1.0, 50.0, 100.0, 150.0, 1e6}) {
    CAPTURE(gbps);
    rates.cpu_gbps = gbps;
    const std::uint64_t far = far_tokens(advised(policy, rates), kTokens, row_shape(kModel, 16));
    REQUIRE(far >= before);
    before = far;
  }
  rates.cpu_gbps = 0.01;
  REQUIRE(advised(policy, rates) == FarOptions{.min_tokens = 32 * kLeastAdvised, .share = 0.f});
  REQUIRE(advised("quest", rates) == FarOptions{.min_tokens = 32 * 64, .share = 0.f});
  // What it chooses by itself is no more than that.
  REQUIRE(advised("exact | int4 | top_k=64", rates).all());
  rates.cpu_gbps = 1e6;
  REQUIRE(advised(policy, rates).all());
  // Nothing is hidden where the device fetches, and nobody chooses where everything is attended.
  REQUIRE(advised(policy, rates, 1, PlacementMode::stream).min_tokens == 32 * kLeastAdvised);
  REQUIRE(advised("full", rates).all());
  REQUIRE(advised("streaming", rates).all());
}
