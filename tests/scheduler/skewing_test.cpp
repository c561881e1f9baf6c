// Skewed keys, by which InfiniGen estimates: how they are turned and what is estimated of them, against the definitions
// in float64, with Eigen's singular vectors.

#include <Eigen/SVD>
#include <algorithm>
#include <cmath>
#include <limits>

#include "scheduler/labels/skewed_cache.hpp"
#include "scheduler/labels/skewing.hpp"
#include "tests/scheduler/lopsided.hpp"

using namespace sluice;
using namespace sluice::scheduler;
using namespace sluice::scheduler::test;

namespace {

using Matrix = Eigen::Matrix<double, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;

/// Right singular vectors, a row each, the largest singular value first.
Matrix singular_vectors(const std::vector<float>& rows) {
  const auto count = static_cast<Eigen::Index>(rows.size() / kDim);
  const Matrix all =
      Eigen::Map<const Eigen::Matrix<float, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>>(rows.data(), count, kDim)
          .cast<double>();
  return Eigen::JacobiSVD<Matrix>(all, Eigen::ComputeFullV).matrixV().transpose();
}

double product(const double* a, const float* b) {
  double sum = 0.0;
  for (std::uint32_t c = 0; c < kDim; ++c) sum += a[c] * double{b[c]};
  return sum;
}

}  // namespace

TEST_CASE("skewing turns coordinates to the queries' singular vectors, and leaves products as they are", "[skewing]") {
  const std::uint32_t rows = GENERATE(0u, 1u, 5u, 16u, 300u);
  const bool outliers = GENERATE(false, true);
  CAPTURE(rows, outliers);
  std::vector<float> queries = lopsided(rows, 3);
  if (outliers && rows > 1) {
    for (std::uint32_t c = 0; c < kDim; ++c) queries[kDim + c] *= 1e6f;
  }
  const std::vector<double> skewing = skewing_matrix(queries, kDim);
  const Matrix a = Eigen::Map<const Matrix>(skewing.data(), kDim, kDim);
  REQUIRE((a * a.transpose() - Matrix::Identity(kDim, kDim)).cwiseAbs().maxCoeff() < 1e-12);
  const std::vector<float> q = lopsided(4, 5), k = random_queries(4, kDim, 6);
  for (std::uint32_t i = 0; i < 4; ++i) {
    double turned = 0.0, plain = 0.0;
    for (std::uint32_t c = 0; c < kDim; ++c) {
      plain += double{q[i * kDim + c]} * double{k[i * kDim + c]};
      turned += product(&skewing[c * kDim], &q[i * kDim]) * product(&skewing[c * kDim], &k[i * kDim]);
    }
    REQUIRE(std::abs(turned - plain) < 1e-10);
  }
  if (rows < 16 || outliers) return;  // Where singular values are far apart, vectors are but for their signs.
  const Matrix want = singular_vectors(queries);
  for (std::uint32_t c = 0; c < kDim; ++c) REQUIRE(std::abs(a.row(c).dot(want.row(c))) > 1.0 - 1e-6);
}

TEST_CASE("rows of queries that are no numbers have no say", "[skewing]") {
  std::vector<float> queries = lopsided(40, 8);
  const std::vector<double> want = skewing_matrix(queries, kDim);
  std::vector<float> more = queries;
  more.resize(more.size() + 2 * kDim, 1.f);
  more[queries.size() + 3] = std::numeric_limits<float>::quiet_NaN();
  more[queries.size() + kDim] = std::numeric_limits<float>::infinity();
  REQUIRE(skewing_matrix(more, kDim) == want);
}

TEST_CASE("estimates are those of the channels in which the prompt's newest queries are largest", "[skewing]") {
  const float share = GENERATE(0.01f, 0.2f, 0.5f, 1.f);
  const bool known = GENERATE(true, false);
  CAPTURE(share, known);
  const std::uint32_t n = 300;
  FakeKv kv = FakeKv::random(n, kDim, kGroup, 11);
  const std::uint32_t queries = known ? kSkewQueries + 9 : 0;
  const std::vector<float> last = lopsided(std::size_t{queries} * kGroup, 12);
  SkewedCache cache(share, kShape);
  cache.begin({.kv_head = 0, .tokens = n, .queries = queries, .last_q = last, .kv = &kv});
  const auto channels = std::max(static_cast<std::uint32_t>(double{share} * kDim + 1e-6), 1u);
  REQUIRE(cache.channels() == channels);
  const std::ptrdiff_t newest = std::ptrdiff_t{kSkewQueries} * kGroup * kDim;
  const std::vector<float> sample =
      known ? std::vector<float>(last.end() - newest, last.end()) : std::vector<float>(kv.k.end() - newest, kv.k.end());
  const Matrix a = singular_vectors(sample);
  std::vector<double> sums(kDim, 0.0);
  for (std::size_t row = 0; row < sample.size(); row += kDim)
    for (std::uint32_t c = 0; c < kDim; ++c) sums[c] += std::abs(product(a.row(c).data(), &sample[row]));
  const std::vector<std::uint32_t> chosen =
      best(positions(0, kDim), channels, [&](std::uint32_t c) { return sums[c]; });
  const std::vector<float> q = lopsided(kGroup, 13);
  std::vector<float> found(std::size_t{n} * kGroup);
  cache.estimate(q.data(), n, kv, found.data());
  for (std::size_t i = 0; i < found.size(); ++i) {
    double want = 0.0, size = 0.0;  // An element is off by 2^-8 of itself.
    for (const std::uint32_t c : chosen) {
      const double term =
          product(a.row(c).data(), &q[i % kGroup * kDim]) * product(a.row(c).data(), &kv.k[i / kGroup * kDim]) / 4.0;
      want += term;
      size += std::abs(term);
    }
    REQUIRE(std::abs(found[i] - want) <= size / 256.0 + 1e-4);
  }
}
