#pragma once

#include <cstdint>
#include <vector>

#include "sluice/prefill.hpp"
#include "tests/support/flexprefill_reference.hpp"
#include "tests/support/prompt.hpp"

/// StreamingLLM's mask and MInference's patterns once more in float64, by their definitions.
namespace sluice::test {

struct PatternChoice {
  std::vector<HeadPattern> may_be{};  ///< more than one where two hold nearly the same
  BlockMask sure{};                   ///< every device keeps these
  BlockMask possible{};               ///< and none keeps others
  std::uint64_t causal = 0;
};

namespace reference {

/// By all pairs of a position of the query block and a key: nothing rounds, so that every device keeps the same.
[[nodiscard]] BlockMask streaming(std::uint32_t first, std::uint32_t count, const StreamingPrefillSpec& spec);
[[nodiscard]] PatternChoice minference(const Prompt& prompt, std::uint32_t head, std::uint32_t first,
                                       std::uint32_t count, const MInferenceSpec& spec);

}  // namespace reference
}  // namespace sluice::test
