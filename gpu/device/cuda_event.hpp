#pragma once

#include <cuda_runtime_api.h>

#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "gpu/device/handles.hpp"
#include "gpu/device/watchdog.hpp"
#include "sluice/device.hpp"

namespace sluice::gpu {

struct DeviceCore;

/// What may make a point of a stream fail, besides CUDA itself.
struct Outcome {
  std::string reason;                            ///< empty unless something failed
  std::vector<std::shared_ptr<FlagWait>> waits;  ///< that may still turn out to have failed
};

/// Turns CUDA's elapsed times into points of the host's clock, by an event recorded on an idle stream of its own.
/// The anchor is always near the event in question, so neither drift nor rounding add up.
/// Thread safety: full.
class Timeline {
 public:
  Timeline();
  /// When a finished event happened: between `enqueued` and `seen`, when the host saw it done. Microseconds.
  [[nodiscard]] Clock::time_point time_of(cudaEvent_t event, Clock::time_point enqueued,
                                          Clock::time_point seen) noexcept;

 private:
  [[nodiscard]] bool anchor() noexcept;

  std::mutex mutex_;
  StreamHandle stream_;
  EventHandle base_;           ///< guarded by mutex_
  Clock::time_point base_at_;  ///< of base_; guarded by mutex_
};

class CudaEvent final : public Event {
 public:
  explicit CudaEvent(std::shared_ptr<DeviceCore> core);
  ~CudaEvent() override;

  [[nodiscard]] State state() const noexcept override;
  [[nodiscard]] std::string reason() const override;
  [[nodiscard]] Clock::time_point time() const noexcept override;

  /// A new point in place of the old one, at the end of `stream`.
  void record(cudaStream_t stream, Outcome outcome);
  /// Makes `stream` wait for the point and adds what may have failed there to `outcome`.
  void join(cudaStream_t stream, Outcome& outcome) const;

 private:
  [[nodiscard]] State state_locked() const noexcept;
  void fail_locked(const std::string& reason) const noexcept;

  const std::shared_ptr<DeviceCore> core_;
  const EventHandle event_;

  mutable std::mutex mutex_;           ///< guards everything below
  mutable State state_ = State::done;  ///< pending: not known to be anything else
  mutable Outcome outcome_;            ///< of the recorded point
  Clock::time_point enqueued_;         ///< before the event was recorded
  mutable Clock::time_point seen_;     ///< when it was first seen not to be pending
  mutable Clock::time_point passed_;   ///< when the stream got there, once asked
  mutable bool timed_ = false;         ///< passed_ is known
  bool recorded_ = false;              ///< event_ stands for the point
};

/// @throws Error{Errc::invalid_argument} naming the operation if the event is of another kind of device.
[[nodiscard]] CudaEvent& cuda_event(Event& event, const char* operation);
[[nodiscard]] const CudaEvent& cuda_event(const Event& event, const char* operation);

}  // namespace sluice::gpu
