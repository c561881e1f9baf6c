#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "tools/cli/bench/gpu_rig.hpp"
#include "tools/cli/text/progress_bar.hpp"
#include "tools/cli/text/report.hpp"

namespace sluice::tools {

/// Times forwards of an engine beside dense attention in device memory: the table, and tables of costs and of
/// traces; and what was traced, for its file. Interrupted, it gives what is finished.
[[nodiscard]] std::string bench_gpu_attention(GpuRig& rig, std::span<const std::uint32_t> lengths,
                                              std::vector<GpuCase> cases, ProgressBar& bar, Report& report);

}  // namespace sluice::tools
