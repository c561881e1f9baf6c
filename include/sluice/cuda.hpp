#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "sluice/device.hpp"
#include "sluice/error.hpp"

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

/// What else the device does while blocks cross the link.
enum class TransferLoad : std::uint8_t {
  idle,  ///< nothing that its memory would notice
  busy,  ///< work that its memory limits, as decoding is at small batches: attention, and a model's products
};

[[nodiscard]] constexpr const char* to_string(TransferLoad load) noexcept {
  return load == TransferLoad::idle ? "idle" : "busy";
}

/// Longest time of a sample, eleven days: what is drawn through samples and beyond them stays finite.
inline constexpr double kMostTransfer_us = 1e12;

/// Measured cost of one batch of equal scattered blocks.
struct TransferSample {
  TransferPath path{};
  TransferLoad load{};
  bool to_device = true;
  std::uint64_t block_bytes = 0;
  std::uint32_t blocks = 0;
  double host_us = 0.0;    ///< the enqueuing thread's time
  double device_us = 0.0;  ///< enqueue to landed. (0, kMostTransfer_us]
};

/// What a calibration found. `automatic` picks the path whose interpolated device_us is lowest, by the idle samples.
/// The busy ones are for copies of which the device is told that it has other work; a direction without any has the
/// idle ones for both.
struct TransferProfile {
  std::vector<TransferSample> samples;
  /// Thread blocks of the gather kernel: the fewest near the best rate.
  std::uint32_t gather_blocks = 16;
  std::uint32_t busy_gather_blocks = 16;  ///< the same beside work that keeps the device's memory busy, at most 16
};

struct CudaDeviceOptions {
  int ordinal = 0;                                 ///< as CUDA counts them, CUDA_VISIBLE_DEVICES applied
  std::uint64_t memory_bytes = 0;                  ///< limit on `allocate`; 0 = what the device has
  std::chrono::milliseconds flag_timeout{30'000};  ///< how long a stream waits for a host flag
  TransferPath transfer = TransferPath::automatic;
  /// Null: built-in crossovers, measured on one H200 over PCIe 5.
  std::shared_ptr<const TransferProfile> profile{};
  /// Far rows of a layer, at most, that the device attends itself, over the link, rather than ask the CPU: each KV head
  /// of each sequence as many as its share of them, up to 64, and 32 of what one thread block looks after (where a
  /// bucket has less than 4,096 tokens, that is all), and none if it has more far rows. A layer all of whose far rows
  /// are attended so waits for no answer. Where the device finds and attends near rows in one kernel: few sequences
  /// that choose by score, on GPUs with thread block clusters. Rows that cross the link count as fetched. What is
  /// attended does not depend on it. 0: none. Measured on an H200 over PCIe 5: docs/design.md.
  std::uint32_t link_rows = 384;
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
///         has no kernels for it.
[[nodiscard]] std::shared_ptr<Device> make_cuda_device(const CudaDeviceOptions& options = {});

}  // namespace sluice
