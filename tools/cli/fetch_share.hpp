#pragma once

#include "sluice/engine_options.hpp"
#include "tools/cli/text/command.hpp"
#include "tools/cli/text/report.hpp"

namespace sluice::tools {

/// `--fetch-share`: EngineOptions::fetch_share, which `share` is unless it is given.
void add_fetch_share(CLI::App& app, float& share);

/// Where both placements are asked for: one that streams fetches everything.
[[nodiscard]] constexpr float share_for(PlacementMode placement, float share) noexcept {
  return placement == PlacementMode::hybrid ? share : 0.f;
}

/// "auto", or the share.
[[nodiscard]] Json fetch_share_json(float share);

}  // namespace sluice::tools
