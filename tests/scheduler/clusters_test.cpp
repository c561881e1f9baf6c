// The cluster index, its ranking, and when tokens are clustered: Tactic's parts.
#include <cmath>

#include "scheduler/clusters/cluster_schedule.hpp"
#include "scheduler/clusters/cluster_source.hpp"
#include "tests/scheduler/attended.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/random.hpp"

using namespace sluice;
using namespace sluice::scheduler;
using namespace sluice::scheduler::test;

namespace {

constexpr std::uint32_t kDim = 16;
constexpr std::uint32_t kGroup = 4;
constexpr AttentionShape kShape{.layers = 1, .q_heads = kGroup, .kv_heads = 1, .head_dim = kDim};

std::vector<std::uint32_t> ordered_tokens(const ClusterSource& source, std::uint32_t h, std::uint32_t begin,
                                          std::uint32_t end) {
  std::vector<std::uint32_t> tokens;
  for_each_in_order(source.index(), source.order(h), begin, end, [&](std::uint32_t token, std::uint32_t i) {
    REQUIRE(i == begin + tokens.size());
    tokens.push_back(token);
  });
  return tokens;
}

std::vector<std::uint32_t> sorted(std::vector<std::uint32_t> tokens) {
  std::sort(tokens.begin(), tokens.end());
  return tokens;
}

/// Of the order that a source gives head `h`, the tokens that hold 90% of the mass.
std::size_t tokens_for_mass(ClusterSource& source, FakeKv& kv, const std::vector<float>& q, std::uint32_t h,
                            std::uint32_t n) {
  source.rank(q.data(), kv);
  double all = 0.0;
  for (std::uint32_t token = 0; token < n; ++token) all += std::exp(kv.logit(q.data(), h, token));
  double sum = 0.0;
  std::size_t count = 0;
  for (const std::uint32_t token : ordered_tokens(source, h, 0, n)) {
    if (sum >= 0.9 * all) break;
    sum += std::exp(kv.logit(q.data(), h, token));
    ++count;
  }
  return count;
}

}  // namespace

TEST_CASE("each token is in one cluster, in the order of positions, empty clusters left out", "[clusters]") {
  ClusterIndex index(2);
  const std::vector<float> centroids{0, 1, 2, 3, 4, 5, 6, 7};
  const std::vector<std::uint32_t> assignment{3, 0, 3, 3, 2, 0};
  index.append({.centroids = centroids, .assignment = assignment});
  index.append({.centroids = std::span(centroids).first(4), .assignment = std::vector<std::uint32_t>{1, 1}});
  REQUIRE(index.tokens() == 8);
  REQUIRE(index.size() == 4);
  const std::vector<std::vector<std::uint32_t>> expected{{1, 5}, {4}, {0, 2, 3}, {6, 7}};
  for (std::uint32_t i = 0; i < 4; ++i) {
    REQUIRE(std::vector(index.members(i).begin(), index.members(i).end()) == expected[i]);
  }
  REQUIRE(std::vector(index.centroids().begin(), index.centroids().end()) ==
          std::vector<float>{0, 1, 4, 5, 6, 7, 2, 3});
  index.append({});
  REQUIRE(index.tokens() == 8);
}

TEST_CASE("clusters rank by score, ties by index, NaN last", "[clusters]") {
  const auto count = GENERATE(0u, 1u, 7u, 5'000u);
  constexpr std::uint32_t kStride = 3;
  std::vector<float> scores(std::size_t{count} * kStride, 1e30f);
  std::mt19937 rng(count);
  std::normal_distribution<float> normal;
  for (std::uint32_t i = 0; i < count; ++i) {
    const float score = std::round(normal(rng) * 20.f) * (i % 50 == 3 ? 1e20f : 0.25f);
    scores[i * kStride] = i % 11 == 5 ? std::nanf("") : i % 13 == 6 ? -0.f : score;
  }
  ClusterRanking ranking;
  ranking.rank(scores.data(), count, kStride);
  std::vector<std::uint32_t> expected = positions(0, count);
  std::stable_sort(expected.begin(), expected.end(), [&](std::uint32_t a, std::uint32_t b) {
    const float x = scores[a * kStride], y = scores[b * kStride];
    return !std::isnan(x) && (std::isnan(y) || x > y);
  });
  REQUIRE(std::vector(ranking.order().begin(), ranking.order().end()) == expected);
}

TEST_CASE("with one token per cluster the order is the exact one", "[clusters]") {
  const std::uint32_t n = 600;
  FakeKv kv = FakeKv::random(n, kDim, kGroup, 5);
  for (std::uint32_t t = 0; t < n; ++t) kv.k[t * kDim] += 0.01f * static_cast<float>(t);  // No two keys are equal.
  ClusterSource source({.tokens_per_cluster = 1, .iterations = 2}, kShape);
  source.begin({.kv_head = 0, .tokens = n, .kv = &kv});
  const std::vector<float> q = random_queries(kGroup, kDim, 6);
  source.rank(q.data(), kv);
  for (std::uint32_t h = 0; h < kGroup; ++h) {
    const auto order = ordered_tokens(source, h, 0, n);
    REQUIRE(sorted(order) == positions(0, n));
    for (std::uint32_t i = 1; i < n; ++i) {
      REQUIRE(kv.logit(q.data(), h, order[i - 1]) >= kv.logit(q.data(), h, order[i]) - 1e-5);
    }
    REQUIRE(ordered_tokens(source, h, 100, 250) == std::vector(order.begin() + 100, order.begin() + 250));
  }
}

TEST_CASE("the device's clusters are due when the CPU's are, and taken back as these", "[clusters]") {
  const ClusterOptions options{.tokens_per_cluster = 30, .recluster_every = 100, .min_tokens = 300};
  FakeKv kv = FakeKv::random(2'000, kDim, kGroup, 7);
  sluice::test::Random random(8);
  for (std::uint32_t round = 0; round < 40; ++round) {
    ClusterSource source(options, kShape);
    ClusterSchedule schedule(options);
    const std::uint32_t prompt = 250 + random.below(400);
    schedule.advance(prompt);
    schedule.forget();  // Another part of the prompt.
    REQUIRE(schedule.clustered() == 0);
    source.begin({.kv_head = 0, .tokens = prompt, .kv = &kv});
    for (std::uint32_t tokens = prompt, step = 0; tokens < 1'500 && step < 400; ++step) {
      schedule.advance(tokens);  // The next token sees as many.
      CAPTURE(prompt, tokens, step);
      REQUIRE(schedule.clustered() == source.clustered());
      REQUIRE(schedule.clusters() <= ClusterSchedule::most_clusters(options, tokens));
      std::uint32_t at = 0;
      std::uint32_t clusters = 0;
      schedule.for_each_behind(
          0, [&](std::uint32_t first, std::uint32_t count, std::uint32_t first_cluster, std::uint32_t more) {
            REQUIRE(first == at);
            REQUIRE(first_cluster == clusters);
            REQUIRE(more == std::max(1u, count / 30));
            at += count;
            clusters += more;
          });
      REQUIRE(at == schedule.clustered());
      REQUIRE(clusters == schedule.clusters());
      schedule.for_each_behind(at, [](auto...) { FAIL("all of it is made"); });
      tokens += 1 + random.below(60);
      source.cluster_new(tokens, kv);
      if (random.below(4) != 0) continue;
      tokens = std::max(prompt, tokens - std::min(tokens, random.below(250)));
      source.truncate(tokens);
      schedule.truncate(tokens);
    }
    schedule.truncate(prompt - 1);  // What is decoded next is behind another prompt.
    REQUIRE(schedule.clustered() == 0);
    schedule.advance(1'777);
    REQUIRE(schedule.clustered() == 1'777);
  }
}

TEST_CASE("blocks that are clustered by themselves order tokens about as well as all of them anew", "[clusters]") {
  constexpr std::uint32_t kTokens = 4'096, kPrompt = 2'048, kTopics = 60;
  const bool drifts = GENERATE(false, true);
  // A block with fewer clusters than it has topics mixes them.
  const auto [every, most] = GENERATE(table<std::uint32_t, double>({{2'048, 1.05}, {1'024, 1.12}, {512, 1.35}}));
  FakeKv kv = FakeKv::random(kTokens, kDim, kGroup, 31);
  sluice::test::Random random(32);
  std::vector<float> topics(std::size_t{kTopics} * kDim);
  for (float& x : topics) x = static_cast<float>(random.normal());
  for (std::uint32_t token = 0; token < kTokens; ++token) {
    // What is generated is about other things, half of which the prompt is not about.
    const std::uint32_t topic = random.below(kTopics / 2) + (drifts && token >= kPrompt ? kTopics / 4 : 0);
    for (std::uint32_t c = 0; c < kDim; ++c)
      kv.k[std::size_t{token} * kDim + c] = topics[topic * kDim + c] + 0.5f * static_cast<float>(random.normal());
  }
  const ClusterOptions options{.tokens_per_cluster = 32, .recluster_every = every};
  ClusterSource appended(options, kShape), anew(options, kShape);
  appended.begin({.kv_head = 0, .tokens = kPrompt, .kv = &kv});
  appended.cluster_new(kTokens, kv);
  anew.begin({.kv_head = 0, .tokens = kTokens, .kv = &kv});
  REQUIRE(appended.clustered() == kTokens);
  std::size_t by_blocks = 0, at_once = 0;
  for (std::uint32_t i = 0; i < 10; ++i) {
    const std::vector<float> q = random_queries(kGroup, kDim, 40 + i, 2.f);
    for (std::uint32_t h = 0; h < kGroup; ++h) {
      by_blocks += tokens_for_mass(appended, kv, q, h, kTokens);
      at_once += tokens_for_mass(anew, kv, q, h, kTokens);
    }
  }
  CAPTURE(drifts, every, by_blocks, at_once);
  REQUIRE(static_cast<double>(by_blocks) <= most * static_cast<double>(at_once));
}

TEST_CASE("new tokens are clustered when there are enough, none lost and none twice", "[clusters]") {
  FakeKv kv = FakeKv::random(1'000, kDim, kGroup, 7);
  ClusterSource source({.tokens_per_cluster = 20, .recluster_every = 100, .min_tokens = 300}, kShape);
  const std::uint32_t prompt = GENERATE(299u, 300u, 555u);
  source.begin({.kv_head = 0, .tokens = prompt, .kv = &kv});
  REQUIRE(source.clustered() == (prompt < 300 ? 0 : prompt));
  const std::uint32_t begun = source.clustered();
  for (std::uint32_t n = prompt; n <= 1'000; ++n) {
    REQUIRE(source.due(n) == (n - source.clustered() >= 100));
    source.cluster_new(n, kv);
    REQUIRE(source.clustered() == begun + (n - begun) / 100 * 100);
  }
  std::vector<std::uint32_t> all;
  for (std::uint32_t i = 0; i < source.index().size(); ++i) {
    const auto members = source.index().members(i);
    all.insert(all.end(), members.begin(), members.end());
  }
  REQUIRE(sorted(all) == positions(0, source.clustered()));
}
