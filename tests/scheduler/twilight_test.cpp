// Top-p over every source: on exact scores, and what counts beside them.

#include <cmath>
#include <limits>

#include "scheduler/policy/scored_set.hpp"
#include "sluice/step/top_p.hpp"
#include "tests/scheduler/pruned_step.hpp"

using namespace sluice;
using namespace sluice::scheduler;
using namespace sluice::scheduler::test;

TEST_CASE("the cut of top-p is that of a sort", "[top_p]") {
  sluice::test::Random random(4);
  for (std::uint32_t round = 0; round < 2'000; ++round) {
    const std::uint32_t count = 1 + random.below(round % 100 == 0 ? 20'000 : 400);
    const std::vector<float> values = sluice::test::random_logits(count, random);
    const double p = round % 10 == 9 ? 1.0 : 0.05 + 0.94 * random.uniform();
    std::vector<Weighed> pool;
    for (const float value : values) {
      if (std::isnan(value) || std::isinf(value)) continue;
      const float top = *std::max_element(values.begin(), values.end(), [](float a, float b) {
        return (std::isnan(a) ? -INFINITY : a) < (std::isnan(b) ? -INFINITY : b);
      });
      pool.push_back(
          {.key = candidate_key(value), .weight = static_cast<float>(std::exp(double{value} - double{top}))});
    }
    if (pool.empty()) continue;
    const std::uint32_t cut = top_p_cut(pool, p);
    std::vector<std::uint32_t> mask((count + 31) / 32);
    std::uint32_t kept = 0;
    for (std::uint32_t i = 0; i < count; ++i) {
      if (std::isnan(values[i]) || std::isinf(values[i]) || candidate_key(values[i]) < cut) continue;
      mask[i / 32] |= 1u << (i % 32);
      ++kept;
    }
    CAPTURE(round, count, p);
    REQUIRE(sluice::test::is_top_p(values, p, mask, kept, 1e-6));
  }
}

TEST_CASE("top-p over all tokens keeps the fewest that hold p, and hands their scores on", "[top_p][policy]") {
  const std::uint32_t n = GENERATE(5u, 33u, 700u);
  const std::string p = GENERATE("0.3", "0.8", "0.95", "1");
  CAPTURE(n, p);
  PrunedStep step("exact | top_p=" + p + " | near=0%,sinks=0,recent=0", n);
  const FakeNear near(n, 0, 0);
  step.select(near.set);
  std::vector<std::uint32_t> expected;
  std::size_t sum = 0;
  for (std::uint32_t h = 0; h < kGroup; ++h) {
    const auto own = kept_of(positions(0, n), std::stod(p), [&](auto t) { return step.kv.logit(step.q.data(), h, t); });
    const double all = attend(step.kv, step.q.data(), h, positions(0, n)).mass;
    REQUIRE(attend(step.kv, step.q.data(), h, own).mass >= std::stod(p) * all * (1 - 1e-9));
    sum += own.size();
    unite(expected, own);
  }
  REQUIRE(step.row.tokens == expected);
  REQUIRE(step.row.tokens.size() <= sum);
  REQUIRE(step.row.scores.size() == expected.size() * kGroup);
  for (std::size_t i = 0; i < expected.size(); ++i) {
    for (std::uint32_t h = 0; h < kGroup; ++h) {
      REQUIRE(step.row.scores[i * kGroup + h] == static_cast<float>(step.kv.logit(step.q.data(), h, expected[i])));
    }
  }
  REQUIRE(step.counters.scored == n);
  REQUIRE(step.counters.estimated == 0);
}

TEST_CASE("one heavy key needs one token, flat attention p of them", "[top_p][policy]") {
  const std::uint32_t n = 1'000;
  PrunedStep step("exact | top_p=0.95 | near=0%,sinks=0,recent=0", n);
  std::fill(step.q.begin(), step.q.end(), 0.f);
  for (std::uint32_t h = 0; h < kGroup; ++h) step.q[h * kDim] = 4.f;
  std::fill(step.kv.k.begin(), step.kv.k.end(), 0.f);
  step.kv.k[321 * kDim] = 40.f;
  const FakeNear near(n, 0, 0);
  step.select(near.set);
  REQUIRE(step.row.tokens == std::vector<std::uint32_t>{321});
  for (std::uint32_t t = 0; t < n; ++t) step.kv.k[t * kDim] = 1e-5f * static_cast<float>(t);  // no ties
  step.select(near.set);
  REQUIRE(step.row.tokens == positions(50, n));
  std::fill(step.kv.k.begin(), step.kv.k.end(), 0.f);  // nothing but ties
  step.select(near.set);
  REQUIRE(step.row.tokens == positions(0, n));
}

TEST_CASE("sinks and the recent window count first, and none is selected", "[top_p][policy]") {
  const std::uint32_t n = 900;
  PrunedStep step("exact | top_p=0.9 | near=0%,sinks=4,recent=60", n, kPageTokens, 0.5f);
  const FakeNear near(n, 4, 60);
  step.select(near.set);
  std::vector<std::uint32_t> expected;
  for (std::uint32_t h = 0; h < kGroup; ++h) {
    unite(expected,
          kept_of(positions(0, n), 0.9, [&](auto t) { return step.kv.logit(step.q.data(), h, t); }, 4, n - 60));
  }
  REQUIRE(!expected.empty());
  REQUIRE(step.row.tokens == far_only(expected, near.set));
}

TEST_CASE("a sink or a window that holds p suffices, whether a source proposed it or not", "[top_p][policy]") {
  const std::string source = GENERATE("exact", "pages", "history:alpha=0.05", "history:alpha=0.05+pages", "clusters");
  const std::string estimate = GENERATE("", " | int4");
  const bool sink = GENERATE(true, false);
  const std::uint32_t n = 1'000;
  CAPTURE(source, estimate, sink);
  PrunedStep step(source + estimate + " | top_p=0.95 | near=0%,sinks=4,recent=100", n);
  const std::uint32_t heavy = sink ? 1 : n - 90;
  step.set_logits([&](std::uint32_t t) { return t == heavy ? 12.f : 1e-4f * static_cast<float>(t); });
  const FakeNear near(n, 4, 100);
  std::vector<std::uint32_t> lists;  // Neither the sink's page nor the window's.
  for (std::uint32_t h = 0; h < kGroup; ++h) lists.insert(lists.end(), {5, 6, 7, 8});
  step.select(near.set, source.find("pages") == std::string::npos ? std::span<const std::uint32_t>{} : lists);
  const std::uint32_t open = (n - 1) / kPageTokens * kPageTokens;
  REQUIRE(n - 100 < open);  // The newest page is in the window.
  REQUIRE(step.row.tokens.empty());
  step.set_logits([&](std::uint32_t t) { return t == 200 ? 12.f : 1e-4f * static_cast<float>(t); });
  step.select(near.set, source.find("pages") == std::string::npos ? std::span<const std::uint32_t>{} : lists);
  if (source.find("history") == std::string::npos && source != "clusters") {
    REQUIRE(step.row.tokens == std::vector<std::uint32_t>{200});
  }
  if (source.find("history") == std::string::npos) return;
  step.policy->observe(0, step.copies);  // Sinks, though weighed, are in no table.
  step.policy->forecast(0, n + 1);
}

TEST_CASE("when everything is near, nothing is selected", "[top_p][policy]") {
  const std::string text = GENERATE("exact | top_p=0.9", "exact | int4 | top_p=0.99", "exact | int4 | top_p=1");
  const std::uint32_t n = GENERATE(3u, 200u);
  CAPTURE(text, n);
  PrunedStep step(text + " | near=0%,sinks=2,recent=1000", n);
  const FakeNear near(n, 2, 1'000);
  step.select(near.set);
  REQUIRE(step.row.tokens.empty());
}

TEST_CASE("of equal tokens the near ones count first and the far ones stay together", "[top_p][policy]") {
  const std::string estimate = GENERATE("", " | int4");
  CAPTURE(estimate);
  const std::uint32_t n = 1'000;
  const auto select = [&](const std::string& p, double slope) {
    PrunedStep step("exact" + estimate + " | top_p=" + p + " | near=0%,sinks=0,recent=600", n);
    step.set_logits([&](std::uint32_t t) { return slope * t; });
    const FakeNear near(n, 0, 600);
    step.select(near.set);
    return step.row.tokens;
  };
  REQUIRE(select("0.5", 0.0).empty());
  REQUIRE(select("0.599", 0.0).empty());
  REQUIRE(select("0.61", 0.0) == positions(0, 400));
  REQUIRE(select("1", 0.0) == positions(0, 400));
  REQUIRE(select("0.5", 1e-6).empty());
  REQUIRE(select("0.7005", 1e-6) == positions(299, 400));
}

TEST_CASE("keys with NaN are never kept, and nothing is if there is nothing else", "[top_p][policy]") {
  const std::uint32_t n = 100;
  const std::string p = GENERATE("0.9", "1");
  PrunedStep step("exact | top_p=" + p + " | near=0%,sinks=0,recent=0", n);
  const FakeNear near(n, 0, 0);
  std::fill_n(step.kv.k.begin() + 40 * kDim, 10 * kDim, std::numeric_limits<float>::quiet_NaN());
  step.select(near.set);
  REQUIRE_FALSE(step.row.tokens.empty());
  for (const std::uint32_t token : step.row.tokens) REQUIRE((token < 40 || token >= 50));
  std::fill(step.kv.k.begin(), step.kv.k.end(), std::numeric_limits<float>::quiet_NaN());
  step.select(near.set);
  REQUIRE(step.row.tokens.empty());
}
