#include "scheduler/clusters/curve_fit.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "scheduler/fast_exp.hpp"

namespace sluice::scheduler {
namespace {

/// Sum of 1 / i for 1 <= i <= k, to 1e-6 of it from k = 5 on.
double harmonic(std::uint32_t k) noexcept {
  if (k == 0) return 0.0;
  const double x = k;
  return std::log(x) + 0.57721566490153286 + 0.5 / x - 1.0 / (12.0 * x * x);
}

/// Mean of 1 / i over a window: where on the curve its mean lies.
double mean_inverse(ListRange window) noexcept {
  return (harmonic(window.end) - harmonic(window.begin)) / window.size();
}

/// The curve's mass behind the head. It ends where a negative b pulls the curve below zero, so that it never falls.
class Tail {
 public:
  Tail(const FittedCurve& curve, std::uint32_t head, std::uint32_t n) : curve_(curve), head_(head), end_(n) {
    if (curve.b < 0.0) end_ = static_cast<std::uint32_t>(std::min<double>(n, std::floor(-curve.a / curve.b)));
  }
  /// Of positions head .. k.
  [[nodiscard]] double mass(std::uint32_t k) const noexcept {
    const std::uint32_t last = std::min(k, end_);
    if (last <= head_) return 0.0;
    return curve_.a * (harmonic(last) - harmonic(head_)) + curve_.b * (last - head_);
  }

 private:
  FittedCurve curve_;
  std::uint32_t head_;
  std::uint32_t end_;
};

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
  if (!(near_mean >= far_mean)) return {.a = 0.0, .b = 0.5 * (near_mean + far_mean)};
  const double near_at = mean_inverse(near);
  const double a = (near_mean - far_mean) / (near_at - mean_inverse(far));
  return {.a = a, .b = near_mean - a * near_at};
}

std::uint32_t fitted_budget(std::span<const float> head, const FittedCurve& curve, std::uint32_t n,
                            double share, double anyway) noexcept {
  const auto exact = static_cast<std::uint32_t>(head.size());
  const Tail tail(curve, exact, n);
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
