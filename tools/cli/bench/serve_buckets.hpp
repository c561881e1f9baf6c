#pragma once

#include <compare>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

namespace sluice::tools {

/// Of a forward that only decodes: its rows, padding included, and the tokens of the longest sequence that it is for.
struct DecodeSize {
  std::uint32_t rows = 1;
  std::uint32_t tokens = 1;
  friend constexpr auto operator<=>(const DecodeSize&, const DecodeSize&) = default;
};

/// What forwards of one engine are bounded by.
struct DecodeRoom {
  std::uint32_t rows = 1;    ///< at most
  std::uint32_t tokens = 1;  ///< of a sequence, at most: a multiple of page_tokens
  std::uint32_t page_tokens = 1;
  std::uint32_t dense_tokens = 0;  ///< up to which all is attended in launches of its own; 0: they never are
  std::uint64_t near_tokens = 0;   ///< that near memory has room for: beyond it these launches are not used
};

/// Sizes that forwards which only decode are padded to, few enough for a graph of each: 1, 2, 4, ... rows or as many as
/// there may be, and lengths that halve.
class DecodeSizes {
 public:
  explicit DecodeSizes(const DecodeRoom& room);

  /// Ascending.
  [[nodiscard]] std::span<const std::uint32_t> rows() const noexcept { return rows_; }
  [[nodiscard]] std::span<const std::uint32_t> tokens() const noexcept { return tokens_; }
  /// The smallest that has room. None where that is attended otherwise than by itself: dense attention that is not
  /// worth more rows or tokens than near memory has room for.
  [[nodiscard]] std::optional<DecodeSize> of(DecodeSize wanted) const noexcept;

 private:
  [[nodiscard]] bool dense(DecodeSize size) const noexcept;

  DecodeRoom room_;
  std::vector<std::uint32_t> rows_, tokens_;
};

}  // namespace sluice::tools
