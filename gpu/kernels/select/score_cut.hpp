#pragma once

#include <algorithm>
#include <cstdint>

/// How the rows that a launch scores are cut into thread blocks.
namespace sluice::gpu::score_int4 {

inline constexpr std::uint32_t kBlocksPerSm = 2;
/// Tokens that a thread block scores in a turn.
inline constexpr std::uint32_t kBlockTokens = 256;
/// Turns of one thread block, at most: 264 blocks at once, of 132 multiprocessors, have all of half a million tokens of
/// 8 KV heads, or of 32 KV heads with 140,000 each, as one that comes later begins anew.
inline constexpr std::uint32_t kMostChunks = 72;

/// Thread block i of `blocks` has chunks of kBlockTokens tokens, at most `chunks`. Blocks take them in turn, as what
/// will be chosen is often close together, and candidates of a block that finds many would keep all others waiting.
struct Cut {
  std::uint32_t blocks = 0;  ///< of a row
  std::uint32_t chunks = 0;
  /// What the launch takes, in turns of a block. Blocks that find no room begin when others have ended, so that a few
  /// too many take it twice as long.
  std::uint32_t turns = 0;
};

inline constexpr std::uint32_t kMostWaves = 4;  ///< of thread blocks, more than it takes

/// @param rows  as long as the longest, which has `tokens`
/// @param room  thread blocks that run at once
[[nodiscard]] constexpr Cut cut_of(std::uint32_t rows, std::uint32_t tokens, std::uint32_t room) noexcept {
  constexpr std::uint32_t kBegin = 3;  // What a block takes before its first turn, about.
  const auto div_up = [](std::uint32_t a, std::uint32_t b) { return (a + b - 1) / b; };  // Every launch does it.
  const std::uint32_t all = div_up(tokens, kBlockTokens);
  Cut best;
  // As many rounds of blocks as it takes for each row to have one, and for none to have too many turns.
  const std::uint32_t first = div_up(rows * div_up(all, kMostChunks), room);
  for (std::uint32_t waves = first; waves < first + kMostWaves; ++waves) {
    const std::uint32_t blocks = std::min(waves * room / rows, all);
    const std::uint32_t chunks = div_up(all, blocks);
    const std::uint32_t turns = waves * (chunks + kBegin);
    if (best.blocks == 0 || turns < best.turns) best = {.blocks = blocks, .chunks = chunks, .turns = turns};
  }
  return best;
}

/// Thread blocks that run at once beside one more for each of `heads` rows.
[[nodiscard]] constexpr std::uint32_t room_beside(std::uint32_t heads, std::uint32_t multiprocessors) noexcept {
  const std::uint32_t room = multiprocessors * kBlocksPerSm;
  return std::max(heads, room - std::min(room, heads));
}

}  // namespace sluice::gpu::score_int4
