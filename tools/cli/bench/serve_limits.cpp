// When a run holds its limits, and which rate is the last that does.
#include "tools/cli/bench/serve_limits.hpp"

#include <algorithm>

#include "tools/cli/text/report.hpp"

namespace sluice::tools {
namespace {

constexpr double kLate = 0.99;  ///< percentile of the times between tokens

bool waits_too_long(std::uint64_t too_long, std::uint64_t requests) noexcept { return 2 * too_long > requests; }

}  // namespace

bool holds(const ServeLimits& limits, const ServeResult& result) {
  if (result.given_up || result.waiting != 0) return false;
  if (limits.between_ms != 0.0 && percentile(result.between_ms, kLate) > limits.between_ms) return false;
  if (limits.queued_s == 0.0) return true;
  const auto waited = std::ranges::count_if(result.queued_s, [&](double wait) { return wait > limits.queued_s; });
  return !waits_too_long(static_cast<std::uint64_t>(waited) + result.refused, result.requests);
}

bool lost(const ServeLimits& limits, std::uint64_t requests, std::uint64_t waited_too_long, std::uint64_t tokens,
          std::uint64_t tokens_too_late) noexcept {
  if (limits.queued_s != 0.0 && waits_too_long(waited_too_long, requests)) return true;
  // The percentile lies between two samples: with one more than its share above the limit both do.
  return limits.between_ms != 0.0 &&
         static_cast<double>(tokens_too_late) > (1.0 - kLate) * static_cast<double>(tokens) + 1.0;
}

std::optional<double> largest_that_holds(std::span<const double> rates, const std::function<bool(double)>& holds) {
  std::size_t low = 0, high = rates.size();  // Those before `low` hold, those from `high` on do not.
  while (low < high) {
    const std::size_t middle = low + (high - low) / 2;
    if (holds(rates[middle])) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  return low == 0 ? std::nullopt : std::optional(rates[low - 1]);
}

}  // namespace sluice::tools
