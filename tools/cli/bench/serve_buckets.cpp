#include "tools/cli/bench/serve_buckets.hpp"

#include <algorithm>

#include "sluice/units.hpp"

namespace sluice::tools {

DecodeSizes::DecodeSizes(const DecodeRoom& room) : room_(room) {
  for (std::uint32_t rows = 1; rows < room.rows; rows *= 2) rows_.push_back(rows);
  rows_.push_back(room.rows);
  // What is launched for a short sequence in a graph of a longer one ends at once; half of it is little.
  constexpr std::uint32_t kHalvings = 3, kLeast = 1024;
  const auto whole_pages = [&](std::uint32_t tokens) {
    return static_cast<std::uint32_t>(div_up(tokens, room.page_tokens)) * room.page_tokens;
  };
  for (std::uint32_t i = 0; i <= kHalvings; ++i) {
    const std::uint32_t tokens = whole_pages(std::max(1u, room.tokens >> i));
    if (i == 0 || tokens >= kLeast) tokens_.push_back(tokens);
  }
  const std::uint32_t dense = room.dense_tokens / room.page_tokens * room.page_tokens;
  if (dense != 0 && dense < room.tokens) tokens_.push_back(dense);
  std::ranges::sort(tokens_);
  tokens_.erase(std::ranges::unique(tokens_).begin(), tokens_.end());
}

std::optional<DecodeSize> DecodeSizes::of(DecodeSize wanted) const noexcept {
  const auto rows = std::ranges::lower_bound(rows_, wanted.rows);
  const auto tokens = std::ranges::lower_bound(tokens_, wanted.tokens);
  if (rows == rows_.end() || tokens == tokens_.end()) return std::nullopt;
  const DecodeSize size{.rows = *rows, .tokens = *tokens};
  if (dense(wanted) && !dense(size)) return std::nullopt;
  return size;
}

bool DecodeSizes::dense(DecodeSize size) const noexcept {
  return size.tokens <= room_.dense_tokens && std::uint64_t{size.rows} * size.tokens <= room_.near_tokens;
}

}  // namespace sluice::tools
