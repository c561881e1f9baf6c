// What history must be able to follow, and how much it scores to do so.
#include <cmath>
#include <functional>
#include <iterator>
#include <vector>

#include "scheduler/history/group_history.hpp"
#include "tests/scheduler/attended.hpp"
#include "tests/support/catch.hpp"

using namespace sluice;
using namespace sluice::scheduler;
using namespace sluice::scheduler::test;

namespace {

/// Smallest share, over steps and heads, of the true top-k that LFPS attends.
double worst_overlap(const PatternKv::Logit& logit, std::uint32_t k, std::uint32_t prompt, std::uint32_t steps) {
  const AttentionShape shape{.layers = 1, .q_heads = 2, .kv_heads = 1, .head_dim = 1};
  PatternKv kv(2, logit);
  auto policy =
      make_layer_policy(parse_policy("lfps:bypass=0,budget=" + std::to_string(k)), shape, kPageTokens, LayerId{0});
  const auto last_q = kv.last_queries(prompt, 32);
  policy->begin({.kv_head = 0, .tokens = prompt, .queries = 32, .last_q = last_q, .kv = &kv});
  double worst = 1.0;
  for (std::uint32_t n = prompt + 1; n <= prompt + steps; ++n) {
    const FakeNear near(n, 4, 0);
    const auto q = kv.query(n - 1);
    policy->forecast(0, n);
    const SelectionRow row = select(*policy, kv, n, q, near.set).row;
    policy->observe(0, kv);
    for (std::uint32_t h = 0; h < 2; ++h) {
      const auto truth = best(positions(4, n), k, [&](std::uint32_t j) { return logit(h, n - 1, j); });
      const auto chosen = attended_by(row, h);
      std::vector<std::uint32_t> hits;
      std::set_intersection(truth.begin(), truth.end(), chosen.begin(), chosen.end(), std::back_inserter(hits));
      worst = std::min(worst, static_cast<double>(hits.size()) / k);
    }
  }
  return worst;
}

double noise_of(std::uint32_t a, std::uint32_t b) { return noise(a * 0x9e3779b9u + b); }

/// Nearly normal: mean 0, standard deviation 1.
double gauss(std::uint32_t a, std::uint32_t b) {
  double sum = 0.0;
  for (std::uint32_t i = 0; i < 12; ++i) sum += noise_of(a + i * 101, b + i * 7);
  return sum;
}

/// Heads as the LFPS specification has them in its sanity check, section 9: a persistent term of each key, neighbours
/// correlated by 0.5, a term of each distance, a penalty of distance, slow noise; 4 kinds, 2 of each.
class SyntheticHeads {
 public:
  static constexpr std::uint32_t kHeads = 8;

  explicit SyntheticHeads(std::uint32_t tokens)
      : tokens_(tokens), key_(std::size_t{kHeads} * tokens), slash_(key_.size()) {
    for (std::uint32_t i = 0; i < key_.size(); ++i) {
      key_[i] = static_cast<float>(0.866 * gauss(i, 1) + (i > 0 ? 0.5 * key_[i - 1] : 0.0));
      slash_[i] = static_cast<float>(gauss(i, 2));
    }
  }
  double operator()(std::uint32_t h, std::uint32_t p, std::uint32_t j) const {
    constexpr double kSpread[4] = {2.0, 3.0, 4.0, 4.5}, kRecency[4] = {1.7, 1.2, 0.8, 0.5};
    const std::uint32_t e = p - j;
    return kSpread[h % 4] * key_[h * tokens_ + j] + 0.5 * kSpread[h % 4] * slash_[h * tokens_ + e] -
           kRecency[h % 4] * std::log(1.0 + e) + 2.4 * noise_of(p / 4 + h, j);
  }

 private:
  std::uint32_t tokens_;
  std::vector<float> key_, slash_;
};

/// Share of the positions that a history proposes, in percent, over the steps behind a prompt of `n` tokens.
double proposed_percent(const SyntheticHeads& heads, float alpha, std::uint32_t n, std::uint32_t steps) {
  constexpr std::uint32_t kHeads = SyntheticHeads::kHeads;
  PatternKv kv(kHeads, std::cref(heads));
  GroupHistory history({.alpha = alpha}, kHeads, 4);
  const auto last_q = kv.last_queries(n, 32);
  history.begin({.kv_head = 0, .tokens = n, .queries = 32, .last_q = last_q, .kv = &kv});
  double share = 0.0;
  for (std::uint32_t step = 1; step <= steps; ++step) {
    history.forecast(n + step);
    for (std::uint32_t h = 0; h < kHeads; ++h) {
      const auto tokens = members(history.expanded(h));
      share += static_cast<double>(tokens.size()) / (n + step) / (kHeads * steps);
      std::vector<float> scores;
      for (const std::uint32_t t : tokens) scores.push_back(static_cast<float>(heads(h, n + step - 1, t)));
      history.observe(h, tokens, scores);
    }
  }
  return 100.0 * share;
}

}  // namespace

TEST_CASE("history follows a pure slash and a pure vertical pattern without a miss", "[lfps]") {
  SECTION("slash: always the same distance") {
    REQUIRE(worst_overlap([](auto h, auto p, auto j) { return p - j == 37 + h ? 12.0 : 0.0; }, 1, 700, 200) == 1.0);
  }
  SECTION("vertical: always the same positions") {
    REQUIRE(worst_overlap([](auto h, auto, auto j) { return j == 50 + h || j == 333 || j == 600 ? 12.0 : 0.0; }, 3, 700,
                          200) == 1.0);
  }
  SECTION("both at once") {
    const auto both = [](auto, auto p, auto j) { return p - j == 90 ? 12.0 : j == 333 ? 13.0 : 0.0; };
    REQUIRE(worst_overlap(both, 2, 700, 200) == 1.0);
  }
}

// Section 9 of the LFPS specification. What it rejects as a threshold has next to no effect of alpha.
TEST_CASE("what history proposes falls with alpha and with the context about as published", "[lfps]") {
  struct Published {
    std::uint32_t tokens;
    double percent[3];  ///< of the positions, by alpha: Table 4 of the paper
  };
  constexpr float kAlphas[] = {0.1f, 0.2f, 0.4f};
  constexpr std::uint32_t kSteps = 12;
  const auto want = GENERATE(Published{4096, {8.0, 6.0, 4.2}}, Published{16384, {5.0, 4.1, 3.2}});
  const SyntheticHeads heads(want.tokens + kSteps);
  double found[3];
  for (std::size_t i = 0; i < std::size(kAlphas); ++i) {
    found[i] = proposed_percent(heads, kAlphas[i], want.tokens, kSteps);
    CAPTURE(want.tokens, kAlphas[i], found[i]);
    CHECK(std::abs(found[i] / want.percent[i] - 1.0) < 0.25);
  }
  CHECK(found[0] > 1.4 * found[2]);
  CHECK(found[0] < 2.2 * found[2]);
}
