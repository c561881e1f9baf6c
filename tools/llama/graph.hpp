#pragma once

#include <cstddef>
#include <functional>
#include <memory>

#include "sluice/device.hpp"

namespace sluice::tools {

/// Work that was captured from a stream, to be enqueued there again and again.
class CapturedWork {
 public:
  virtual ~CapturedWork() = default;
  /// @throws Error{Errc::device}
  virtual void replay() = 0;
  /// Of its graph.
  [[nodiscard]] virtual std::size_t nodes() const noexcept = 0;
};

/// Whether forwards of an engine can be captured on the device's streams.
[[nodiscard]] bool can_capture(const Device& device, Handover handover = Handover::automatic) noexcept;
/// What `enqueue` puts on the stream, a cudaStream_t, which does not run.
/// @throws Error{Errc::device} if CUDA refuses, Error{Errc::unsupported} in a build without CUDA.
[[nodiscard]] std::unique_ptr<CapturedWork> capture(void* stream, const std::function<void()>& enqueue);

}  // namespace sluice::tools
