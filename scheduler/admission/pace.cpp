#include "scheduler/admission/pace.hpp"

#include <algorithm>
#include <bit>
#include <cmath>
#include <numeric>
#include <utility>

namespace sluice::scheduler {
namespace {

constexpr std::size_t kMostTerms = 6;
constexpr std::size_t kTokens = 2;  // The term of chunk_tokens.
/// Terms before it are the likelier ones. While chunks were all alike, their time may be of their tokens or of their
/// being there; then it is of their tokens, as one who took it the other way round would make them as long as can be.
constexpr std::size_t kPlain = 4;
using Values = std::array<double, kMostTerms>;
using Matrix = std::array<Values, kMostTerms>;

double product(const Values& coefficients, const Values& terms) noexcept {
  return std::inner_product(coefficients.begin(), coefficients.end(), terms.begin(), 0.0);
}

/// Solves for the unknowns in `used` (a bit each), the others being 0. What is not determined is taken to be small.
Values solved(const Matrix& products, const Values& wanted, unsigned used) noexcept {
  Matrix rows = products;
  Values right = wanted;
  for (std::size_t i = 0; i < kMostTerms; ++i) {
    if ((used >> i & 1) == 0) continue;
    rows[i][i] += (i < kPlain ? 1e-9 : 1e-3) * (products[i][i] + 1e-300);
  }
  // Without exchanging rows: the matrix is symmetric and positive.
  for (std::size_t pivot = 0; pivot < kMostTerms; ++pivot) {
    if ((used >> pivot & 1) == 0) continue;
    for (std::size_t row = pivot + 1; row < kMostTerms; ++row) {
      if ((used >> row & 1) == 0 || rows[pivot][pivot] == 0.0) continue;
      const double factor = rows[row][pivot] / rows[pivot][pivot];
      for (std::size_t column = pivot; column < kMostTerms; ++column) rows[row][column] -= factor * rows[pivot][column];
      right[row] -= factor * right[pivot];
    }
  }
  Values values{};
  for (std::size_t row = kMostTerms; row-- > 0;) {
    if ((used >> row & 1) == 0 || rows[row][row] == 0.0) continue;
    double rest = right[row];
    for (std::size_t column = row + 1; column < kMostTerms; ++column) rest -= rows[row][column] * values[column];
    values[row] = rest / rows[row][row];
  }
  return values;
}

/// All sets of terms but the empty one, a bit each, those of few terms first.
constexpr auto kSubsets = [] {
  std::array<unsigned, (1u << kMostTerms) - 1> sets{};
  std::iota(sets.begin(), sets.end(), 1u);
  // By insertion: stable, and sorted when this is compiled.
  for (std::size_t i = 1; i < sets.size(); ++i) {
    for (std::size_t j = i; j > 0 && std::popcount(sets[j]) < std::popcount(sets[j - 1]); --j)
      std::swap(sets[j], sets[j - 1]);
  }
  return sets;
}();

/// Of all solutions without a negative value, that with the least error, and the fewest terms if there are several: by
/// trying which values are 0.
Values solved_at_or_above_0(const Matrix& products, const Values& wanted) noexcept {
  Values best{};
  double least = 0.0;  // Error beyond that of all values 0.
  for (const unsigned used : kSubsets) {
    const Values values = solved(products, wanted, used);
    if (std::ranges::any_of(values, [](double value) { return !(value >= 0.0); })) continue;
    double error = 0.0;
    for (std::size_t row = 0; row < kMostTerms; ++row) {
      error -= 2.0 * values[row] * wanted[row];
      for (std::size_t column = 0; column < kMostTerms; ++column)
        error += values[row] * products[row][column] * values[column];
    }
    if (error < least - 1e-9 * std::abs(least)) {  // Of two that are as good the one with fewer terms.
      least = error;
      best = values;
    }
  }
  return best;
}

}  // namespace

Pace::Terms Pace::terms_of(const PacedForward& forward) noexcept {
  return {1.0,
          static_cast<double>(forward.decode_rows),
          static_cast<double>(forward.chunk_tokens),
          forward.chunk_pairs,
          forward.chunk_tokens == 0 ? 0.0 : 1.0,
          forward.chunk_keys};
}

template <class Visit>
void Pace::for_each(const Visit& visit) const {
  for (const Ring& ring : rings_) {
    for (std::size_t i = 0; i < std::min<std::size_t>(ring.added, kKept); ++i) visit(ring.samples[i]);
  }
}

void Pace::observe(const PacedForward& forward, double seconds) noexcept {
  if (!std::isfinite(seconds) || seconds <= 0.0 || (forward.decode_rows == 0 && forward.chunk_tokens == 0)) return;
  Ring& ring = rings_[forward.chunk_tokens == 0 ? 0 : 1];
  ring.samples[ring.added++ % kKept] = {.terms = terms_of(forward), .seconds = seconds};
  fit();
}

// First all alike, then less for those that lie far above the others, as a machine that stalls makes forwards longer
// and nothing makes them shorter. A sample weighs by its relative error, so that short forwards, which those who wait
// for a token feel, count as much as long ones.
void Pace::fit() noexcept {
  const auto even = [](const Sample& sample) { return 1.0 / (sample.seconds * sample.seconds); };
  solve(even);
  constexpr int kRounds = 3;
  for (int round = 0; round < kRounds; ++round) {
    const Terms before = coefficients_;
    solve([&](const Sample& sample) {
      constexpr double kFar = 0.25;  // Of the time itself.
      const double rest = sample.seconds - product(before, sample.terms);
      const double over = std::max(1.0, rest / (kFar * sample.seconds));
      return even(sample) / (over * over * over * over);
    });
  }
}

template <class Weight>
void Pace::solve(const Weight& weight) noexcept {
  Terms scale{};  // Pairs are millions and rows are few.
  for_each([&](const Sample& sample) {
    for (std::size_t term = 0; term < kTerms; ++term) scale[term] = std::max(scale[term], sample.terms[term]);
  });
  for (double& each : scale) each = each == 0.0 ? 1.0 : each;
  Matrix products{};
  Values wanted{};
  for_each([&](const Sample& sample) {
    const double w = weight(sample);
    for (std::size_t row = 0; row < kTerms; ++row) {
      const double x = w * sample.terms[row] / scale[row];
      wanted[row] += x * sample.seconds;
      for (std::size_t column = 0; column < kTerms; ++column)
        products[row][column] += x * sample.terms[column] / scale[column];
    }
  });
  const Values values = solved_at_or_above_0(products, wanted);
  for (std::size_t term = 0; term < kTerms; ++term) coefficients_[term] = values[term] / scale[term];
}

std::uint32_t Pace::largest() const noexcept {
  double most = 0.0;
  for_each([&](const Sample& sample) { most = std::max(most, sample.terms[kTokens]); });
  return static_cast<std::uint32_t>(most);
}

double Pace::seconds(const PacedForward& forward) const noexcept { return product(coefficients_, terms_of(forward)); }

}  // namespace sluice::scheduler
