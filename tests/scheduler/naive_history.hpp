#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <numbers>
#include <vector>

namespace sluice::scheduler::test {

/// A score table in float64 that decays every entry at every step: what ScoreTable must be equal to.
struct NaiveTable {
  std::vector<double> s;

  void decay(double factor) {
    for (double& x : s) x *= factor;
  }
  [[nodiscard]] double sum() const {
    double total = 0.0;
    for (const double x : s) total += x;
    return total;
  }
  [[nodiscard]] double mean() const { return sum() / static_cast<double>(s.size()); }
  /// Eq. (8), form R1, two passes.
  [[nodiscard]] double threshold(double alpha) const {
    const double m = mean();
    double variance = 0.0, fourth = 0.0, top = 0.0;
    for (const double x : s) {
      variance += (x - m) * (x - m);
      fourth += std::pow(x - m, 4);
      top = std::max(top, x);
    }
    variance /= static_cast<double>(s.size());
    fourth /= static_cast<double>(s.size());
    return m + alpha * (top - m) / std::sqrt(fourth / (variance * variance));
  }
};

/// LFPS sections 4.1, 4.2, 4.4 and 4.5 for one query head, as written.
struct NaiveHistory {
  std::uint32_t sinks = 4;
  double decay = 0.95;
  NaiveTable vertical, slash;

  using Logit = std::function<double(std::uint32_t p, std::uint32_t j)>;

  void begin(std::uint32_t tokens, std::uint32_t queries, const Logit& logit) {
    vertical.s.assign(tokens - sinks, 0.0);
    slash.s.assign(tokens - sinks, 0.0);
    const double c = 1.0 / (2.0 * queries * (1.0 - decay));
    for (std::uint32_t p = tokens - queries; p < tokens; ++p) {
      double total = 0.0;
      for (std::uint32_t j = sinks; j <= p; ++j) total += std::exp(logit(p, j));
      for (std::uint32_t j = sinks; j <= p; ++j) {
        const double a = std::exp(logit(p, j)) / total;
        vertical.s[j - sinks] += c * a;
        slash.s[p - j] += c * a;
      }
    }
  }
  void extend(std::uint32_t tokens) {
    vertical.s.resize(tokens - sinks, 0.0);
    slash.s.resize(tokens - sinks, 0.0);
  }
  [[nodiscard]] double sv(std::uint32_t j) const { return vertical.s[j - sinks]; }
  [[nodiscard]] double ss(std::uint32_t j, std::uint32_t n) const { return slash.s[n - 1 - j]; }

  [[nodiscard]] std::vector<std::uint32_t> expanded(std::uint32_t n,
                                                    const std::vector<std::uint32_t>& candidates) const {
    const double mv = vertical.mean(), ms = slash.mean();
    std::vector<std::uint32_t> out;
    for (const std::uint32_t j : candidates) {
      for (const int o : {-1, 0, 1, 2}) {
        const std::int64_t t = static_cast<std::int64_t>(j) + o;
        if (t < sinks || t >= n) continue;
        const auto u = static_cast<std::uint32_t>(t);
        if (sv(u) > mv || ss(u, n) > ms) out.push_back(u);
      }
    }
    std::sort(out.begin(), out.end());
    out.erase(std::unique(out.begin(), out.end()), out.end());
    return out;
  }
  /// A weight is the largest one times a power of 2^(1/8), the nearest; none if it is less than 2^-20 of that. All add
  /// up to a half.
  void observe(std::uint32_t n, const std::vector<std::uint32_t>& tokens, const std::vector<float>& scores) {
    const float top = *std::max_element(scores.begin(), scores.end());
    std::vector<double> weights;
    double total = 0.0;
    for (const float s : scores) {
      // In float32: of a distance between two powers both are the nearest.
      const float eighths = std::floor((top - s) * (8.f * std::numbers::log2e_v<float>)+0.5f);
      weights.push_back(eighths < 160.f ? std::exp2(-static_cast<double>(eighths) / 8.0) : 0.0);
      total += weights.back();
    }
    vertical.decay(decay);
    slash.decay(decay);
    for (std::size_t i = 0; i < tokens.size(); ++i) {
      const double w = 0.5 * weights[i] / total;
      vertical.s[tokens[i] - sinks] += w;
      slash.s[n - 1 - tokens[i]] += w;
    }
  }
};

}  // namespace sluice::scheduler::test
