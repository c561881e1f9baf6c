// K-means over as many keys as fill a GPU, in device memory, against the CPU's.

#include <algorithm>
#include <cmath>
#include <vector>

#include "cpu/machine/topology.hpp"
#include "cpu/stages/stages.hpp"
#include "sluice/step/permutation.hpp"
#include "tests/gpu/gpu_support.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/problem.hpp"

namespace sluice::test {
namespace {

constexpr std::uint32_t kDim = 128;

struct Clusters {
  std::vector<float> centroids;
  std::vector<std::uint32_t> assignment;
};

/// The task without memory; its scratch size is asked of it.
ClusterTask task_over(const KvView& kv, std::uint32_t count, std::uint32_t clusters, std::uint32_t iterations) {
  return {.kv = kv, .first = 7, .count = count, .clusters = clusters, .iterations = iterations, .seed = 3};
}

Clusters on_gpu(const Problem& problem, std::uint32_t count, std::uint32_t clusters, std::uint32_t iterations) {
  GpuUnderTest under_test;
  KvView kv = problem.kv();
  kv.base = under_test.on_device(problem.memory()).data();
  ClusterTask task = task_over(kv, count, clusters, iterations);
  const std::vector<std::byte> scratch(under_test.stages().cluster_scratch_bytes(task), std::byte{0xff});
  const auto centroids = under_test.on_device(std::span<const float>(std::vector<float>(clusters * kDim)));
  const auto assignment = under_test.on_device(std::span<const std::uint32_t>(std::vector<std::uint32_t>(count)));
  task.centroids = centroids.data();
  task.assignment = assignment.data();
  task.scratch = under_test.on_device(std::span(scratch)).data();
  under_test.stages().cluster({&task, 1}, under_test.stream());
  return {.centroids = under_test.from_device(std::span<const float>(centroids)),
          .assignment = under_test.from_device(std::span<const std::uint32_t>(assignment))};
}

Clusters on_cpu(const Problem& problem, std::uint32_t count, std::uint32_t clusters, std::uint32_t iterations) {
  static const cpu::Topology topology;
  static const cpu::Workers workers(topology, {});
  Clusters result{.centroids = std::vector<float>(clusters * kDim), .assignment = std::vector<std::uint32_t>(count)};
  ClusterTask task = task_over(problem.kv(), count, clusters, iterations);
  task.centroids = result.centroids.data();
  task.assignment = result.assignment.data();
  cpu::cluster({.workers = workers}, {&task, 1});
  return result;
}

std::size_t agreeing(const Clusters& a, const Clusters& b) {
  std::size_t same = 0;
  for (std::size_t i = 0; i < a.assignment.size(); ++i) same += a.assignment[i] == b.assignment[i];
  return same;
}

}  // namespace

TEST_CASE("the GPU's first assignment is the CPU's, but for keys between two centroids", "[gpu][cluster]") {
  const auto dtype = GENERATE(DType::bf16, DType::f16);
  CAPTURE(to_string(dtype));
  const Problem problem({.dtype = dtype, .tokens = 40'000, .head_dim = kDim, .group = 1});
  const Clusters gpu = on_gpu(problem, 39'990, 1'251, 1);
  const Clusters cpu = on_cpu(problem, 39'990, 1'251, 1);
  REQUIRE(agreeing(gpu, cpu) >= 39'950);
}

TEST_CASE("a long clustering on the GPU is deterministic and ends in the means of its keys", "[gpu][cluster]") {
  const std::uint32_t count = 70'001;  // more chunks of the counting sort than it has, so that these grow
  const Problem problem({.tokens = 70'100, .head_dim = kDim, .group = 1});
  const Clusters found = on_gpu(problem, count, 2'000, 10);
  const Clusters again = on_gpu(problem, count, 2'000, 10);
  REQUIRE(found.assignment == again.assignment);
  REQUIRE(found.centroids == again.centroids);

  std::vector<double> sums(std::size_t{2'000} * kDim, 0.0);
  std::vector<std::uint32_t> sizes(2'000, 0);
  for (std::uint32_t i = 0; i < count; ++i) {
    REQUIRE(found.assignment[i] < 2'000);
    ++sizes[found.assignment[i]];
    for (std::uint32_t c = 0; c < kDim; ++c) sums[std::size_t{found.assignment[i]} * kDim + c] += problem.k(7 + i, c);
  }
  double worst = 0.0;
  for (std::size_t i = 0; i < sums.size(); ++i) {
    if (sizes[i / kDim] == 0) continue;
    worst = std::max(worst, std::abs(found.centroids[i] - sums[i] / sizes[i / kDim]));
  }
  REQUIRE(worst < 1e-5);
}

}  // namespace sluice::test
