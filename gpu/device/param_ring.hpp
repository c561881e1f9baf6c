#pragma once

#include <cuda_runtime_api.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "sluice/units.hpp"

namespace sluice::gpu {

/// Pinned, device-readable memory for the arguments of queued kernels: written by the host when a verb is
/// enqueued, read by the kernel over the link when it runs. A ring of segments; a segment is used again once the
/// stream has passed the event that closed it, so a full ring makes the enqueuing thread wait, bounded.
/// Thread safety: the stream's.
class ParamRing {
 public:
  struct Options {
    std::uint64_t segment_bytes = 1 * MiB;
    std::chrono::milliseconds timeout{30'000};
  };
  ParamRing(cudaStream_t stream, const Options& options);
  ~ParamRing();
  ParamRing(const ParamRing&) = delete;
  ParamRing& operator=(const ParamRing&) = delete;

  /// Memory for one verb, 16-byte aligned; valid until the stream has passed what is enqueued next.
  /// @throws Error{Errc::out_of_capacity} for more than a segment, Error{Errc::timeout} if the stream does not move.
  [[nodiscard]] std::byte* take(std::uint64_t bytes);
  template <class T>
  [[nodiscard]] std::span<T> take_array(std::uint64_t count) {
    return {reinterpret_cast<T*>(take(count * sizeof(T))), count};
  }
  [[nodiscard]] std::uint64_t largest() const noexcept { return options_.segment_bytes; }

 private:
  static constexpr std::size_t kSegments = 4;
  void open_next();

  cudaStream_t stream_;
  Options options_;
  std::byte* memory_ = nullptr;
  std::array<cudaEvent_t, kSegments> passed_{};
  std::size_t segment_ = 0;
  std::uint64_t used_ = 0;
};

}  // namespace sluice::gpu
