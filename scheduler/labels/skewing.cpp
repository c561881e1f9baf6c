#include "scheduler/labels/skewing.hpp"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "scheduler/labels/key_blocks.hpp"

namespace sluice::scheduler {
namespace {

/// Sums of products of the channels of all rows: its eigenvectors are the right singular vectors.
std::vector<double> gram_matrix(std::span<const float> rows, std::size_t d) {
  std::vector<double> gram(d * d, 0.0);
  for (std::size_t first = 0; first < rows.size(); first += d) {
    const float* const row = rows.data() + first;
    if (!is_finite(row, d)) continue;
    for (std::size_t i = 0; i < d; ++i) {
      const double x = row[i];
      for (std::size_t j = 0; j < d; ++j) gram[i * d + j] += x * static_cast<double>(row[j]);
    }
  }
  return gram;
}

struct Rotation {
  double cosine = 1.0;
  double sine = 0.0;
};

/// The smaller of the two that make element (p, q) zero (Golub and Van Loan, section 8.5).
Rotation rotation_of(double pp, double pq, double qq) {
  const double tau = (qq - pp) / (2.0 * pq);
  const double t = std::copysign(1.0, tau) / (std::abs(tau) + std::hypot(1.0, tau));
  const double cosine = 1.0 / std::hypot(1.0, t);
  return {.cosine = cosine, .sine = t * cosine};
}

void rotate_rows(double* p, double* q, std::size_t d, const Rotation& by) {
#pragma omp simd
  for (std::size_t i = 0; i < d; ++i) {
    const double x = p[i], y = q[i];
    p[i] = by.cosine * x - by.sine * y;
    q[i] = by.sine * x + by.cosine * y;
  }
}

void rotate_columns(double* matrix, std::size_t p, std::size_t q, std::size_t d, const Rotation& by) {
  for (std::size_t i = 0; i < d; ++i) {
    double& x = matrix[i * d + p];
    double& y = matrix[i * d + q];
    const double was = x;
    x = by.cosine * was - by.sine * y;
    y = by.sine * was + by.cosine * y;
  }
}

/// One cyclic sweep over a symmetric matrix, whose eigenvectors become the rows of `vectors`; whether anything of it
/// was left to turn.
bool sweep(std::vector<double>& matrix, std::vector<double>& vectors, std::size_t d, double negligible) {
  bool turned = false;
  for (std::size_t p = 0; p + 1 < d; ++p) {
    for (std::size_t q = p + 1; q < d; ++q) {
      const double pq = matrix[p * d + q];
      if (std::abs(pq) <= negligible) continue;
      turned = true;
      const Rotation by = rotation_of(matrix[p * d + p], pq, matrix[q * d + q]);
      rotate_columns(matrix.data(), p, q, d, by);
      rotate_rows(&matrix[p * d], &matrix[q * d], d, by);
      rotate_rows(&vectors[p * d], &vectors[q * d], d, by);
    }
  }
  return turned;
}

}  // namespace

std::vector<double> skewing_matrix(std::span<const float> queries, std::uint32_t head_dim) {
  constexpr int kMostSweeps = 30;        // It converges quadratically; this is far more than it takes.
  constexpr double kNegligible = 1e-10;  // Of the mean eigenvalue.
  const std::size_t d = head_dim;
  std::vector<double> gram = gram_matrix(queries, d);
  std::vector<double> vectors(d * d, 0.0);
  double trace = 0.0;
  for (std::size_t c = 0; c < d; ++c) {
    vectors[c * d + c] = 1.0;
    trace += gram[c * d + c];
  }
  for (int i = 0; i < kMostSweeps && sweep(gram, vectors, d, kNegligible * trace / static_cast<double>(d)); ++i) {
  }
  std::vector<std::size_t> order(d);
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::ranges::stable_sort(order, [&](std::size_t a, std::size_t b) { return gram[a * d + a] > gram[b * d + b]; });
  std::vector<double> sorted;
  sorted.reserve(d * d);
  for (const std::size_t c : order) sorted.insert(sorted.end(), &vectors[c * d], &vectors[c * d] + d);
  return sorted;
}

}  // namespace sluice::scheduler
