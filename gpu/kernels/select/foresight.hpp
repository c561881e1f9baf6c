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
  float bound = 0.f;   ///< scores that reach this many times the query's length are candidates; 0: nothing is known
  float margin = 0.f;  ///< as many times what is chosen are to be candidates; 0: nothing is known
};

/// Candidates of a layer's choices by top-k, found while keys are scored: what reaches a bound that goes by the step
/// before. It saves reading all scores once more; what is chosen does not depend on it. Device memory.
struct Foresight {
  HeadBound* bounds = nullptr;         ///< [lists, group]; null: nothing is foreseen
  std::uint32_t* counts = nullptr;     ///< [lists, group] candidates found, also of those there was no room for
  Candidate* candidates = nullptr;     ///< [lists, group, room], unordered
  std::uint32_t room = 0;
};

}  // namespace sluice::gpu
