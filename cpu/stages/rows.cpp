#include "cpu/stages/rows.hpp"

#include <algorithm>
#include <cmath>
#include <limits>

namespace sluice::cpu {

void merge_into(const Partial& whole, const Partial& part, std::uint32_t rows, std::uint32_t head_dim) noexcept {
  for (std::uint32_t r = 0; r < rows; ++r) {
    const MergeWeights weights = merge_weights(whole.lse[r], part.lse[r]);
    float* const to = whole.out + std::size_t{r} * head_dim;
    const float* const from = part.out + std::size_t{r} * head_dim;
#pragma omp simd
    for (std::uint32_t c = 0; c < head_dim; ++c) to[c] = weights.a * to[c] + weights.b * from[c];
    whole.lse[r] = weights.lse;
  }
}

void key_mean(const Kernels& kernels, const PageLayout& layout, const std::byte* page, float* out) noexcept {
  const auto finite = [](float x) { return std::abs(x) <= std::numeric_limits<float>::max() ? x : 0.f; };
  float row[kMaxHeadDim];
  std::fill_n(out, layout.head_dim, 0.f);
  for (std::uint32_t i = 0; i < layout.page_tokens; ++i) {
    read_row(kernels, layout, page + i * layout.row_bytes(), scales_in(layout, page, i), row);
    for (std::uint32_t c = 0; c < layout.head_dim; ++c) out[c] += finite(row[c]);
  }
  const float share = 1.f / static_cast<float>(layout.page_tokens);
  for (std::uint32_t c = 0; c < layout.head_dim; ++c) out[c] = finite(out[c] * share);
}

}  // namespace sluice::cpu
