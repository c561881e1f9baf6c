#include "tests/support/rest_reference.hpp"

#include <algorithm>
#include <cmath>
#include <numeric>

namespace sluice::test {
namespace {

/// One KV head of those that choose together, `askers` tokens from `first` on, of the first `common` tokens.
class Group {
 public:
  Group(const Story& story, const AttentionShape& shape, std::uint32_t layer, std::uint32_t first, std::uint32_t askers,
        std::uint32_t common, std::uint32_t kv, const RestPolicy& policy)
      : story_(story), shape_(shape), layer_(layer), common_(common), kv_(kv), policy_(policy), marked_(common, false) {
    sink_end_ = std::min(policy.sinks, common);
    recent_ = std::max(sink_end_, std::min(common, first + 1 - std::min(policy.recent, first + 1)));
    const std::vector<float> mean = story.mean_key(layer, kv, first + askers);
    for (std::uint32_t j = 0; j < common; ++j) {
      marked_[j] = anyway(j);
      copies_.push_back(decoded(key(j), mean.data(), shape.head_dim));
    }
    for (std::uint32_t i = 0; i < askers; ++i)
      for (std::uint32_t h = 0; h < shape.group(); ++h) choose(estimates(first + i, h));
  }

  /// What the query of `token` attends: of tokens behind the common ones all up to its own.
  void attend(std::uint32_t token, std::uint32_t h, Attention& to) const {
    const std::vector<double> guessed = estimates(token, h);
    const std::vector<double> value = mean();
    std::vector<double> out(shape_.head_dim, 0.0);
    const auto attends = [&](std::uint32_t j) { return j >= common_ || marked_[j]; };
    const auto weighs = [&](std::uint32_t j) { return attends(j) ? score(token, h, j) : guessed[j]; };
    double top = -INFINITY;
    for (std::uint32_t j = 0; j <= token; ++j) top = std::fmax(top, weighs(j));
    double sum = 0.0;
    for (std::uint32_t j = 0; j <= token; ++j) {
      if (!attends(j) && (value.empty() || std::isnan(guessed[j]))) continue;
      const double weight = std::exp(weighs(j) - top);
      sum += weight;
      for (std::uint32_t c = 0; c < shape_.head_dim; ++c) out[c] += weight * (attends(j) ? of(j)[c] : value[c]);
    }
    for (const double x : out) to.out.push_back(x / sum);
    to.lse.push_back(top + std::log(sum));
  }

 private:
  [[nodiscard]] bool anyway(std::uint32_t j) const { return j < sink_end_ || j >= recent_; }
  [[nodiscard]] const float* key(std::uint32_t j) const { return story_.k(layer_, j) + kv_ * shape_.head_dim; }
  [[nodiscard]] const float* of(std::uint32_t j) const { return story_.v(layer_, j) + kv_ * shape_.head_dim; }
  template <class Key>
  [[nodiscard]] double product(std::uint32_t token, std::uint32_t h, const Key& key) const {
    const float* const q = story_.q(layer_, token) + (kv_ * shape_.group() + h) * shape_.head_dim;
    double dot = 0.0;
    for (std::uint32_t c = 0; c < shape_.head_dim; ++c) dot += double{key[c]} * q[c];
    return reference::score(shape_, dot);
  }
  [[nodiscard]] double score(std::uint32_t token, std::uint32_t h, std::uint32_t j) const {
    return product(token, h, key(j));
  }
  /// Of the common tokens.
  [[nodiscard]] std::vector<double> estimates(std::uint32_t token, std::uint32_t h) const {
    std::vector<double> all;
    for (const auto& copy : copies_) all.push_back(product(token, h, copy));
    return all;
  }

  void choose(const std::vector<double>& guessed) {
    std::vector<std::uint32_t> order(common_);
    std::iota(order.begin(), order.end(), 0u);
    const auto rank = [&](std::uint32_t j) { return std::isnan(guessed[j]) ? -INFINITY : guessed[j]; };
    std::ranges::stable_sort(order, [&](std::uint32_t a, std::uint32_t b) { return rank(a) > rank(b); });
    const auto weight = [&](std::uint32_t j) { return std::exp(rank(j) - rank(order.front())); };
    double all = 0.0;
    double held = 0.0;
    for (const std::uint32_t j : order) {
      all += weight(j);
      held += anyway(j) ? weight(j) : 0.0;
    }
    std::uint32_t chosen = 0;
    for (const std::uint32_t j : order) {
      if (policy_.mass == 0.0 ? chosen == policy_.picks : held >= policy_.mass * all) return;
      if (anyway(j)) continue;
      ++chosen;
      held += weight(j);
      marked_[j] = true;
    }
  }

  /// Empty without full pages.
  [[nodiscard]] std::vector<double> mean() const {
    const std::uint32_t full = (common_ - 1) / policy_.page_tokens;  // Before the newest.
    const std::uint32_t pages = std::min(full, 256u);
    std::vector<double> sum(pages == 0 ? 0 : shape_.head_dim, 0.0);
    for (std::uint32_t i = 0; i < pages; ++i) {
      const std::uint32_t first = i * full / pages * policy_.page_tokens;
      for (std::uint32_t j = first; j < first + policy_.page_tokens; ++j)
        for (std::uint32_t c = 0; c < shape_.head_dim; ++c)
          sum[c] += of(j)[c] / (double{1} * pages * policy_.page_tokens);
    }
    return sum;
  }

  const Story& story_;
  const AttentionShape& shape_;
  std::uint32_t layer_, common_, kv_;
  const RestPolicy& policy_;
  std::uint32_t sink_end_ = 0, recent_ = 0;
  std::vector<bool> marked_;
  std::vector<std::vector<double>> copies_;
};

}  // namespace

Attention attended_with_rest(const Story& story, const AttentionShape& shape, std::uint32_t layer, std::uint32_t token,
                             const RestPolicy& policy) {
  Attention attention;
  for (std::uint32_t kv = 0; kv < shape.kv_heads; ++kv) {
    const Group group(story, shape, layer, token, 1, token + 1, kv, policy);
    for (std::uint32_t h = 0; h < shape.group(); ++h) group.attend(token, h, attention);
  }
  return attention;
}

Attention attended_with_rest(const Story& story, const AttentionShape& shape, std::uint32_t layer, const RestTeam& team,
                             std::uint32_t draft, const RestPolicy& policy) {
  Attention attention;
  for (std::uint32_t kv = 0; kv < shape.kv_heads; ++kv) {
    const Group group(story, shape, layer, team.first, team.drafts, team.first, kv, policy);
    for (std::uint32_t h = 0; h < shape.group(); ++h) group.attend(team.first + draft, h, attention);
  }
  return attention;
}

}  // namespace sluice::test
