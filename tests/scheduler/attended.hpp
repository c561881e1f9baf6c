#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "scheduler/token_set.hpp"
#include "tests/scheduler/fakes.hpp"

/// What policies chose, and what attending that comes to, in float64.
namespace sluice::scheduler::test {

/// Positions that query head `h` attends beyond the near set, ascending.
inline std::vector<std::uint32_t> attended_by(const SelectionRow& row, std::uint32_t h,
                                              std::uint32_t page_tokens = kPageTokens) {
  std::vector<std::uint32_t> tokens;
  for (const PageRun& run : row.runs) {
    for (std::uint32_t r = run.begin; r < run.end; ++r) tokens.push_back(run.page * page_tokens + r);
  }
  for (std::size_t i = 0; i < row.tokens.size(); ++i) {
    if (row.members.empty() || ((row.members[i] >> h) & 1) != 0) tokens.push_back(row.tokens[i]);
  }
  std::sort(tokens.begin(), tokens.end());
  return tokens;
}

inline std::vector<std::uint32_t> near_tokens(const NearSet& near, std::uint32_t n) {
  std::vector<std::uint32_t> tokens;
  for (std::uint32_t t = 0; t < n; ++t) {
    if (near.contains(t)) tokens.push_back(t);
  }
  return tokens;
}

/// Attention in float64 over a set of tokens.
struct Attended {
  std::vector<double> out;
  double mass = 0.0;  ///< sum of exp(logit)
};

inline Attended attend(const FakeKv& kv, const float* q, std::uint32_t h, const std::vector<std::uint32_t>& tokens) {
  Attended result{.out = std::vector<double>(kv.head_dim(), 0.0)};
  for (const std::uint32_t t : tokens) {
    const double weight = std::exp(kv.logit(q, h, t));
    result.mass += weight;
    for (std::uint32_t c = 0; c < kv.head_dim(); ++c)
      result.out[c] += weight * kv.v[std::size_t{t} * kv.head_dim() + c];
  }
  for (double& x : result.out) x /= result.mass > 0.0 ? result.mass : 1.0;
  return result;
}

inline std::vector<std::uint32_t> positions(std::uint32_t begin, std::uint32_t end) {
  std::vector<std::uint32_t> tokens;
  for (std::uint32_t t = begin; t < end; ++t) tokens.push_back(t);
  return tokens;
}

inline double distance(const std::vector<double>& a, const std::vector<double>& b) {
  double square = 0.0;
  for (std::size_t i = 0; i < a.size(); ++i) square += (a[i] - b[i]) * (a[i] - b[i]);
  return std::sqrt(square);
}

/// Largest norm of the values of the first `n` tokens: averages of them are no further apart than twice as much.
inline double longest_value(const FakeKv& kv, std::uint32_t n) {
  const std::vector<double> zero(kv.head_dim(), 0.0);
  double longest = 0.0;
  for (std::uint32_t t = 0; t < n; ++t) {
    const auto first = kv.v.begin() + std::size_t{t} * kv.head_dim();
    longest = std::max(longest, distance({first, first + kv.head_dim()}, zero));
  }
  return longest;
}

inline double max_difference(const std::vector<double>& a, const std::vector<double>& b) {
  double worst = 0.0;
  for (std::size_t i = 0; i < a.size(); ++i) worst = std::max(worst, std::abs(a[i] - b[i]));
  return worst;
}

inline bool is_subset(const std::vector<std::uint32_t>& inner, const std::vector<std::uint32_t>& outer) {
  return std::includes(outer.begin(), outer.end(), inner.begin(), inner.end());
}

/// Adds tokens to ascending ones, each once.
inline void unite(std::vector<std::uint32_t>& all, const std::vector<std::uint32_t>& more) {
  all.insert(all.end(), more.begin(), more.end());
  std::sort(all.begin(), all.end());
  all.erase(std::unique(all.begin(), all.end()), all.end());
}

inline std::vector<std::uint32_t> members(const TokenSet& set) {
  std::vector<std::uint32_t> tokens;
  set.for_each([&](std::uint32_t t) { tokens.push_back(t); });
  return tokens;
}

/// The k best of `tokens` by logit, ties to the lowest position, ascending: by sorting everything.
inline std::vector<std::uint32_t> best(const std::vector<std::uint32_t>& tokens, std::uint32_t k,
                                       const std::function<double(std::uint32_t)>& logit) {
  std::vector<std::uint32_t> order = tokens;
  std::stable_sort(order.begin(), order.end(), [&](std::uint32_t a, std::uint32_t b) {
    return static_cast<float>(logit(a)) > static_cast<float>(logit(b));
  });
  order.resize(std::min<std::size_t>(order.size(), k));
  std::sort(order.begin(), order.end());
  return order;
}

/// What a policy chooses for the token that sees `n`.
struct Selected {
  SelectionRow row;
  Bypass bypass;
  SelectCounters counters;
};
inline Selected select(LayerPolicy& policy, KvReader& kv, std::uint32_t n, const std::vector<float>& q,
                       const NearSet& near, std::uint32_t kv_head = 0) {
  Selected selected;
  policy.select({.kv_head = kv_head, .tokens = n, .q = q.data(), .near = &near, .kv = &kv}, selected.row,
                selected.bypass, selected.counters);
  return selected;
}

/// What a copy of a policy chooses from next, and what it chooses.
struct Proposal {
  std::uint64_t candidates = 0;  ///< of all query heads
  std::vector<std::uint32_t> tokens;
  friend bool operator==(const Proposal&, const Proposal&) = default;
};
inline Proposal proposal(const LayerPolicy& policy, KvReader& kv, const std::vector<float>& q, std::uint32_t n) {
  const std::unique_ptr<LayerPolicy> copy = policy.clone();
  const FakeNear near(n, 4, 0);
  copy->forecast(0, n);
  const Selected next = select(*copy, kv, n, q, near.set);
  return {.candidates = next.counters.expanded_per_head, .tokens = next.row.tokens};
}

}  // namespace sluice::scheduler::test
