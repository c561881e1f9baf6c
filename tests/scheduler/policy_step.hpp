#pragma once

#include <functional>
#include <memory>
#include <string>

#include "scheduler/layer_policy.hpp"
#include "tests/scheduler/attended.hpp"
#include "tests/support/catch.hpp"

namespace sluice::scheduler::test {

inline constexpr std::uint32_t kDim = 16;
inline constexpr std::uint32_t kGroup = 4;
inline const AttentionShape kShape{.layers = 2, .q_heads = kGroup, .kv_heads = 1, .head_dim = kDim};

inline std::unique_ptr<LayerPolicy> make(const std::string& text) {
  return make_layer_policy(parse_policy(text), kShape, kPageTokens, LayerId{0});
}

/// One policy over a prompt of n - 1 random tokens, its step n, and a place for what it selects.
struct Step {
  Step(const std::string& text, std::uint32_t tokens, std::uint32_t seed = 1, float q_scale = 1.f)
      : spec(parse_policy(text)), n(tokens), kv(FakeKv::random(tokens, kDim, kGroup, seed)), policy(make(text)) {
    const std::uint32_t queries = std::min(n - 1, 40u);
    last_q = random_queries(std::size_t{queries} * kGroup, kDim, seed + 100, q_scale);
    q = random_queries(kGroup, kDim, seed + 200, q_scale);
    policy->begin({.kv_head = 0, .tokens = n - 1, .queries = queries, .last_q = last_q, .kv = &kv});
    kv.rows_scored = 0;
  }
  void select(const NearSet& near, std::span<const std::uint32_t> ranked = {}) {
    policy->forecast(0, n);
    row.clear();
    counters = {};
    policy->select({.kv_head = 0, .tokens = n, .q = q.data(), .ranked_pages = ranked, .near = &near, .kv = &kv}, row,
                   bypass, counters);
    REQUIRE(kv.ascending);
    check_row(near);
  }
  /// What holds for every row: ascending, unique, far, with true scores and members among the heads.
  void check_row(const NearSet& near) const {
    REQUIRE((row.members.empty() || row.members.size() == row.tokens.size()));
    REQUIRE(row.scores.size() == row.tokens.size() * kGroup);
    for (std::size_t i = 0; i < row.tokens.size(); ++i) {
      REQUIRE(row.tokens[i] < n);
      REQUIRE_FALSE(near.contains(row.tokens[i]));
      if (i > 0) REQUIRE(row.tokens[i - 1] < row.tokens[i]);
      if (!row.members.empty()) REQUIRE((row.members[i] != 0 && row.members[i] < (1u << kGroup)));
      for (std::uint32_t h = 0; h < kGroup; ++h) {
        REQUIRE(row.scores[i * kGroup + h] == static_cast<float>(kv.logit(q.data(), h, row.tokens[i])));
      }
    }
  }
  [[nodiscard]] std::function<double(std::uint32_t)> logit(std::uint32_t h) const {
    return [this, h](std::uint32_t t) { return kv.logit(q.data(), h, t); };
  }

  PolicySpec spec;
  std::uint32_t n;
  FakeKv kv;
  std::unique_ptr<LayerPolicy> policy;
  std::vector<float> last_q, q;
  SelectionRow row;
  Bypass bypass;
  SelectCounters counters;
};

}  // namespace sluice::scheduler::test
