#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "sluice/device.hpp"

namespace sluice::gpu {

struct DeviceCore;

// What CudaDevice allocates and registers, with the same errors. The device is current.

/// Charged to the device's ledger.
[[nodiscard]] std::unique_ptr<Buffer> allocate_device(std::shared_ptr<DeviceCore> core, std::uint64_t bytes);
[[nodiscard]] std::unique_ptr<Buffer> allocate_pinned(std::shared_ptr<DeviceCore> core, std::uint64_t bytes);
[[nodiscard]] std::unique_ptr<Registration> register_host(std::shared_ptr<DeviceCore> core,
                                                          std::span<std::byte> memory);

}  // namespace sluice::gpu
