// Which positions a history proposes: how far candidates are widened, carried on to later steps, and held back.
#include "tests/scheduler/history_twins.hpp"

using namespace sluice;
using namespace sluice::scheduler;
using namespace sluice::scheduler::test;

TEST_CASE("candidates shrink as alpha grows, the expansion stays above a mean", "[history]") {
  std::vector<std::uint32_t> wider;
  for (const float alpha : {0.05f, 0.1f, 0.2f, 0.3f, 0.4f, 1.f, 3.f}) {
    Twins twins(2000, 32, {.alpha = alpha});
    twins.forecast();
    const std::vector<std::uint32_t> candidates = twins.candidates(0, alpha);
    if (alpha > 0.05f) REQUIRE(is_subset(candidates, wider));
    wider = candidates;

    const ScoreTable& v = twins.history.vertical(0);
    const ScoreTable& s = twins.history.slash(0);
    const auto expanded = members(twins.history.expanded(0));
    REQUIRE(is_subset(candidates, expanded));
    for (const std::uint32_t t : expanded) {
      const bool above_v = v.score(t - kSinks) > v.sum() / v.size() * (1 - 1e-6);
      const bool above_s = s.score(twins.n - 1 - t) > s.sum() / s.size() * (1 - 1e-6);
      REQUIRE((above_v || above_s));
    }
  }
}

TEST_CASE("expansion respects both ends of the offloaded positions", "[history]") {
  // Candidates at the first offloaded position and at the newest one; everything is above the mean around them.
  GroupHistory history({}, 1, kSinks);
  const std::uint32_t n = GENERATE(8u, 9u, 70u);
  CAPTURE(n);
  history.forecast(n);
  REQUIRE(history.blank());
  std::vector<std::uint32_t> tokens = {kSinks, kSinks + 1, n - 2, n - 1};
  history.observe(0, tokens, std::vector<float>{3.f, 0.f, 0.f, 3.f});
  history.forecast(n + 1);
  REQUIRE_FALSE(history.blank());
  const auto expanded = members(history.expanded(0));
  REQUIRE(expanded.front() == kSinks);
  REQUIRE(expanded.back() == n);  // slash distance 0 moved along with the newest token
  REQUIRE(std::binary_search(expanded.begin(), expanded.end(), n - 1));
}

TEST_CASE("what a forecast looks at grows with its candidates, not with the context", "[history]") {
  const auto looked_at = [](std::uint32_t n) {
    // 30 keys at fixed positions hold all the attention.
    PatternKv kv(kGroup,
                 [](std::uint32_t, std::uint32_t, std::uint32_t j) { return j % 101 == 7 && j < 3100 ? 20.0 : 0.0; });
    const HistoryOptions options;
    GroupHistory history(options, kGroup, kSinks);
    const auto q = kv.last_queries(n, 32);
    history.begin({.kv_head = 0, .tokens = n, .queries = 32, .last_q = q, .kv = &kv});
    history.forecast(n + 1);
    std::size_t sum = 0;
    for (std::uint32_t h = 0; h < kGroup; ++h) {
      for (const ScoreTable* table : {&history.vertical(h), &history.slash(h)})
        sum += table->for_each_above(table->cut(options.alpha).threshold, [](std::uint32_t) {});
    }
    return sum;
  };
  const std::size_t small = looked_at(4096);
  REQUIRE(small >= 2 * 30);
  REQUIRE(looked_at(65536) <= small + small / 4);
}

TEST_CASE("followed candidates stay by position and move by distance", "[history]") {
  const std::uint32_t by = GENERATE(1u, 3u, 64u, 70u);
  CAPTURE(by);
  Twins twins(700, 32, {.observe_every = 4});
  twins.forecast();
  const std::uint32_t n = twins.n;
  std::vector<std::uint32_t> expected;
  for (std::uint32_t h = 0; h < kGroup; ++h) {
    const ScoreTable& vertical = twins.history.vertical(h);
    const ScoreTable& slash = twins.history.slash(h);
    const double v_mean = vertical.sum() / vertical.size(), s_mean = slash.sum() / slash.size();
    for (const std::uint32_t token : members(twins.history.expanded(h))) {
      if (vertical.score(token - kSinks) > v_mean) expected.push_back(token);
      if (slash.score(n - 1 - token) > s_mean) expected.push_back(token + by);
    }
  }
  const auto tidy = [&] {
    std::sort(expected.begin(), expected.end());
    expected.erase(std::unique(expected.begin(), expected.end()), expected.end());
  };
  tidy();
  const auto followed = [&](std::uint32_t tokens) {
    twins.history.follow(tokens);
    TokenSet set;
    set.reset(tokens);
    twins.history.unite_followed(set);
    return set;
  };
  REQUIRE(members(followed(n + by)) == expected);

  // A heavy token found meanwhile joins at its position and at its distance.
  const std::uint32_t heavy = n / 2;
  twins.history.note(heavy);
  const TokenSet later = followed(n + by + 5);
  for (const std::uint32_t token : {heavy - 1, heavy, heavy + 2, heavy + 4, heavy + 5, heavy + 7}) {
    REQUIRE(later.contains(token));
  }
}

TEST_CASE("a forecast beyond its limit proposes nothing", "[history]") {
  Twins free(700, 32, {.alpha = 0.01f}), held(700, 32, {.alpha = 0.01f, .limit = 0.001f});
  free.forecast();
  held.forecast();
  REQUIRE(free.history.expanded(0).size() > 1);
  for (std::uint32_t h = 0; h < kGroup; ++h) REQUIRE(held.history.expanded(h).size() == 0);
  REQUIRE_FALSE(held.history.blank());
}

TEST_CASE("a table that is not asked proposes nothing, and without expansion neighbours do not", "[history]") {
  const auto tables = GENERATE(HistoryTables::both, HistoryTables::vertical, HistoryTables::slash);
  const bool expand = GENERATE(true, false);
  CAPTURE(tables, expand);
  Twins twins(700, 32, {.tables = tables, .expand = expand});
  const bool by_position = tables != HistoryTables::slash, by_distance = tables != HistoryTables::vertical;
  std::size_t proposed = 0, widened = 0;
  for (int step = 0; step < 40; ++step) {
    twins.forecast();
    for (std::uint32_t h = 0; h < kGroup; ++h) {
      CAPTURE(step, h);
      const NaiveHistory& naive = twins.naive[h];
      const double mv = naive.vertical.mean(), ms = naive.slash.mean();
      const double tau_v = naive.vertical.threshold(0.2), tau_s = naive.slash.threshold(0.2);
      const auto above = [&](std::uint32_t j, double v, double s, double slack) {
        return (by_position && naive.sv(j) > v * (1 + slack)) ||
               (by_distance && naive.ss(j, twins.n) > s * (1 + slack));
      };
      const TokenSet& expanded = twins.history.expanded(h);
      for (std::uint32_t j = kSinks; j < twins.n; ++j) {
        // Within rounding it may be either.
        bool sure = above(j, tau_v, tau_s, 2 * kError), possible = above(j, tau_v, tau_s, -2 * kError);
        proposed += sure ? 1 : 0;
        for (const int o : {-1, 0, 1, 2}) {
          const std::int64_t from = std::int64_t{j} - o;
          if (!expand || from < kSinks || from >= twins.n) continue;
          const auto k = static_cast<std::uint32_t>(from);
          sure |= above(k, tau_v, tau_s, 2 * kError) && above(j, mv, ms, 2 * kError);
          possible |= above(k, tau_v, tau_s, -2 * kError) && above(j, mv, ms, -2 * kError);
        }
        if (sure) REQUIRE(expanded.contains(j));
        if (!possible) REQUIRE_FALSE(expanded.contains(j));
        widened += expanded.contains(j) ? 1 : 0;
      }
    }
    twins.observe();
  }
  REQUIRE(proposed > 40);
  REQUIRE(widened >= proposed);
}
