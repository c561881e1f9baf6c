#pragma once

#include <cmath>
#include <random>

#include "sluice/error.hpp"
#include "sluice/policy.hpp"

namespace sluice::test {

/// What sources, estimate and budget of a policy may say, whether they read it or not.
inline void fill_randomly(PolicySpec& spec, std::mt19937& rng) {
  const auto below = [&rng](std::uint32_t most) { return static_cast<std::uint32_t>(rng() % most); };
  const auto maybe = [&](auto& field, auto value) {
    if (below(3) == 0) field = value;
  };
  const auto share = [&] { return below(4) == 0 ? 0.f : static_cast<float>(below(1000)) / 999.f; };
  maybe(spec.history.alpha, 0.01f + share());
  maybe(spec.history.init_queries, 1 + below(32));
  maybe(spec.history.local_tokens, below(30));
  maybe(spec.history.share_in_group, true);
  maybe(spec.history.observe_near, false);
  maybe(spec.history.observe_every, 1 + below(9));
  maybe(spec.history.limit, share());
  maybe(spec.history.tables, static_cast<HistoryTables>(below(3)));
  maybe(spec.history.expand, false);
  maybe(spec.pages.digest, DigestKind::box);
  maybe(spec.pages.rank, PageRank::layer);
  maybe(spec.pages.min_pages, 1 + below(9));
  maybe(spec.pages.min_tokens, below(99));
  maybe(spec.pages.share, share());
  maybe(spec.clusters.tokens_per_cluster, 1 + below(40));
  maybe(spec.clusters.min_tokens, below(99));
  maybe(spec.clusters.candidates, 1 + below(99));
  maybe(spec.lsh.bits, 1 + below(16));
  maybe(spec.lsh.seed, std::uint64_t{rng()} << 20);
  maybe(spec.snapshot.budget, 1 + below(300));
  maybe(spec.snapshot.window, 1 + below(32));
  maybe(spec.snapshot.kernel, 1 + 2 * below(9));
  maybe(spec.snapshot.pooling, Pooling::mean);
  maybe(spec.snapshot.pyramid, 1 + below(30));
  maybe(spec.snapshot.floor, share());
  maybe(spec.labels.channels, 1 + below(40));
  maybe(spec.labels.min_tokens, 1 + below(99));
  maybe(spec.labels.share, share());
  maybe(spec.estimate, static_cast<Estimate>(below(5)));
  maybe(spec.skewed_share, 0.01f + 0.9f * share());
  maybe(spec.rehearsed, true);
  spec.budget.kind = static_cast<BudgetKind>(below(7));
  maybe(spec.budget.min_tokens, 1 + below(99));
  maybe(spec.budget.share, share());
  maybe(spec.budget.mass, 0.01f + 0.9f * share());
  maybe(spec.budget.microbatch, 1 + below(9));
  maybe(spec.budget.error, 0.01f + 0.9f * share());
  maybe(spec.budget.delta, 0.01f + 0.4f * share());
  maybe(spec.budget.sample, 0.01f + 0.9f * share());
  maybe(spec.budget.alpha, 0.01f + 20.f * share());
  maybe(spec.budget.rule, static_cast<ProgressRule>(below(4)));
  maybe(spec.far, FarOptions{.min_tokens = below(5000), .share = share()});
  maybe(spec.near.sink_tokens, below(20));
  maybe(spec.near.recent_tokens, below(200));
  maybe(spec.bypass_threshold, share());
  maybe(spec.bypass_guards.variance, below(2) == 0 ? INFINITY : 0.01f + 9.f * share());
  maybe(spec.bypass_guards.growth, below(2) == 0 ? INFINITY : 3.f * share());
  maybe(spec.dense_layers, below(3));
  maybe(spec.dense_every, below(5));
  maybe(spec.page_tokens, 8u << below(6));
}

/// A valid one.
inline PolicySpec random_policy(std::mt19937& rng) {
  for (;;) {
    PolicySpec spec;
    spec.name = "random";
    spec.sources = static_cast<std::uint16_t>(rng() % 3 == 0 ? rng() % 128 : rng() % 2 << rng() % 7);
    if (rng() % 4 == 0) spec.sources |= static_cast<std::uint16_t>(Source::labels);
    fill_randomly(spec, rng);
    try {
      validate(spec);
      return spec;
    } catch (const Error&) {  // Its stages do not go together.
    }
  }
}

}  // namespace sluice::test
