// The search for the nearest centroid, in every instruction set that this CPU has.

#include <cmath>
#include <limits>
#include <vector>

#include "cpu/kernels/kernels.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/random.hpp"

namespace sluice::test {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

struct Search {
  Search(std::uint32_t row_count, std::uint32_t centroid_count, std::uint32_t dim)
      : rows(row_count),
        count(centroid_count),
        head_dim(dim),
        tiles((count + cpu::kCentroidTile - 1) / cpu::kCentroidTile),
        keys(std::size_t{rows} * dim),
        centroids(std::size_t{tiles} * dim * cpu::kCentroidTile, 0.f),
        half_norms(std::size_t{tiles} * cpu::kCentroidTile, kInfinity) {
    Random random(rows + count + dim);
    for (float& x : keys) x = static_cast<float>(random.normal());
    for (std::uint32_t j = 0; j < count; ++j) {
      half_norms[j] = 0.f;
      // Small whole numbers, so that sums are exact and equal centroids tie.
      for (std::uint32_t c = 0; c < dim; ++c) at(j, c) = static_cast<float>(random.below(3)) - 1.f;
      for (std::uint32_t c = 0; c < dim; ++c) half_norms[j] += 0.5f * at(j, c) * at(j, c);
    }
  }
  [[nodiscard]] float& at(std::uint32_t j, std::uint32_t c) {
    const std::size_t tile = j / cpu::kCentroidTile;
    return centroids[(tile * head_dim + c) * cpu::kCentroidTile + j % cpu::kCentroidTile];
  }
  void copy_centroid(std::uint32_t from, std::uint32_t to) {
    for (std::uint32_t c = 0; c < head_dim; ++c) at(to, c) = at(from, c);
    half_norms[to] = half_norms[from];
  }
  [[nodiscard]] double closeness(std::uint32_t row, std::uint32_t j) {
    double dot = 0.0;
    for (std::uint32_t c = 0; c < head_dim; ++c) dot += static_cast<double>(keys[row * head_dim + c]) * at(j, c);
    return dot - static_cast<double>(half_norms[j]);
  }
  [[nodiscard]] std::vector<std::uint32_t> run(const cpu::Kernels& kernels) {
    std::vector<float> scratch(std::size_t{rows} * (cpu::kCentroidTile + 1));
    std::vector<std::uint32_t> nearest(rows, 1234);
    kernels.nearest({.keys = keys.data(),
                     .centroids = centroids.data(),
                     .half_norms = half_norms.data(),
                     .rows = rows,
                     .tiles = tiles,
                     .head_dim = head_dim,
                     .scratch = scratch.data(),
                     .nearest = nearest.data()});
    return nearest;
  }

  std::uint32_t rows, count, head_dim, tiles;
  std::vector<float> keys, centroids, half_norms;
};

}  // namespace

TEST_CASE("every instruction set finds the nearest centroid", "[cpu][kernels]") {
  const auto rows = GENERATE(1u, 7u, 64u);
  const auto count = GENERATE(1u, 63u, 64u, 65u, 200u);
  const auto head_dim = GENERATE(16u, 80u, 128u);
  CAPTURE(rows, count, head_dim);
  Search search(rows, count, head_dim);
  for (const cpu::Kernels* kernels : cpu::available_kernels()) {
    CAPTURE(kernels->name);
    const std::vector<std::uint32_t> nearest = search.run(*kernels);
    for (std::uint32_t r = 0; r < rows; ++r) {
      REQUIRE(nearest[r] < count);
      for (std::uint32_t j = 0; j < count; ++j) {
        REQUIRE(search.closeness(r, nearest[r]) >= search.closeness(r, j) - 1e-4);
      }
    }
  }
}

TEST_CASE("equal centroids: the first is taken; NaN is nearest to nothing", "[cpu][kernels]") {
  Search search(9, 150, 32);
  for (std::uint32_t j = 3; j < 150; ++j) search.copy_centroid(j % 3, j);
  search.half_norms[0] = std::nanf("");
  for (std::uint32_t c = 0; c < 32; ++c) {
    search.at(1, c) = std::nanf("");  // 4 is the next like it.
    search.keys[5 * 32 + c] = std::nanf("");
  }
  for (const cpu::Kernels* kernels : cpu::available_kernels()) {
    CAPTURE(kernels->name);
    const std::vector<std::uint32_t> nearest = search.run(*kernels);
    for (std::uint32_t r = 0; r < 9; ++r) {
      if (r == 5) {
        REQUIRE(nearest[r] == 0);
      } else {
        REQUIRE((nearest[r] == 2 || nearest[r] == 3 || nearest[r] == 4));
      }
    }
  }
}

}  // namespace sluice::test
