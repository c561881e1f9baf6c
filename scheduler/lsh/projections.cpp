#include "scheduler/lsh/projections.hpp"

#include <cmath>
#include <map>
#include <mutex>
#include <numbers>
#include <tuple>

#include "sluice/step/permutation.hpp"

namespace sluice::scheduler {
namespace {

/// The i-th number of a seeded sequence, in (0, 1].
double uniform(std::uint64_t seed, std::uint64_t i) noexcept {
  const std::uint64_t bits = mixed_bits(mixed_bits(seed) + (i + 1) * 0x9e3779b97f4a7c15u);
  return (static_cast<double>(bits >> 11) + 1.0) * 0x1.0p-53;
}

}  // namespace

Projections::Projections(std::uint32_t head_dim, const LshOptions& options)
    : bits_(options.bits), tables_(options.tables), rows_(std::size_t{head_dim} * options.bits * options.tables) {
  for (std::size_t i = 0; i < rows_.size(); ++i) {
    const double radius = std::sqrt(-2.0 * std::log(uniform(options.seed, 2 * i)));
    rows_[i] = static_cast<float>(radius * std::cos(2.0 * std::numbers::pi * uniform(options.seed, 2 * i + 1)));
  }
}

void Projections::encode(const float* products, std::uint32_t columns, std::uint16_t* codes,
                         std::uint64_t stride) const noexcept {
  for (std::uint32_t table = 0; table < tables_; ++table) {
    std::uint16_t* const to = codes + table * stride;
    for (std::uint32_t j = 0; j < columns; ++j) to[j] = 0;
    for (std::uint32_t bit = 0; bit < bits_; ++bit) {
      const float* const row = products + (std::size_t{table} * bits_ + bit) * columns;
#pragma omp simd
      for (std::uint32_t j = 0; j < columns; ++j) {
        to[j] = static_cast<std::uint16_t>(to[j] | (static_cast<std::uint32_t>(row[j] > 0.f) << bit));
      }
    }
  }
}

std::shared_ptr<const Projections> shared_projections(std::uint32_t head_dim, const LshOptions& options) {
  using Key = std::tuple<std::uint32_t, std::uint32_t, std::uint32_t, std::uint64_t>;
  static std::mutex mutex;
  static std::map<Key, std::weak_ptr<const Projections>> known;  // guarded by mutex
  const std::scoped_lock lock(mutex);
  std::weak_ptr<const Projections>& entry = known[{head_dim, options.bits, options.tables, options.seed}];
  std::shared_ptr<const Projections> projections = entry.lock();
  if (!projections) entry = projections = std::make_shared<const Projections>(head_dim, options);
  return projections;
}

}  // namespace sluice::scheduler
