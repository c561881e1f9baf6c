// A step of a policy that prunes what its source proposes, on exact scores and on estimates.
#pragma once

#include <algorithm>
#include <cmath>
#include <iterator>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "scheduler/policy/policies.hpp"
#include "tests/scheduler/policy_step.hpp"
#include "tests/support/prune_reference.hpp"

namespace sluice::scheduler::test {

/// A FakeKv whose estimates come from keys of 16 levels, but for the newest page.
class CoarseKv final : public KvReader {
 public:
  CoarseKv(FakeKv& kv, std::uint32_t tokens, std::uint32_t page_tokens)
      : kv_(kv), copies_(kv), open_((tokens - 1) / page_tokens * page_tokens) {
    for (std::uint32_t token = 0; token < open_; ++token) {
      float* const row = copies_.k.data() + std::size_t{token} * kv.head_dim();
      const auto [least, most] = std::minmax_element(row, row + kv.head_dim());
      const float zero = *least;
      const float scale = std::max(*most - zero, 1e-9f) / 15.f;
      for (std::uint32_t c = 0; c < kv.head_dim(); ++c) row[c] = zero + scale * std::round((row[c] - zero) / scale);
    }
  }
  void score(const float* q, std::span<const std::uint32_t> tokens, float* out) override { kv_.score(q, tokens, out); }
  void estimate(const float* q, std::span<const std::uint32_t> tokens, float* out) override {
    copies_.score(q, tokens, out);
  }
  void key(std::uint32_t token, float* out) override { kv_.key(token, out); }
  void value(std::uint32_t token, float* out) override { kv_.value(token, out); }
  void keys(std::uint32_t first, std::uint32_t count, float* out) override { kv_.keys(first, count, out); }
  void cluster(const ClusterRequest& request, float* centroids, std::uint32_t* assignment) override {
    kv_.cluster(request, centroids, assignment);
  }
  void score_rows(const float* x, std::uint32_t columns, const float* rows, std::uint32_t count, float* out) override {
    kv_.score_rows(x, columns, rows, count, out);
  }

  [[nodiscard]] float estimated(const float* q, std::uint32_t h, std::uint32_t token) const {
    return static_cast<float>(copies_.logit(q, h, token));
  }
  [[nodiscard]] std::uint64_t rows_estimated() const { return copies_.rows_scored; }
  /// Makes `value` the first channel of a token's key and of its copy, and the others 0: a copy that is exact.
  void set_key(std::uint32_t token, float value) {
    for (FakeKv* kv : {&kv_, &copies_}) {
      float* const row = kv->k.data() + std::size_t{token} * kv->head_dim();
      std::fill_n(row, kv->head_dim(), 0.f);
      row[0] = value;
    }
  }

 private:
  FakeKv& kv_;
  FakeKv copies_;
  std::uint32_t open_;
};

/// One policy, one step. Pages are ranked by hand.
struct PrunedStep {
  PrunedStep(const std::string& text, std::uint32_t tokens, std::uint32_t page_tokens = kPageTokens,
             float q_scale = 2.f)
      : spec(parse_policy(text)),
        n(tokens),
        kv(FakeKv::random(tokens, kDim, kGroup, 3)),
        copies(kv, tokens, page_tokens),
        policy(make_layer_policy(spec, kShape, page_tokens, LayerId{0})),
        q(random_queries(kGroup, kDim, 7, q_scale)) {
    const std::vector<float> last_q = random_queries(40 * kGroup, kDim, 8);
    policy->begin({.kv_head = 0, .tokens = n - 1, .queries = 40, .last_q = last_q, .kv = &copies});
    kv.rows_scored = 0;
  }
  void select(const NearSet& near, std::span<const std::uint32_t> ranked = {}) {
    row.clear();
    counters = {};
    policy->forecast(0, n);
    policy->select({.kv_head = 0, .tokens = n, .q = q.data(), .ranked_pages = ranked, .near = &near, .kv = &copies},
                   row, bypass, counters);
    for (std::size_t i = 0; i < row.tokens.size(); ++i) {
      REQUIRE(row.tokens[i] < n);
      REQUIRE_FALSE(near.contains(row.tokens[i]));
      if (i > 0) REQUIRE(row.tokens[i - 1] < row.tokens[i]);
    }
    REQUIRE(row.members.empty());
    REQUIRE(row.runs.empty());
  }
  /// Logits as wanted, the same for all query heads.
  template <class Logit>
  void set_logits(const Logit& logit) {
    std::fill(q.begin(), q.end(), 0.f);
    for (std::uint32_t h = 0; h < kGroup; ++h) q[h * kDim] = std::sqrt(static_cast<float>(kDim));
    for (std::uint32_t token = 0; token < n; ++token) copies.set_key(token, static_cast<float>(logit(token)));
  }

  PolicySpec spec;
  std::uint32_t n;
  FakeKv kv;
  CoarseKv copies;
  std::unique_ptr<LayerPolicy> policy;
  std::vector<float> q;
  SelectionRow row;
  Bypass bypass;
  SelectCounters counters;
};

/// What top-p keeps of `tokens`, ascending positions, besides those before `begin` and from `end` on, which are
/// attended anyway.
template <class Logit>
std::vector<std::uint32_t> kept_of(const std::vector<std::uint32_t>& tokens, double p, const Logit& logit,
                                   std::uint32_t begin = 0, std::uint32_t end = ~0u) {
  std::vector<float> values;
  for (const std::uint32_t token : tokens) values.push_back(static_cast<float>(logit(token)));
  const auto below = [&](std::uint32_t position) {
    return static_cast<std::size_t>(std::lower_bound(tokens.begin(), tokens.end(), position) - tokens.begin());
  };
  std::vector<std::uint32_t> kept;
  for (const std::uint32_t i : sluice::test::sorted_top_p(values, p, {.begin = below(begin), .end = below(end)})) {
    kept.push_back(tokens[i]);
  }
  return kept;
}

inline std::vector<std::uint32_t> far_only(const std::vector<std::uint32_t>& tokens, const NearSet& near) {
  std::vector<std::uint32_t> far;
  std::copy_if(tokens.begin(), tokens.end(), std::back_inserter(far), [&](auto t) { return !near.contains(t); });
  return far;
}

/// `ranked` ascending pages below `pages` for every head, different ones.
inline std::vector<std::uint32_t> some_pages(std::uint32_t pages, std::uint32_t ranked) {
  std::vector<std::uint32_t> all;
  for (std::uint32_t h = 0; h < kGroup; ++h) {
    for (std::uint32_t i = 0; i < ranked; ++i) all.push_back(i * (pages / ranked) + (h + i) % (pages / ranked));
  }
  return all;
}

}  // namespace sluice::scheduler::test
