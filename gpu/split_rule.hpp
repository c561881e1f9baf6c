#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>

/// Who attends what `split` finds, as far as numbers alone say it: for who launches it, and for who plans without a GPU.
namespace sluice::gpu {

/// Far rows that a thread block has room for that attends them itself, see CudaDeviceOptions::link_rows; and of a list.
inline constexpr std::uint32_t kMostLinkRows = 32;
inline constexpr std::uint32_t kMostListLinkRows = 64;

/// Thread blocks that look after one row and KV head, at most.
inline constexpr std::uint32_t kMostSplitBlocks = 8;
/// Tokens of a sequence from which each of them is worth another one: as many as one reads at once.
inline constexpr std::uint32_t kSplitBlockTokens = 2048;
/// Longer sequences attend so many near rows that more multiprocessors than split has blocks for are worth a launch.
inline constexpr std::uint32_t kMostSplitTokensAttended = 1u << 18;

/// Of `most` blocks of a list, enough for all lists to fill the device about twice.
[[nodiscard]] constexpr std::uint32_t split_blocks_wanted(std::uint32_t lists, std::uint32_t tokens,
                                                          std::uint32_t multiprocessors, std::uint32_t most) noexcept {
  const std::uint32_t wanted = std::min(2 * multiprocessors / lists, tokens / kSplitBlockTokens);
  return std::bit_floor(std::clamp(wanted, 1u, most));
}

/// Of these, those of a list that attend what they find near, one on a multiprocessor; 0: another kernel does that.
[[nodiscard]] constexpr std::uint32_t split_blocks_attending(std::uint32_t blocks, std::uint32_t lists,
                                                             std::uint32_t tokens,
                                                             std::uint32_t multiprocessors) noexcept {
  if (lists > multiprocessors || tokens > kMostSplitTokensAttended) return 0;
  const std::uint32_t attending = std::min(blocks, std::bit_floor(multiprocessors / lists));
  // The largest clusters are fast where many multiprocessors are free. (One H100, us a layer at 32K tokens, apart and
  // so: one row 58 and 55, two 94 and 97, four 148 and 149, eight 233 and 220.)
  return attending == kMostSplitBlocks && 2 * lists * attending > multiprocessors ? 0 : attending;
}

/// Far rows of a list up to which blocks that attend take these, too, of `link_rows` of a layer.
[[nodiscard]] constexpr std::uint32_t list_link_rows(std::uint32_t link_rows, std::uint32_t lists) noexcept {
  return std::min(kMostListLinkRows, link_rows / lists);
}

}  // namespace sluice::gpu
