#pragma once

#include <cstddef>
#include <cstdint>

#include "cpu/kernels/kernels.hpp"
#include "sluice/step/page.hpp"
#include "sluice/step/partial.hpp"

/// Rows of keys, values and partial results, one at a time, by the thread that calls.
namespace sluice::cpu {

[[nodiscard]] inline const ElementKernels& kernels_for(const Kernels& kernels, DType type) noexcept {
  return kernels.element[static_cast<int>(type)];
}

/// The scales of a page from a token on: of its key, of its value; null if it has none.
[[nodiscard]] inline const float* scales_in(const PageLayout& layout, const std::byte* page,
                                            std::uint32_t token = 0) noexcept {
  if (!layout.scaled()) return nullptr;
  return reinterpret_cast<const float*>(page + layout.scales_offset()) + std::size_t{2} * token;
}

/// A row of keys or values of a page to float32. `scale`: the row's, if the layout has scales.
inline void read_row(const Kernels& kernels, const PageLayout& layout, const std::byte* row, const float* scale,
                     float* out) noexcept {
  if (layout.scaled()) return kernels.e4m3.decode(row, *scale, out, layout.head_dim);
  kernels_for(kernels, layout.dtype).widen(row, out, layout.head_dim);
}
inline void write_row(const Kernels& kernels, const PageLayout& layout, const float* in, std::byte* row,
                      float* scale) noexcept {
  if (layout.scaled()) return kernels.e4m3.encode(in, row, scale, layout.head_dim);
  kernels_for(kernels, layout.dtype).narrow(in, row, layout.head_dim);
}

/// The mean key of a full page, see CodeLayout: float32 [head_dim].
void key_mean(const Kernels& kernels, const PageLayout& layout, const std::byte* page, float* out) noexcept;

/// Folds `part` into `whole`, row by row, by the merge algebra.
void merge_into(const Partial& whole, const Partial& part, std::uint32_t rows, std::uint32_t head_dim) noexcept;

}  // namespace sluice::cpu
