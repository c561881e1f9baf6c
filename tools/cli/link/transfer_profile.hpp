#pragma once

#include <memory>
#include <string>

#include "sluice/cuda.hpp"

namespace sluice::tools {

/// Transfer profiles as files, for `--transfer-profile`: written by `sluice link --save-profile`.
/// JSON: {schema_version: 2, kind: "transfer_profile", device, pci_bus_id, cuda_driver, gather_blocks,
///        busy_gather_blocks,
///        samples: [{path, load: "idle"|"busy", direction: "h2d"|"d2h", block_bytes, blocks, host_us, device_us}]}.
/// Files of version 1 know no busy device and are refused.

/// @throws Error{Errc::not_found} or Error{Errc::io} if the file cannot be read, Error{Errc::corrupt} naming what is
/// wrong with it.
[[nodiscard]] std::shared_ptr<const TransferProfile> load_transfer_profile(const std::string& path);

/// As above, with the GPU that it was measured on; what the file does not say of it is empty.
struct MeasuredProfile {
  std::shared_ptr<const TransferProfile> profile;
  CudaDeviceFacts facts;
};
[[nodiscard]] MeasuredProfile load_measured_profile(const std::string& path);

/// The file appears whole or not at all.  @throws Error{Errc::io}
void save_transfer_profile(const TransferProfile& profile, const CudaDeviceFacts& facts, const std::string& path);

}  // namespace sluice::tools
