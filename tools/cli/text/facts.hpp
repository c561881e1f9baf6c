#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "tools/cli/text/report.hpp"

namespace sluice::tools {

/// Version of this program, e.g. "0.2.0".
[[nodiscard]] const char* version() noexcept;

/// Memory of the machine and of this process, in bytes; 0 if the kernel does not say.
struct MemoryFacts {
  static constexpr std::uint64_t kNoLimit = ~std::uint64_t{0};
  std::uint64_t total = 0;
  std::uint64_t available = 0;            ///< what the kernel and the control groups leave; kNoLimit: neither says
  std::uint64_t locked_limit = kNoLimit;  ///< RLIMIT_MEMLOCK
};
[[nodiscard]] MemoryFacts memory_facts();

/// Model name of the first CPU, "unknown" if the kernel does not say.
[[nodiscard]] std::string cpu_model();
/// Bytes of the last-level cache; 32 MiB if the system does not say.
[[nodiscard]] std::uint64_t last_level_cache_bytes() noexcept;

/// The `host` object of a JSON report: cpu, isa, topology, memory, os, compiler, gpu. Never throws for a fact
/// that cannot be read; it is null then.
[[nodiscard]] Json host_facts();

}  // namespace sluice::tools
