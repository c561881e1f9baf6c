#pragma once

#include <cstdint>
#include <vector>

#include "scheduler/layer_policy.hpp"

namespace sluice::scheduler {

/// What a prompt's last queries attended, per query head of one KV head, in the form of eq. (4):
/// the share of attention per position and per distance, summed over the queries.
struct PromptAttention {
  std::uint32_t rows = 0;          ///< queries that saw a token beyond the sinks
  std::vector<float> by_position;  ///< [group, tokens - sinks]: entry j - sinks
  std::vector<float> by_distance;  ///< [group, tokens - sinks]: entry p - j for a query at position p
};

/// Softmax rows of the last `queries` prompt queries over the positions that each of them sees, sinks left
/// out and renormalised. Reads K once per 8 queries; holds 8 rows of scores at a time.
[[nodiscard]] PromptAttention attend_prompt(const PromptContext& prompt, std::uint32_t group, std::uint32_t sinks,
                                            std::uint32_t queries);

}  // namespace sluice::scheduler
