#pragma once

#include <cstdint>

namespace sluice::gpu {

/// A token that may be chosen, and the key that its score is ordered by.
struct Candidate {
  std::uint32_t key;
  std::uint32_t token;
};

/// What a query head's last choice lets expect of its next one.
struct HeadBound {
  /// Scores that reach this many times the query's length over that of the list's center are candidates; 0: nothing is
  /// known.
  float bound = 0.f;
  float margin = 0.f;  ///< as many times what is chosen are to be candidates; 0: nothing is known
};

/// Candidates of a layer's choices by top-k, found while keys are scored: what reaches a bound that goes by the step
/// before. It saves reading all scores once more; what is chosen does not depend on it. Device memory.
struct Foresight {
  HeadBound* bounds = nullptr;         ///< [lists, group]; null: nothing is foreseen
  std::uint32_t* counts = nullptr;     ///< [lists, group] candidates found, also of those there was no room for
  Candidate* candidates = nullptr;     ///< [lists, group, room], unordered
  std::uint32_t room = 0;
  /// [lists, head_dim] about the mean of the keys that came last. What a query gives all keys alike, as some channels
  /// of many models' keys are large and much the same, changes from query to query and says nothing of who is chosen.
  float* centers = nullptr;
  std::uint32_t head_dim = 0;
  float score_scale = 1.f;  ///< of what q and k multiply to
};

/// Part of a center that a new key replaces.
inline constexpr float kCenterStep = 1.f / 32;

}  // namespace sluice::gpu
