#pragma once

#include <cstdint>

#include "sluice/prefill.hpp"
#include "sluice/units.hpp"

namespace sluice {

/// The newest queries of a chunk, which stand for all of it, are at most so many.
[[nodiscard]] constexpr std::uint32_t representative_rows(PrefillMode mode) noexcept {
  return mode == PrefillMode::minference ? 64 : kPrefillBlock;
}
/// What a choice of blocks has to look at.
enum class PromptLook : std::uint8_t {
  nothing,    ///< but lengths
  means,      ///< queries and keys, as means of blocks
  attention,  ///< these, and what the newest queries attend
};
[[nodiscard]] constexpr PromptLook looks_at(const PrefillSpec& spec) noexcept {
  if (spec.mode == PrefillMode::streaming) return PromptLook::nothing;
  if (spec.mode != PrefillMode::minference) return PromptLook::attention;
  switch (spec.minference.pattern) {
    case HeadPattern::a_shape: return PromptLook::nothing;
    case HeadPattern::block_sparse: return PromptLook::means;
    default: return PromptLook::attention;
  }
}
/// Chunks that see no more tokens than these attend them all.
[[nodiscard]] std::uint32_t dense_prompt_tokens(const PrefillSpec& spec) noexcept;

/// What FlexPrefill costs on a device besides the pairs that it keeps, in units of the time in which dense attention
/// computes one (query block, key block) pair of a query head. Measured; what PrefillMode::automatic goes by.
struct PrefillCosts {
  double per_chunk = 0.0;
  double per_key_block = 0.0;  ///< that the chunk sees
  double per_pair = 0.0;       ///< of a query block and any of these
};

/// What was found out about one query head of one chunk.
struct PrefillChoice {
  float divergence = 0.f;                             ///< FlexPrefill: Jensen-Shannon distance, [0, sqrt(ln 2)]
  std::uint32_t query_aware = 0;                      ///< 1: blocks were chosen per query block
  std::uint32_t columns = 0;                          ///< blocks of columns that were chosen (N_v)
  std::uint32_t diagonals = 0;                        ///< block offsets that were chosen (N_s)
  std::uint64_t kept = 0;                             ///< (query block, key block) pairs to compute
  std::uint64_t causal = 0;                           ///< and those that dense attention computes
  HeadPattern pattern = HeadPattern::vertical_slash;  ///< MInference: never `best`
};

/// How many blocks so many tokens fill, all but the last of them wholly.
[[nodiscard]] constexpr std::uint32_t prefill_blocks_of(std::uint32_t tokens) noexcept {
  return static_cast<std::uint32_t>(div_up(tokens, kPrefillBlock));
}
/// Block offsets, from a query block's own on, that the newest `window` tokens of any of its queries touch.
[[nodiscard]] constexpr std::uint32_t window_offsets(std::uint32_t window) noexcept {
  return prefill_blocks_of(window - 1) + 1;
}
/// Blocks of positions that the tokens [first, first + count) touch.
[[nodiscard]] constexpr std::uint32_t prefill_blocks(std::uint32_t first, std::uint32_t count) noexcept {
  return count == 0 ? 0 : (first + count - 1) / kPrefillBlock - first / kPrefillBlock + 1;
}
/// Words of one query block's bits when `keys` keys are visible to the chunk.
[[nodiscard]] constexpr std::uint32_t prefill_mask_words(std::uint32_t keys) noexcept {
  return static_cast<std::uint32_t>(div_up(div_up(keys, kPrefillBlock), 32));
}

}  // namespace sluice
