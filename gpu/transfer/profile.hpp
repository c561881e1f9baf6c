#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "sluice/cuda.hpp"

namespace sluice::gpu {

/// Crossovers of one H200 over PCIe 5, for devices that nobody has calibrated.
[[nodiscard]] std::shared_ptr<const TransferProfile> default_profile();

/// Reads a TransferProfile as a function of block size and count: log-log interpolation between its samples.
/// Immutable, so safe to share.
class PathChooser {
 public:
  /// Null: the default profile. @throws Error{Errc::invalid_argument} naming a sample that makes no sense.
  explicit PathChooser(std::shared_ptr<const TransferProfile> profile);

  struct Batch {
    bool to_device = true;
    bool may_stage = false;  ///< the sources may be read at once
    std::uint64_t block_bytes = 0;
    std::uint32_t blocks = 0;
  };
  /// The path with the lowest time; the copy engine if the profile knows none. One block is one copy anyway.
  [[nodiscard]] TransferPath choose(const Batch& batch) const noexcept;
  /// Infinite if the profile has no samples of the path in this direction.
  [[nodiscard]] double device_us(TransferPath path, const Batch& batch) const noexcept;
  [[nodiscard]] std::uint32_t gather_blocks() const noexcept { return profile_->gather_blocks; }

 private:
  /// Time over one axis, both in log2.
  struct Curve {
    double log_bytes = 0.0;
    std::vector<std::pair<double, double>> points;  ///< (log2 blocks, log2 us), rising in the first
  };
  using Surface = std::vector<Curve>;  ///< rising in log_bytes
  static constexpr std::size_t kPaths = 5;

  [[nodiscard]] const Surface& surface(TransferPath path, bool to_device) const noexcept {
    return surfaces_[static_cast<std::size_t>(path)][to_device ? 1 : 0];
  }

  std::shared_ptr<const TransferProfile> profile_;
  std::array<std::array<Surface, 2>, kPaths> surfaces_;
};

}  // namespace sluice::gpu
