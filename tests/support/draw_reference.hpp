#pragma once

#include <cstdint>
#include <optional>

#include "sluice/step/sample.hpp"
#include "tests/support/reference.hpp"
#include "tests/support/story.hpp"

namespace sluice::test {

/// A policy `exact | int4 | sample=M`, or `sample=M,error=E,most=B`.
struct DrawPolicy {
  std::uint32_t sinks = 0;
  std::uint32_t recent = 1;
  std::uint32_t drawn = 0;  ///< M
  double error = 0.0;       ///< E; 0: every head draws M
  std::uint32_t most = 0;   ///< B
  std::uint32_t seed = 1;
  std::uint32_t redraw = 0;
  bool group_draws = false;
};

/// New tokens of a sequence that choose together, see Story::Together; one by itself if `drafts` is 0.
struct DrawTeam {
  std::uint32_t first = 0;
  std::uint32_t drafts = 0;
  std::uint32_t draft = 0;  ///< whose output this is
};

/// What the query heads of a layer get, in float64. Nothing if a head's scores are so close where it stops to draw, or
/// its error bar so close to E, that float32 may draw others.
[[nodiscard]] std::optional<Attention> attended_with_draws(const Story& story, const AttentionShape& shape,
                                                           std::uint32_t layer, const DrawTeam& team,
                                                           const DrawPolicy& policy);

}  // namespace sluice::test
