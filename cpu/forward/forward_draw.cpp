#include "cpu/forward/forward_draw.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "cpu/forward/forward_layer.hpp"
#include "sluice/step/order_key.hpp"

namespace sluice::cpu {

void perturb(const AttentionShape& shape, const ScoreInt4Task& task) {
  if (!task.draws.any()) return;
  for (std::uint32_t h = 0; h < shape.group(); ++h) {
    float* const scores = task.out + std::uint64_t{h} * task.tokens;
    const std::uint32_t key = task.draws.key_of(h);
    for (std::uint32_t token = task.sinks; token < std::min(task.recent, task.tokens); ++token)
      scores[token] = shape.capped(scores[token]) + gumbel_draw(key, token);
  }
}

namespace {

/// A query head that draws.
struct Head {
  const AttentionShape& shape;
  const ForwardRow& row;
  std::uint32_t draw_key;  ///< of its draws
  const float* scores;     ///< of all tokens; of those between sinks and recent ones perturbed
  std::uint32_t* picks;    ///< [row.picks] the largest of these, counted from row.sink_end

  [[nodiscard]] float score(std::uint32_t pick) const noexcept { return scores[row.sink_end + pick]; }
  [[nodiscard]] double estimate(std::uint32_t pick) const noexcept {
    return score(pick) - gumbel_draw(draw_key, row.sink_end + pick);
  }

  /// The thresholds of so many, which come first then. If one token would be left, it is drawn, too.
  [[nodiscard]] DrawThresholds draw(std::uint32_t count) const noexcept {
    if (count + 1 == row.recent_begin - row.sink_end) return {.drawn = row.picks};
    // The larger token of equals is the lesser one.
    const auto above = [&](std::uint32_t a, std::uint32_t b) {
      const std::uint32_t first = order_key(score(a)), second = order_key(score(b));
      return first != second ? first > second : a < b;
    };
    std::nth_element(picks, picks + count, picks + row.picks, above);
    return {.largest_left = score(picks[count]),
            .least_drawn = score(*std::max_element(picks, picks + std::max(count, 1u), above)),
            .drawn = count};
  }
};

/// Tells by the tokens that a head draws at most whether fewer are enough, see sample.hpp.
class Judge {
 public:
  /// @param bound      thresholds of the most, which come first of the picks
  /// @param reference  a score, which all others are relative to
  Judge(const Head& head, const DrawThresholds& bound, double reference) : error_(head.row.draws.error) {
    // Of fewer numbers than are drawn each is, with certainty.
    const double last = bound.largest_left > -kInfinity ? bound.largest_left - reference : -kInfinity;
    for (std::uint32_t i = 0; i < bound.drawn; ++i) {
      const double above = head.estimate(head.picks[i]) - reference;
      if (std::isnan(above)) continue;
      drawn_.push_back({.above = above, .chance = chance(above - last)});
      sum_ += std::exp(above) / drawn_.back().chance;
    }
    const auto add = [&](std::uint32_t begin, std::uint32_t end) {
      for (std::uint32_t token = begin; token < end; ++token) {
        const double above = head.shape.capped(head.scores[token]) - reference;
        if (!std::isnan(above)) sum_ += std::exp(above);
      }
    };
    add(0, head.row.sink_end);
    add(head.row.recent_begin, head.row.old_tokens());
  }

  [[nodiscard]] bool enough(std::uint32_t drawn) const noexcept {
    const double threshold = std::log(error_ * sum_ / std::sqrt(double{1} * drawn));
    double count = 0.0;
    for (const Token& token : drawn_) count += chance(token.above - threshold) / token.chance;
    return count <= drawn;
  }

 private:
  static constexpr double kInfinity = std::numeric_limits<double>::infinity();
  struct Token {
    double above;   ///< its estimate
    double chance;  ///< that it is among the most
  };
  /// That a token is drawn whose estimate is so far above a threshold.
  [[nodiscard]] static double chance(double above) noexcept { return -std::expm1(-std::exp(above)); }

  double error_;
  double sum_ = 0.0;  ///< of the softmax weights
  std::vector<Token> drawn_;
};

/// Draws as many tokens as the head's error bar asks for.
DrawThresholds draw(const Head& head) {
  const std::uint32_t least = head.row.draws.least, most = head.row.picks - 1;
  const DrawThresholds first = head.draw(least);
  // Of fewer numbers all are drawn.
  if (least >= most || !(first.largest_left > -std::numeric_limits<float>::infinity())) return first;
  const Judge judge(head, head.draw(most), first.largest_left);
  std::uint32_t drawn = least;
  while (drawn != most && !judge.enough(drawn)) drawn = more_draws(drawn, most);
  return head.draw(drawn);
}

}  // namespace

void keep_drawn(const ForwardMemory& m, std::uint32_t layer) {
  for_each_head(m, layer, [&](const ForwardRow& row, std::uint32_t kv_head, std::uint32_t index) {
    if (!row.draws.any()) return;
    const HeadDraws draws = row.draws.of(kv_head, m.own_group());
    const float* const scores = m.scores + first_head(m, index) * m.score_room();
    for (std::uint32_t h = 0; h < m.shape.group(); ++h) {
      const std::uint64_t head = first_head(m, index) + h;
      m.thresholds[head] = draw({.shape = m.shape,
                                 .row = row,
                                 .draw_key = draws.key_of(h),
                                 .scores = scores + std::uint64_t{h} * row.tokens,
                                 .picks = m.picks + head * m.max_picks});
    }
  });
}

Drawn::Drawn(const ForwardMemory& memory, const ForwardRow& row, std::uint32_t list) noexcept
    : memory_(memory),
      row_(row),
      draws_(row.draws.of(list % memory.shape.kv_heads, memory.own_group())),
      scores_(memory.scores + first_head(memory, list) * memory.score_room()),
      thresholds_(memory.thresholds + first_head(memory, list)) {}

float Drawn::correction(std::uint32_t token) const noexcept {
  if (row_.in_window(token)) return 0.f;
  float sum = 0.f;
  for (std::uint32_t draw = 0; draw < draws_.heads; ++draw) {
    const float exponential = exponential_draw(draws_.key_of(draw), token);
    float largest = 0.f;  // Of the heads that share the draw.
    for (std::uint32_t h = draw; h < memory_.shape.group(); h += draws_.heads)
      largest =
          std::max(largest, draw_rate(scores_[std::uint64_t{h} * row_.tokens + token], exponential, thresholds_[h]));
    sum += largest;
  }
  return draw_correction(sum);
}

}  // namespace sluice::cpu
