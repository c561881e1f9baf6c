// vAttention: the best tokens and the sample, against the definition; the error's bound, counted.

#include <cmath>
#include <limits>

#include "scheduler/policy/policies.hpp"
#include "tests/scheduler/policy_step.hpp"

using namespace sluice;
using namespace sluice::scheduler;
using namespace sluice::scheduler::test;

namespace {

struct Sampled {
  Sampled(const std::string& text, FakeKv& kv, std::uint32_t n, const std::vector<float>& q, const NearSet& near)
      : spec(parse_policy(text)) {
    const auto policy = make(text);
    policy->begin({.kv_head = 0, .tokens = n - 1, .queries = 0, .last_q = {}, .kv = &kv});
    policy->select({.kv_head = 0, .tokens = n, .q = q.data(), .near = &near, .kv = &kv}, row, bypass, counters);
  }
  PolicySpec spec;
  SelectionRow row;
  Bypass bypass;
  SelectCounters counters;
};

/// Denominator of a head by what is near and by what it attends, relative to the true one.
double denominator(const FakeKv& kv, const float* q, std::uint32_t h, const SelectionRow& row, const NearSet& near,
                   std::uint32_t n) {
  double found = 0.0, whole = 0.0;
  for (std::uint32_t t = 0; t < n; ++t) {
    const double weight = std::exp(kv.logit(q, h, t));
    whole += weight;
    if (near.contains(t)) found += weight;
  }
  for (const PageRun& run : row.runs) {  // Where there is nothing to sample.
    for (std::uint32_t r = run.begin; r < run.end; ++r) found += std::exp(kv.logit(q, h, run.page * kPageTokens + r));
  }
  for (std::size_t i = 0; i < row.tokens.size(); ++i)
    if ((row.members[i] >> h & 1) != 0) found += std::exp(double{row.scores[i * kGroup + h]});
  return found / whole;
}

}  // namespace

TEST_CASE("the normal quantile is that of tables", "[vattention]") {
  REQUIRE(std::abs(two_sided_normal(0.05) - 1.959964) < 1e-6);
  REQUIRE(std::abs(two_sided_normal(0.1) - 1.644854) < 1e-6);
  REQUIRE(std::abs(two_sided_normal(0.5) - 0.674490) < 1e-6);
  REQUIRE(std::abs(two_sided_normal(1e-9) - 6.109410) < 1e-6);
}

TEST_CASE("each head attends its best as they are, and a sample of the others for what it stands for", "[vattention]") {
  const std::uint32_t n = GENERATE(400u, 2000u);
  const float scale = GENERATE(0.3f, 2.f);
  const std::string estimate = GENERATE("", " | int4");  // FakeKv's copies are the keys.
  CAPTURE(n, scale, estimate);
  FakeKv kv = FakeKv::random(n, kDim, kGroup, n);
  const std::vector<float> q = random_queries(kGroup, kDim, 3, scale);
  const FakeNear near(n, 4, 10);
  Sampled run("exact" + estimate + " | verified=0.2,delta=0.2,heavy=20,sample=5% | near=0,sinks=4,recent=10", kv, n, q,
              near.set);
  std::vector<std::uint32_t> far;
  for (std::uint32_t t = 0; t < n; ++t)
    if (!near.set.contains(t)) far.push_back(t);
  const std::uint32_t others = static_cast<std::uint32_t>(far.size()) - 20;
  const std::uint32_t first = std::max(32u, static_cast<std::uint32_t>(std::ceil(double{0.05f} * others)));
  REQUIRE(std::ranges::is_sorted(run.row.tokens));
  for (std::uint32_t h = 0; h < kGroup; ++h) {
    const auto attended = attended_by(run.row, h);
    const auto heavy = best(far, 20, [&](std::uint32_t t) { return kv.logit(q.data(), h, t); });
    REQUIRE(is_subset(heavy, attended));
    REQUIRE(is_subset(attended, far));
    const std::size_t size = attended.size() - 20;
    REQUIRE(size >= first);
    REQUIRE(size <= others);
    for (std::size_t i = 0; i < run.row.tokens.size(); ++i) {
      if ((run.row.members[i] >> h & 1) == 0) continue;
      const bool is_heavy = std::ranges::binary_search(heavy, run.row.tokens[i]);
      const double want = kv.logit(q.data(), h, run.row.tokens[i]) +
                          (is_heavy ? 0.0 : std::log(static_cast<double>(others) / static_cast<double>(size)));
      REQUIRE(std::abs(run.row.scores[i * kGroup + h] - want) < 1e-5);
    }
  }
  REQUIRE(run.counters.candidates == far.size());
  // The same again.
  Sampled again("exact" + estimate + " | verified=0.2,delta=0.2,heavy=20,sample=5% | near=0,sinks=4,recent=10", kv, n,
                q, near.set);
  REQUIRE(again.row.tokens == run.row.tokens);
  REQUIRE(again.row.scores == run.row.scores);
}

TEST_CASE("the sample is as large as the bound asks, by its own first part", "[vattention]") {
  const std::uint32_t n = 3000;
  FakeKv kv = FakeKv::random(n, kDim, kGroup, 5);
  const std::vector<float> q = random_queries(kGroup, kDim, 6, 0.5f);
  const FakeNear near(n, 4, 60);
  // The first sample alone: an error that asks for no more.
  Sampled first("exact | verified=0.99,heavy=64,sample=10% | near=0,sinks=4,recent=60", kv, n, q, near.set);
  Sampled run("exact | verified=0.03,delta=0.05,heavy=64,sample=10% | near=0,sinks=4,recent=60", kv, n, q, near.set);
  const std::uint32_t others = n - 4 - 60 - 64;
  const auto share = static_cast<std::uint32_t>(std::ceil(double{0.1f} * others));
  for (std::uint32_t h = 0; h < kGroup; ++h) {
    const auto heavy = best(positions(4, n - 60), 64, [&](std::uint32_t t) { return kv.logit(q.data(), h, t); });
    double kept = 0.0, sum = 0.0, squares = 0.0;
    for (const std::uint32_t t : near_tokens(near.set, n)) kept += std::exp(kv.logit(q.data(), h, t));
    const auto attended = attended_by(first.row, h);
    REQUIRE(attended.size() == share + 64);
    for (const std::uint32_t t : attended) {
      const double weight = std::exp(kv.logit(q.data(), h, t));
      if (std::ranges::binary_search(heavy, t)) {
        kept += weight;
      } else {
        sum += weight;
        squares += weight * weight;
      }
    }
    const double mean = sum / share;
    const double deviation = std::sqrt((squares - sum * mean) / (share - 1));
    const double size = std::pow(1.959964 * others * deviation / (0.03 * (kept + others * mean)), 2);
    const auto want = std::clamp(static_cast<std::uint32_t>(std::ceil(size)), share, others);
    CAPTURE(h, size);
    REQUIRE(std::abs(static_cast<double>(attended_by(run.row, h).size()) - 64.0 - want) <= 1.0);
    REQUIRE(is_subset(attended, attended_by(run.row, h)));
  }
}

TEST_CASE("denominators are right on the average, and off by more than the error no more often than delta",
          "[vattention]") {
  const auto [scale, error] = GENERATE(std::pair{0.2f, 0.05}, std::pair{0.8f, 0.1}, std::pair{2.f, 0.1});
  CAPTURE(scale, error);
  const std::uint32_t n = 2500;
  FakeKv kv = FakeKv::random(n + 80, kDim, kGroup, 8);
  const std::string text =
      "exact | verified=" + std::to_string(error) + ",delta=0.1,heavy=40,sample=4% | near=0,sinks=4,recent=20";
  double sum = 0.0, count = 0.0, off = 0.0, attended = 0.0;
  for (std::uint32_t step = 0; step < 80; ++step) {  // Each draws another sample.
    const std::vector<float> q = random_queries(kGroup, kDim, 300 + step, scale);
    const FakeNear near(n + step, 4, 20);
    const Sampled run(text, kv, n + step, q, near.set);
    for (std::uint32_t h = 0; h < kGroup; ++h) {
      const double ratio = denominator(kv, q.data(), h, run.row, near.set, n + step);
      sum += ratio;
      off += std::abs(ratio - 1.0) > error;
      attended += static_cast<double>(attended_by(run.row, h).size()) / n;
      count += 1.0;
    }
  }
  CAPTURE(sum / count, off / count, attended / count);
  REQUIRE(std::abs(sum / count - 1.0) < error / 5);
  REQUIRE(off / count < 0.15);  // 320 of them, not all independent: three deviations.
  REQUIRE(attended / count < 0.7);
}

TEST_CASE("attention by a few best tokens is off where it is flat, and with the sample it is not", "[vattention]") {
  const std::uint32_t n = 2000;
  FakeKv kv = FakeKv::random(n, kDim, kGroup, 9);
  for (float& x : kv.v) x += 1.f;
  double plain = 0.0, sampled = 0.0;
  for (std::uint32_t round = 0; round < 10; ++round) {
    const std::vector<float> q = random_queries(kGroup, kDim, 400 + round, 0.4f);
    const FakeNear near(n, 4, 20);
    const Sampled run("exact | verified=0.05,heavy=40,sample=5% | near=0,sinks=4,recent=20", kv, n, q, near.set);
    for (std::uint32_t h = 0; h < kGroup; ++h) {
      const Attended dense = attend(kv, q.data(), h, positions(0, n));
      auto kept = best(positions(4, n - 20), 40, [&](std::uint32_t t) { return kv.logit(q.data(), h, t); });
      for (const std::uint32_t t : near_tokens(near.set, n)) kept.push_back(t);
      std::ranges::sort(kept);
      plain += max_difference(attend(kv, q.data(), h, kept).out, dense.out);
      Attended found = attend(kv, q.data(), h, near_tokens(near.set, n));
      for (double& x : found.out) x *= found.mass;
      for (std::size_t i = 0; i < run.row.tokens.size(); ++i) {
        if ((run.row.members[i] >> h & 1) == 0) continue;
        const double weight = std::exp(double{run.row.scores[i * kGroup + h]});
        found.mass += weight;
        for (std::uint32_t c = 0; c < kDim; ++c)
          found.out[c] += weight * kv.v[std::size_t{run.row.tokens[i]} * kDim + c];
      }
      for (double& x : found.out) x /= found.mass;
      sampled += max_difference(found.out, dense.out);
    }
  }
  CAPTURE(plain, sampled);
  REQUIRE(sampled < 0.4 * plain);
}

TEST_CASE("where there is nothing to sample, or nothing is known, all is attended", "[vattention]") {
  const std::string text = "exact | verified=0.1,heavy=20 | near=0,sinks=4,recent=5";
  const std::uint32_t n = GENERATE(1u, 4u, 9u, 10u, 61u);
  FakeKv kv = FakeKv::random(200, kDim, kGroup, 10);
  const std::vector<float> q = random_queries(kGroup, kDim, 11);
  const FakeNear near(n, 4, 5);
  const Sampled few(text, kv, n, q, near.set);
  for (std::uint32_t h = 0; h < kGroup; ++h)
    REQUIRE(attended_by(few.row, h).size() + near_tokens(near.set, n).size() == n);
  // Keys that are no numbers weigh nothing, but among others they are attended like these.
  std::ranges::fill(kv.k, std::numeric_limits<float>::quiet_NaN());
  const FakeNear near_many(200, 4, 5);
  const Sampled spoilt(text, kv, 200, q, near_many.set);
  for (std::uint32_t h = 0; h < kGroup; ++h) REQUIRE(attended_by(spoilt.row, h).size() == 191);
}

TEST_CASE("keys that are no numbers do not make the sample larger", "[vattention]") {
  const std::uint32_t n = 1500;
  FakeKv kv = FakeKv::random(n, kDim, kGroup, 14);
  for (std::uint32_t t = 0; t < n; t += 3)
    std::fill_n(kv.k.begin() + t * kDim, kDim, t % 2 == 0 ? std::nanf("") : -std::numeric_limits<float>::infinity());
  const std::vector<float> q(kGroup * kDim, 0.1f);
  const FakeNear near(n, 4, 5);
  const Sampled run("exact | verified=0.2,delta=0.2,heavy=20,sample=4% | near=0,sinks=4,recent=5", kv, n, q, near.set);
  for (std::uint32_t h = 0; h < kGroup; ++h) REQUIRE(attended_by(run.row, h).size() < 500);
}

TEST_CASE("equal scores need no more than the first sample", "[vattention]") {
  const std::uint32_t n = 1000;
  FakeKv kv = FakeKv::random(n, kDim, kGroup, 12);
  std::ranges::fill(kv.k, 0.f);
  const std::vector<float> q = random_queries(kGroup, kDim, 13);
  const FakeNear near(n, 4, 5);
  const Sampled run("exact | verified=0.01,heavy=20,sample=4% | near=0,sinks=4,recent=5", kv, n, q, near.set);
  for (std::uint32_t h = 0; h < kGroup; ++h) {
    const auto attended = attended_by(run.row, h);
    REQUIRE(attended.size() == 20 + 39);
    REQUIRE(is_subset(positions(4, 24), attended));  // Ties go to the earlier.
    REQUIRE(std::abs(denominator(kv, q.data(), h, run.row, near.set, n) - 1.0) < 1e-5);
  }
}
