#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "sluice/device.hpp"

namespace sluice::gpu {

class ParamRing;

/// A CUDA stream behind the Stream contract; see CudaDevice::create_stream.
class CudaStream : public Stream {
 public:
  [[nodiscard]] virtual cudaStream_t handle() const noexcept = 0;
  /// Pinned memory through which verbs hand task descriptors to kernels of this stream.
  [[nodiscard]] virtual ParamRing& params() noexcept = 0;
  /// Device memory for partial results of split work: private to the stream, so that verbs need not allocate, and
  /// free again when a verb's last kernel is done. The first kCounterBytes are zero, and every kernel that uses them
  /// leaves them zero. Allocated by the first call.
  /// @throws Error{Errc::out_of_capacity}
  [[nodiscard]] virtual std::span<std::byte> scratch() = 0;
  static constexpr std::uint64_t kCounterBytes = 64 * KiB;
  static constexpr std::uint64_t kScratchBytes = 32 * MiB;
  /// Fails the next event or flag of the stream with this reason, unless something failed before.
  virtual void fail(const std::string& reason) noexcept = 0;
};

/// @throws Error{Errc::invalid_argument} naming the verb if the stream is null or of another device.
[[nodiscard]] CudaStream& cuda_stream(Stream* stream, const char* verb);

}  // namespace sluice::gpu
