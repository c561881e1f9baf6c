#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <random>
#include <span>
#include <vector>

#include "scheduler/layer_policy.hpp"
#include "sluice/step/permutation.hpp"

namespace sluice::scheduler::test {

inline constexpr std::uint32_t kPageTokens = 32;

/// K-means as ClusterTask describes it, of finite `keys` [count, dim]; in float64 and not fast.
inline void naive_cluster(const float* keys, std::uint32_t dim, const ClusterRequest& request, float* centroids,
                          std::uint32_t* assignment) {
  for (std::uint32_t j = 0; j < request.clusters; ++j) {
    std::copy_n(keys + std::size_t{permuted(j, request.count, request.seed)} * dim, dim,
                centroids + std::size_t{j} * dim);
  }
  for (std::uint32_t round = 0; round < request.iterations; ++round) {
    std::vector<double> sums(std::size_t{request.clusters} * dim, 0.0);
    std::vector<std::uint32_t> sizes(request.clusters, 0);
    for (std::uint32_t i = 0; i < request.count; ++i) {
      const float* const key = keys + std::size_t{i} * dim;
      double best = HUGE_VAL;
      for (std::uint32_t j = 0; j < request.clusters; ++j) {
        const float* const centroid = centroids + std::size_t{j} * dim;
        double distance = 0.0;
        for (std::uint32_t c = 0; c < dim; ++c) distance += (key[c] - centroid[c]) * (key[c] - centroid[c]);
        if (distance < best) {
          best = distance;
          assignment[i] = j;
        }
      }
      ++sizes[assignment[i]];
      for (std::uint32_t c = 0; c < dim; ++c) sums[std::size_t{assignment[i]} * dim + c] += key[c];
    }
    for (std::size_t i = 0; i < sums.size(); ++i) {
      if (sizes[i / dim] != 0) centroids[i] = static_cast<float>(sums[i] / sizes[i / dim]);
    }
  }
}

/// Keys and values of one KV head in plain memory. Counts what is read.
class FakeKv final : public KvReader {
 public:
  FakeKv(std::uint32_t tokens, std::uint32_t head_dim, std::uint32_t group)
      : head_dim_(head_dim), group_(group), k(std::size_t{tokens} * head_dim), v(k.size()) {}

  /// Gaussian keys and values; every 97th key is an outlier, every 13th repeats its neighbour (ties).
  static FakeKv random(std::uint32_t tokens, std::uint32_t head_dim, std::uint32_t group, std::uint32_t seed) {
    FakeKv kv(tokens, head_dim, group);
    std::mt19937 rng(seed);
    std::normal_distribution<float> normal;
    for (std::size_t i = 0; i < kv.k.size(); ++i) {
      const std::size_t token = i / head_dim;
      kv.k[i] = normal(rng) * (token % 97 == 50 ? 6.f : 1.f);
      if (token % 13 == 12) kv.k[i] = kv.k[i - head_dim];
      kv.v[i] = normal(rng);
    }
    return kv;
  }

  void score(const float* q, std::span<const std::uint32_t> tokens, float* out) override {
    rows_scored += tokens.size();
    for (std::size_t i = 0; i < tokens.size(); ++i) {
      ascending = ascending && (i == 0 || tokens[i - 1] < tokens[i]);
      for (std::uint32_t h = 0; h < group_; ++h) out[i * group_ + h] = static_cast<float>(logit(q, h, tokens[i]));
    }
  }
  void key(std::uint32_t token, float* out) override {
    std::copy_n(k.data() + std::size_t{token} * head_dim_, head_dim_, out);
  }
  void value(std::uint32_t token, float* out) override {
    std::copy_n(v.data() + std::size_t{token} * head_dim_, head_dim_, out);
  }
  void keys(std::uint32_t first, std::uint32_t count, float* out) override {
    std::copy_n(k.data() + std::size_t{first} * head_dim_, std::size_t{count} * head_dim_, out);
  }
  void cluster(const ClusterRequest& request, float* centroids, std::uint32_t* assignment) override {
    ++clusterings;
    naive_cluster(k.data() + std::size_t{request.first} * head_dim_, head_dim_, request, centroids, assignment);
  }
  void score_rows(const float* x, std::uint32_t columns, const float* rows, std::uint32_t count, float* out) override {
    for (std::size_t i = 0; i < count; ++i) {
      for (std::size_t j = 0; j < columns; ++j) {
        double dot = 0.0;
        for (std::size_t c = 0; c < head_dim_; ++c)
          dot += static_cast<double>(x[j * head_dim_ + c]) * rows[i * head_dim_ + c];
        out[i * columns + j] = static_cast<float>(dot / std::sqrt(static_cast<double>(head_dim_)));
      }
    }
  }

  [[nodiscard]] double logit(const float* q, std::uint32_t h, std::uint32_t token) const {
    double dot = 0.0;
    for (std::uint32_t c = 0; c < head_dim_; ++c) {
      dot += static_cast<double>(q[h * head_dim_ + c]) * k[std::size_t{token} * head_dim_ + c];
    }
    return dot / std::sqrt(static_cast<double>(head_dim_));
  }
  [[nodiscard]] std::uint32_t head_dim() const { return head_dim_; }
  [[nodiscard]] std::uint32_t group() const { return group_; }

 private:
  std::uint32_t head_dim_, group_;

 public:
  std::vector<float> k, v;  ///< [tokens, head_dim]
  std::uint64_t rows_scored = 0;
  std::uint32_t clusterings = 0;
  bool ascending = true;
};

/// Logits as a function of (query head, query position, key position): patterns without keys. A query is one
/// number, its position; use `query(p)` with head_dim 1.
class PatternKv final : public KvReader {
 public:
  using Logit = std::function<double(std::uint32_t h, std::uint32_t p, std::uint32_t j)>;
  PatternKv(std::uint32_t group, Logit logit) : group_(group), logit_(std::move(logit)) {}

  void score(const float* q, std::span<const std::uint32_t> tokens, float* out) override {
    rows_scored += tokens.size();
    for (std::size_t i = 0; i < tokens.size(); ++i) {
      for (std::uint32_t h = 0; h < group_; ++h) {
        out[i * group_ + h] = static_cast<float>(logit_(h, static_cast<std::uint32_t>(q[h]), tokens[i]));
      }
    }
  }
  void key(std::uint32_t, float* out) override { *out = 0.f; }
  void value(std::uint32_t, float* out) override { *out = 1.f; }
  void keys(std::uint32_t, std::uint32_t count, float* out) override { std::fill_n(out, count, 0.f); }
  void cluster(const ClusterRequest& request, float* centroids, std::uint32_t* assignment) override {
    std::fill_n(centroids, request.clusters, 0.f);
    std::fill_n(assignment, request.count, 0u);
  }
  void score_rows(const float* x, std::uint32_t columns, const float* rows, std::uint32_t count, float* out) override {
    for (std::size_t i = 0; i < count; ++i) {
      for (std::size_t j = 0; j < columns; ++j) out[i * columns + j] = x[j] * rows[i];
    }
  }

  [[nodiscard]] std::vector<float> query(std::uint32_t p) const {
    return std::vector<float>(group_, static_cast<float>(p));
  }
  /// Queries of the last `count` positions of a prompt.
  [[nodiscard]] std::vector<float> last_queries(std::uint32_t tokens, std::uint32_t count) const {
    std::vector<float> q;
    for (std::uint32_t p = tokens - count; p < tokens; ++p) q.insert(q.end(), group_, static_cast<float>(p));
    return q;
  }
  std::uint64_t rows_scored = 0;

 private:
  std::uint32_t group_;
  Logit logit_;
};

/// A near set together with the memory of its page flags.
struct FakeNear {
  FakeNear(std::uint32_t n, std::uint32_t sinks, std::uint32_t recent, std::uint32_t page_tokens = kPageTokens)
      : set{.sink_end = std::min(sinks, n), .recent_begin = n - std::min(recent, n), .page_tokens = page_tokens} {}
  NearSet set;
};

inline std::vector<float> random_queries(std::size_t rows, std::uint32_t head_dim, std::uint32_t seed,
                                         float scale = 1.f) {
  std::mt19937 rng(seed);
  std::normal_distribution<float> normal;
  std::vector<float> q(rows * head_dim);
  for (float& x : q) x = normal(rng) * scale;
  return q;
}

/// In [-0.5, 0.5), the same for the same number: what logits as a function of positions scatter by.
inline double noise(std::uint32_t x) {
  x = (x ^ (x >> 16)) * 0x7feb352du;
  x = (x ^ (x >> 15)) * 0x846ca68bu;
  return static_cast<double>(x ^ (x >> 16)) / 4294967296.0 - 0.5;
}

}  // namespace sluice::scheduler::test
