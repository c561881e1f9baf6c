#include "scheduler/history/group_history.hpp"

#include <limits>

#include "tests/scheduler/fakes.hpp"
#include "tests/scheduler/naive_history.hpp"
#include "tests/support/catch.hpp"

using namespace sluice;
using namespace sluice::scheduler;
using namespace sluice::scheduler::test;

namespace {

constexpr std::uint32_t kGroup = 2;
constexpr std::uint32_t kSinks = 4;
/// What rounding may do to a score of a table that decays by 0.95, as a share of it: see ScoreTable.
constexpr double kError = 20 * kScoreError;
/// Of a score that was rounded once, and computed in float32.
constexpr double kOnce = kScoreError + 1e-4;
/// Of a sum, whose entries are off to both sides: what the specification allows (section 10, test 1).
constexpr double kSumError = 1e-3;

/// Persistent keys, a slash band, recency and noise: head 1 sees other keys than head 0.
double habit(std::uint32_t h, std::uint32_t p, std::uint32_t j) {
  const auto noise = [](std::uint32_t x) {
    x = (x ^ (x >> 16)) * 0x7feb352du;
    x = (x ^ (x >> 15)) * 0x846ca68bu;
    return static_cast<double>(x ^ (x >> 16)) / 4294967296.0 - 0.5;
  };
  if (j < kSinks) return 8.0;
  const double vertical = noise(j * 2 + h) > 0.47 ? 5.0 : 0.0;
  const double slash = (p - j) % 41 == 7 ? 2.5 : 0.0;
  return vertical + slash - 0.6 * std::log(1.0 + (p - j)) + noise(p * 7919 + j * 31 + h) * 1.5;
}

/// Runs prompt and `steps` decode steps of a history and its naive twin; `check(n)` looks at both in between.
struct Twins {
  explicit Twins(std::uint32_t prompt, std::uint32_t queries, HistoryOptions options = {})
      : history(options, kGroup, kSinks), kv(kGroup, habit), n(prompt) {
    const auto q = kv.last_queries(prompt, std::min(prompt, 64u));
    history.begin({.kv_head = 0, .tokens = prompt, .queries = std::min(prompt, 64u), .last_q = q, .kv = &kv});
    for (std::uint32_t h = 0; h < kGroup; ++h) {
      naive[h].sinks = kSinks;
      naive[h].decay = options.decay;
      naive[h].begin(prompt, queries, [h](std::uint32_t p, std::uint32_t j) { return habit(h, p, j); });
    }
  }
  void forecast() {
    ++n;
    history.forecast(n);
    for (auto& twin : naive) twin.extend(n);
  }
  void observe() {
    for (std::uint32_t h = 0; h < kGroup; ++h) {
      std::vector<std::uint32_t> tokens;
      std::vector<float> scores;
      history.expanded(h).for_each([&](std::uint32_t t) {
        tokens.push_back(t);
        scores.push_back(static_cast<float>(habit(h, n - 1, t)));
      });
      history.observe(h, tokens, scores);
      naive[h].observe(n, tokens, scores);
    }
  }
  GroupHistory history;
  NaiveHistory naive[kGroup];
  PatternKv kv;
  std::uint32_t n;
};

std::vector<std::uint32_t> members(const TokenSet& set) {
  std::vector<std::uint32_t> tokens;
  set.for_each([&](std::uint32_t t) { tokens.push_back(t); });
  return tokens;
}

}  // namespace

TEST_CASE("the prompt fills both tables as equation 4 says", "[history]") {
  const std::uint32_t init = GENERATE(1u, 5u, 32u);
  CAPTURE(init);
  const float decay = GENERATE(0.95f, 0.5f);
  Twins twins(400, init, {.decay = decay, .init_queries = init});
  for (std::uint32_t h = 0; h < kGroup; ++h) {
    const double stationary = 0.5 / (1.0 - decay);
    REQUIRE(twins.history.vertical(h).sum() == Approx(stationary).epsilon(kSumError));
    REQUIRE(twins.history.slash(h).sum() == Approx(stationary).epsilon(kSumError));
    REQUIRE(twins.history.vertical(h).size() == 396);
    for (std::uint32_t i = 0; i < 396; ++i) {
      REQUIRE(twins.history.vertical(h).score(i) == Approx(twins.naive[h].vertical.s[i]).epsilon(kOnce).margin(1e-9));
      REQUIRE(twins.history.slash(h).score(i) == Approx(twins.naive[h].slash.s[i]).epsilon(kOnce).margin(1e-9));
    }
  }
}

TEST_CASE("prompts shorter than the initial queries use the rows there are", "[history]") {
  const std::uint32_t prompt = GENERATE(5u, 6u, 17u);  // 5: one token beyond the sinks
  CAPTURE(prompt);
  Twins twins(prompt, prompt - kSinks);
  for (std::uint32_t h = 0; h < kGroup; ++h) {
    REQUIRE(twins.history.vertical(h).sum() == Approx(10.0).epsilon(kSumError));
    REQUIRE(twins.history.slash(h).sum() == Approx(10.0).epsilon(kSumError));
    for (std::uint32_t i = 0; i < prompt - kSinks; ++i) {
      REQUIRE(twins.history.slash(h).score(i) == Approx(twins.naive[h].slash.s[i]).epsilon(kOnce).margin(1e-9));
    }
  }
}

TEST_CASE("prompts without a token beyond the sinks, or without queries, leave the history blank", "[history]") {
  const std::uint32_t prompt = GENERATE(0u, 1u, 4u, 300u);
  CAPTURE(prompt);
  PatternKv kv(kGroup, habit);
  GroupHistory history({}, kGroup, kSinks);
  history.begin({.kv_head = 0, .tokens = prompt, .queries = 0, .last_q = {}, .kv = &kv});
  history.forecast(prompt + 1);
  REQUIRE(history.blank());
  REQUIRE(members(history.expanded(0)).empty());
}

TEST_CASE("candidates and expansion follow the naive tables over 300 steps", "[history]") {
  const float alpha = GENERATE(0.1f, 0.3f);
  CAPTURE(alpha);
  Twins twins(600, 32, {.alpha = alpha});
  std::size_t proposed = 0;
  for (int step = 0; step < 300; ++step) {
    twins.forecast();
    for (std::uint32_t h = 0; h < kGroup; ++h) {
      CAPTURE(step, h);
      const NaiveHistory& naive = twins.naive[h];
      REQUIRE(naive.vertical.s.size() == twins.n - kSinks);
      const double tau_v = naive.vertical.threshold(alpha), tau_s = naive.slash.threshold(alpha);
      const std::vector<std::uint32_t> candidates = members(twins.history.candidates(h));
      for (std::uint32_t j = kSinks; j < twins.n; ++j) {
        const double v = naive.sv(j), s = naive.ss(j, twins.n);
        const bool unclear = std::abs(v - tau_v) < 2 * kError * tau_v || std::abs(s - tau_s) < 2 * kError * tau_s;
        const bool is = std::binary_search(candidates.begin(), candidates.end(), j);
        if (!unclear) REQUIRE(is == (v > tau_v || s > tau_s));
      }
      const auto expected = naive.expanded(twins.n, candidates);
      const auto expanded = members(twins.history.expanded(h));
      // A difference is allowed only where a score equals its mean to rounding.
      std::vector<std::uint32_t> differ;
      std::set_symmetric_difference(expected.begin(), expected.end(), expanded.begin(), expanded.end(),
                                    std::back_inserter(differ));
      const double mv = naive.vertical.mean(), ms = naive.slash.mean();
      for (const std::uint32_t j : differ) {
        const bool unclear = std::abs(naive.sv(j) - mv) < 2 * kError * mv || std::abs(naive.ss(j, twins.n) - ms) < 2 * kError * ms;
        REQUIRE(unclear);
      }
      proposed += candidates.size();
    }
    twins.observe();
    for (std::uint32_t h = 0; h < kGroup; ++h) {
      REQUIRE(twins.history.vertical(h).sum() == Approx(10.0).epsilon(kSumError));
      REQUIRE(twins.history.slash(h).sum() == Approx(10.0).epsilon(kSumError));
    }
  }
  REQUIRE(proposed > 600);  // The loop compared something.
}

TEST_CASE("candidates shrink as alpha grows, the expansion stays above a mean", "[history]") {
  std::vector<std::uint32_t> wider;
  for (const float alpha : {0.05f, 0.1f, 0.2f, 0.3f, 0.4f, 1.f, 3.f}) {
    Twins twins(2000, 32, {.alpha = alpha});
    twins.forecast();
    const std::vector<std::uint32_t> candidates = members(twins.history.candidates(0));
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

TEST_CASE("a forecast's cost follows its candidates, not the context", "[history]") {
  const auto looked_at = [](std::uint32_t n) {
    // 30 keys at fixed positions hold all the attention.
    PatternKv kv(kGroup,
                 [](std::uint32_t, std::uint32_t, std::uint32_t j) { return j % 101 == 7 && j < 3100 ? 20.0 : 0.0; });
    GroupHistory history({}, kGroup, kSinks);
    const auto q = kv.last_queries(n, 32);
    history.begin({.kv_head = 0, .tokens = n, .queries = 32, .last_q = q, .kv = &kv});
    history.forecast(n + 1);
    return history.looked_at();
  };
  const std::uint64_t small = looked_at(4096);
  REQUIRE(small >= 2 * 30);
  REQUIRE(looked_at(65536) <= small + small / 4);
}

TEST_CASE("scores that are not finite do not poison the tables", "[history]") {
  Twins twins(300, 32);
  twins.forecast();
  const float nan = std::numeric_limits<float>::quiet_NaN(), inf = std::numeric_limits<float>::infinity();
  const double before = twins.history.vertical(0).score(50 - kSinks);

  SECTION("beside finite ones they weigh nothing") {
    twins.history.observe(0, std::vector<std::uint32_t>{50, 60, 70, 80}, std::vector<float>{nan, 2.f, inf, -inf});
    REQUIRE(twins.history.vertical(0).sum() == Approx(10.0).epsilon(kSumError));
    REQUIRE(twins.history.vertical(0).score(50 - kSinks) == Approx(0.95 * before).epsilon(1e-5));
  }
  SECTION("alone, or with nothing at all, they change nothing") {
    twins.history.observe(0, std::vector<std::uint32_t>{50, 60}, std::vector<float>{nan, -inf});
    twins.history.observe(0, {}, {});
    REQUIRE(twins.history.vertical(0).score(50 - kSinks) == before);
    REQUIRE(twins.history.vertical(0).sum() == Approx(10.0).epsilon(kSumError));
  }
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
