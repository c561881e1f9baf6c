#pragma once

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "sluice/device.hpp"
#include "sluice/tensor.hpp"

namespace sluice::tools {

/// Moves data between ordinary and device memory through one pinned buffer, piece by piece, and waits for each.
/// Device and stream must outlive it. Thread safety: the stream's.
/// @throws Error{Errc::timeout}, Error{Errc::device} from the calls that wait.
class Staging {
 public:
  static constexpr std::uint64_t kPieceBytes = 8 * 1024 * 1024;
  /// Writes the bytes from `offset` on into `piece`.
  using Fill = std::function<void(std::span<std::byte> piece, std::uint64_t offset)>;
  using Drain = std::function<void(std::span<const std::byte> piece, std::uint64_t offset)>;

  /// @param timeout  of the wait for one piece
  Staging(Device& device, Stream& stream, std::chrono::milliseconds timeout);
  void to_device(std::byte* to, std::uint64_t bytes, const Fill& fill);
  void to_host(const std::byte* from, std::uint64_t bytes, const Drain& drain);

 private:
  void copy(std::byte* to, const std::byte* from, std::uint64_t bytes);

  Stream& stream_;
  std::chrono::milliseconds timeout_;
  std::unique_ptr<Buffer> pinned_;
};

/// Carries q, k and v between a prompt cache in ordinary memory and an engine on a device.
class TensorCourier {
 public:
  /// What a tensor is says which memory receives it: until the next tensor of the same slot.
  enum Slot : std::uint8_t { q, k, v };

  TensorCourier(Device& device, Stream& stream, std::chrono::milliseconds timeout);
  /// @param dense  in ordinary memory, without gaps
  [[nodiscard]] TensorView to_device(Slot slot, const TensorView& dense);
  /// The result has the strides of `view`.
  [[nodiscard]] TensorView to_host(Slot slot, const TensorView& view);

 private:
  static constexpr std::size_t kSlots = 3;

  Device& device_;
  Staging staging_;
  std::array<std::unique_ptr<Buffer>, kSlots> near_;
  std::array<std::vector<std::byte>, kSlots> far_;
};

}  // namespace sluice::tools
