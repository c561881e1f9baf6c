// Candidates that are pruned by estimates, 4-bit copies of their keys: by top-p, and by top-k.

#include <cmath>
#include <limits>

#include "tests/scheduler/pruned_step.hpp"

using namespace sluice;
using namespace sluice::scheduler;
using namespace sluice::scheduler::test;

TEST_CASE("the newest page counts: with most of the mass there, little else is kept", "[top_p][int4]") {
  const std::string source = GENERATE("exact", "pages", "history+pages", "history:share_group=on+pages", "clusters");
  const std::uint32_t n = 3'000, open = (n - 1) / kPageTokens * kPageTokens;
  const std::uint32_t from = GENERATE(2'976u, 2'999u);      // Its first token or its last.
  if (from == open && source.find("history") == 0) return;  // Beside history only the newest tokens are candidates.
  CAPTURE(source, from);
  PrunedStep step(source + " | int4 | top_p=0.95 | near=0%,sinks=0,recent=0", n);
  const std::vector<float> noise = random_queries(n, 1, 5, 2.f);
  double far = 0.0;
  for (std::uint32_t t = 0; t < from; ++t) far += std::exp(double{noise[t]});
  const double heavy = std::log(9.0 * far / (n - from));  // 90% of the mass
  const auto logit = [&](std::uint32_t t) { return t < from ? noise[t] : heavy + 1e-4 * t; };
  step.set_logits(logit);
  const FakeNear near(n, 0, 0);
  const auto lists = some_pages(open / kPageTokens, open / kPageTokens);
  step.select(near.set, source.find("pages") == std::string::npos ? std::span<const std::uint32_t>{} : lists);
  const std::size_t whole = kept_of(positions(0, n), 0.95, logit).size();
  CAPTURE(step.row.tokens.size(), whole, step.counters.candidates);
  REQUIRE(step.row.tokens.size() <= whole + (n - open));
  if (source != "exact" && source != "pages") return;  // Others need not propose every token.
  auto expected = positions(open, n);
  unite(expected, kept_of(positions(0, n), 0.95, logit, 0, open));
  REQUIRE(step.row.tokens == expected);
}

TEST_CASE("what is attended anyway has no weight where its score is no number", "[top_p][int4]") {
  const float odd = GENERATE(std::numeric_limits<float>::quiet_NaN(), -std::numeric_limits<float>::infinity());
  const std::string p = GENERATE("0.5", "1");
  const std::uint32_t n = 500, open = (n - 1) / kPageTokens * kPageTokens;
  CAPTURE(odd, p);
  PrunedStep step("exact | int4 | top_p=" + p + " | near=0%,sinks=4,recent=0", n);
  const auto logit = [&](std::uint32_t t) { return t < 4 || t >= open ? odd : 1e-3f * static_cast<float>(t); };
  step.set_logits(logit);
  const FakeNear near(n, 4, 0);
  step.select(near.set);
  auto expected = kept_of(positions(4, open), std::stod(p), logit);
  REQUIRE_FALSE(expected.empty());
  unite(expected, positions(open, n));
  REQUIRE(step.row.tokens == expected);
}

TEST_CASE("estimated candidates are cut by their estimates, the newest page is kept, no estimate is passed on",
          "[top_p][int4]") {
  const std::uint32_t n = GENERATE(1u, 2u, 33u, 97u, 700u, 1'025u);
  const bool pages = GENERATE(true, false);
  CAPTURE(n, pages);
  PrunedStep step(std::string(pages ? "pages" : "exact") + " | int4 | top_p=0.9 | near=0%,sinks=2,recent=0", n);
  const FakeNear near(n, 2, 0);
  const std::uint32_t open = (n - 1) / kPageTokens * kPageTokens;
  const std::uint32_t ranked = pages ? open / kPageTokens / 2 : 0;
  const auto lists = pages ? some_pages(open / kPageTokens, ranked) : std::vector<std::uint32_t>{};
  step.select(near.set, lists);
  REQUIRE(step.row.scores.empty());
  REQUIRE(step.kv.rows_scored == 0);
  REQUIRE(step.counters.estimated == step.copies.rows_estimated());

  std::vector<std::uint32_t> expected = positions(open, n);
  for (std::uint32_t h = 0; h < kGroup; ++h) {
    std::vector<std::uint32_t> candidates = positions(0, pages ? std::min(2u, n) : open);
    for (std::uint32_t i = 0; i < ranked; ++i) {
      const std::uint32_t page = lists[h * ranked + i];
      unite(candidates, positions(page * kPageTokens, (page + 1) * kPageTokens));
    }
    unite(candidates, positions(open, n));
    unite(expected, kept_of(
                        candidates, 0.9, [&](auto t) { return step.copies.estimated(step.q.data(), h, t); }, 2, open));
  }
  REQUIRE(step.row.tokens == far_only(expected, near.set));
}

TEST_CASE("what estimates keep covers nearly p, and bounds the error of the output", "[top_p][int4]") {
  const std::string p = GENERATE("0.6", "0.9", "0.99");
  const float q_scale = GENERATE(1.f, 4.f);
  const std::uint32_t n = 800;
  CAPTURE(p, q_scale);
  PrunedStep step("pages | int4 | top_p=" + p + " | near=0%,sinks=0,recent=0", n, kPageTokens, q_scale);
  const FakeNear near(n, 0, 0);
  const std::uint32_t open = (n - 1) / kPageTokens * kPageTokens, ranked = 8;
  const auto lists = some_pages(open / kPageTokens, ranked);
  step.select(near.set, lists);
  const double share = std::stod(p);
  const double longest = longest_value(step.kv, n);
  for (std::uint32_t h = 0; h < kGroup; ++h) {
    std::vector<std::uint32_t> candidates = positions(open, n);
    double delta = 0.0;
    for (std::uint32_t i = 0; i < ranked; ++i) {
      const std::uint32_t page = lists[h * ranked + i];
      unite(candidates, positions(page * kPageTokens, (page + 1) * kPageTokens));
    }
    for (const std::uint32_t t : candidates) {
      delta =
          std::max(delta, std::abs(step.copies.estimated(step.q.data(), h, t) - step.kv.logit(step.q.data(), h, t)));
    }
    const Attended whole = attend(step.kv, step.q.data(), h, positions(0, n));
    const Attended kept = attend(step.kv, step.q.data(), h, attended_by(step.row, h));
    const double proposed = attend(step.kv, step.q.data(), h, candidates).mass / whole.mass;
    const double coverage = kept.mass / whole.mass;
    CAPTURE(h, delta, proposed, coverage);
    REQUIRE(coverage >= proposed * share / (share + (1.0 - share) * std::exp(2.0 * delta)) * (1.0 - 1e-6));
    REQUIRE(distance(kept.out, whole.out) <= 2.0 * (1.0 - coverage) * longest * (1.0 + 1e-9));
  }
}

TEST_CASE("a larger p keeps more, and p = 1 keeps what was proposed", "[top_p][int4]") {
  const std::string source = GENERATE("exact", "pages", "history:alpha=0.05+pages", "history:alpha=0.05");
  CAPTURE(source);
  const std::uint32_t n = 600;
  const FakeNear near(n, 4, 0);
  std::vector<std::uint32_t> before;
  std::uint64_t candidates = 0;
  for (const std::string p : {"0.2", "0.5", "0.9", "1"}) {
    PrunedStep step(source + " | int4 | top_p=" + p + " | near=0%,sinks=4,recent=0", n);
    const auto lists = some_pages(18, 6);
    step.select(near.set, source.find("pages") == std::string::npos ? std::span<const std::uint32_t>{} : lists);
    REQUIRE(is_subset(before, step.row.tokens));
    REQUIRE(step.row.scores.empty());
    before = step.row.tokens;
    candidates = step.counters.candidates - step.counters.near_hits;
    step.policy->observe(0, step.copies);
    step.policy->forecast(0, n + 1);
  }
  REQUIRE(before.size() == candidates);
}

TEST_CASE("top-k of estimates takes the k best estimates", "[int4][policy]") {
  const std::uint32_t n = 500;
  PrunedStep step("exact | int4 | top_k=20 | near=0%,sinks=4,recent=0", n);
  const FakeNear near(n, 4, 0);
  step.select(near.set);
  std::vector<std::uint32_t> expected;
  for (std::uint32_t h = 0; h < kGroup; ++h) {
    unite(expected, best(positions(4, n), 20, [&](auto t) { return step.copies.estimated(step.q.data(), h, t); }));
  }
  REQUIRE(step.row.tokens == expected);
  REQUIRE(step.row.scores.empty());
}
