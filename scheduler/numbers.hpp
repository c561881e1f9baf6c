#pragma once

#include <cstdint>
#include <optional>
#include <string_view>

namespace sluice::scheduler {

// Numbers as text, of policies and of the command line. The whole text is the number: no blanks, no plus, nothing behind
// it; decimal whatever its zeros in front; nothing that is too large, not finite, or 0 only because it is too small.

/// Digits alone.
[[nodiscard]] std::optional<std::uint64_t> read_whole(std::string_view text) noexcept;

/// A number with an optional suffix: whole * 2^10 for K, 2^20 for M, 2^30 for G, 2^40 for T.
struct Scaled {
  std::uint64_t value = 0;  ///< rounded down
  bool exact = true;        ///< nothing was lost by that
  bool suffix = false;
};
/// Digits with an optional fraction and an optional suffix, in either case.
[[nodiscard]] std::optional<Scaled> read_scaled(std::string_view text) noexcept;
/// The same where only a whole number has a meaning: 64, 8K, 1.5K.
[[nodiscard]] std::optional<std::uint64_t> read_count(std::string_view text) noexcept;

/// A decimal number, its exponent allowed, that a float can hold.
[[nodiscard]] std::optional<double> read_decimal(std::string_view text) noexcept;
/// 2% or 0.02: not negative.
[[nodiscard]] std::optional<double> read_share(std::string_view text) noexcept;

}  // namespace sluice::scheduler
