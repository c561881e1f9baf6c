#pragma once

#include <cstdint>
#include <span>

namespace sluice::tools {

/// Up to this many rows, a product goes row by row through a matrix-vector kernel: a matrix-matrix kernel would
/// spend more on packing the weights than it gains, and so a row's result does not depend on its company.
inline constexpr std::uint32_t kVectorRows = 16;

/// What a product does with its destination.
enum class Into : std::uint8_t { overwrite, add };

/// y[i, j] (=, +=) sum_c x[i, c] * w[j, c]: activations times the transpose of a weight block. float32;
/// rows are dense, strides in elements. `y` must not overlap the inputs.
struct ProductArgs {
  const float* x = nullptr;  ///< [rows, inner], every `x_stride` elements
  const float* w = nullptr;  ///< [outs, inner], dense
  float* y = nullptr;        ///< [rows, outs], every `y_stride` elements
  std::uint32_t rows = 0;
  std::uint32_t inner = 0;
  std::uint32_t outs = 0;
  std::uint64_t x_stride = 0;
  std::uint64_t y_stride = 0;
  Into into = Into::overwrite;
};

/// The arithmetic that deserves the machine's widest registers, compiled once per instruction set. Each
/// routine runs on the calling thread and allocates at most scratch of its own.
struct Products {
  const char* isa;  ///< "generic", "avx2", "avx512"
  void (*multiply)(const ProductArgs&);
  /// gate[i] = silu(gate[i]) * up[i] for i < count, silu(g) = g / (1 + exp(-g)).
  void (*swiglu)(float* gate, const float* up, std::uint32_t count);
};

/// Those that this machine can run, widest last; never empty.
[[nodiscard]] std::span<const Products* const> usable_products();
/// The widest of them.
[[nodiscard]] const Products& best_products();

}  // namespace sluice::tools
