#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "sluice/cuda.hpp"

namespace sluice::gpu {

/// Crossovers of one H200 over PCIe 5, for devices that were not calibrated.
[[nodiscard]] std::shared_ptr<const TransferProfile> default_profile();

/// Reads a TransferProfile as a function of block size and count. Between samples times run along straight lines, in
/// the count as in the size: a batch costs something to begin, each block something, and each byte.
/// Immutable, so safe to share.
class PathChooser {
 public:
  /// Null: the default profile. @throws Error{Errc::invalid_argument} naming a sample that makes no sense.
  explicit PathChooser(std::shared_ptr<const TransferProfile> profile);

  struct Batch {
    TransferLoad load{};
    bool to_device = true;
    bool may_stage = false;  ///< the sources may be read at once
    std::uint64_t block_bytes = 0;
    std::uint32_t blocks = 0;
  };
  /// The path with the lowest time; the copy engine if the profile knows none. One block is one copy anyway.
  [[nodiscard]] TransferPath choose(const Batch& batch) const noexcept;
  /// Infinite if the profile has no samples of the path in this direction.
  [[nodiscard]] double device_us(TransferPath path, const Batch& batch) const noexcept;
  [[nodiscard]] std::uint32_t gather_blocks(TransferLoad load) const noexcept {
    return load == TransferLoad::busy ? profile_->busy_gather_blocks : profile_->gather_blocks;
  }

 private:
  /// Times of one block size.
  struct Curve {
    double block_bytes = 0.0;
    std::vector<std::pair<double, double>> points;  ///< (blocks, us), rising in the first
  };
  using Surface = std::vector<Curve>;  ///< rising in block_bytes
  static constexpr std::size_t kPaths = 5;
  using Direction = std::array<Surface, kPaths>;

  [[nodiscard]] static std::size_t index(TransferLoad load, bool to_device) noexcept {
    return 2 * static_cast<std::size_t>(load) + (to_device ? 1 : 0);
  }

  std::shared_ptr<const TransferProfile> profile_;
  std::array<Direction, 4> directions_;  ///< to host and to device, idle and busy
};

}  // namespace sluice::gpu
