#include "gpu/device/buffers.hpp"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstring>
#include <limits>
#include <string>
#include <utility>

#include "gpu/device/cuda_error.hpp"
#include "gpu/device/device_core.hpp"
#include "gpu/device/handles.hpp"
#include "sluice/error.hpp"
#include "sluice/units.hpp"

namespace sluice::gpu {
namespace {

constexpr std::uint64_t kAlignment = 4 * KiB;

std::uint64_t free_bytes() noexcept {
  std::size_t free = 0;
  std::size_t total = 0;
  if (cudaMemGetInfo(&free, &total) != cudaSuccess) (void)cudaGetLastError();
  return free;
}

/// Of size `bytes`, rounded up so that every buffer has an address of its own; 0 if no machine has that much.
std::uint64_t rounded(std::uint64_t bytes) noexcept {
  if (bytes > static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max()) - 2 * kAlignment) return 0;
  return div_up(std::max<std::uint64_t>(bytes, 1), kAlignment) * kAlignment;
}

std::byte* aligned(std::byte* memory) noexcept {
  return reinterpret_cast<std::byte*>(div_up(reinterpret_cast<std::uintptr_t>(memory), kAlignment) * kAlignment);
}

/// CUDA aligns to 256 bytes only, and large pieces to more.
DeviceMemory take_device(std::uint64_t bytes) {
  const auto allocate = [](std::uint64_t size) {
    void* memory = nullptr;
    if (cudaMalloc(&memory, size) != cudaSuccess) (void)cudaGetLastError();
    return DeviceMemory(static_cast<std::byte*>(memory));
  };
  const std::uint64_t size = rounded(bytes);
  DeviceMemory memory = size == 0 ? DeviceMemory() : allocate(size);
  if (memory && aligned(memory.get()) != memory.get()) memory = allocate(size + kAlignment);
  if (!memory)
    throw Error(Errc::out_of_capacity, "CUDA device: asked for " + std::to_string(bytes) + " bytes, the GPU has " +
                                           std::to_string(free_bytes()) +
                                           " free; cache less near, or free memory of other programs on the GPU");
  return memory;
}

PinnedMemory take_pinned(std::uint64_t bytes) {
  void* memory = nullptr;
  const std::uint64_t size = rounded(bytes);
  const cudaError_t status =
      size == 0 ? cudaErrorMemoryAllocation : cudaHostAlloc(&memory, size, cudaHostAllocPortable | cudaHostAllocMapped);
  if (status != cudaSuccess) {
    (void)cudaGetLastError();
    throw Error(Errc::out_of_capacity, "CUDA device: cannot pin " + std::to_string(bytes) + " bytes of host memory: " +
                                           describe(status) + "; free host memory or raise `ulimit -l`");
  }
  std::memset(memory, 0, size);
  return PinnedMemory(static_cast<std::byte*>(memory));
}

/// Removes a range from what the device knows, before it goes.
void forget(DeviceCore& core, std::span<const std::byte> memory) noexcept {
  core.activate();
  core.watchdog.forget(memory);
  core.memory.erase(memory.data());
}

/// Memory that CUDA has just given out overlaps nothing that is still in use.
void remember(DeviceCore& core, std::span<const std::byte> memory, MemoryKind kind) {
  if (!core.memory.insert(memory, kind))
    throw Error(Errc::device,
                "CUDA device: the driver returned memory that a buffer of this device still "
                "has; other code must not free a buffer's memory");
}

class DeviceBuffer final : public Buffer {
 public:
  DeviceBuffer(std::shared_ptr<DeviceCore> core, std::uint64_t bytes) : core_(std::move(core)), bytes_(bytes) {
    core_->ledger.charge(bytes);
    try {
      memory_ = take_device(bytes);
      remember(*core_, known(), MemoryKind::device);
    } catch (...) {
      core_->ledger.refund(bytes);
      throw;
    }
  }
  ~DeviceBuffer() override {
    forget(*core_, known());
    memory_.reset();
    core_->ledger.refund(bytes_);
  }
  [[nodiscard]] std::byte* data() const noexcept override { return aligned(memory_.get()); }
  [[nodiscard]] std::uint64_t bytes() const noexcept override { return bytes_; }

 private:
  [[nodiscard]] std::span<const std::byte> known() const noexcept { return {data(), rounded(bytes_)}; }

  std::shared_ptr<DeviceCore> core_;
  std::uint64_t bytes_;
  DeviceMemory memory_;
};

class PinnedBuffer final : public Buffer {
 public:
  PinnedBuffer(std::shared_ptr<DeviceCore> core, std::uint64_t bytes)
      : core_(std::move(core)), bytes_(bytes), memory_(take_pinned(bytes)) {
    remember(*core_, known(), MemoryKind::pinned);
  }
  ~PinnedBuffer() override { forget(*core_, known()); }
  [[nodiscard]] std::byte* data() const noexcept override { return memory_.get(); }
  [[nodiscard]] std::uint64_t bytes() const noexcept override { return bytes_; }

 private:
  [[nodiscard]] std::span<const std::byte> known() const noexcept { return {memory_.get(), rounded(bytes_)}; }

  std::shared_ptr<DeviceCore> core_;  ///< outlives the memory
  std::uint64_t bytes_;
  PinnedMemory memory_;
};

class HostRegistration final : public Registration {
 public:
  HostRegistration(std::shared_ptr<DeviceCore> core, std::span<std::byte> memory)
      : core_(std::move(core)), memory_(memory) {
    if (memory.empty()) throw Error(Errc::device, "CUDA device: there is no memory to register");
    if (!core_->memory.insert(memory, MemoryKind::pinned))
      throw Error(Errc::device, "CUDA device: part of the memory is already registered; unregister it first");
    const cudaError_t status =
        cudaHostRegister(memory.data(), memory.size(), cudaHostRegisterPortable | cudaHostRegisterMapped);
    if (status == cudaSuccess) return;
    (void)cudaGetLastError();
    core_->memory.erase(memory.data());
    throw Error(Errc::device, "CUDA device: cannot pin " + std::to_string(memory.size()) +
                                  " bytes of host memory: " + describe(status) + refusal_remedy(status));
  }
  ~HostRegistration() override {
    forget(*core_, memory_);
    (void)cudaHostUnregister(memory_.data());
    (void)cudaGetLastError();
  }

 private:
  [[nodiscard]] static const char* refusal_remedy(cudaError_t status) noexcept {
    return status == cudaErrorHostMemoryAlreadyRegistered
               ? "; another registration holds one of its pages"
               : "; raise the limit by `ulimit -l unlimited`, pin less, or pin it in smaller pieces";
  }

  std::shared_ptr<DeviceCore> core_;
  std::span<std::byte> memory_;
};

}  // namespace

std::unique_ptr<Buffer> allocate_device(std::shared_ptr<DeviceCore> core, std::uint64_t bytes) {
  return std::make_unique<DeviceBuffer>(std::move(core), bytes);
}

std::unique_ptr<Buffer> allocate_pinned(std::shared_ptr<DeviceCore> core, std::uint64_t bytes) {
  return std::make_unique<PinnedBuffer>(std::move(core), bytes);
}

std::unique_ptr<Registration> register_host(std::shared_ptr<DeviceCore> core, std::span<std::byte> memory) {
  return std::make_unique<HostRegistration>(std::move(core), memory);
}

}  // namespace sluice::gpu
