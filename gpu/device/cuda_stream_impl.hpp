#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "gpu/device/cuda_stream.hpp"
#include "gpu/device/device_core.hpp"
#include "gpu/device/transfer_paths.hpp"

namespace sluice::gpu {

/// The CUDA stream behind CudaDevice::create_stream.
///
/// A failure is a reason that the next record or signal takes. What fails while it is enqueued is known at once;
/// what fails on the device is known to CUDA, whose error every later event reports. A flag that was waited for may
/// fail when the stream gets there, long after the next event was recorded, so the event looks at it once it is
/// passed. A *signalled flag* cannot: it is raised by the stream itself, so it fails for flags that are known to
/// have failed when `signal` is called, and the next event fails for the others.
class QueueStream final : public CudaStream {
 public:
  QueueStream(std::shared_ptr<DeviceCore> core, std::string name);
  /// Releases the stream's flag waits and gives it a moment to drain; what then still waits for another stream runs
  /// when that comes.
  ~QueueStream() override;

  void copy(std::span<const Copy> batch) override;
  void fill(std::span<std::byte> memory, std::byte value) override;
  void record(Event& event) override;
  void wait(const Event& event) override;
  void signal(Flag& flag, std::uint64_t value) override;
  void wait(const Flag& flag, std::uint64_t value) override;
  void synchronize(Deadline deadline) override;
  [[nodiscard]] void* native_handle() const noexcept override;

  [[nodiscard]] cudaStream_t handle() const noexcept override;
  [[nodiscard]] ParamRing& params() noexcept override { return lane_->ring; }
  [[nodiscard]] std::span<std::byte> scratch() override { return lane_->scratch_memory(); }
  void fail(const std::string& reason) noexcept override;

  /// As `copy`, on a path of the caller's choice.
  void copy(std::span<const Copy> batch, const PathChoice& choice);
  /// Where the last batch went.
  [[nodiscard]] TransferPath last_path() const noexcept { return lane_->transfer.last_path(); }

 private:
  template <class Enqueue>
  void attempt(const char* what, Enqueue&& enqueue);
  void require_pinned(const Flag& flag, const char* operation) const;
  void sift_waits();
  void wait_on_host(const Flag& flag, std::uint64_t value);
  [[nodiscard]] Transfer::Order order();

  const std::shared_ptr<DeviceCore> core_;
  const std::string name_;
  std::unique_ptr<Lane> lane_;
  Outcome outcome_;  ///< since the last event
  /// The stream may hold work that writes or awaits host memory, so sources of a copy must not be read early.
  /// `handle` is how such work of others gets in: for verbs at once, for callers who keep it at any time.
  mutable bool dirty_ = false;
  mutable bool shared_ = false;  ///< the native handle was given away
};

}  // namespace sluice::gpu
