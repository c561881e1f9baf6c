// K-means over the keys of a KV head. What costs is the search for the nearest centroid, a product of all keys with all
// centroids, of which only a block exists at a time. By a kernel of ours: 2,048 keys of 128 channels meet 256 centroids
// in 1.2 ms of one AVX-512 core, Eigen takes 2.0 compiled for that core, and 43 for any x86-64 (best of 10 runs).

#include "cpu/stages/k_means.hpp"

#include <algorithm>
#include <atomic>
#include <bit>
#include <limits>
#include <string>
#include <vector>

#include "cpu/stages/rows.hpp"
#include "cpu/threads/lent.hpp"
#include "sluice/error.hpp"
#include "sluice/step/permutation.hpp"

namespace sluice::cpu {
namespace {

constexpr std::uint32_t kBlockKeys = 64;  ///< that meet one tile of centroids while both are in the L1 and L2 caches
constexpr std::uint32_t kBlockClusters = 64;  ///< whose means one thread takes at a time

bool is_finite(const float* row, std::uint32_t count) noexcept {
  constexpr std::uint32_t kExponent = 0x7f80'0000u;
  std::uint32_t bad = 0;
#pragma omp simd reduction(| : bad)
  for (std::uint32_t c = 0; c < count; ++c) {
    bad |= static_cast<std::uint32_t>((std::bit_cast<std::uint32_t>(row[c]) & kExponent) == kExponent);
  }
  return bad == 0;
}

/// One task. Where workers share it it is Lent, for its bodies refer to it.
class KMeans {
 public:
  KMeans(const Workers* workers, const Kernels& kernels, const ClusterTask& task)
      : workers_(workers),
        kernels_(kernels),
        task_(task),
        dim_(task.kv.layout.head_dim),
        tiles_(static_cast<std::uint32_t>(div_up(task.clusters, kCentroidTile))),
        tiled_(std::size_t{tiles_} * kCentroidTile * dim_),
        half_norms_(std::size_t{tiles_} * kCentroidTile, std::numeric_limits<float>::infinity()),
        assignment_(task.count, kNone),
        starts_(std::size_t{task.clusters} + 1),
        members_(task.count) {}

  void run() {
    for (std::uint32_t i = 0; i < task_.clusters; ++i) {
      read_key(permuted(i, task_.count, task_.seed), task_.centroids + std::size_t{i} * dim_);
    }
    for (std::uint32_t i = 0; i < task_.iterations; ++i) {
      tile_centroids();
      if (!assign()) break;
      list_members();
      for_each(static_cast<std::uint32_t>(div_up(task_.clusters, kBlockClusters)),
               [this](std::uint32_t block) { move_centroids(block * kBlockClusters); });
    }
    write_lists();
  }

 private:
  template <class Body>
  void for_each(std::uint32_t count, const Body& body) const {
    if (workers_ != nullptr) return workers_->parallel_for(count, body);
    for (std::uint32_t i = 0; i < count; ++i) body(i);
  }

  /// A key that is not finite is NaN in all its elements.
  void read_key(std::uint32_t index, float* out) const {
    const std::size_t token = std::size_t{task_.first} + index;
    const PageLayout& layout = task_.kv.layout;
    read_row(kernels_, layout, task_.kv.k_row(token), layout.scaled() ? task_.kv.scales(token) : nullptr, out);
    if (!is_finite(out, dim_)) std::fill_n(out, dim_, std::numeric_limits<float>::quiet_NaN());
  }

  void tile_centroids() {
    for_each(tiles_, [this](std::uint32_t tile) {
      const std::uint32_t first = tile * kCentroidTile;
      for (std::uint32_t i = first; i < std::min(first + kCentroidTile, task_.clusters); ++i) {
        const float* const centroid = task_.centroids + std::size_t{i} * dim_;
        float* const column = tiled_.data() + std::size_t{first} * dim_ + (i - first);
        double norm = 0.0;
        for (std::uint32_t c = 0; c < dim_; ++c) {
          norm += static_cast<double>(centroid[c]) * centroid[c];
          column[std::size_t{c} * kCentroidTile] = centroid[c];
        }
        half_norms_[i] = static_cast<float>(0.5 * norm);
      }
    });
  }

  /// Whether any key changed hands.
  bool assign() {
    changed_.store(false, std::memory_order_relaxed);
    for_each(static_cast<std::uint32_t>(div_up(task_.count, kBlockKeys)), [this](std::uint32_t block) {
      alignas(64) float keys[kBlockKeys * (kMaxHeadDim + kCentroidTile + 1)];
      const std::uint32_t first = block * kBlockKeys;
      const std::uint32_t rows = std::min(kBlockKeys, task_.count - first);
      for (std::uint32_t r = 0; r < rows; ++r) read_key(first + r, keys + std::size_t{r} * dim_);
      std::uint32_t found[kBlockKeys];
      kernels_.nearest({.keys = keys,
                        .centroids = tiled_.data(),
                        .half_norms = half_norms_.data(),
                        .rows = rows,
                        .tiles = tiles_,
                        .head_dim = dim_,
                        .scratch = keys + std::size_t{kBlockKeys} * dim_,
                        .nearest = found});
      if (std::equal(found, found + rows, assignment_.begin() + first)) return;
      std::copy_n(found, rows, assignment_.begin() + first);
      changed_.store(true, std::memory_order_relaxed);
    });
    return changed_.load(std::memory_order_relaxed);
  }

  /// members_[starts_[i], starts_[i + 1]) become the keys of cluster i, ascending.
  void list_members() {
    std::fill(starts_.begin(), starts_.end(), 0);
    for (std::uint32_t i = 0; i < task_.count; ++i) ++starts_[assignment_[i] + 1];
    for (std::uint32_t i = 0; i < task_.clusters; ++i) starts_[i + 1] += starts_[i];
    for (std::uint32_t i = 0; i < task_.count; ++i) members_[starts_[assignment_[i]]++] = i;
    std::copy_backward(starts_.begin(), starts_.end() - 1, starts_.end());
    starts_.front() = 0;
  }

  /// The lists are those of the last iteration in which a key changed hands: the first one is such.
  void write_lists() const {
    if (task_.assignment != nullptr) std::copy(assignment_.begin(), assignment_.end(), task_.assignment);
    for (std::uint32_t i = 0; i < task_.count && task_.members != nullptr; ++i)
      task_.members[i] = task_.first + members_[i];
    for (std::uint32_t i = 0; i <= task_.clusters && task_.starts != nullptr; ++i)
      task_.starts[i] = task_.first + starts_[i];
  }

  void move_centroids(std::uint32_t first) const {
    float key[kMaxHeadDim];
    double sum[kMaxHeadDim];
    for (std::uint32_t i = first; i < std::min(first + kBlockClusters, task_.clusters); ++i) {
      std::fill_n(sum, dim_, 0.0);
      std::uint32_t counted = 0;
      for (std::uint32_t m = starts_[i]; m < starts_[i + 1]; ++m) {
        read_key(members_[m], key);
        if (key[0] != key[0]) continue;
        ++counted;
#pragma omp simd
        for (std::uint32_t c = 0; c < dim_; ++c) sum[c] += static_cast<double>(key[c]);
      }
      if (counted == 0) continue;
      float* const centroid = task_.centroids + std::size_t{i} * dim_;
      for (std::uint32_t c = 0; c < dim_; ++c) centroid[c] = static_cast<float>(sum[c] / counted);
    }
  }

  const Workers* workers_;  ///< null: the calling thread alone
  const Kernels& kernels_;
  ClusterTask task_;
  std::uint32_t dim_;
  std::uint32_t tiles_;
  std::vector<float> tiled_;       ///< [tiles, head_dim, kCentroidTile]
  std::vector<float> half_norms_;  ///< [tiles, kCentroidTile]
  std::vector<std::uint32_t> assignment_;
  std::vector<std::uint32_t> starts_;
  std::vector<std::uint32_t> members_;
  std::atomic<bool> changed_{false};
};

}  // namespace

void check_clusters(const ClusterTask& task) {
  if (task.count == 0 || (task.clusters != 0 && task.clusters <= task.count && task.iterations != 0)) return;
  throw Error(Errc::invalid_argument,
              "cluster: " + std::to_string(task.clusters) + " clusters of " + std::to_string(task.count) + " keys in " +
                  std::to_string(task.iterations) +
                  " iterations; ask for 1 to as many as there are keys, and 1 iteration or more");
}

void k_means(const Kernels& kernels, const ClusterTask& task) {
  check_clusters(task);
  if (task.count != 0) KMeans(nullptr, kernels, task).run();
}

void k_means(const Kernels& kernels, const ClusterTask& task, const Workers& workers) {
  check_clusters(task);
  if (task.count != 0) Lent<KMeans>(workers, &workers, kernels, task)->run();
}

}  // namespace sluice::cpu
