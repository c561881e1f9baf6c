// full, streaming, and layers below dense_layers.

#include "scheduler/layer_policy.hpp"
#include "tests/scheduler/attended.hpp"
#include "tests/support/catch.hpp"

using namespace sluice;
using namespace sluice::scheduler;
using namespace sluice::scheduler::test;

namespace {

const AttentionShape kShape{.layers = 4, .q_heads = 2, .kv_heads = 1, .head_dim = 16};

SelectionRow select(const std::string& text, std::uint32_t n, const NearSet& near, std::uint32_t layer = 0) {
  FakeKv kv = FakeKv::random(n, 16, 2, 3);
  const auto q = random_queries(2, 16, 4);
  const auto policy = make_layer_policy(parse_policy(text), kShape, near.page_tokens, LayerId{layer});
  policy->begin({.kv_head = 0, .tokens = n - 1, .queries = 0, .last_q = {}, .kv = &kv});
  policy->forecast(0, n);
  SelectionRow row;
  Bypass bypass{.heads = 3, .out = {}, .lse = {}};
  SelectCounters counters;
  policy->select({.kv_head = 0, .tokens = n, .q = q.data(), .near = &near, .kv = &kv}, row, bypass, counters);
  REQUIRE(bypass.heads == 0);
  REQUIRE(kv.rows_scored == 0);
  policy->observe(0, kv);
  return row;
}

}  // namespace

TEST_CASE("full attends every token that is not near, as at most one run per page", "[full]") {
  const std::uint32_t n = GENERATE(1u, 4u, 5u, 32u, 33u, 100u, 1000u);
  const std::uint32_t sinks = GENERATE(0u, 4u, 40u);
  const std::uint32_t recent = GENERATE(0u, 1u, 70u);
  const std::uint32_t page_tokens = GENERATE(8u, 32u, 256u);
  CAPTURE(n, sinks, recent, page_tokens);
  const FakeNear near(n, sinks, recent, page_tokens);
  const SelectionRow row = select("full", n, near.set);
  REQUIRE(row.tokens.empty());
  for (std::size_t i = 0; i < row.runs.size(); ++i) {
    REQUIRE(row.runs[i].begin < row.runs[i].end);
    REQUIRE(row.runs[i].end <= page_tokens);
    if (i > 0) REQUIRE(row.runs[i - 1].page < row.runs[i].page);
  }
  std::vector<std::uint32_t> expected;
  for (std::uint32_t t = 0; t < n; ++t) {
    if (!near.set.contains(t)) expected.push_back(t);
  }
  REQUIRE(attended_by(row, 0, page_tokens) == expected);
}

TEST_CASE("streaming attends sinks and window whatever lies between", "[streaming]") {
  const std::uint32_t n = GENERATE(1u, 4u, 1024u, 5000u);
  const PolicySpec spec = parse_policy("streaming");
  const FakeNear near(n, spec.near.sink_tokens, spec.near.recent_tokens);
  REQUIRE(select("streaming", n, near.set).attended() == 0);
  // With no more than sinks and window there is no middle: dense.
  REQUIRE(near_tokens(near.set, n).size() == std::min(n, 1024u));
}

TEST_CASE("layers below dense_layers attend everything", "[full]") {
  const FakeNear near(500, 4, 0);
  for (const std::string text : {"streaming:dense=2,recent=0", "lfps:dense=2", "topk:dense=2"}) {
    CAPTURE(text);
    REQUIRE(attended_by(select(text, 500, near.set, 0), 0) == positions(4, 500));
    REQUIRE(attended_by(select(text, 500, near.set, 1), 0) == positions(4, 500));
  }
  REQUIRE(select("streaming:dense=2,recent=0", 500, near.set, 2).attended() == 0);
}
