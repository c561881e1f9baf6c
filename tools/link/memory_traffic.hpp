#pragma once

#include <cuda_runtime_api.h>

#include <array>
#include <memory>

#include "gpu/device/cuda_device.hpp"
#include "gpu/device/handles.hpp"

namespace sluice::tools {

/// Keeps a device's memory as busy as attention does, without a gap, for as long as its caller renews it: two launches
/// of the memory load are queued, and one that has ended is replaced.
/// Destroyed, it waits for the end of both.
/// Thread safety: one thread.
class MemoryTraffic {
 public:
  /// @throws Error{Errc::out_of_capacity}
  explicit MemoryTraffic(gpu::CudaDevice& device);

  /// It goes on for at least another kSlice_us.
  void renew();
  /// Some of it is still queued or under way.
  [[nodiscard]] bool running() const;

  static constexpr std::uint32_t kSlice_us = 40'000;

 private:
  std::uint32_t thread_blocks_;
  std::unique_ptr<Buffer> memory_;
  std::unique_ptr<Buffer> moved_;
  std::unique_ptr<gpu::QueueStream> stream_;
  std::array<gpu::EventHandle, 2> ends_;
};

}  // namespace sluice::tools
