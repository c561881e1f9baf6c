#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <vector>

#include "sluice/page_rules.hpp"
#include "sluice/step/attend_tasks.hpp"
#include "sluice/step/prefill_tasks.hpp"
#include "sluice/step/progress.hpp"
#include "sluice/step/select_tasks.hpp"
#include "sluice/tensor.hpp"
#include "tests/support/problem.hpp"

/// Every stage once more in float64, as plainly as possible: what all devices are held against.
namespace sluice::test {

/// One element of a tensor, exactly.
[[nodiscard]] double load_element(const std::byte* data, DType type, std::size_t index) noexcept;
/// Rounds to the nearest element, ties to even; too large becomes infinite.
void store_element(std::byte* data, DType type, std::size_t index, double value) noexcept;

/// Rounds a row of keys or values and stores it; `scale`: the row's, of a type that has some, see E4m3.
void store_row(std::byte* row, float* scale, DType type, std::span<const double> values) noexcept;
/// What it holds, exactly.
[[nodiscard]] std::vector<double> load_row(const std::byte* row, const float* scale, DType type, std::size_t size);
/// What becomes of it, exactly.
[[nodiscard]] std::vector<double> rounded_row(DType type, std::span<const double> values);

/// A token and the heads that attend it.
struct Attended {
  std::uint32_t token = 0;
  std::uint32_t members = ~0u;
};
/// All heads attend all of `tokens`.
[[nodiscard]] std::vector<Attended> attended(std::span<const std::uint32_t> tokens);
/// Tokens begin .. end - 1, all heads.
[[nodiscard]] std::vector<Attended> attended(std::uint32_t begin, std::uint32_t end);

struct Attention {
  std::vector<double> out;  ///< [group, head_dim]
  std::vector<double> lse;  ///< [group]
};

namespace reference {

/// The score that a product of q and k gives.
[[nodiscard]] double score(const AttentionShape& shape, double product);
[[nodiscard]] double score(const Problem& problem, std::uint32_t head, std::uint32_t token);
[[nodiscard]] Attention attend(const Problem& problem, std::span<const Attended> tokens);
/// hi, then lo, of consecutive tokens; unrounded.
[[nodiscard]] std::vector<double> digest(const Problem& problem, std::uint32_t begin, std::uint32_t end, DigestKind kind);
/// Indices of the k largest, ascending by index; equal values by lowest index, NaN last.
[[nodiscard]] std::vector<std::uint32_t> top_k(std::span<const float> values, std::uint32_t k);

/// What a ProgressState and its functions come to; masses are natural logs, in the order of visits.
struct Progress {
  double mass = -std::numeric_limits<double>::infinity();
  double unseen = std::numeric_limits<double>::infinity();
};
void add_mass(Progress& progress, double mass);
void add_pages(Progress& progress, ProgressRule rule, std::span<const double> masses, std::size_t full);
[[nodiscard]] double progress_share(const Progress& progress, std::uint32_t left, double bound);

}  // namespace reference

/// Largest |a - b|; infinite if the sizes differ or one of a pair is not finite and the other differs.
[[nodiscard]] double max_abs_diff(std::span<const float> a, std::span<const double> b);
[[nodiscard]] double max_abs_diff(std::span<const float> a, std::span<const float> b);

/// How far a float32 result may lie from the reference: products of head_dim terms as large as the largest
/// score round at its scale, and a weight is off by as much as its score.
[[nodiscard]] double tolerance(const Problem& problem);

}  // namespace sluice::test
