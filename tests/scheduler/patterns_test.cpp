// What history must be able to follow, and how much it scores to do so.

#include <cstdio>

#include "scheduler/history/group_history.hpp"
#include "tests/scheduler/fakes.hpp"
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
    SelectionRow row;
    Bypass bypass;
    SelectCounters counters;
    policy->forecast(0, n);
    policy->select({.kv_head = 0, .tokens = n, .q = q.data(), .near = &near.set, .kv = &kv}, row, bypass, counters);
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

double noise(std::uint32_t a, std::uint32_t b) {
  std::uint32_t x = a * 0x9e3779b9u + b;
  x = (x ^ (x >> 16)) * 0x7feb352du;
  x = (x ^ (x >> 15)) * 0x846ca68bu;
  return static_cast<double>(x ^ (x >> 16)) / 4294967296.0;
}

/// Nearly normal: mean 0, standard deviation 1.
double gauss(std::uint32_t a, std::uint32_t b) {
  double sum = -6.0;
  for (std::uint32_t i = 0; i < 12; ++i) sum += noise(a + i * 101, b + i * 7);
  return sum;
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

// The sanity check of the LFPS specification, section 9: 4 kinds of heads, 2 seeds, 12 steps. Prints; run it by
// its tag, "[expansion]".
TEST_CASE("share of positions that LFPS scores on synthetic heads", "[.][expansion]") {
  constexpr std::uint32_t kHeads = 8, kSteps = 12;
  const double spread[4] = {2.0, 3.0, 4.0, 4.5}, recency[4] = {1.7, 1.2, 0.8, 0.5};
  std::printf("%-8s", "alpha");
  for (std::uint32_t n = 4096; n <= 131072; n *= 2) std::printf("%8uK", n / 1024);
  for (const float alpha : {0.1f, 0.2f, 0.3f, 0.4f}) {
    std::printf("\n%-8.1f", static_cast<double>(alpha));
    for (std::uint32_t n = 4096; n <= 131072; n *= 2) {
      // Persistent key term with neighbour correlation 0.5, slash term, distance penalty, slow noise.
      const std::uint32_t room = n + kSteps;
      std::vector<float> key(std::size_t{kHeads} * room), slash(key.size());
      for (std::uint32_t i = 0; i < key.size(); ++i) {
        key[i] = static_cast<float>(0.866 * gauss(i, 1) + (i > 0 ? 0.5 * key[i - 1] : 0.0));
        slash[i] = static_cast<float>(gauss(i, 2));
      }
      PatternKv kv(kHeads, [&](std::uint32_t h, std::uint32_t p, std::uint32_t j) {
        const std::uint32_t e = p - j;
        return spread[h % 4] * key[h * room + j] + 0.5 * spread[h % 4] * slash[h * room + e] -
               recency[h % 4] * std::log(1.0 + e) + 2.4 * (noise(p / 4 + h, j) - 0.5);
      });
      GroupHistory history({.alpha = alpha}, kHeads, 4);
      const auto q = kv.last_queries(n, 32);
      history.begin({.kv_head = 0, .tokens = n, .queries = 32, .last_q = q, .kv = &kv});
      double share = 0.0;
      for (std::uint32_t step = 1; step <= kSteps; ++step) {
        history.forecast(n + step);
        const auto query = kv.query(n + step - 1);
        for (std::uint32_t h = 0; h < kHeads; ++h) {
          share += static_cast<double>(history.expanded(h).size()) / (n + step) / (kHeads * kSteps);
          std::vector<std::uint32_t> tokens;
          history.expanded(h).for_each([&](std::uint32_t t) { tokens.push_back(t); });
          std::vector<float> all(tokens.size() * kHeads), scores;
          kv.score(query.data(), tokens, all.data());
          for (std::size_t i = 0; i < tokens.size(); ++i) scores.push_back(all[i * kHeads + h]);
          history.observe(h, tokens, scores);
        }
      }
      std::printf("%8.1f%%", 100.0 * share);
    }
  }
  std::printf("\n");
}
