#include "scheduler/history/score_table.hpp"

#include <algorithm>
#include <cmath>
#include <random>
#include <set>
#include <vector>

#include "scheduler/undo.hpp"
#include "tests/scheduler/naive_history.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/random.hpp"

using namespace sluice::scheduler;
using sluice::scheduler::test::NaiveTable;

namespace {

std::set<std::uint32_t> above(const ScoreTable& table, ScoreCode threshold) {
  std::set<std::uint32_t> found;
  table.for_each_above(threshold, [&](std::uint32_t i) { REQUIRE(found.insert(i).second); });
  return found;
}

std::set<std::uint32_t> above_by_scan(const ScoreTable& table, ScoreCode threshold) {
  std::set<std::uint32_t> found;
  for (std::uint32_t i = 0; i < table.size(); ++i) {
    if (table.stored()[i] > threshold) found.insert(i);
  }
  return found;
}

/// g: a score is what is stored times this.
double unit_of(const ScoreTable& table) { return 1.0 / table.step().per_weight; }

void add(ScoreTable& table, std::uint32_t index, float weight) { table.add({&index, 1}, &weight); }

/// Heavy-tailed prompt scores that sum to 10: a few spikes, a long tail over 30 orders of magnitude.
std::vector<float> prompt_scores(std::uint32_t n, std::uint32_t seed) {
  std::mt19937 rng(seed);
  std::normal_distribution<double> normal;
  std::vector<double> s(n);
  double sum = 0.0;
  for (double& x : s) sum += x = std::exp(6.0 * normal(rng));
  std::vector<float> scaled;
  for (const double x : s) scaled.push_back(static_cast<float>(10.0 * x / sum));
  return scaled;
}

}  // namespace

TEST_CASE("lazy decay equals decaying every entry, over 300 steps", "[score_table]") {
  // 0.5 folds the unit into the table twenty times, 1e-20 at every step, by more octaves than there are codes for.
  const double decay = GENERATE(0.95, 0.5, 1e-3, 1e-20);
  const double alpha = GENERATE(0.1, 0.4);
  CAPTURE(decay, alpha);
  // Every step may round a score once more, and what it was off by before decays; the cut is rounded, too.
  const double error = kScoreError / (1.0 - decay) + 4 * kScoreError;
  constexpr double kForgotten = 2 * kSmallestScore / ScoreTable::kSmallestUnit;
  ScoreTable table;
  NaiveTable naive;
  const auto start = prompt_scores(700, 3);
  table.assign(start);
  naive.s.assign(start.begin(), start.end());

  std::mt19937 rng(11);
  for (std::uint32_t step = 0; step < 300; ++step) {
    const std::uint32_t size = 700 + step;
    table.extend(size);
    naive.s.resize(size, 0.0);

    const ScoreTable::Cut cut = table.cut(alpha);
    REQUIRE_FALSE(cut.uniform);
    const double threshold = naive.threshold(alpha);
    REQUIRE(from_code(cut.mean) * unit_of(table) == Approx(naive.mean()).epsilon(error));
    REQUIRE(from_code(cut.threshold) * unit_of(table) == Approx(threshold).epsilon(error));
    const auto found = above(table, cut.threshold);
    REQUIRE(found == above_by_scan(table, cut.threshold));
    for (std::uint32_t i = 0; i < size; ++i) {
      if (std::abs(naive.s[i] - threshold) <= 2 * error * threshold) continue;
      REQUIRE(found.count(i) == (naive.s[i] > threshold ? 1u : 0u));
    }
    REQUIRE(above(table, cut.mean) == above_by_scan(table, cut.mean));

    table.decay(decay);
    naive.decay(decay);
    for (std::uint32_t touch = 0; touch < 20; ++touch) {
      const auto i = touch < 10 ? touch * 7 : static_cast<std::uint32_t>(rng() % size);
      const float weight = 0.5f / static_cast<float>(1u << (touch % 12));
      add(table, i, weight);
      naive.s[i] += weight;
    }
  }
  for (std::uint32_t i = 0; i < table.size(); ++i) {
    REQUIRE(table.score(i) == Approx(naive.s[i]).epsilon(error).margin(kForgotten));
  }
  REQUIRE(table.sum() == Approx(naive.sum()).epsilon(error));
}

TEST_CASE("a table that tells nothing has a uniform cut", "[score_table]") {
  ScoreTable table;
  REQUIRE(table.cut(0.2).uniform);  // no entries
  table.extend(100);
  REQUIRE(table.cut(0.2).uniform);  // all zero
  REQUIRE(above(table, table.cut(0.2).threshold).empty());

  SECTION("equal entries, also after decay") {
    table.assign(std::vector<float>(1000, 0.3f));
    for (int step = 0; step < 50; ++step) {
      table.decay(0.95);
      for (std::uint32_t i = 0; i < table.size(); ++i) add(table, i, 0.01f);
      const auto cut = table.cut(0.2);
      REQUIRE(cut.uniform);
      REQUIRE(cut.threshold == cut.mean);
    }
  }
  SECTION("one entry") {
    table.assign(std::vector<float>(1, 10.f));
    REQUIRE(table.cut(0.2).uniform);
  }
  SECTION("the first weights of an empty table are found, tiny ones included") {
    add(table, 7, 1e-20f);
    add(table, 3, 0.5f);
    add(table, 9, 1e-3f);
    const auto cut = table.cut(0.2);
    REQUIRE_FALSE(cut.uniform);
    REQUIRE(above(table, cut.threshold) == std::set<std::uint32_t>{3});
  }
}

TEST_CASE("a single spike has the threshold of its closed form", "[score_table]") {
  const std::uint32_t n = GENERATE(2u, 10u, 5000u);
  ScoreTable table;
  std::vector<float> scores(n, 0.f);
  scores[n / 2] = 10.f;
  table.assign(scores);
  const auto cut = table.cut(0.3);
  // Form R2: mean + alpha * std equals form R1 here (spec section 4.2), up to the kurtosis' finite-n term.
  const double p = 1.0 / n, mean = 10.0 * p;
  const double kurtosis = (1.0 - 3.0 * p * (1.0 - p)) / (p * (1.0 - p));
  REQUIRE(from_code(cut.threshold) ==
          Approx(mean + 0.3 * (10.0 - mean) / std::sqrt(kurtosis)).epsilon(4 * kScoreError));
  REQUIRE(above(table, cut.threshold) == std::set<std::uint32_t>{n / 2});
}

TEST_CASE("finding candidates looks at as many entries in a small and a large table", "[score_table]") {
  // 40 entries stand out of n tiny ones, each in a block of its own.
  const auto looked_at = [](std::uint32_t n) {
    std::vector<float> scores(n);
    for (std::uint32_t i = 0; i < n; ++i) scores[i] = 1e-7f * static_cast<float>(1 + i % 5);
    for (std::uint32_t i = 0; i < 40; ++i) scores[i * (n / 40)] = 0.1f + 0.01f * static_cast<float>(i);
    ScoreTable table;
    table.assign(scores);
    for (int step = 0; step < 100; ++step) {
      table.decay(0.95);
      for (std::uint32_t i = 0; i < 40; ++i) add(table, i * (n / 40), 0.5f / 40);
    }
    const auto cut = table.cut(0.2);
    return table.for_each_above(cut.threshold, [](std::uint32_t) {});
  };
  REQUIRE(looked_at(4096) <= 40 * 32);
  REQUIRE(looked_at(65536) <= looked_at(4096));
}

TEST_CASE("a large table finds everything above its threshold and its mean", "[score_table]") {
  ScoreTable table;
  table.assign(prompt_scores(20000, 5));
  std::mt19937 rng(1);
  for (std::uint32_t step = 0; step < 400; ++step) {
    table.decay(0.95);
    for (int touch = 0; touch < 50; ++touch) add(table, static_cast<std::uint32_t>(rng() % 20000), 0.01f);
    const auto cut = table.cut(0.2);
    REQUIRE(above(table, cut.threshold) == above_by_scan(table, cut.threshold));
  }
  const auto cut = table.cut(0.2);
  REQUIRE(above(table, cut.mean) == above_by_scan(table, cut.mean));
}

TEST_CASE("a table that doubles without an update still finds everything above its mean", "[score_table]") {
  ScoreTable table;
  std::vector<float> scores;
  for (int i = 0; i < 512; ++i) scores.push_back(0.01f + 0.0001f * static_cast<float>(i % 100));
  table.assign(scores);
  for (std::uint32_t size = 512; size <= 64 * 512; size *= 2) {
    table.extend(size);
    const auto cut = table.cut(0.01);
    if (cut.uniform) continue;
    REQUIRE(above(table, cut.mean) == above_by_scan(table, cut.mean));
  }
  REQUIRE(above(table, table.cut(0.01).mean).size() == 512);
}

TEST_CASE("codes are ordered as what they stand for, and every float has the nearest", "[score_table]") {
  REQUIRE(from_code(0) == 0.f);
  for (std::uint32_t code = 1; code <= kLargestCode; ++code) {
    const auto here = static_cast<ScoreCode>(code);
    const float value = from_code(here);
    const float below = from_code(static_cast<ScoreCode>(code - 1));
    REQUIRE(value > below);
    REQUIRE(to_code(value) == here);
    REQUIRE(floor_code(value) == here);
    REQUIRE(floor_code(std::nextafter(static_cast<double>(value), 0.0)) == code - 1);
    if (code == 1) continue;  // What lies between 0 and it is forgotten or kept, whichever is nearer in logarithm.
    const double middle = (static_cast<double>(value) + below) / 2.0;
    REQUIRE(to_code(static_cast<float>(middle)) == (code % 2 == 0 ? here : code - 1));  // Ties to even.
    REQUIRE(to_code(std::nextafter(static_cast<float>(middle), HUGE_VALF)) == here);
    REQUIRE(std::abs(middle - value) <= kScoreError * middle);
  }
  REQUIRE(to_code(1e-20f) == 0);
  REQUIRE(to_code(0x1p40f) == kLargestCode);
  REQUIRE(to_code(HUGE_VALF) == kLargestCode);
  REQUIRE(floor_code(1e300) == kLargestCode);
}

TEST_CASE("a score that is fed for long stays near what it adds up to", "[score_table]") {
  // Always the same weight: rounding has no chance to cancel, but for the unit that moves.
  const double weight = GENERATE(0.5, 0.3333, 1e-3, 1e-6);
  CAPTURE(weight);
  ScoreTable table;
  table.extend(100);
  double exact = 0.0;
  for (int step = 0; step < 2000; ++step) {
    table.decay(0.95);
    exact = exact * 0.95 + weight;
    add(table, 42, static_cast<float>(weight));
    REQUIRE(table.score(42) == Approx(exact).epsilon(20 * kScoreError));
    REQUIRE(table.sum() == Approx(table.score(42)).epsilon(1e-9));
  }
}

TEST_CASE("a table without entries holds nothing, others 2 bytes an entry and little more", "[score_table]") {
  ScoreTable table;
  REQUIRE(table.heap_bytes() == 0);
  table.extend(0);
  table.decay(0.95);
  (void)table.cut(0.2);
  REQUIRE(table.heap_bytes() == 0);
  const bool grows = GENERATE(false, true);
  if (!grows) table.assign(prompt_scores(8192, 9));
  for (std::uint32_t size = 1; size <= 20000; size += 7) {
    table.extend(size);
    REQUIRE(table.heap_bytes() <= ScoreTable::most_heap_bytes(std::max(size, grows ? 0u : 8192u)));
  }
  REQUIRE(table.heap_bytes() <= 20000 * 11 / 5);
}

TEST_CASE("steps that are taken back leave the table bit by bit as it was, also where codes were forgotten and lowered",
          "[score_table][undo]") {
  const double decay = GENERATE(0.85, 0.9, 0.95, 0.998);
  CAPTURE(decay);
  struct Step {
    ScoreTable before;
    ScoreTable::Undo undo;
    std::vector<std::uint32_t> indices;
    std::vector<ScoreChange> changes;
  };
  sluice::test::Random random(17);
  std::vector<float> scores(700);
  for (float& score : scores) score = std::ldexp(1.f, -static_cast<int>(random.below(34)));  // Some are forgotten soon.
  ScoreTable table;
  table.assign(scores);
  std::vector<Step> steps;
  for (int at = 0; at < 700; ++at) {
    Step step{.before = table, .undo = table.decay(decay), .indices = {}, .changes = {}};
    table.extend(table.size() + 1);
    for (std::uint32_t index = random.below(90); index < table.size(); index += 1 + random.below(90))
      step.indices.push_back(index);
    if (at % 2 == 0) std::ranges::reverse(step.indices);
    const std::vector<float> weights(step.indices.size(), 0.5f / static_cast<float>(1 + random.below(1000)));
    step.changes.resize(step.indices.size());
    table.add(step.indices, weights.data(), step.changes.data());
    REQUIRE_FALSE(step.undo.lossy);
    steps.push_back(std::move(step));
    if (steps.size() > kUndoTokens) steps.erase(steps.begin());
    if (random.below(12) != 0) continue;
    for (std::size_t back = std::min<std::size_t>(random.below(kUndoTokens + 1), steps.size()); back != 0; --back) {
      const Step& last = steps.back();
      auto next = [i = std::size_t{0}, &last]() mutable {
        const ScoreTable::Entry entry{.index = last.indices[i], .code = last.changes[i].before};
        ++i;
        return entry;
      };
      table.undo(last.undo, static_cast<std::uint32_t>(last.changes.size()), std::ref(next));
      table.shrink(last.before.size());
      REQUIRE(table.size() == last.before.size());
      REQUIRE(unit_of(table) == unit_of(last.before));
      REQUIRE(table.sum() == last.before.sum());
      for (std::uint32_t i = 0; i < table.size(); ++i) REQUIRE(table.score(i) == last.before.score(i));
      const ScoreTable::Cut cut = table.cut(0.2), was = last.before.cut(0.2);
      REQUIRE((cut.mean == was.mean && cut.threshold == was.threshold && cut.uniform == was.uniform));
      std::vector<std::uint32_t> found, want;
      table.for_each_above(cut.threshold, [&](std::uint32_t i) { found.push_back(i); });
      last.before.for_each_above(was.threshold, [&](std::uint32_t i) { want.push_back(i); });
      REQUIRE(found == want);
      steps.pop_back();
    }
  }
}
