#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "gpu/device/cuda_stream_impl.hpp"
#include "gpu/device/device_core.hpp"
#include "gpu/forward/forward_verbs.hpp"
#include "gpu/kernels/load_all.hpp"
#include "sluice/cuda.hpp"
#include "sluice/device.hpp"

namespace sluice::gpu {

/// Least compute capability, before the dot: the kernels use asynchronous copies and bf16 products.
inline constexpr int kLeastMajor = 8;

/// One GPU behind the Device contract, on the primary context that all CUDA code of the process shares.
/// Host memory that its streams touch by kernels or flags must be pinned: `allocate_pinned`, `register_host`, or
/// CUDA's own calls. Flags that a stream waits for may go when the stream has passed them, if their memory is the
/// device's; in memory of others, when the next event of the stream was seen done as well.
/// Freeing device or pinned memory waits for the device, as CUDA does.
/// Thread safety: as Device.
class CudaDevice final : public Device {
 public:
  /// @throws see make_cuda_device.
  explicit CudaDevice(const CudaDeviceOptions& options);
  ~CudaDevice() override;

  [[nodiscard]] const DeviceInfo& info() const noexcept override { return info_; }
  [[nodiscard]] sluice::ForwardVerbs* forward_verbs() noexcept override { return forward_verbs_.get(); }
  [[nodiscard]] std::unique_ptr<Buffer> allocate(std::uint64_t bytes) override;
  [[nodiscard]] std::unique_ptr<Buffer> allocate_pinned(std::uint64_t bytes) override;
  [[nodiscard]] std::unique_ptr<Registration> register_host(std::span<std::byte> memory) override;
  [[nodiscard]] std::unique_ptr<Stream> create_stream(const std::string& name) override;
  [[nodiscard]] std::unique_ptr<Event> create_event() override;
  /// The link as the transfer profile has it.
  [[nodiscard]] DeviceRates rates(std::uint64_t page_bytes) const override;

  /// As create_stream, for callers that choose paths.
  [[nodiscard]] std::unique_ptr<QueueStream> create_queue(const std::string& name);
  [[nodiscard]] const PathChooser& chooser() const noexcept { return core_->chooser; }
  [[nodiscard]] bool memory_operations() const noexcept { return core_->memory_operations; }
  [[nodiscard]] std::uint32_t multiprocessors() const noexcept { return multiprocessors_; }
  [[nodiscard]] const KernelLimits& limits() const noexcept { return limits_; }
  [[nodiscard]] int ordinal() const noexcept { return core_->ordinal; }

 private:
  DeviceInfo info_;
  std::uint32_t multiprocessors_ = 0;
  double peak_memory_gbps_ = 0.0;  ///< 0 if unknown
  std::shared_ptr<DeviceCore> core_;
  KernelLimits limits_;
  std::unique_ptr<ForwardVerbs> forward_verbs_;
};

/// See cuda_device_facts.
[[nodiscard]] CudaDeviceFacts facts_of(int ordinal);

/// @throws Error{Errc::invalid_argument} naming the operation if it is no CUDA device.
[[nodiscard]] CudaDevice& cuda_device(Device& device, const char* operation);

}  // namespace sluice::gpu
