#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "sluice/device.hpp"

namespace sluice {

/// How scattered blocks cross the link. Contiguous blocks always travel as one copy.
enum class TransferPath : std::uint8_t {
  automatic,    ///< the fastest for the batch by the device's TransferProfile
  copy_engine,  ///< one cudaMemcpyAsync per block
  batch,        ///< one cudaMemcpyBatchAsync per batch
  gather,       ///< a kernel of a few blocks that reads or writes host memory directly
  staged,       ///< the calling thread gathers into pinned memory, one copy from there (host to device only)
};

[[nodiscard]] constexpr const char* to_string(TransferPath path) noexcept {
  switch (path) {
    case TransferPath::automatic: return "auto";
    case TransferPath::copy_engine: return "copy-engine";
    case TransferPath::batch: return "batch";
    case TransferPath::gather: return "gather";
    case TransferPath::staged: return "staged";
  }
  return "unknown";
}

/// @throws Error{Errc::invalid_argument} that lists the paths.
[[nodiscard]] TransferPath parse_transfer_path(std::string_view text);

/// Measured cost of one batch of equal scattered blocks.
struct TransferSample {
  TransferPath path{};
  bool to_device = true;
  std::uint64_t block_bytes = 0;
  std::uint32_t blocks = 0;
  double host_us = 0.0;    ///< the enqueuing thread's time
  double device_us = 0.0;  ///< enqueue to landed
};

/// What a calibration found. `automatic` picks the path whose interpolated device_us is lowest.
struct TransferProfile {
  std::vector<TransferSample> samples;
  std::uint32_t gather_blocks = 16;  ///< thread blocks of the gather kernel: the fewest within 2% of the best rate
};

struct CudaDeviceOptions {
  int ordinal = 0;                                 ///< as CUDA counts them, CUDA_VISIBLE_DEVICES applied
  std::uint64_t memory_bytes = 0;                  ///< limit on `allocate`; 0 = what the device has
  std::chrono::milliseconds flag_timeout{30'000};  ///< how long a stream waits for a host flag
  TransferPath transfer = TransferPath::automatic;
  /// Null: built-in crossovers, measured on one H200 over PCIe 5.
  std::shared_ptr<const TransferProfile> profile{};
  /// Without a profile, and if `transfer` is automatic: measure one first, as calibrate_transfers does.
  bool calibrate_at_start = false;
  /// The verbs of a batch (Stream::begin_batch), as those of a step before its hand-over, are one CUDA graph.
  bool graphs = false;
};

/// What a TransferProfile holds for: this GPU in this place under this driver.
struct CudaDeviceFacts {
  std::string name;
  std::string pci_bus_id{};  ///< domain:bus:device.function
  int driver = 0;          ///< newest CUDA that the driver serves, as CUDA numbers versions: 13000
  friend bool operator==(const CudaDeviceFacts&, const CudaDeviceFacts&) = default;
};

/// @throws as make_cuda_device where there is no such GPU. Says nothing of whether the GPU can serve.
[[nodiscard]] CudaDeviceFacts cuda_device_facts(int ordinal = 0);

/// GPUs that this build can use; 0 without one, without a driver, or in a build without CUDA. Never throws.
[[nodiscard]] std::uint32_t cuda_devices() noexcept;

/// @throws Error{Errc::unsupported} in a build without CUDA, on a machine without driver or GPU, and for a GPU that
///         cannot serve; Error{Errc::device} naming the cause if there is no such GPU beside others, or if this build
///         has no kernels for it; if it is to calibrate, as calibrate_transfers.
[[nodiscard]] std::shared_ptr<Device> make_cuda_device(const CudaDeviceOptions& options = {});

/// Measures every path on an idle link for some 0.5 s. Allocates about 256 MiB on either side meanwhile.
/// @throws Error{Errc::out_of_capacity}; Error{Errc::device}; Error{Errc::invalid_argument} if `device` is no CUDA device.
[[nodiscard]] TransferProfile calibrate_transfers(Device& device);

}  // namespace sluice
