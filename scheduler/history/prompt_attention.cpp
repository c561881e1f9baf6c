#include "scheduler/history/prompt_attention.hpp"

#include <algorithm>
#include <limits>
#include <numeric>
#include <span>

#include "scheduler/fast_exp.hpp"

namespace sluice::scheduler {
namespace {

constexpr std::uint32_t kRowsAtOnce = 8;      // scores held: 8 * n * group floats, 16 MiB at n = 128 Ki, group 4
constexpr std::uint32_t kTokensAtOnce = 256;  // 64 KiB of bf16 K rows at head_dim 128: stays in L2 for the 8 queries

/// Scores of `rows` queries from position `first` on, over the tokens that each sees; out [row][token - sinks][group].
void score_rows(const PromptContext& prompt, std::uint32_t first, std::uint32_t rows, std::uint32_t group,
                std::uint32_t sinks, std::vector<float>& out) {
  const std::uint32_t off = prompt.tokens - sinks;
  const std::size_t q_stride = prompt.last_q.size() / prompt.queries;
  const float* q = prompt.last_q.data() + (first - (prompt.tokens - prompt.queries)) * q_stride;
  std::vector<std::uint32_t> tokens(kTokensAtOnce);
  for (std::uint32_t begin = sinks; begin < first + rows; begin += kTokensAtOnce) {
    std::iota(tokens.begin(), tokens.end(), begin);
    for (std::uint32_t row = 0; row < rows; ++row) {
      const std::uint32_t visible = first + row + 1;
      if (begin >= visible) continue;
      const std::uint32_t count = std::min(kTokensAtOnce, visible - begin);
      prompt.kv->score(q + row * q_stride, std::span(tokens).first(count),
                       out.data() + (std::size_t{row} * off + (begin - sinks)) * group);
    }
  }
}

/// Adds one query head's softmax row to its two sums. `scores` has stride `group`.
void add_row(const float* scores, std::uint32_t group, std::uint32_t visible, float* by_position, float* by_distance,
             std::vector<float>& weights) {
  weights.resize(visible);
  float top = -std::numeric_limits<float>::infinity();
  for (std::uint32_t i = 0; i < visible; ++i) {
    weights[i] = scores[std::size_t{i} * group];
    top = weights[i] > top ? weights[i] : top;
  }
  float* w = weights.data();
  double sum = 0.0;
#pragma omp simd reduction(+ : sum)
  for (std::uint32_t i = 0; i < visible; ++i) {
    w[i] = fast_exp(w[i] - top);
    sum += w[i];
  }
  if (!(sum > 0.0)) return;  // No finite score in the row.
  const auto scale = static_cast<float>(1.0 / sum);
#pragma omp simd
  for (std::uint32_t i = 0; i < visible; ++i) {
    by_position[i] += w[i] * scale;
    by_distance[visible - 1 - i] += w[i] * scale;
  }
}

}  // namespace

PromptAttention attend_prompt(const PromptContext& prompt, std::uint32_t group, std::uint32_t sinks,
                              std::uint32_t queries) {
  PromptAttention sums;
  if (prompt.tokens <= sinks) return sums;
  const std::uint32_t off = prompt.tokens - sinks;
  // A query before position `sinks` sees sinks only and says nothing.
  sums.rows = std::min({queries, prompt.queries, off});
  sums.by_position.assign(std::size_t{group} * off, 0.f);
  sums.by_distance.assign(std::size_t{group} * off, 0.f);

  std::vector<float> scores(std::size_t{std::min(sums.rows, kRowsAtOnce)} * off * group);
  std::vector<float> weights;
  for (std::uint32_t done = 0; done < sums.rows; done += kRowsAtOnce) {
    const std::uint32_t rows = std::min(kRowsAtOnce, sums.rows - done);
    const std::uint32_t first = prompt.tokens - sums.rows + done;
    score_rows(prompt, first, rows, group, sinks, scores);
    for (std::uint32_t row = 0; row < rows; ++row) {
      const std::uint32_t visible = first + row + 1 - sinks;
      for (std::uint32_t h = 0; h < group; ++h) {
        add_row(scores.data() + std::size_t{row} * off * group + h, group, visible,
                sums.by_position.data() + std::size_t{h} * off, sums.by_distance.data() + std::size_t{h} * off,
                weights);
      }
    }
  }
  return sums;
}

}  // namespace sluice::scheduler
