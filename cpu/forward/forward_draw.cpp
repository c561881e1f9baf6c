#include "cpu/forward/forward_draw.hpp"

#include <algorithm>

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

/// Of `count` picks of a head, which are tokens from `begin` on in ascending order.
DrawThresholds set_least_aside(const float* scores, std::uint32_t begin, std::uint32_t* picks, std::uint32_t count) {
  // The larger token of equals is the lesser one.
  const auto less = [&](std::uint32_t a, std::uint32_t b) {
    const std::uint32_t first = order_key(scores[begin + a]), second = order_key(scores[begin + b]);
    return first != second ? first < second : a > b;
  };
  std::uint32_t* const least = std::min_element(picks, picks + count, less);
  DrawThresholds thresholds{.largest_left = scores[begin + *least]};
  std::rotate(least, least + 1, picks + count);
  thresholds.least_drawn = scores[begin + *std::min_element(picks, picks + count - 1, less)];
  return thresholds;
}

}  // namespace

void keep_drawn(const ForwardMemory& m, std::uint32_t layer) {
  for_each_head(m, layer, [&](const ForwardRow& row, std::uint32_t, std::uint32_t index) {
    if (!row.draws.any()) return;
    const float* const scores = m.scores + first_head(m, index) * m.score_room();
    for (std::uint32_t h = 0; h < m.shape.group(); ++h) {
      const std::uint64_t head = first_head(m, index) + h;
      m.thresholds[head] = set_least_aside(scores + std::uint64_t{h} * row.tokens, row.sink_end,
                                           m.picks + head * m.max_picks, row.picks);
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
