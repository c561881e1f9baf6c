#pragma once

#include <cstdint>

#include "tools/cli/text/report.hpp"

namespace sluice::tools {

/// What a machine has, as far as options go by it. Sizes in bytes.
struct MachineRoom {
  std::uint64_t host_available = 0;  ///< 0: unknown
  std::uint32_t cores = 1;           ///< that the process may use
  std::uint64_t device_memory = 0;   ///< of the GPU; 0: there is none
};

/// Host memory for keys and values: three quarters of what is available, in whole GiB; in MiB below one.
[[nodiscard]] std::uint64_t recommended_host_bytes(const MachineRoom& room) noexcept;

/// Options to begin with on such a machine, as `run` and as the server calls them, and why.
[[nodiscard]] Table recommended_options(const MachineRoom& room);

}  // namespace sluice::tools
