#pragma once

#include <array>
#include <cstdint>

namespace sluice {

/// Distribution of a quantity in [0, 1], in 1,000 equal bins; a percentile is exact to 0.001.
class ShareHistogram {
 public:
  void add(double share) noexcept;
  void merge(const ShareHistogram& other) noexcept;
  [[nodiscard]] std::uint64_t count() const noexcept { return count_; }
  [[nodiscard]] double mean() const noexcept { return count_ == 0 ? 0.0 : sum_ / static_cast<double>(count_); }
  [[nodiscard]] double min() const noexcept { return count_ == 0 ? 0.0 : min_; }
  /// Share of the samples that are at least `share`, exact to 0.001; 0 if there are none.
  [[nodiscard]] double share_above(double share) const noexcept;
  /// Value below which `fraction` of the samples lie; 0 if there are none.
  [[nodiscard]] double percentile(double fraction) const noexcept;

 private:
  std::array<std::uint64_t, 1000> bins_{};
  std::uint64_t count_ = 0;
  double sum_ = 0.0;
  double min_ = 1.0;
};

}  // namespace sluice
