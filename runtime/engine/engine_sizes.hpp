#pragma once

#include <cstdint>
#include <optional>

#include "sluice/engine_options.hpp"
#include "sluice/page_rules.hpp"

namespace sluice::runtime {

/// What an engine has room for, of what policies want beside the features of the largest bucket. All of the runtime
/// reads these; EngineOptions only say what they are made of.
struct EngineSizes {
  std::uint32_t prompt_queries = 1;     ///< of a prompt's newest tokens, for each of EngineOptions::cpu_sequences
  std::uint32_t max_picks = 1;          ///< tokens that a query head may choose on the device
  std::uint32_t max_ranked = 1;         ///< pages that a query head may choose
  std::uint32_t max_window = 1;         ///< sinks and recent tokens of a policy, together
  std::uint32_t max_clusters = 1;       ///< of a KV head, for each of EngineOptions::cluster_sequences
  std::uint32_t code_bits = 0;          ///< of a channel of the copies of keys; 0: there are none
  std::optional<DigestKind> digests{};  ///< of full pages; none: they have none
  bool forecasts = false;               ///< what histories propose lies ready for the device
};

/// Of an engine with these options, whatever its device is.
[[nodiscard]] EngineSizes sizes_of(const EngineOptions& options) noexcept;

}  // namespace sluice::runtime
