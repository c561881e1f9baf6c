#pragma once

#include <cstdint>
#include <limits>
#include <string>
#include <string_view>
#include <vector>

#include "sluice/tensor.hpp"

namespace sluice::tools {

// The numbers of the command line, and nothing else reads any: decimal whatever their zeros in front, no wrap-around,
// nothing before or behind them. See scheduler/numbers.hpp, which policies read theirs by, too.

/// Reads bytes: digits with an optional K, M, G or T (binary: 1G = 2^30), an optional fraction, and an optional
/// `B` or `iB` after the suffix, in either case: 64M, 64mib. `option` is named in the message.
/// @throws Error{Errc::invalid_argument}
[[nodiscard]] std::uint64_t parse_size(std::string_view text, std::string_view option, std::uint64_t least = 0);

/// Bytes as parse_size reads them, rounded to three digits: `4G`, `1.25M`, `17`.
[[nodiscard]] std::string format_size(std::uint64_t bytes);

/// Reads a share as `10%` or `0.1`; in [0, 1].
/// @throws Error{Errc::invalid_argument}
[[nodiscard]] double parse_share(std::string_view text, std::string_view option);

/// Reads a comma list of shares, each as parse_share reads it.
/// @throws Error{Errc::invalid_argument}
[[nodiscard]] std::vector<double> parse_shares(std::string_view text, std::string_view option);
/// Both ends belong to it.
struct CountRange {
  std::uint64_t least = 0;
  std::uint64_t most = std::numeric_limits<std::uint32_t>::max();
};
/// Reads a whole number, K and M allowed: `128`, `8K`.
/// @throws Error{Errc::invalid_argument} that names the range.
[[nodiscard]] std::uint64_t parse_count(std::string_view text, std::string_view option, CountRange range = {});

struct NumberRange {
  double least = 0.0;
  double most = 1.0;
};
/// Reads a decimal number that a float can hold: `0.95`, `1e-3`.
/// @throws Error{Errc::invalid_argument} that names the range.
[[nodiscard]] double parse_number(std::string_view text, std::string_view option, NumberRange range = {});

/// A number with as few digits as a reader would write, at most six.
[[nodiscard]] std::string shortest(double value);

/// Reads any whole number of 64 bits.
/// @throws Error{Errc::invalid_argument}
[[nodiscard]] std::uint64_t parse_seed(std::string_view text, std::string_view option);

/// Reads a comma list of token counts, each at least 1, K and M allowed: `2048,8K`.
/// @throws Error{Errc::invalid_argument}
[[nodiscard]] std::vector<std::uint32_t> parse_counts(std::string_view text, std::string_view option);

/// Reads "0-7,16" as 0, 1, ... 7, 16.
[[nodiscard]] std::vector<std::uint32_t> parse_ranges(std::string_view text, std::string_view option);
/// @throws Error{Errc::invalid_argument} that lists the types.
[[nodiscard]] DType parse_dtype(std::string_view text, std::string_view option);
/// The same of keys and values in an engine's memory, which may have scales.
[[nodiscard]] DType parse_kv_dtype(std::string_view text, std::string_view option);

/// Splits on commas. A list that may be empty is not split where it is.
/// @throws Error{Errc::invalid_argument} if an item is empty, such as between two commas
[[nodiscard]] std::vector<std::string> split_list(std::string_view text, std::string_view option);

/// Splits a list of policies, whose options hold commas themselves: a comma starts a new policy unless
/// `key=value` follows it; `;` always does. `full,lfps:alpha=0.3,budget=2%,topk` is three policies.
/// @throws Error{Errc::invalid_argument} if an item is empty
/// @return each policy as the user wrote it
[[nodiscard]] std::vector<std::string> split_policies(std::string_view text);

}  // namespace sluice::tools
