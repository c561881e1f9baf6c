#pragma once

#include <cstdint>

#include "sluice/device.hpp"
#include "sluice/engine_options.hpp"
#include "tools/cli/text/command.hpp"

namespace sluice::tools {

/// `--fetch-share`: EngineOptions::fetch_share, or what the machine's rates advise.
struct FetchShare {
  float share = EngineOptions{}.fetch_share;
  bool advised = false;  ///< `auto`: `share` is to be what `advise` says
};

void add_fetch_share(CLI::App& app, FetchShare& share);

/// `auto` becomes a number by rates that are measured now, and is told on standard error; 0 without a GPU (`device`
/// null), where there is no link. `threads` of host work; 0: one per core.
void advise(FetchShare& share, const Device* device, std::uint32_t threads);

/// Where both placements are asked for: one that streams fetches everything.
[[nodiscard]] constexpr float share_for(PlacementMode placement, const FetchShare& share) noexcept {
  return placement == PlacementMode::hybrid ? share.share : 0.f;
}

}  // namespace sluice::tools
