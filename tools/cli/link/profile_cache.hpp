#pragma once

#include <filesystem>
#include <functional>
#include <memory>
#include <string>

#include "sluice/cuda.hpp"

namespace sluice::tools {

/// Transfer profiles that were measured without being asked for, one file per GPU in the user's cache.

/// $XDG_CACHE_HOME/sluice, else ~/.cache/sluice; empty if the environment names neither.
[[nodiscard]] std::filesystem::path cache_directory();

/// Name of the GPU's file: its name and place on the bus, in letters that every file system takes.
[[nodiscard]] std::string profile_file_name(const CudaDeviceFacts& facts);

/// The profile kept for this GPU under this driver; measured and kept if there is none, or none that can be read or
/// that was measured under the same facts. One line to `say` for a file that is there and cannot be read, as those of
/// an older version, and one for a profile that cannot be kept, which is used all the same.
/// @throws what `measure` throws.
[[nodiscard]] std::shared_ptr<const TransferProfile> cached_profile(
    const std::filesystem::path& directory, const CudaDeviceFacts& facts,
    const std::function<TransferProfile()>& measure, const std::function<void(const std::string&)>& say);

}  // namespace sluice::tools
