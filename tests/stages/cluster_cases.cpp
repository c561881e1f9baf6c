// K-means, on any device.

#include <Eigen/Core>
#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <vector>

#include "sluice/step/permutation.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/errors.hpp"
#include "tests/support/random.hpp"
#include "tests/support/reference.hpp"
#include "tests/support/sanitized.hpp"
#include "tests/support/stages_under_test.hpp"

namespace sluice::test {
namespace {

constexpr float kUntouched = 1234.f;

struct ClusterOptions {
  std::uint32_t first = 0;
  std::uint32_t count = 0;
  std::uint32_t clusters = 0;
  std::uint32_t iterations = 10;
  std::uint64_t seed = 7;
};

using Matrix = Eigen::Matrix<double, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;

struct Clustering {
  Matrix centroids;  ///< [clusters, head_dim]
  std::vector<std::uint32_t> assignment;
};

Matrix keys_of(const Problem& problem, std::uint32_t first, std::uint32_t count) {
  return Matrix::NullaryExpr(count, problem.options().head_dim, [&](Eigen::Index i, Eigen::Index c) {
    return problem.k(first + static_cast<std::uint32_t>(i), static_cast<std::uint32_t>(c));
  });
}

/// Means of the members; centroids without any stay.
void move_to_means(const Matrix& keys, Clustering& clustering) {
  Matrix sums = Matrix::Zero(clustering.centroids.rows(), keys.cols());
  std::vector<std::uint32_t> members(static_cast<std::size_t>(sums.rows()));
  for (std::uint32_t i = 0; i < keys.rows(); ++i) {
    sums.row(clustering.assignment[i]) += keys.row(i);
    ++members[clustering.assignment[i]];
  }
  for (std::uint32_t j = 0; j < members.size(); ++j)
    if (members[j] != 0) clustering.centroids.row(j) = sums.row(j) / members[j];
}

/// Lloyd's algorithm in float64, as plainly as possible, for finite keys.
Clustering reference_cluster(const Problem& problem, const ClusterOptions& options) {
  const Matrix keys = keys_of(problem, options.first, options.count);
  Clustering result{.centroids = Matrix(options.clusters, keys.cols()),
                    .assignment = std::vector<std::uint32_t>(options.count, kNone)};
  for (std::uint32_t j = 0; j < options.clusters; ++j)
    result.centroids.row(j) = keys.row(permuted(j, options.count, options.seed));
  for (std::uint32_t round = 0; round < options.iterations; ++round) {
    const std::vector<std::uint32_t> before = result.assignment;
    for (std::uint32_t i = 0; i < options.count; ++i) {
      Eigen::Index nearest = 0;  // The first of several.
      (void)(result.centroids.rowwise() - keys.row(i)).rowwise().squaredNorm().minCoeff(&nearest);
      result.assignment[i] = static_cast<std::uint32_t>(nearest);
    }
    if (result.assignment == before) break;
    move_to_means(keys, result);
  }
  return result;
}

ClusterTask task_of(StagesUnderTest& under_test, const Placed& placed, const ClusterOptions& options) {
  const std::size_t floats = std::size_t{options.clusters} * placed.kv.layout.head_dim;
  ClusterTask task{.kv = placed.kv,
                   .first = options.first,
                   .count = options.count,
                   .clusters = options.clusters,
                   .iterations = options.iterations,
                   .seed = options.seed,
                   .centroids = under_test.array(floats + 1, kUntouched).data(),
                   .assignment = under_test.array(std::size_t{options.count} + 1, 1234u).data(),
                   .members = under_test.array(std::size_t{options.count} + 1, 1234u).data(),
                   .starts = under_test.array(std::size_t{options.clusters} + 2, 1234u).data()};
  task.scratch = under_test.scratch(under_test.stages().cluster_scratch_bytes(task));
  return task;
}

/// Each cluster's tokens one after the other, as their assignment says.
void require_lists(const ClusterTask& task) {
  if (task.count == 0) return;
  const std::vector<std::uint32_t> assignment(task.assignment, task.assignment + task.count);
  std::vector<std::uint32_t> members(task.count);
  std::iota(members.begin(), members.end(), task.first);
  std::ranges::stable_sort(members, {}, [&](std::uint32_t token) { return assignment[token - task.first]; });
  std::vector<std::uint32_t> starts(task.clusters + 1, task.first);
  for (const std::uint32_t cluster : assignment) ++starts[cluster + 1];
  for (std::uint32_t cluster = 0; cluster < task.clusters; ++cluster)
    starts[cluster + 1] += starts[cluster] - task.first;
  REQUIRE(std::equal(members.begin(), members.end(), task.members));
  REQUIRE(std::equal(starts.begin(), starts.end(), task.starts));
}

Clustering result_of(const ClusterTask& task) {
  using Found = Eigen::Matrix<float, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
  const std::uint32_t dim = task.kv.layout.head_dim;
  REQUIRE(task.centroids[std::size_t{task.clusters} * dim] == kUntouched);
  REQUIRE(task.assignment[task.count] == 1234u);
  REQUIRE(task.members[task.count] == 1234u);
  REQUIRE(task.starts[task.clusters + 1] == 1234u);
  require_lists(task);
  return {.centroids = Eigen::Map<const Found>(task.centroids, task.clusters, dim).cast<double>(),
          .assignment = {task.assignment, task.assignment + task.count}};
}

Clustering run(StagesUnderTest& under_test, const Problem& problem, const ClusterOptions& options) {
  const ClusterTask task = task_of(under_test, place(under_test, problem), options);
  under_test.stages().cluster({&task, 1}, under_test.stream());
  under_test.finish();
  return result_of(task);
}

double objective(const Matrix& keys, const Clustering& clustering) {
  double sum = 0.0;
  for (std::uint32_t i = 0; i < keys.rows(); ++i)
    sum += (keys.row(i) - clustering.centroids.row(clustering.assignment[i])).squaredNorm();
  return sum;
}

/// Infinity where something is not a number, of which maxCoeff() may say nothing.
double largest_difference(const Matrix& a, const Matrix& b) {
  const Matrix off = a - b;
  return off.allFinite() ? off.cwiseAbs().maxCoeff() : std::numeric_limits<double>::infinity();
}

/// Keys in blobs far apart, one of which each centroid begins in. Blob 0 is one point many times over; the last
/// centroid begins there too, like the first, and so stays empty.
void make_blobs(Problem& problem, const ClusterOptions& options) {
  const std::uint32_t dim = problem.options().head_dim;
  Random random(options.seed);
  std::vector<std::uint32_t> blob(options.count);
  for (std::uint32_t& b : blob) b = random.below(options.clusters - 1);
  for (std::uint32_t j = 0; j < options.clusters; ++j) {
    blob[permuted(j, options.count, options.seed)] = j % (options.clusters - 1);
  }
  std::vector<double> centres(std::size_t{options.clusters} * dim);
  for (double& x : centres) x = 3.0 * random.normal();
  for (std::uint32_t i = 0; i < options.count; ++i) {
    for (std::uint32_t c = 0; c < dim; ++c) {
      const double noise = blob[i] == 0 ? 0.0 : 0.1 * random.normal();
      problem.set_k(options.first + i, c, centres[blob[i] * dim + c] + noise);
    }
  }
}

}  // namespace

TEST_CASE("permuted indices are a permutation, and differ by seed", "[stages][cluster]") {
  const auto count = GENERATE(1u, 2u, 3u, 16u, 17u, 1000u, 4096u, 70'000u);
  CAPTURE(count);
  std::vector<bool> seen(count, false);
  std::uint32_t same = 0;
  for (std::uint32_t i = 0; i < count; ++i) {
    const std::uint32_t image = permuted(i, count, 5);
    REQUIRE(image < count);
    REQUIRE_FALSE(seen[image]);
    seen[image] = true;
    same += image == permuted(i, count, 6);
  }
  if (count >= 1000) REQUIRE(same < count / 100);
}

TEST_CASE("clusters of well-separated keys are the reference's", "[stages][cluster]") {
  const auto [dtype, head_dim, count, first] =
      GENERATE(grid(std::array{DType::f32, DType::f16, DType::bf16, DType::fp8_e4m3}, std::array{64u, 80u, 128u},
                    std::array{40u, 400u}, std::array{0u, 37u}));
  CAPTURE(to_string(dtype), head_dim, count, first);
  const auto under_test = stages_under_test();
  const ClusterOptions options{.first = first, .count = count, .clusters = count / 13};
  Problem problem({.dtype = dtype, .tokens = first + count + 5, .head_dim = head_dim, .group = 1});
  if (!under_test->supports(problem.shape(), problem.layout().near())) return;
  make_blobs(problem, options);
  const Clustering found = run(*under_test, problem, options);
  const Clustering expected = reference_cluster(problem, options);
  REQUIRE(found.assignment == expected.assignment);
  REQUIRE(largest_difference(found.centroids, expected.centroids) < 1e-5);
  REQUIRE(std::count(found.assignment.begin(), found.assignment.end(), options.clusters - 1) == 0);
}

TEST_CASE("every iteration brings keys nearer to their centroids, the means of their keys", "[stages][cluster]") {
  const auto [dtype, head_dim, clusters] =
      GENERATE(grid(std::array{DType::f16, DType::bf16}, std::array{64u, 128u}, std::array{1u, 5u, 33u, 100u}));
  CAPTURE(to_string(dtype), head_dim, clusters);
  const auto under_test = stages_under_test();
  const Problem problem({.dtype = dtype, .tokens = 700, .head_dim = head_dim, .group = 1, .outlier = 20.0});
  const Matrix keys = keys_of(problem, 3, 690);
  double before = std::numeric_limits<double>::infinity();
  for (const std::uint32_t iterations : {1u, 2u, 4u, 100u}) {
    CAPTURE(iterations);
    const ClusterOptions options{.first = 3, .count = 690, .clusters = clusters, .iterations = iterations};
    const Clustering found = run(*under_test, problem, options);
    REQUIRE(std::all_of(found.assignment.begin(), found.assignment.end(), [&](auto j) { return j < clusters; }));
    Clustering means = found;
    move_to_means(keys, means);
    REQUIRE(largest_difference(found.centroids, means.centroids) < 1e-5);
    const double now = objective(keys, found);
    REQUIRE(now <= before * (1.0 + 1e-6));
    before = now;
    if (iterations != 100) continue;
    // At rest: no key has a nearer centroid than its own, but for rounding.
    for (std::uint32_t i = 0; i < options.count; ++i) {
      const Eigen::VectorXd distances = (found.centroids.rowwise() - keys.row(i)).rowwise().squaredNorm();
      REQUIRE(distances[found.assignment[i]] <= distances.minCoeff() + 0.05);
    }
    const Clustering again = run(*under_test, problem, options);
    REQUIRE(again.assignment == found.assignment);
    REQUIRE((again.centroids == found.centroids));
  }
}

TEST_CASE("as many clusters as distinct keys leave each key alone", "[stages][cluster]") {
  const auto count = GENERATE(1u, 2u, 31u, 200u);
  CAPTURE(count);
  const auto under_test = stages_under_test();
  const Problem problem({.tokens = count, .head_dim = 128, .group = 1});
  const ClusterOptions options{.count = count, .clusters = count, .iterations = 3};
  const Clustering found = run(*under_test, problem, options);
  for (std::uint32_t j = 0; j < count; ++j) {
    const std::uint32_t token = permuted(j, count, options.seed);
    REQUIRE(found.assignment[token] == j);
    for (std::uint32_t c = 0; c < 128; ++c) REQUIRE(found.centroids(j, c) == problem.k(token, c));
  }
}

TEST_CASE("equal keys all belong to the first cluster", "[stages][cluster]") {
  const auto under_test = stages_under_test();
  Problem problem({.tokens = 300, .head_dim = 64, .group = 1});
  for (std::uint32_t token = 1; token < 300; ++token) {
    for (std::uint32_t c = 0; c < 64; ++c) problem.set_k(token, c, problem.k(0, c));
  }
  const Clustering found = run(*under_test, problem, {.count = 300, .clusters = 40});
  REQUIRE(found.assignment == std::vector<std::uint32_t>(300, 0));
  for (std::uint32_t c = 0; c < 64; ++c) {
    REQUIRE(std::abs(found.centroids(0, c) - problem.k(0, c)) <= 1e-6 * std::abs(problem.k(0, c)));
    REQUIRE(found.centroids(39, c) == problem.k(0, c));
  }
}

TEST_CASE("keys that are not finite go to cluster 0 and into no mean", "[stages][cluster]") {
  const double bad =
      GENERATE(std::nan(""), std::numeric_limits<double>::infinity(), -std::numeric_limits<double>::infinity());
  const bool seeds_too = GENERATE(false, true);
  CAPTURE(bad, seeds_too);
  const auto under_test = stages_under_test();
  const ClusterOptions options{.count = 400, .clusters = 30};
  Problem problem({.tokens = 400, .head_dim = 128, .group = 1});
  std::vector<std::uint32_t> broken{permuted(100, 400, options.seed), permuted(399, 400, options.seed)};
  if (seeds_too) broken.push_back(permuted(29, 400, options.seed));
  for (const std::uint32_t token : broken) problem.set_k(token, 77, bad);
  const Clustering found = run(*under_test, problem, options);
  for (const std::uint32_t token : broken) REQUIRE(found.assignment[token] == 0);
  for (std::uint32_t j = 0; j < 30; ++j) {
    std::vector<double> sum(128, 0.0);
    std::uint32_t members = 0;
    for (std::uint32_t i = 0; i < 400; ++i) {
      if (found.assignment[i] != j || std::find(broken.begin(), broken.end(), i) != broken.end()) continue;
      ++members;
      for (std::uint32_t c = 0; c < 128; ++c) sum[c] += problem.k(i, c);
    }
    const bool lost = seeds_too && j == 29;
    REQUIRE((members == 0) == lost);
    for (std::uint32_t c = 0; c < 128; ++c) {
      const double centroid = found.centroids(j, c);
      REQUIRE((lost ? std::isnan(centroid) : std::abs(centroid - sum[c] / members) < 1e-5));
    }
  }
}

TEST_CASE("clusterings of several KV heads at once are those of each alone", "[stages][cluster]") {
  const auto under_test = stages_under_test();
  const Problem problem({.tokens = 3'000, .head_dim = 128, .group = 1});
  const Placed placed = place(*under_test, problem);
  const std::vector<ClusterOptions> all{{.first = 0, .count = 3'000, .clusters = 94},
                                        {.first = 5, .count = 0, .clusters = 0},
                                        {.first = 952, .count = 2'048, .clusters = 64, .iterations = 2},
                                        {.first = 2'999, .count = 1, .clusters = 1, .iterations = 1}};
  std::vector<ClusterTask> tasks;
  for (const ClusterOptions& options : all) tasks.push_back(task_of(*under_test, placed, options));
  under_test->stages().cluster(tasks, under_test->stream());
  under_test->finish();
  for (std::size_t i = 0; i < all.size(); ++i) {
    CAPTURE(i);
    const Clustering found = result_of(tasks[i]);
    if (all[i].count == 0) continue;
    const Clustering alone = run(*under_test, problem, all[i]);
    REQUIRE(found.assignment == alone.assignment);
    REQUIRE((found.centroids == alone.centroids));
  }
}

TEST_CASE("a clustering that cannot be is refused before anything is written", "[stages][cluster]") {
  const auto under_test = stages_under_test();
  const Problem problem({.tokens = 20, .head_dim = 64, .group = 1});
  const Placed placed = place(*under_test, problem);
  for (const ClusterOptions& options : {ClusterOptions{.count = 4, .clusters = 5}, ClusterOptions{.count = 4},
                                        ClusterOptions{.count = 4, .clusters = 2, .iterations = 0}}) {
    const ClusterTask task = task_of(*under_test, placed, options);
    REQUIRE(code_of([&] { under_test->stages().cluster({&task, 1}, under_test->stream()); }) == Errc::invalid_argument);
    under_test->finish();
    REQUIRE(task.centroids[0] == kUntouched);
    REQUIRE(task.assignment[0] == 1234u);
  }
}

}  // namespace sluice::test
