#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "sluice/step/int4.hpp"
#include "tests/support/random.hpp"

/// Estimating and cutting once more in float64, as plainly as possible.
namespace sluice::test {

/// One row of a copy in codes, exactly as it is stored.
struct DecodedRow {
  double scale = 0.0;
  double zero = 0.0;
  std::vector<std::uint32_t> codes;  ///< [head_dim]
  [[nodiscard]] double at(std::size_t channel) const { return codes[channel] * scale + zero; }
};
[[nodiscard]] DecodedRow decode_row(const std::byte* copy, const CodeLayout& layout, std::uint32_t row);

/// H x, see CodeLayout.
[[nodiscard]] std::vector<double> rotated(std::span<const double> x);

/// Which values of a row may be kept: [begin, end). The others are attended anyway.
struct Choice {
  std::size_t begin = 0;
  std::size_t end = ~std::size_t{0};
  [[nodiscard]] bool has(std::size_t i) const { return i >= begin && i < end; }
};

/// What top-p keeps of `values`, by sorting: ascending indices, ties of the smallest included.
[[nodiscard]] std::vector<std::uint32_t> sorted_top_p(std::span<const float> values, double p, Choice choice = {});

/// Whether `mask` and `count` are what top-p keeps: the heaviest that may be kept, of mass p with those attended
/// anyway, and without the smallest of them (and its ties) less; sums may be off by `within`. The reference's answer is
/// always right.
[[nodiscard]] bool is_top_p(std::span<const float> values, double p, std::span<const std::uint32_t> mask,
                            std::uint32_t count, double within, Choice choice = {});

/// Whether they are what top-p keeps if that is no more than `most`; else the best that are no more, of equal ones all
/// or none, which hold less.
[[nodiscard]] bool is_top_p_of_most(std::span<const float> values, double p, std::uint32_t most,
                                    std::span<const std::uint32_t> mask, std::uint32_t count, double within,
                                    Choice choice = {});

/// A row of logits: normal, of any spread from 0.5 to 5; or with few distinct values; or all but one far below; or with
/// NaN and infinities.
[[nodiscard]] std::vector<float> random_logits(std::uint32_t count, Random& random);

}  // namespace sluice::test
