// Sampled attention by its formulas, in float64: unbiased whatever the estimates are worth.
#include "sluice/step/sample.hpp"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <random>
#include <vector>

#include "sluice/policy.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/draw_levels.hpp"

using namespace sluice;
using namespace sluice::test;

namespace {

/// Query heads of a KV head and their tokens: logits, what is thought of them, and one number of each value.
struct Group {
  std::uint32_t heads, tokens, picks;
  std::vector<double> logits, estimates, values;

  Group(std::uint32_t heads_, std::uint32_t tokens_, std::uint32_t picks_, double error, std::uint64_t seed)
      : heads(heads_), tokens(tokens_), picks(picks_) {
    std::mt19937_64 random(seed);
    std::normal_distribution<double> normal;
    for (std::uint32_t i = 0; i < heads * tokens; ++i) {
      logits.push_back(1.5 * normal(random));
      estimates.push_back(logits.back() + error * normal(random));
    }
    for (std::uint32_t i = 0; i < tokens; ++i) values.push_back(normal(random));
  }
  [[nodiscard]] double logit(std::uint32_t h, std::uint32_t i) const { return logits[h * tokens + i]; }
  /// Sums of weights, and of weighted values, of a head: over all tokens.
  struct Sums {
    double mass = 0.0, value = 0.0;
    std::uint32_t drawn = 0;  ///< tokens of the head itself
    void add(double weight, double of) {
      mass += weight;
      value += weight * of;
    }
  };
  [[nodiscard]] Sums all(std::uint32_t h) const {
    Sums sums;
    for (std::uint32_t i = 0; i < tokens; ++i) sums.add(std::exp(logit(h, i)), values[i]);
    return sums;
  }
  /// And over those that are drawn, by their chances. `shift` is added to all estimates. `error`: heads draw more, up
  /// to four times as many, where their error bars exceed it.
  [[nodiscard]] std::vector<Sums> drawn(const HeadDraws& draws, double shift = 0.0, double error = 0.0) const {
    std::vector<double> scores(heads * tokens);
    std::vector<DrawThresholds> thresholds(heads);
    for (std::uint32_t h = 0; h < heads; ++h) {
      double* const own = scores.data() + h * tokens;
      for (std::uint32_t i = 0; i < tokens; ++i)
        own[i] = estimates[h * tokens + i] + shift + double{gumbel_draw(draws.key_of(h), i)};
      const std::vector<double> order = in_order({own, tokens});
      const std::span<const double> thought(estimates.data() + h * tokens, tokens);
      const std::uint32_t count =
          error == 0.0 ? picks : level_of(thought, {own, tokens}, 0.0, picks, 4 * picks, error).drawn;
      thresholds[h] = {.largest_left = static_cast<float>(order[count]),
                       .least_drawn = static_cast<float>(order[count - 1]),
                       .drawn = count};
    }
    std::vector<Sums> sums(heads);
    for (std::uint32_t h = 0; h < heads; ++h) sums[h].drawn = thresholds[h].drawn;
    for (std::uint32_t i = 0; i < tokens; ++i) {
      bool any = false;
      double rate = 0.0;
      for (std::uint32_t draw = 0; draw < draws.heads; ++draw) {
        double largest = 0.0;
        for (std::uint32_t h = draw; h < heads; h += draws.heads) {
          const auto score = static_cast<float>(scores[h * tokens + i]);
          any |= score > thresholds[h].largest_left;
          largest = std::max(largest, double{draw_rate(score, exponential_draw(draws.key_of(h), i), thresholds[h])});
        }
        rate += largest;
      }
      if (!any) continue;
      const double correction = double{draw_correction(static_cast<float>(rate))};
      for (std::uint32_t h = 0; h < heads; ++h) sums[h].add(std::exp(logit(h, i) + correction), values[i]);
    }
    return sums;
  }
};

/// Mean and standard error of what is added.
struct Mean {
  double sum = 0.0, squares = 0.0;
  std::uint32_t count = 0;
  void add(double x) {
    sum += x;
    squares += x * x;
    ++count;
  }
  [[nodiscard]] double mean() const { return sum / count; }
  [[nodiscard]] double error() const { return std::sqrt((squares / count - mean() * mean()) / count); }
};

}  // namespace

TEST_CASE("sampled sums are unbiased, whatever the estimates are worth", "[sample]") {
  constexpr std::uint32_t kSeeds = 10'000;
  // Good codes, codes of 2 bits, and pure noise.
  const auto [heads, draws, error] =
      GENERATE(table<std::uint32_t, std::uint32_t, double>({{1, 1, 0.1}, {3, 3, 0.5}, {4, 1, 0.5}, {2, 2, 2.0}}));
  CAPTURE(heads, draws, error);
  const Group group(heads, 40, 8, error, 7);
  std::vector<Mean> mass(heads), value(heads);
  for (std::uint32_t seed = 0; seed < kSeeds; ++seed) {
    const auto sums = group.drawn({.key = mix_bits(seed), .heads = draws});
    for (std::uint32_t h = 0; h < heads; ++h) {
      mass[h].add(sums[h].mass);
      value[h].add(sums[h].value);
    }
  }
  for (std::uint32_t h = 0; h < heads; ++h) {
    CAPTURE(h, mass[h].error(), value[h].error());
    REQUIRE(std::abs(mass[h].mean() - group.all(h).mass) < 4 * mass[h].error());
    REQUIRE(std::abs(value[h].mean() - group.all(h).value) < 4 * value[h].error());
    REQUIRE(mass[h].error() < 0.05 * group.all(h).mass);
  }
}

TEST_CASE("heads that draw more where their error bars are large stay unbiased", "[sample]") {
  constexpr std::uint32_t kSeeds = 10'000;
  // An error between those of two numbers of tokens, so that one is drawn as often as another.
  const auto [heads, draws, noise, error] = GENERATE(table<std::uint32_t, std::uint32_t, double, double>(
      {{1, 1, 0.1, 0.155}, {1, 1, 1.0, 0.125}, {3, 3, 0.5, 0.15}, {4, 1, 0.5, 0.15}}));
  CAPTURE(heads, draws, noise, error);
  const Group group(heads, 150, 10, noise, 7);
  std::vector<Mean> mass(heads), value(heads);
  std::vector<std::uint32_t> levels(41);
  for (std::uint32_t seed = 0; seed < kSeeds; ++seed) {
    const auto sums = group.drawn({.key = mix_bits(seed), .heads = draws}, 0.0, error);
    for (std::uint32_t h = 0; h < heads; ++h) {
      mass[h].add(sums[h].mass);
      value[h].add(sums[h].value);
      ++levels[sums[h].drawn];
    }
  }
  CAPTURE(levels[10], levels[20], levels[40]);
  REQUIRE(levels[10] + levels[20] + levels[40] == heads * kSeeds);
  REQUIRE(std::max({levels[10], levels[20], levels[40]}) < 0.95 * heads * kSeeds);
  // Of a token that another head drew it is not known how many this one would have drawn with it: with ten tokens that
  // is a tenth of what one seed is off by.
  const double approximate = draws == 1 ? 0.0 : 0.15 * std::sqrt(double{kSeeds});
  for (std::uint32_t h = 0; h < heads; ++h) {
    CAPTURE(h, mass[h].mean() / group.all(h).mass, mass[h].error() / group.all(h).mass, value[h].error());
    REQUIRE(std::abs(mass[h].mean() - group.all(h).mass) < (4 + approximate) * mass[h].error());
    REQUIRE(std::abs(value[h].mean() - group.all(h).value) < (4 + approximate) * value[h].error());
  }
}

TEST_CASE("a constant added to all estimates changes nothing", "[sample]") {
  const Group group(3, 50, 6, 0.3, 9);
  for (std::uint32_t seed = 0; seed < 50; ++seed) {
    const HeadDraws draws{.key = mix_bits(seed), .heads = 3};
    const auto here = group.drawn(draws), there = group.drawn(draws, 5.0);
    for (std::uint32_t h = 0; h < 3; ++h) REQUIRE(here[h].mass == Approx(there[h].mass).epsilon(1e-4));
  }
}

TEST_CASE("draws are exponential numbers, independent between heads and tokens", "[sample]") {
  const HeadDraws draws{.key = 5, .heads = 2};
  Mean mean, both, neighbours;
  for (std::uint32_t i = 0; i < 100'000; ++i) {
    const double a = exponential_draw(draws.key_of(0), i), b = exponential_draw(draws.key_of(1), i);
    REQUIRE(a > 0.0);
    REQUIRE(std::isfinite(gumbel_draw(draws.key_of(0), i)));
    mean.add(a);
    both.add((a - 1) * (b - 1));
    neighbours.add((a - 1) * (exponential_draw(draws.key_of(0), i + 1) - 1));
  }
  REQUIRE(std::abs(mean.mean() - 1) < 4 * mean.error());
  REQUIRE(std::abs(both.mean()) < 4 * both.error());
  REQUIRE(std::abs(neighbours.mean()) < 4 * neighbours.error());
  REQUIRE(mean.squares / mean.count == Approx(2.0).epsilon(0.03));
}

TEST_CASE("chances of scores that are no finite numbers", "[sample]") {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const DrawThresholds some{.largest_left = 1.f, .least_drawn = 2.f}, none{};
  REQUIRE(draw_rate(nan, 1.f, some) == 0.f);
  REQUIRE(draw_rate(-kInfinity, 1.f, some) == 0.f);
  REQUIRE(draw_rate(kInfinity, 1.f, some) == kInfinity);
  REQUIRE(draw_rate(3.f, 1.f, none) == kInfinity);         // Nothing is left: all were drawn.
  REQUIRE(draw_rate(-kInfinity, 1.f, none) == kInfinity);  // Among fewer numbers than are drawn.
  REQUIRE(draw_correction(kInfinity) == 0.f);
  REQUIRE(draw_correction(1e-6f) == Approx(-std::log(1e-6f)));
  // A token that was drawn by the threshold below it, and any other by the one above.
  REQUIRE(draw_rate(3.f, 1.f, some) == Approx(std::exp(2.f)));
  REQUIRE(draw_rate(1.f, 1.f, some) == Approx(std::exp(-1.f)));
}

TEST_CASE("an error bar is read, described and refused", "[sample][policy]") {
  const PolicySpec spec = parse_policy("exact | int4 | sample=128,error=2%,most=700");
  REQUIRE(spec.budget.draw_error == Approx(0.02));
  REQUIRE(spec.budget.draw_most == 700);
  REQUIRE(parse_policy(to_string(spec)).budget == spec.budget);
  REQUIRE(parse_policy("sluice:error=3.5%").budget == parse_policy("sluice | sample=256,error=0.035").budget);
  REQUIRE(parse_policy("sluice | sample=128,error=off,most=600").budget == parse_policy("sluice | sample=128").budget);
  for (const char* text :
       {"sample=128,error=0", "sample=128,error=100%", "sample=128,error=-1%", "sample=128,error=nan",
        "sample=128,error=2%,most=127", "sample=128,error=2%,most=4000000000", "sample=9,error"})
    REQUIRE_THROWS_AS(parse_policy(std::string("exact | int4 | ") + text), Error);
  REQUIRE_THROWS_WITH(parse_policy("exact | int4 | sample=128,error=2%,most=100"),
                      Catch::Contains("draw_most is 100") && Catch::Contains("raise most"));
}

TEST_CASE("sample is read, described and refused", "[sample][policy]") {
  const PolicySpec spec = parse_policy("exact | int4 | sample=128,seed=7,redraw=16,draws=group");
  REQUIRE(spec.budget.kind == BudgetKind::drawn);
  REQUIRE(spec.budget.min_tokens == 128);
  REQUIRE(spec.budget.share == 0.f);
  REQUIRE(parse_policy(to_string(spec)).budget == spec.budget);
  REQUIRE(parse_policy("exact | int4 | sample=max(64, 0.5%)").budget.share == Approx(0.005));
  for (const char* text : {"pages | int4 | sample=64", "exact | sample=64", "exact | int4 | sample=0",
                           "exact | int4 | sample=64 | bypass=0.9",
                           "none | sample=64", "exact | int4 | sample=64,draws=all", "exact | int4 | sample"})
    REQUIRE_THROWS_AS(parse_policy(text), Error);
}
