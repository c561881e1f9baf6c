#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "sluice/units.hpp"
#include "tools/cli/text/output.hpp"
#include "tools/cli/text/report.hpp"

namespace sluice::tools {

struct LinkOptions {
  int device = 0;
  bool quick = false;
  int samples = 5;            ///< per figure; the median counts
  int numa_node = -1;         ///< of the host's buffers; -1: the node nearest to the GPU
  std::uint64_t pin_gib = 1;  ///< to pin as an engine pins its pool; 0: do not
  std::string sections = "transfers,gather,load,latency,pinning";
  std::string profile;       ///< file to judge `auto` by; empty: calibrate
  std::string save_profile;  ///< file for the calibration; empty: none
  bool json = false;
  OutputOptions output;
};

/// What the link was found to do.
struct LinkFindings {
  Json facts = Json::object();  ///< for the report's `link` key
  std::vector<Table> tables{};
  std::vector<std::string> verdict{};  ///< sentences
};

/// @throws Error{Errc::unsupported} in a build without CUDA; Error{Errc::device} if bytes arrive wrong.
[[nodiscard]] LinkFindings measure_link(const LinkOptions& options);

}  // namespace sluice::tools
