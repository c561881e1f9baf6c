#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "gpu/device/cuda_event.hpp"
#include "gpu/device/handles.hpp"
#include "gpu/device/memory_map.hpp"
#include "gpu/device/param_ring.hpp"
#include "gpu/device/path_chooser.hpp"
#include "gpu/device/transfer_paths.hpp"
#include "gpu/device/watchdog.hpp"
#include "sluice/cuda.hpp"

namespace sluice::gpu {

/// Bytes of `allocate` in use, against the limit. Thread safety: full.
class Ledger {
 public:
  explicit Ledger(std::uint64_t limit) noexcept : limit_(limit) {}
  /// @throws Error{Errc::out_of_capacity}
  void charge(std::uint64_t bytes);
  void refund(std::uint64_t bytes) noexcept;

 private:
  const std::uint64_t limit_;
  std::mutex mutex_;
  std::uint64_t used_ = 0;  ///< guarded by mutex_
};

/// A CUDA stream with the memory that its work needs. Kept by the device when its Stream goes: freeing memory would
/// wait for every other stream of the device, and one of them may wait for a flag.
struct Lane {
  Lane(int priority, std::chrono::milliseconds timeout);

  int priority;
  StreamHandle stream;
  DeviceMemory scratch;  ///< none until `scratch_memory` is called
  ParamRing ring;
  Transfer transfer;
  PinnedMemory words;             ///< the first is the ticket of the last wait that the stream got to
  std::uint64_t next_ticket = 1;  ///< rises over the lane's whole life
  /// @throws Error{Errc::out_of_capacity}
  [[nodiscard]] std::span<std::byte> scratch_memory();
  [[nodiscard]] std::uint64_t* arrived() const noexcept { return reinterpret_cast<std::uint64_t*>(words.get()); }
};

/// What a device and everything made by it share; the last of them destroys it.
struct DeviceCore {
  /// The device of `options.ordinal` is current. `limit`: bytes that may be allocated.
  DeviceCore(const CudaDeviceOptions& options, std::uint64_t limit);
  ~DeviceCore();
  DeviceCore(const DeviceCore&) = delete;
  DeviceCore& operator=(const DeviceCore&) = delete;

  /// Makes the device current on the calling thread, which is cheap where it already is.
  void activate() const noexcept { (void)cudaSetDevice(ordinal); }
  /// Highest priority for the stream named "device": near attention goes before what merely prepares.
  [[nodiscard]] std::unique_ptr<Lane> take_lane(const std::string& name);
  void give_back(std::unique_ptr<Lane> lane) noexcept;

  const int ordinal;
  const std::chrono::milliseconds flag_timeout;
  const TransferPath path;
  const bool memory_operations;  ///< streams write and wait for words by themselves
  PathChooser chooser;
  Ledger ledger;
  MemoryMap memory;
  Timeline timeline;
  Watchdog watchdog;

 private:
  std::mutex mutex_;
  std::vector<std::unique_ptr<Lane>> idle_;  ///< given back; some may still have work queued; guarded by mutex_
};

}  // namespace sluice::gpu
