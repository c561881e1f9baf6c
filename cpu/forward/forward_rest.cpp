// What a row leaves: how much it weighs to each query head, and the value that stands for it.
#include <algorithm>
#include <cmath>
#include <numeric>
#include <vector>

#include "cpu/backend/verbs.hpp"
#include "cpu/forward/forward_layer.hpp"
#include "cpu/forward/forward_marks.hpp"
#include "sluice/partial.hpp"

namespace sluice::cpu {
namespace {

/// Natural log of the sum of exponentials of these tokens' scores, which NaN and -infinity are no part of.
float weight_of(const Kernels& kernels, const AttentionShape& shape, const std::vector<std::uint32_t>& tokens,
                const float* scores) {
  thread_local std::vector<float> capped;
  thread_local std::vector<float> weights;
  capped.clear();
  for (const std::uint32_t token : tokens) {
    if (const float score = shape.capped(scores[token]); !std::isnan(score)) capped.push_back(score);
  }
  const auto top = std::ranges::max_element(capped);
  if (top == capped.end() || *top == kEmptyLse) return kEmptyLse;
  weights.resize(capped.size());
  kernels.weigh(capped.data(), capped.size(), *top, weights.data());
  return *top + static_cast<float>(std::log(std::accumulate(weights.begin(), weights.end(), 0.0)));
}

}  // namespace

void weigh_rest(const Kernels& kernels, const ForwardMemory& m, const ForwardRow& row, std::uint32_t plane,
                std::uint32_t index) {
  thread_local std::vector<std::uint32_t> left;
  left.clear();
  const Marks attended = marks_of(m, row, index);
  for (std::uint32_t token = row.sink_end; token < row.recent_begin; ++token) {
    if (!attended.contains(token)) left.push_back(token);
  }
  const std::uint64_t first = first_head(m, index);
  const float* const scores = m.scores + first * m.score_room();
  float* const mass = m.rest_mass_of(index);  // In one part.
  for (std::uint32_t h = 0; h < m.shape.group(); ++h) {
    mass[2 * h] = weight_of(kernels, m.shape, left, scores + h * std::uint64_t{row.tokens});
    mass[2 * h + 1] = mass[2 * h] == kEmptyLse ? 0.f : 1.f;
  }

  float* const out = m.rest_out_of(index);
  float mean[kMaxHeadDim];
  std::fill_n(out, m.shape.head_dim, 0.f);
  for (std::uint32_t i = 0; i < row.rest; ++i) {
    const std::uint32_t block = m.list_of(row.list)[row.rest_page(i, m.layout.page_tokens)];
    kernels_for(kernels, m.layout.dtype).widen(m.value_mean_of(plane, block), mean, m.shape.head_dim);
    for (std::uint32_t c = 0; c < m.shape.head_dim; ++c) out[c] += mean[c];
  }
  for (std::uint32_t c = 0; c < m.shape.head_dim; ++c) out[c] /= static_cast<float>(row.rest);
}

}  // namespace sluice::cpu
