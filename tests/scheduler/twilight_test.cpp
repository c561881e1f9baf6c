// Select, then prune: top-p on exact scores and on estimates, over every source.

#include <cmath>
#include <limits>

#include "scheduler/policy/policies.hpp"
#include "scheduler/policy/scored_set.hpp"
#include "sluice/top_p.hpp"
#include "tests/scheduler/policy_step.hpp"
#include "tests/support/prune_reference.hpp"

using namespace sluice;
using namespace sluice::scheduler;
using namespace sluice::scheduler::test;

namespace {

/// A FakeKv whose estimates come from keys of 16 levels, but for the newest page.
class CoarseKv final : public KvReader {
 public:
  CoarseKv(FakeKv& kv, std::uint32_t tokens, std::uint32_t page_tokens)
      : kv_(kv), copies_(kv), open_((tokens - 1) / page_tokens * page_tokens) {
    for (std::uint32_t token = 0; token < open_; ++token) {
      float* const row = copies_.k.data() + std::size_t{token} * kv.head_dim();
      const auto [least, most] = std::minmax_element(row, row + kv.head_dim());
      const float zero = *least;
      const float scale = std::max(*most - zero, 1e-9f) / 15.f;
      for (std::uint32_t c = 0; c < kv.head_dim(); ++c) row[c] = zero + scale * std::round((row[c] - zero) / scale);
    }
  }
  void score(const float* q, std::span<const std::uint32_t> tokens, float* out) override { kv_.score(q, tokens, out); }
  void estimate(const float* q, std::span<const std::uint32_t> tokens, float* out) override {
    copies_.score(q, tokens, out);
  }
  void key(std::uint32_t token, float* out) override { kv_.key(token, out); }
  void value(std::uint32_t token, float* out) override { kv_.value(token, out); }
  void keys(std::uint32_t first, std::uint32_t count, float* out) override { kv_.keys(first, count, out); }
  void cluster(const ClusterRequest& request, float* centroids, std::uint32_t* assignment) override {
    kv_.cluster(request, centroids, assignment);
  }
  void score_rows(const float* x, std::uint32_t columns, const float* rows, std::uint32_t count, float* out) override {
    kv_.score_rows(x, columns, rows, count, out);
  }

  [[nodiscard]] float estimated(const float* q, std::uint32_t h, std::uint32_t token) const {
    return static_cast<float>(copies_.logit(q, h, token));
  }
  [[nodiscard]] std::uint64_t rows_estimated() const { return copies_.rows_scored; }
  /// Makes `value` the first channel of a token's key and of its copy, and the others 0: a copy that is exact.
  void set_key(std::uint32_t token, float value) {
    for (FakeKv* kv : {&kv_, &copies_}) {
      float* const row = kv->k.data() + std::size_t{token} * kv->head_dim();
      std::fill_n(row, kv->head_dim(), 0.f);
      row[0] = value;
    }
  }

 private:
  FakeKv& kv_;
  FakeKv copies_;
  std::uint32_t open_;
};

/// One policy, one step. Pages are ranked by hand.
struct PrunedStep {
  PrunedStep(const std::string& text, std::uint32_t tokens, std::uint32_t page_tokens = kPageTokens,
             float q_scale = 2.f)
      : spec(parse_policy(text)),
        n(tokens),
        kv(FakeKv::random(tokens, kDim, kGroup, 3)),
        copies(kv, tokens, page_tokens),
        policy(make_layer_policy(spec, kShape, page_tokens, LayerId{0})),
        q(random_queries(kGroup, kDim, 7, q_scale)) {
    const std::vector<float> last_q = random_queries(40 * kGroup, kDim, 8);
    policy->begin({.kv_head = 0, .tokens = n - 1, .queries = 40, .last_q = last_q, .kv = &copies});
    kv.rows_scored = 0;
  }
  void select(const NearSet& near, std::span<const std::uint32_t> ranked = {}) {
    row.clear();
    counters = {};
    policy->forecast(0, n);
    policy->select({.kv_head = 0, .tokens = n, .q = q.data(), .ranked_pages = ranked, .near = &near, .kv = &copies},
                   row, bypass, counters);
    for (std::size_t i = 0; i < row.tokens.size(); ++i) {
      REQUIRE(row.tokens[i] < n);
      REQUIRE_FALSE(near.contains(row.tokens[i]));
      if (i > 0) REQUIRE(row.tokens[i - 1] < row.tokens[i]);
    }
    REQUIRE(row.members.empty());
    REQUIRE(row.runs.empty());
  }
  /// Logits as wanted, the same for all query heads.
  template <class Logit>
  void set_logits(const Logit& logit) {
    std::fill(q.begin(), q.end(), 0.f);
    for (std::uint32_t h = 0; h < kGroup; ++h) q[h * kDim] = std::sqrt(static_cast<float>(kDim));
    for (std::uint32_t token = 0; token < n; ++token) copies.set_key(token, static_cast<float>(logit(token)));
  }

  PolicySpec spec;
  std::uint32_t n;
  FakeKv kv;
  CoarseKv copies;
  std::unique_ptr<LayerPolicy> policy;
  std::vector<float> q;
  SelectionRow row;
  Bypass bypass;
  SelectCounters counters;
};

/// What top-p keeps of `tokens`, ascending positions, besides those before `begin` and from `end` on, which are
/// attended anyway.
template <class Logit>
std::vector<std::uint32_t> kept_of(const std::vector<std::uint32_t>& tokens, double p, const Logit& logit,
                                   std::uint32_t begin = 0, std::uint32_t end = ~0u) {
  std::vector<float> values;
  for (const std::uint32_t token : tokens) values.push_back(static_cast<float>(logit(token)));
  const auto below = [&](std::uint32_t position) {
    return static_cast<std::size_t>(std::lower_bound(tokens.begin(), tokens.end(), position) - tokens.begin());
  };
  std::vector<std::uint32_t> kept;
  for (const std::uint32_t i : sluice::test::sorted_top_p(values, p, {.begin = below(begin), .end = below(end)})) {
    kept.push_back(tokens[i]);
  }
  return kept;
}

void unite(std::vector<std::uint32_t>& all, const std::vector<std::uint32_t>& more) {
  all.insert(all.end(), more.begin(), more.end());
  std::sort(all.begin(), all.end());
  all.erase(std::unique(all.begin(), all.end()), all.end());
}

std::vector<std::uint32_t> far_only(const std::vector<std::uint32_t>& tokens, const NearSet& near) {
  std::vector<std::uint32_t> far;
  std::copy_if(tokens.begin(), tokens.end(), std::back_inserter(far), [&](auto t) { return !near.contains(t); });
  return far;
}

/// `ranked` ascending pages below `pages` for every head, different ones.
std::vector<std::uint32_t> some_pages(std::uint32_t pages, std::uint32_t ranked) {
  std::vector<std::uint32_t> all;
  for (std::uint32_t h = 0; h < kGroup; ++h) {
    for (std::uint32_t i = 0; i < ranked; ++i) all.push_back(i * (pages / ranked) + (h + i) % (pages / ranked));
  }
  return all;
}

}  // namespace

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
      pool.push_back({.key = order_key(value), .weight = static_cast<float>(std::exp(double{value} - double{top}))});
    }
    if (pool.empty()) continue;
    const std::uint32_t cut = top_p_cut(pool, p);
    std::vector<std::uint32_t> mask((count + 31) / 32);
    std::uint32_t kept = 0;
    for (std::uint32_t i = 0; i < count; ++i) {
      if (std::isnan(values[i]) || std::isinf(values[i]) || order_key(values[i]) < cut) continue;
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

TEST_CASE("sinks and the recent window count first, near pages by weight; none is selected", "[top_p][policy]") {
  const std::uint32_t n = 900;
  PrunedStep step("exact | top_p=0.9 | near=10%,sinks=4,recent=60", n, kPageTokens, 0.5f);
  const FakeNear near(n, 4, 60, {3, 9, 17});
  step.select(near.set);
  std::vector<std::uint32_t> expected;
  for (std::uint32_t h = 0; h < kGroup; ++h) {
    unite(expected,
          kept_of(positions(0, n), 0.9, [&](auto t) { return step.kv.logit(step.q.data(), h, t); }, 4, n - 60));
  }
  REQUIRE(step.row.tokens == far_only(expected, near.set));
  REQUIRE(step.row.tokens.size() < expected.size());
}

TEST_CASE("the newest page counts: with most of the mass there, little else is kept", "[top_p][int4]") {
  const std::string source = GENERATE("exact", "pages", "history+pages", "history:share_group=on+pages", "clusters");
  const std::uint32_t n = 3'000, open = (n - 1) / kPageTokens * kPageTokens;
  const std::uint32_t from = GENERATE(2'976u, 2'999u);  // Its first token or its last.
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
  const bool window = GENERATE(true, false);
  const std::uint32_t n = GENERATE(3u, 200u);
  CAPTURE(text, window, n);
  PrunedStep step(text + " | near=0%,sinks=2,recent=" + (window ? "1000" : "0"), n);
  const FakeNear near(n, 2, window ? 1'000 : 0, window ? std::vector<std::uint32_t>{} : positions(0, (n + 31) / 32));
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
    unite(expected,
          kept_of(candidates, 0.9, [&](auto t) { return step.copies.estimated(step.q.data(), h, t); }, 2, open));
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
  double longest = 0.0;
  for (std::uint32_t t = 0; t < n; ++t) {
    double square = 0.0;
    for (std::uint32_t c = 0; c < kDim; ++c) square += std::pow(double{step.kv.v[t * kDim + c]}, 2);
    longest = std::max(longest, std::sqrt(square));
  }
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
    double error = 0.0;
    for (std::uint32_t c = 0; c < kDim; ++c) error += std::pow(kept.out[c] - whole.out[c], 2);
    REQUIRE(std::sqrt(error) <= 2.0 * (1.0 - coverage) * longest * (1.0 + 1e-9));
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

TEST_CASE("the preset is Quest's ranking, pruned", "[policy_text]") {
  const PolicySpec spec = twilight_spec();
  REQUIRE_NOTHROW(validate(spec));
  const std::string words = to_string(spec);
  REQUIRE(words == "pages:box,budget=8192 | int4 | top_p=0.95 | near=0%,sinks=4,recent=0 | dense=2 | page=16");
  PolicySpec parsed = parse_policy(words);
  parsed.name = spec.name;
  REQUIRE(parsed == spec);
}
