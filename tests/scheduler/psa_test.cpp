// Progressive attention by the CPU: which pages it visits, when it stops, what that covers.

#include <limits>
#include <numeric>

#include "scheduler/policy/page_order.hpp"
#include "scheduler/policy/policies.hpp"
#include "sluice/page_rules.hpp"
#include "tests/scheduler/policy_step.hpp"

using namespace sluice;
using namespace sluice::scheduler;
using namespace sluice::scheduler::test;

namespace {

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

PolicySpec psa(float mass, std::uint32_t microbatch, ProgressRule rule = ProgressRule::least) {
  PolicySpec spec;
  spec.sources = static_cast<std::uint16_t>(Source::pages);
  spec.budget.kind = BudgetKind::progressive;
  spec.budget.mass = mass;
  spec.budget.microbatch = microbatch;
  spec.budget.rule = rule;
  return spec;
}

/// One KV head whose group shares a query unless `own_queries`, so that there is one true order of its pages.
struct Head {
  Head(std::uint32_t tokens, std::uint32_t seed, bool own_queries = false)
      : n(tokens),
        kv(FakeKv::random(tokens, kDim, kGroup, seed)),
        q(random_queries(kGroup, kDim, seed + 200, 1.5f)),
        pages((tokens - 1) / kPageTokens) {
    for (std::uint32_t h = 1; h < kGroup && !own_queries; ++h) std::copy_n(q.begin(), kDim, q.begin() + h * kDim);
  }

  [[nodiscard]] double page_mass(std::uint32_t h, std::uint32_t page) const {
    return attend(kv, q.data(), h, positions(page * kPageTokens, (page + 1) * kPageTokens)).mass;
  }
  /// Scores [group, pages] that rank pages by what they weigh.
  [[nodiscard]] std::vector<float> true_scores() const {
    std::vector<float> scores;
    for (std::uint32_t h = 0; h < kGroup; ++h) {
      for (std::uint32_t p = 0; p < pages; ++p) scores.push_back(static_cast<float>(std::log(page_mass(h, p))));
    }
    return scores;
  }
  /// Quest's: bounds of q.k.
  [[nodiscard]] std::vector<float> box_scores() const {
    std::vector<float> scores;
    for (std::uint32_t h = 0; h < kGroup; ++h) {
      for (std::uint32_t p = 0; p < pages; ++p) {
        float sum = 0.f;
        for (std::uint32_t c = 0; c < kDim; ++c) {
          float best = -std::numeric_limits<float>::infinity();
          for (std::uint32_t t = p * kPageTokens; t < (p + 1) * kPageTokens; ++t) {
            best = std::max(best, q[h * kDim + c] * kv.k[std::size_t{t} * kDim + c]);
          }
          sum += best;
        }
        scores.push_back(sum);
      }
    }
    return scores;
  }
  /// Selects, and checks what holds for every row.
  void select(const PolicySpec& spec, const NearSet& near, std::span<const float> scores) {
    row.clear();
    counters = {};
    kv.rows_scored = 0;
    const auto policy = make_progressive_policy(spec, kShape, kPageTokens);
    policy->select({.kv_head = 0, .tokens = n, .q = q.data(), .page_scores = scores, .near = &near, .kv = &kv}, row,
                   bypass, counters);
    REQUIRE(kv.ascending);
    REQUIRE(counters.scored == kv.rows_scored);
    REQUIRE(row.members.empty());
    REQUIRE(row.scores.size() == row.tokens.size() * kGroup);
    for (std::size_t i = 0; i < row.tokens.size(); ++i) {
      REQUIRE(row.tokens[i] < n);
      REQUIRE_FALSE(near.contains(row.tokens[i]));
      if (i > 0) REQUIRE(row.tokens[i - 1] < row.tokens[i]);
      for (std::uint32_t h = 0; h < kGroup; ++h) {
        const auto score = static_cast<float>(kv.logit(q.data(), h, row.tokens[i]));
        REQUIRE((row.scores[i * kGroup + h] == score || std::isnan(score)));
      }
    }
  }
  /// What is near and what was selected.
  [[nodiscard]] std::vector<std::uint32_t> attended(const NearSet& near) const {
    auto tokens = near_tokens(near, n);
    tokens.insert(tokens.end(), row.tokens.begin(), row.tokens.end());
    std::sort(tokens.begin(), tokens.end());
    return tokens;
  }
  /// Share of the mass that near and selected tokens hold.
  [[nodiscard]] double coverage(const NearSet& near, std::uint32_t h) const {
    return attend(kv, q.data(), h, attended(near)).mass / attend(kv, q.data(), h, positions(0, n)).mass;
  }
  [[nodiscard]] std::vector<std::uint32_t> visited_pages() const {
    std::vector<std::uint32_t> list;
    for (const std::uint32_t t : row.tokens) {
      if (list.empty() || list.back() != t / kPageTokens) list.push_back(t / kPageTokens);
    }
    return list;
  }

  std::uint32_t n;
  FakeKv kv;
  std::vector<float> q;
  std::uint32_t pages;
  SelectionRow row;
  Bypass bypass;
  SelectCounters counters;
};

/// A FakeKv that gives its scores as estimates, and no others.
class Estimates final : public KvReader {
 public:
  explicit Estimates(FakeKv& kv) : kv_(kv) {}
  void score(const float*, std::span<const std::uint32_t>, float*) override { FAIL("keys were read"); }
  void estimate(const float* q, std::span<const std::uint32_t> tokens, float* out) override {
    kv_.score(q, tokens, out);
  }
  void key(std::uint32_t, float*) override { FAIL("keys were read"); }
  void value(std::uint32_t token, float* out) override { kv_.value(token, out); }
  void keys(std::uint32_t, std::uint32_t, float*) override { FAIL("keys were read"); }
  void cluster(const ClusterRequest& request, float* centroids, std::uint32_t* assignment) override {
    kv_.cluster(request, centroids, assignment);
  }
  void score_rows(const float* x, std::uint32_t columns, const float* rows, std::uint32_t count, float* out) override {
    kv_.score_rows(x, columns, rows, count, out);
  }

 private:
  FakeKv& kv_;
};

}  // namespace

TEST_CASE("progressive: in true order the share is covered, for all heads and microbatches", "[psa]") {
  const auto n = GENERATE(33u, 640u, 1'999u);
  const auto microbatch = GENERATE(1u, 4u, 100u);
  const auto mass = GENERATE(0.5f, 0.95f);
  const auto sinks = GENERATE(0u, 4u);
  CAPTURE(n, microbatch, mass, sinks);
  Head head(n, n + microbatch);
  const FakeNear near(n, sinks, sinks == 0 ? 0 : 70);
  head.select(psa(mass, microbatch), near.set, head.true_scores());
  for (std::uint32_t h = 0; h < kGroup; ++h) {
    const double covered = head.coverage(near.set, h);
    REQUIRE(covered >= mass - 1e-5);
    // What was left out weighs so little that the output cannot be far off: both are means of values.
    const Attended some = attend(head.kv, head.q.data(), h, head.attended(near.set));
    const Attended all = attend(head.kv, head.q.data(), h, positions(0, n));
    REQUIRE(distance(some.out, all.out) <= 2 * (1 - covered) * longest_value(head.kv, n) + 1e-9);
  }
}

TEST_CASE("progressive: it visits no page more than the rule asks for, in the order of the scores", "[psa]") {
  Head head(3'000, 5);
  const FakeNear near(3'000, 0, 0);
  const auto scores = head.true_scores();
  head.select(psa(0.8f, 1), near.set, scores);
  std::vector<std::uint32_t> order(head.pages);
  std::iota(order.begin(), order.end(), 0u);
  std::sort(order.begin(), order.end(), [&](auto a, auto b) { return scores[a] > scores[b]; });
  // The open page, then pages until P = A / (A + least * left) passes.
  double attended = attend(head.kv, head.q.data(), 0, positions(head.pages * kPageTokens, 3'000)).mass;
  std::vector<std::uint32_t> expected{head.pages};
  for (const std::uint32_t page : order) {
    attended += head.page_mass(0, page);
    expected.push_back(page);
    const double left = head.pages + 1.0 - static_cast<double>(expected.size());
    if (attended / (attended + head.page_mass(0, page) * left) >= 0.8) break;
  }
  std::sort(expected.begin(), expected.end());
  REQUIRE(expected.size() < head.pages);
  REQUIRE(head.visited_pages() == expected);
  REQUIRE(head.counters.iterations == expected.size() - 1);

  const std::size_t one = expected.size();
  head.select(psa(0.8f, 4), near.set, scores);
  REQUIRE(head.visited_pages().size() >= one);
  REQUIRE(head.visited_pages().size() <= one + 3);
}

TEST_CASE("progressive: by copies it visits what it would if they were keys, and leaves scores to these", "[psa]") {
  const auto rule = GENERATE(ProgressRule::least, ProgressRule::mean, ProgressRule::median);
  const auto sinks = GENERATE(0u, 40u);
  Head head(2'000, 6, true);
  const FakeNear near(2'000, sinks, sinks);
  const auto scores = head.box_scores();
  PolicySpec spec = psa(0.8f, 4, rule);
  head.select(spec, near.set, scores);
  const SelectCounters exact = head.counters;
  spec.estimate = Estimate::int4;
  Estimates kv(head.kv);
  SelectionRow row;
  SelectCounters counters;
  make_progressive_policy(spec, kShape, kPageTokens)
      ->select(
          {.kv_head = 0, .tokens = head.n, .q = head.q.data(), .page_scores = scores, .near = &near.set, .kv = &kv},
          row, head.bypass, counters);
  REQUIRE(row.tokens == head.row.tokens);
  REQUIRE(row.tokens.size() < 1'900);
  REQUIRE(row.scores.empty());
  REQUIRE((counters.estimated == exact.scored && counters.scored == 0));
  REQUIRE(counters.iterations == exact.iterations);
}

TEST_CASE("progressive: all of the mass is dense attention, whatever the order", "[psa]") {
  const auto microbatch = GENERATE(1u, 7u, 1024u);
  Head head(777, 9, true);
  std::vector<float> scores(kGroup * head.pages);
  std::iota(scores.begin(), scores.end(), -100.f);
  const FakeNear near(777, 5, 40);
  head.select(psa(1.f, microbatch), near.set, scores);
  REQUIRE(head.attended(near.set) == positions(0, 777));
}

TEST_CASE("progressive: ties by larger index, no number last, and no harm from either", "[psa]") {
  Head head(64 * kPageTokens + 1, 3);
  const FakeNear near(head.n, 0, 0);
  std::vector<float> scores(kGroup * head.pages, 1.f);
  for (std::uint32_t h = 0; h < kGroup; ++h) scores[h * head.pages + 63] = kNan;
  head.select(psa(1e-6f, 3), near.set, scores);
  REQUIRE(head.visited_pages() == std::vector<std::uint32_t>{60, 61, 62, 64});
  std::fill(scores.begin(), scores.end(), kNan);
  head.select(psa(1e-6f, 1), near.set, scores);
  REQUIRE(head.visited_pages() == std::vector<std::uint32_t>{63, 64});

  std::fill_n(head.kv.k.begin() + 63 * kPageTokens * kDim, kDim, kNan);
  head.select(psa(0.9f, 1), near.set, scores);
  REQUIRE(head.row.tokens.size() > kPageTokens);
  std::fill(head.kv.k.begin(), head.kv.k.end(), kNan);
  head.select(psa(0.9f, 5), near.set, scores);
  REQUIRE(head.row.tokens.size() == head.n);  // Nothing weighs anything, so nothing is enough.
}

TEST_CASE("progressive: what is certified is covered, though the order is not the true one", "[psa]") {
  const auto mass = GENERATE(0.5f, 0.9f, 0.99f);
  const auto seed = GENERATE(range(0u, 8u));
  CAPTURE(mass, seed);
  Head head(1'600, seed, true);
  const FakeNear near(1'600, 4, 64);
  const auto scores = head.box_scores();
  head.select(psa(mass, 4), near.set, scores);
  const std::size_t guessed = head.row.tokens.size();
  head.select(psa(mass, 4, ProgressRule::certified), near.set, scores);
  for (std::uint32_t h = 0; h < kGroup; ++h) REQUIRE(head.coverage(near.set, h) >= mass - 1e-5);
  REQUIRE(head.row.tokens.size() >= guessed);
}

TEST_CASE("progressive: milder rules visit at least as much", "[psa]") {
  Head head(2'500, 12, true);
  const FakeNear near(2'500, 4, 0);
  const auto scores = head.box_scores();
  head.select(psa(0.9f, 4), near.set, scores);
  const std::size_t least = head.row.tokens.size();
  for (const auto rule : {ProgressRule::mean, ProgressRule::median}) {
    head.select(psa(0.9f, 4, rule), near.set, scores);
    REQUIRE(head.row.tokens.size() >= least);
  }
}

TEST_CASE("progressive: a context that is all near or has no full page", "[psa]") {
  Head small(20, 1);
  const FakeNear none(20, 0, 0);
  small.select(psa(0.95f, 4), none.set, {});
  REQUIRE(small.row.tokens == positions(0, 20));
  const FakeNear whole(20, 4, 16);
  small.select(psa(0.95f, 4), whole.set, {});
  REQUIRE(small.row.tokens.empty());
  Head one(1, 1);
  const FakeNear first(1, 4, 0);
  one.select(psa(0.95f, 4), first.set, {});
  REQUIRE(one.row.tokens.empty());
}

TEST_CASE("progressive: bounds of what is left hold for every prefix of the order", "[psa]") {
  Head head(900, 21, true);
  const FakeNear near(900, 0, 0);
  const auto scores = head.box_scores();
  PageOrder order;
  order.rank(scores, kGroup, near.set, 900);
  std::vector<PageRun> taken;
  while (order.left() != 0) {
    const auto bounds = order.bounds(kShape);
    for (std::uint32_t h = 0; h < kGroup; ++h) {
      double left = 0.0;
      for (std::uint32_t page = 0; page < head.pages; ++page) {
        const bool is_taken = std::any_of(taken.begin(), taken.end(), [&](auto& run) { return run.page == page; });
        if (!is_taken) left += head.page_mass(h, page);
      }
      REQUIRE(bounds[h] >= std::log(left) - 1e-5);
    }
    order.take(3, taken);
  }
  REQUIRE(taken.size() == head.pages);
  REQUIRE(order.bounds(kShape)[0] == -std::numeric_limits<float>::infinity());
}

TEST_CASE("progressive: how many pages are sorted beforehand does not change their order", "[psa]") {
  const auto likely = GENERATE(1u, 5u, 56u, 57u, 1'000u);
  const auto bounds_after = GENERATE(0u, 3u, 100u);  // Pages that are taken before the first bound is asked for.
  CAPTURE(likely, bounds_after);
  Head head(901, 22, true);
  const FakeNear near(901, 20, 40);
  auto scores = head.box_scores();
  for (std::size_t i = 0; i < scores.size(); i += 3) scores[i] = 2.f;  // Ties.
  scores[7] = std::numeric_limits<float>::quiet_NaN();
  PageOrder expected;
  PageOrder order;
  expected.rank(scores, kGroup, near.set, 901);
  order.rank(scores, kGroup, near.set, 901, likely);
  REQUIRE(order.left() == expected.left());
  for (std::uint32_t taken = 0; expected.left() != 0; ++taken) {
    REQUIRE(order.next() == expected.next());
    if (taken == bounds_after) REQUIRE(std::ranges::equal(order.bounds(kShape), expected.bounds(kShape)));
    std::vector<PageRun> wanted;
    std::vector<PageRun> found;
    REQUIRE(order.take(1, found) == expected.take(1, wanted));
    REQUIRE(found == wanted);
    REQUIRE(order.left() == expected.left());
  }
}

TEST_CASE("progressive: a budget of far tokens ends the walk down the same order", "[psa][far]") {
  const auto [n, microbatch] = GENERATE(table<std::uint32_t, std::uint32_t>({{3'000, 4}, {2'017, 1}, {1'500, 7}}));
  CAPTURE(n, microbatch);
  Head head(n, 8);
  const std::vector<float> scores = head.true_scores();
  const FakeNear near(n, 4, 0);
  PolicySpec spec = psa(1.f, microbatch);
  head.select(spec, near.set, scores);
  const auto free = head.visited_pages();
  for (const std::uint32_t far : {2 * kGroup * kPageTokens, 9 * kPageTokens + 5, 100 * kGroup * kPageTokens}) {
    CAPTURE(far);
    spec.far = {.min_tokens = far, .share = 0.f};
    head.select(spec, near.set, scores);
    REQUIRE(head.row.attended() <= far);
    REQUIRE(is_subset(head.visited_pages(), free));
    if (far > n) REQUIRE(head.visited_pages() == free);
    if (far < n) REQUIRE(head.visited_pages().size() < free.size());
    if (far < n) REQUIRE(head.row.attended() + 2 * kPageTokens > far / kGroup * kGroup);
  }
}
