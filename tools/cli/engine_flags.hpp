#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "sluice/engine.hpp"
#include "tools/cli/runtime_flags.hpp"

namespace sluice::tools {

/// Policies that one engine can serve: it has one page size, and one kind of digests.
struct EngineGroup {
  std::uint32_t page_tokens = 0;
  std::vector<std::size_t> policies;  ///< indices
};
[[nodiscard]] std::vector<EngineGroup> by_engine(std::span<const PolicySpec> policies, const RuntimeFlags& flags);

/// What an engine of one conversation at a time is sized to.
struct EngineRoom {
  std::uint32_t page_tokens = 16;
  std::uint32_t tokens = 0;  ///< of the longest sequence
  std::uint32_t apart = 0;   ///< tokens that a fork has beside those that it shares; 0: there are no forks
  double near = 0.0;         ///< share of the longest sequence that device memory has room for, unless flags say bytes
  PrefillSpec prefill{};
};

/// Options for sequences under any of the given policies, which decode one token at a time.
/// @throws Error{Errc::out_of_capacity} naming the size that would do, if the user's host size is too small;
/// Error{Errc::unsupported} if no engine serves a policy
[[nodiscard]] EngineOptions sized(const RuntimeFlags& flags, const AttentionShape& shape,
                                  std::span<const PolicySpec> policies, const EngineRoom& room);

/// The `config` part of a report.
[[nodiscard]] Json to_json(const EngineOptions& options);

/// @throws Error{Errc::invalid_argument} naming the first flag that is set and means nothing to an engine
void require_for_engine(const RuntimeFlags& flags);

}  // namespace sluice::tools
