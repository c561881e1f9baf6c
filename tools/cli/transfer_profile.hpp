#pragma once

#include <memory>
#include <string>

#include "sluice/cuda.hpp"

namespace sluice::tools {

/// Transfer profiles as files, for `--transfer-profile`: written by `sluice link --save-profile`.
/// JSON: {schema_version, kind: "transfer_profile", device, gather_blocks,
///        samples: [{path, direction: "h2d"|"d2h", block_bytes, blocks, host_us, device_us}]}.

/// @throws Error{Errc::not_found} or Error{Errc::io} if the file cannot be read, Error{Errc::corrupt} naming what is
/// wrong with it.
[[nodiscard]] std::shared_ptr<const TransferProfile> load_transfer_profile(const std::string& path);

/// `device`: name of the GPU, for people. The file appears whole or not at all.  @throws Error{Errc::io}
void save_transfer_profile(const TransferProfile& profile, const std::string& device, const std::string& path);

}  // namespace sluice::tools
