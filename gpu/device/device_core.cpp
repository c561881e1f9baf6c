#include "gpu/device/device_core.hpp"

#include <cstring>
#include <string>
#include <utility>

#include "gpu/device/cuda_error.hpp"
#include "gpu/device/cuda_stream.hpp"
#include "gpu/device/driver.hpp"
#include "sluice/error.hpp"

namespace sluice::gpu {
namespace {

constexpr std::uint64_t kWordBytes = 64;
/// A full ring is patient enough to see the watchdog release the stream.
constexpr std::chrono::milliseconds kRingPatience{5'000};

bool has_memory_operations(int ordinal) {
#ifdef SLUICE_ORDERED_LAUNCHES
  // Tools that let one kernel run at a time would wait for a stream that waits for us.
  (void)ordinal;
  return false;
#else
  return Driver::instance().has_memory_operations(ordinal);
#endif
}

}  // namespace

void Ledger::charge(std::uint64_t bytes) {
  const std::lock_guard lock(mutex_);
  if (bytes > limit_ - used_)
    throw Error(Errc::out_of_capacity, "CUDA device: asked for " + std::to_string(bytes) + " bytes, " +
                                           std::to_string(limit_ - used_) + " of " + std::to_string(limit_) +
                                           " are free; give it larger memory_bytes (in Python "
                                           "device_bytes), or less near_bytes");
  used_ += bytes;
}

void Ledger::refund(std::uint64_t bytes) noexcept {
  const std::lock_guard lock(mutex_);
  used_ -= bytes;
}

Lane::Lane(int stream_priority, std::chrono::milliseconds timeout)
    : priority(stream_priority),
      stream(make_stream(stream_priority)),
      ring(stream.get(), {.timeout = timeout + kRingPatience}),
      transfer(stream.get(), ring),
      words(make_pinned_memory(kWordBytes, "pin a stream's words")) {
  std::memset(words.get(), 0, kWordBytes);
}

std::span<std::byte> Lane::scratch_memory() {
  if (scratch == nullptr) {
    DeviceMemory made = make_device_memory(CudaStream::kScratchBytes, "allocate a stream's scratch memory");
    check(cudaMemsetAsync(made.get(), 0, CudaStream::kScratchBytes, stream.get()), "clear a stream's scratch memory");
    scratch = std::move(made);
  }
  return {scratch.get(), CudaStream::kScratchBytes};
}

DeviceCore::DeviceCore(const CudaDeviceOptions& options, std::uint64_t limit)
    : ordinal(options.ordinal),
      flag_timeout(options.flag_timeout),
      path(options.transfer),
      memory_operations(has_memory_operations(options.ordinal)),
      chooser(options.profile),
      ledger(limit),
      watchdog(options.flag_timeout) {}

DeviceCore::~DeviceCore() {
  activate();
  idle_.clear();
}

std::unique_ptr<Lane> DeviceCore::take_lane(const std::string& name) {
  activate();
  int least = 0;
  int greatest = 0;
  check(cudaDeviceGetStreamPriorityRange(&least, &greatest), "ask for stream priorities");
  const int priority = name == "device" ? greatest : least;
  {
    const std::lock_guard lock(mutex_);
    for (auto& lane : idle_) {
      if (lane->priority != priority || cudaStreamQuery(lane->stream.get()) != cudaSuccess) continue;
      std::unique_ptr<Lane> taken = std::move(lane);
      std::erase(idle_, nullptr);
      return taken;
    }
    (void)cudaGetLastError();
  }
  return std::make_unique<Lane>(priority, flag_timeout);
}

void DeviceCore::give_back(std::unique_ptr<Lane> lane) noexcept {
  const std::lock_guard lock(mutex_);
  try {
    idle_.push_back(std::move(lane));
  } catch (...) {
    // Out of memory: push_back left the lane alone, and it is destroyed here, slowly.
  }
}

}  // namespace sluice::gpu
