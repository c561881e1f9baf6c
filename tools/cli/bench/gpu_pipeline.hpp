#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "tools/cli/bench/gpu_rig.hpp"
#include "tools/cli/text/progress_bar.hpp"
#include "tools/cli/text/report.hpp"

namespace sluice::tools {

/// Reads `on,off`: whether rows that were attended before come near, for each engine that is timed.
/// @throws Error{Errc::invalid_argument}
[[nodiscard]] std::vector<bool> parse_prefetch(const std::string& text);

/// Times forwards whose chosen rows cross the link: what the CPU takes to choose, how much of the link's time the
/// device waits, and what a layer may take by that. `cases` are of the placement `stream`. Adds its table, and to
/// `config` the rate of the link. Interrupted, it gives what is finished.
/// @throws Error{Errc::device} if outputs or the number of tokens attended depend on what is brought near
void bench_gpu_pipeline(GpuRig& rig, std::span<const std::uint32_t> lengths, std::vector<GpuCase> cases,
                        ProgressBar& bar, Report& report);

}  // namespace sluice::tools
