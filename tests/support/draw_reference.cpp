#include "tests/support/draw_reference.hpp"

#include <algorithm>
#include <cmath>
#include <vector>

#include "tests/support/draw_levels.hpp"
#include "tests/support/reference.hpp"

namespace sluice::test {
namespace {

/// Of float32 scores of a GPU, by its faster logarithms.
constexpr double kClose = 5e-4;

/// One KV head of the tokens that choose together, of the first `common` tokens.
class Group {
 public:
  Group(const Story& story, const AttentionShape& shape, std::uint32_t layer, const DrawTeam& team, std::uint32_t kv,
        const DrawPolicy& policy)
      : story_(story),
        shape_(shape),
        layer_(layer),
        first_(team.first),
        askers_(std::max(team.drafts, 1u)),
        common_(team.drafts == 0 ? team.first + 1 : team.first),
        kv_(kv),
        policy_(policy),
        draws_(draws_of(policy)) {
    sink_end_ = std::min(policy.sinks, common_);
    recent_ = std::max(sink_end_, std::min(common_, first_ + 1 - std::min(policy.recent, first_ + 1)));
    whole_ = recent_ - sink_end_ <= policy.drawn + 1;
    const std::vector<float> mean = story.mean_key(layer, kv, first_ + askers_);
    for (std::uint32_t j = 0; j < common_; ++j)
      copies_.push_back(decoded(key(j), mean.data(), shape.head_dim, story.code_bits()));
    for (std::uint32_t i = 0; i < askers_ && !whole_; ++i)
      for (std::uint32_t h = 0; h < shape.group(); ++h) choose(i, h);
  }
  [[nodiscard]] bool close() const { return close_; }

  /// What the query of draft `i` attends: of tokens behind the common ones all up to its own.
  void attend(std::uint32_t i, std::uint32_t h, Attention& to) const {
    std::vector<double> out(shape_.head_dim, 0.0);
    std::vector<std::pair<double, std::uint32_t>> attended;
    for (std::uint32_t j = 0; j <= first_ + i; ++j) {
      if (const std::optional<double> correction = correction_of(j))
        attended.emplace_back(product(i, h, key(j)) + *correction, j);
    }
    const double top = std::ranges::max_element(attended)->first;
    double sum = 0.0;
    for (const auto& [logit, j] : attended) {
      const double weight = std::exp(logit - top);
      sum += weight;
      const float* const value = story_.v(layer_, j) + kv_ * shape_.head_dim;
      for (std::uint32_t c = 0; c < shape_.head_dim; ++c) out[c] += weight * value[c];
    }
    for (const double x : out) to.out.push_back(x / sum);
    to.lse.push_back(top + std::log(sum));
  }

 private:
  struct Head {
    std::vector<double> scores;  ///< of tokens between sinks and recent ones, perturbed
    double least_drawn = -INFINITY, largest_left = -INFINITY;
  };
  [[nodiscard]] HeadDraws draws_of(const DrawPolicy& policy) const {
    const std::uint32_t tokens = first_ + 1;
    const std::uint32_t turn = policy.redraw == 0 ? 0 : tokens / policy.redraw;
    const SampleDraws all{.key = mix_bits(policy.seed ^ mix_bits(turn)),
                          .kind = policy.group_draws ? SampleDraws::Kind::group : SampleDraws::Kind::head};
    return all.in(layer_).of(kv_, shape_.group());
  }
  /// -ln(1 - u), in float64.
  [[nodiscard]] double exponential(std::uint32_t h, std::uint32_t j) const {
    return -std::log1p(-double{HeadDraws::uniform(HeadDraws::bits(draws_.key_of(h), j))});
  }
  [[nodiscard]] const float* key(std::uint32_t j) const { return story_.k(layer_, j) + kv_ * shape_.head_dim; }
  template <class Key>
  [[nodiscard]] double product(std::uint32_t i, std::uint32_t h, const Key& key) const {
    const float* const q = story_.q(layer_, first_ + i) + (kv_ * shape_.group() + h) * shape_.head_dim;
    double dot = 0.0;
    for (std::uint32_t c = 0; c < shape_.head_dim; ++c) dot += double{key[c]} * q[c];
    return reference::score(shape_, dot);
  }
  [[nodiscard]] bool anyway(std::uint32_t j) const { return whole_ || j < sink_end_ || j >= recent_; }

  void choose(std::uint32_t i, std::uint32_t h) {
    Head head;
    std::vector<double> estimates;
    for (std::uint32_t j = sink_end_; j < recent_; ++j) {
      estimates.push_back(product(i, h, copies_[j]));
      head.scores.push_back(estimates.back() - std::log(exponential(h, j)));
    }
    std::uint32_t drawn = policy_.drawn;
    if (policy_.error != 0.0) {
      const DrawLevel level =
          level_of(estimates, head.scores, window(i, h), policy_.drawn, policy_.most, policy_.error);
      drawn = level.drawn;
      close_ |= level.close;
    }
    if (drawn < head.scores.size()) {
      const std::vector<double> order = in_order(head.scores);
      head.least_drawn = order[drawn - 1];
      head.largest_left = order[drawn];
      close_ |= head.least_drawn - head.largest_left < kClose;
    }
    heads_.push_back(std::move(head));
  }

  /// Estimated weights of the tokens that are attended anyway, but of new ones.
  [[nodiscard]] double window(std::uint32_t i, std::uint32_t h) const {
    double sum = 0.0;
    for (std::uint32_t j = 0; j < std::min(common_, first_); ++j) {
      const double weight = anyway(j) ? std::exp(product(i, h, copies_[j])) : 0.0;
      if (!std::isnan(weight)) sum += weight;
    }
    return sum;
  }

  /// Nothing: the token is not attended.
  [[nodiscard]] std::optional<double> correction_of(std::uint32_t j) const {
    if (j >= common_ || anyway(j)) return 0.0;
    const std::uint32_t own = draws_.heads;
    bool drawn = false;
    double rate = 0.0;
    for (std::uint32_t draw = 0; draw < own; ++draw) {
      double largest = 0.0;  // Of all that share the draw, the drafts' among them.
      for (std::uint32_t head = draw; head < heads_.size(); head += own) {
        const Head& of = heads_[head];
        const double score = of.scores[j - sink_end_];
        if (std::isnan(score)) continue;
        drawn |= score > of.largest_left;
        const double threshold = score > of.largest_left ? of.largest_left : of.least_drawn;
        largest = std::fmax(largest, exponential(draw, j) * std::exp(score - threshold));
      }
      rate += largest;
    }
    if (!drawn) return std::nullopt;
    return -std::log(-std::expm1(-rate));
  }

  const Story& story_;
  const AttentionShape& shape_;
  std::uint32_t layer_, first_, askers_, common_, kv_;
  const DrawPolicy& policy_;
  HeadDraws draws_;
  std::uint32_t sink_end_ = 0, recent_ = 0;
  bool whole_ = false, close_ = false;
  std::vector<std::vector<double>> copies_;
  std::vector<Head> heads_;  ///< [drafts, group]
};

}  // namespace

std::optional<Attention> attended_with_draws(const Story& story, const AttentionShape& shape, std::uint32_t layer,
                                             const DrawTeam& team, const DrawPolicy& policy) {
  Attention attention;
  for (std::uint32_t kv = 0; kv < shape.kv_heads; ++kv) {
    const Group group(story, shape, layer, team, kv, policy);
    if (group.close()) return std::nullopt;
    for (std::uint32_t h = 0; h < shape.group(); ++h) group.attend(team.draft, h, attention);
  }
  return attention;
}

}  // namespace sluice::test
