#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "sluice/cuda.hpp"
#include "sluice/device.hpp"
#include "tools/cli/text/command.hpp"

namespace sluice::tools {

/// Where near pages live: `host`, or `cuda` with an optional ordinal, and how blocks cross the link.
struct DeviceFlags {
  std::string device = "host";
  std::string transfer = "auto";
  std::string transfer_profile = "auto";  ///< auto, none, or a file that `sluice link --save-profile` wrote
  std::uint32_t link_rows = CudaDeviceOptions{}.link_rows;
};

void add_device_flags(CLI::App& app, DeviceFlags& flags);

/// Null for the embedded host device. With `auto` the transfer profile of the GPU is measured once per user and
/// driver, see profile_cache.hpp; that and what may go wrong with it is told on standard error.
/// @throws Error{Errc::invalid_argument} naming the flag; else as make_cuda_device.
[[nodiscard]] std::shared_ptr<Device> make_device(const DeviceFlags& flags);

}  // namespace sluice::tools
