#pragma once

#include <cmath>
#include <cstdint>
#include <vector>

#include "scheduler/history/group_history.hpp"
#include "tests/scheduler/attended.hpp"
#include "tests/scheduler/naive_history.hpp"
#include "tests/support/catch.hpp"

/// A history and the same in float64, of keys with habits.
namespace sluice::scheduler::test {

inline constexpr std::uint32_t kGroup = 2;
inline constexpr std::uint32_t kSinks = 4;
/// What rounding may do to a score of a table that decays by 0.95, as a share of it: see ScoreTable.
inline constexpr double kError = 20 * kScoreError;
/// Of a score that was rounded once, and computed in float32.
inline constexpr double kOnce = kScoreError + 1e-4;
/// Of a sum, whose entries are off to both sides: what the specification allows (section 10, test 1).
inline constexpr double kSumError = 1e-3;

/// Persistent keys, a slash band, recency and noise: head 1 sees other keys than head 0.
inline double habit(std::uint32_t h, std::uint32_t p, std::uint32_t j) {
  if (j < kSinks) return 8.0;
  const double vertical = noise(j * 2 + h) > 0.47 ? 5.0 : 0.0;
  const double slash = (p - j) % 41 == 7 ? 2.5 : 0.0;
  return vertical + slash - 0.6 * std::log(1.0 + (p - j)) + noise(p * 7919 + j * 31 + h) * 1.5;
}

/// A history and its naive twins, one for each head, behind a prompt, and step by step.
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
  /// CAND of query head `h`, eq. (7), of the history's own tables, as long as nothing was observed since the forecast.
  [[nodiscard]] std::vector<std::uint32_t> candidates(std::uint32_t h, float alpha) const {
    const ScoreTable& vertical = history.vertical(h);
    const ScoreTable& slash = history.slash(h);
    TokenSet found;
    found.reset(n);
    const auto v = vertical.cut(alpha), s = slash.cut(alpha);
    if (!v.uniform) vertical.for_each_above(v.threshold, [&](std::uint32_t i) { found.add(kSinks + i); });
    if (!s.uniform) slash.for_each_above(s.threshold, [&](std::uint32_t e) { found.add(n - 1 - e); });
    return members(found);
  }
  GroupHistory history;
  NaiveHistory naive[kGroup];
  PatternKv kv;
  std::uint32_t n;
};

}  // namespace sluice::scheduler::test
