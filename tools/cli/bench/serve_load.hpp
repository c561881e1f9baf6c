#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace sluice::tools {

/// One request of a load.
struct LoadRequest {
  double arrival = 0.0;      ///< in mean gaps between requests; divided by a rate, in seconds
  std::uint32_t prompt = 1;  ///< tokens
  std::uint32_t answer = 1;  ///< tokens
};

struct LoadOptions {
  std::uint32_t requests = 64;
  std::uint32_t prompt = 512;  ///< mean, in tokens
  std::uint32_t answer = 64;   ///< likewise
  /// Of lengths, which are log-normal: standard deviation of their logarithms. 0: all are the mean.
  double spread = 0.5;
  std::string lengths;  ///< a file of `prompt,answer` lines, which are taken in order and again; empty: none
  std::uint64_t seed = 0;
};

/// No length is longer than this many means.
inline constexpr std::uint32_t kLongestLength = 4;

/// Requests whose gaps are exponential (a Poisson process). The same on every platform.
/// @throws Error of the file of lengths
[[nodiscard]] std::vector<LoadRequest> make_load(const LoadOptions& options);

/// The first requests of a load: those that come within `seconds` at `rate` a second, one at least; with 0 seconds, or
/// all at once (rate 0), the whole load.
[[nodiscard]] std::span<const LoadRequest> coming_within(std::span<const LoadRequest> load, double rate,
                                                         double seconds) noexcept;

/// Lines of `prompt,answer` in tokens, each at least 1; a first line of these words and empty lines are skipped.
/// `name` is the file in messages.
/// @throws Error{Errc::invalid_argument} naming the line
[[nodiscard]] std::vector<LoadRequest> parse_lengths(std::string_view text, const std::string& name);

}  // namespace sluice::tools
