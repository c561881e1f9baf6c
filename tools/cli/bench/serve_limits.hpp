#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <vector>

#include "tools/cli/engine_columns.hpp"

namespace sluice::tools {

/// What a run is bounded by, and what it has to hold. 0: not at all.
struct ServeLimits {
  /// Requests come for as many seconds; what has not ended half as long after is left as it is.
  double seconds = 0.0;
  double between_ms = 0.0;  ///< 99th percentile of the times between tokens
  double queued_s = 0.0;    ///< median of the times from arrival to admission; who is refused waits for ever

  [[nodiscard]] bool judge() const noexcept { return between_ms != 0.0 || queued_s != 0.0; }
};

/// What serving a load came to.
struct ServeResult {
  double seconds = 0.0;  ///< from the first request until the last has ended, or the run was left
  std::uint64_t requests = 0;
  std::uint64_t prompt_tokens = 0;    ///< that requests came with
  std::uint64_t answer_tokens = 0;    ///< that they were given
  std::uint64_t computed_tokens = 0;  ///< of prompts, those that came again behind a preemption included
  std::uint64_t preempted = 0;        ///< times that a request lost its memory
  std::uint64_t refused = 0;          ///< requests for which there is no room though they were alone
  std::uint64_t unfinished = 0;       ///< requests that had not ended, or not come, when the run was left
  std::uint64_t waiting = 0;          ///< of them, those that had never been admitted
  bool given_up = false;              ///< left as soon as a limit could not be held
  std::uint64_t forwards = 0;
  std::uint64_t replayed = 0;       ///< of them, those that were a graph
  std::uint64_t largest_batch = 0;  ///< requests that ran at once
  std::vector<double> first_ms;     ///< from a request's arrival to its first token
  std::vector<double> between_ms;   ///< from a token of a request to its next
  std::vector<double> queued_s;     ///< from its arrival to its admission, or until the run was left
  std::vector<double> decode_ms;    ///< of forwards without chunks of prompts
  std::vector<double> chunk_ms;     ///< of those with
  DecodeScore decoded;
};

/// Whether a run that has ended held the limits: nothing waits any more, and both percentiles are within them.
[[nodiscard]] bool holds(const ServeLimits& limits, const ServeResult& result);

/// Whether a run of requests that want `tokens` times between tokens in all, and of which so many have waited too long
/// already, those refused included, cannot hold them any more.
[[nodiscard]] bool lost(const ServeLimits& limits, std::uint64_t requests, std::uint64_t waited_too_long,
                        std::uint64_t tokens, std::uint64_t tokens_too_late) noexcept;

/// The last of ascending rates that holds, if all before it do and none behind it: asks for as few as that takes.
[[nodiscard]] std::optional<double> largest_that_holds(std::span<const double> rates,
                                                       const std::function<bool(double)>& holds);

}  // namespace sluice::tools
