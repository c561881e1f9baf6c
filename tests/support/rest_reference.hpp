#pragma once

#include <cstdint>

#include "tests/support/reference.hpp"
#include "tests/support/story.hpp"

namespace sluice::test {

/// A policy of sinks, recent tokens and what query heads choose by 4-bit copies, with the mean of values for the rest.
struct RestPolicy {
  std::uint32_t sinks = 0;
  std::uint32_t recent = 1;
  std::uint32_t picks = 0;  ///< per query head
  double mass = 0.0;        ///< or, if this is not 0, the fewest that hold as much with sinks and recent tokens
  std::uint32_t page_tokens = 16;
};
/// What such a policy makes of a token, in float64: out is [q_heads, head_dim], lse [q_heads]. A group attends what any
/// of its heads chose; to each head the others weigh what their copies say, NaN nothing, and their value is the mean
/// over the full pages, or over 256 of them.
[[nodiscard]] Attention attended_with_rest(const Story& story, const AttentionShape& shape, std::uint32_t layer,
                                           std::uint32_t token, const RestPolicy& policy);

/// The same of a row of a team: its rows attend what any of their heads chose before `first`, the team's first token,
/// and of the team's tokens all up to their own.
struct RestTeam {
  std::uint32_t first = 0;
  std::uint32_t drafts = 1;
};
[[nodiscard]] Attention attended_with_rest(const Story& story, const AttentionShape& shape, std::uint32_t layer,
                                           const RestTeam& team, std::uint32_t draft, const RestPolicy& policy);

}  // namespace sluice::test
