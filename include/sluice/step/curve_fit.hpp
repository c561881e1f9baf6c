#pragma once

#include <cstdint>

/// The fit of Tactic's budget (arXiv 2502.12216, section 4.4 and algorithm 1), the same on the host and on devices: of
/// a list of weights w(i), i from 1, whose head is known exactly and which follows a / i + b behind it.
/// `log` is the natural logarithm of a double, as the caller's machine has it.
namespace sluice {

/// Positions [begin, end) of the list, counted from 0.
struct ListRange {
  std::uint32_t begin = 0;
  std::uint32_t end = 0;
  [[nodiscard]] constexpr std::uint32_t size() const noexcept { return end - begin; }
  friend constexpr bool operator==(const ListRange&, const ListRange&) = default;
};

/// Which of n tokens are read: the head, and two windows behind it.
struct FitSamples {
  std::uint32_t tokens = 0;  ///< n
  ListRange head, near, far;
  [[nodiscard]] constexpr std::uint32_t size() const noexcept { return head.size() + near.size() + far.size(); }
  /// Where in the list sample `i` lies, of the three ranges one after the other.
  [[nodiscard]] constexpr std::uint32_t position(std::uint32_t i) const noexcept {
    if (i < head.size()) return head.begin + i;
    i -= head.size();
    return i < near.size() ? near.begin + i : far.begin + (i - near.size());
  }
  friend constexpr bool operator==(const FitSamples&, const FitSamples&) = default;
};

/// w(i) = max(a / i + b, 0) behind the head.
struct FittedCurve {
  double a = 0.0;
  double b = 0.0;
};

/// Sum of 1 / i for 1 <= i <= k, to 1e-6 of it from k = 5 on.
template <class Log>
[[nodiscard]] constexpr double harmonic(std::uint32_t k, const Log& log) noexcept {
  if (k == 0) return 0.0;
  const double x = k;
  return log(x) + 0.57721566490153286 + 0.5 / x - 1.0 / (12.0 * x * x);
}

/// The curve through the means of two windows. Where the list is not sorted, so that it would rise, it is flat.
template <class Log>
[[nodiscard]] constexpr FittedCurve curve_through(ListRange near, double near_mean, ListRange far, double far_mean,
                                                  const Log& log) noexcept {
  if (!(near_mean >= far_mean)) return {.a = 0.0, .b = 0.5 * (near_mean + far_mean)};
  // Mean of 1 / i over a window: where on the curve its mean lies.
  const double near_at = (harmonic(near.end, log) - harmonic(near.begin, log)) / near.size();
  const double far_at = (harmonic(far.end, log) - harmonic(far.begin, log)) / far.size();
  const double a = (near_mean - far_mean) / (near_at - far_at);
  return {.a = a, .b = near_mean - a * near_at};
}

/// The curve's mass behind the head. It ends where a negative b pulls the curve below zero, so that it never falls.
template <class Log>
class FittedTail {
 public:
  constexpr FittedTail(const FittedCurve& curve, std::uint32_t head, std::uint32_t n, const Log& log)
      : curve_(curve), log_(log), before_(harmonic(head, log)), head_(head), end_(n) {
    if (curve.b >= 0.0) return;
    const double zero = -curve.a / curve.b;  // Not negative.
    if (zero < static_cast<double>(n)) end_ = static_cast<std::uint32_t>(zero);
  }
  /// Of positions head .. k.
  [[nodiscard]] constexpr double mass(std::uint32_t k) const noexcept {
    const std::uint32_t last = k < end_ ? k : end_;
    if (last <= head_) return 0.0;
    return curve_.a * (harmonic(last, log_) - before_) + curve_.b * (last - head_);
  }

 private:
  FittedCurve curve_;
  Log log_;
  double before_;
  std::uint32_t head_;
  std::uint32_t end_;
};

}  // namespace sluice
