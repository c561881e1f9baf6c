#include "scheduler/clusters/curve_fit.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "scheduler/fast_exp.hpp"

namespace sluice::scheduler {
namespace {

constexpr auto kLog = [](double x) noexcept { return std::log(x); };

double mean(std::span<const float> weights) noexcept {
  return std::accumulate(weights.begin(), weights.end(), 0.0) / static_cast<double>(weights.size());
}

}  // namespace

FitSamples fit_samples(const ClusterOptions& options, std::uint32_t n) noexcept {
  constexpr std::uint32_t kLeastWindow = 16;
  constexpr std::uint32_t kLeastClusters = 10;
  if (n < options.min_tokens || n < std::uint64_t{kLeastClusters} * options.tokens_per_cluster) return {};
  const auto at = [n](float share) { return static_cast<std::uint32_t>(std::lround(static_cast<double>(share) * n)); };
  const std::uint32_t width = std::max(kLeastWindow, at(options.window_share));
  const auto window = [&](float centre) -> ListRange {
    const std::uint32_t begin = at(centre) - std::min(at(centre), width / 2);
    return {.begin = begin, .end = std::min(begin + width, n)};
  };
  FitSamples samples{.tokens = n, .head = {}, .near = window(options.near_window), .far = window(options.far_window)};
  const auto head = static_cast<std::uint32_t>(std::ceil(static_cast<double>(options.head_share) * n));
  samples.head.end = std::min(head, samples.near.begin);
  const bool apart = samples.head.end != 0 && samples.near.end <= samples.far.begin && samples.far.size() != 0;
  return apart ? samples : FitSamples{};
}

FittedCurve fit_curve(ListRange near, double near_mean, ListRange far, double far_mean) noexcept {
  return curve_through(near, near_mean, far, far_mean, kLog);
}

std::uint32_t fitted_budget(std::span<const float> head, const FittedCurve& curve, std::uint32_t n,
                            double share, double anyway) noexcept {
  const auto exact = static_cast<std::uint32_t>(head.size());
  const FittedTail tail(curve, exact, n, kLog);
  const double head_mass = std::accumulate(head.begin(), head.end(), 0.0);
  const double all = head_mass + tail.mass(n) + anyway;
  if (share >= 1.0 || !(all > 0.0) || !std::isfinite(all)) return n;
  if (anyway > 0.0 && anyway >= share * all) return 0;
  const double wanted = share * all - anyway;  // Of the list.
  if (head_mass >= wanted) {
    double sum = 0.0;
    for (std::uint32_t i = 0; i < exact; ++i) {
      sum += static_cast<double>(head[i]);
      if (sum >= wanted) return i + 1;
    }
  }
  std::uint32_t low = exact + 1;  // The mass of the first k never falls with k.
  std::uint32_t high = n;
  while (low < high) {
    const std::uint32_t middle = low + (high - low) / 2;
    if (head_mass + tail.mass(middle) >= wanted) {
      high = middle;
    } else {
      low = middle + 1;
    }
  }
  return high;
}

std::uint32_t fitted_budget(std::span<float> scores, const FitSamples& samples, double share,
                            std::span<float> anyway) noexcept {
  float top = -std::numeric_limits<float>::infinity();
  for (const float score : scores) top = score > top ? score : top;
  for (const float score : anyway) top = score > top ? score : top;
  if (!std::isfinite(top)) return samples.tokens;
  for (const std::span<float> some : {scores, anyway}) {
#pragma omp simd
    for (std::size_t i = 0; i < some.size(); ++i) some[i] = fast_exp(some[i] - top);
  }
  const auto head = scores.first(samples.head.size());
  const auto near = scores.subspan(samples.head.size(), samples.near.size());
  const auto far = scores.subspan(samples.head.size() + samples.near.size(), samples.far.size());
  const double attended = std::accumulate(anyway.begin(), anyway.end(), 0.0);
  return fitted_budget(head, fit_curve(samples.near, mean(near), samples.far, mean(far)), samples.tokens, share,
                       attended);
}

}  // namespace sluice::scheduler
