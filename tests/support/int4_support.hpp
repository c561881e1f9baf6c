#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <span>
#include <vector>

#include "tests/support/derived_pages.hpp"
#include "tests/support/prune_reference.hpp"
#include "tests/support/reference.hpp"
#include "tests/support/stages_under_test.hpp"

/// What cases of copies in codes share.
namespace sluice::test::int4_copies {

inline constexpr float kInf = std::numeric_limits<float>::infinity();
inline constexpr float kUntouched = 1234.f;

/// The mean key of a problem's first page, as CodeLayout says it.
inline std::vector<float> mean_key(const Problem& problem) {
  std::vector<float> mean(problem.options().head_dim, 0.f);
  for (std::uint32_t c = 0; c < mean.size(); ++c) {
    for (std::uint32_t token = 0; token < problem.layout().page_tokens; ++token) {
      const double key = problem.k(token, c);
      mean[c] += std::isfinite(key) ? static_cast<float>(key) : 0.f;
    }
    mean[c] *= 1.f / static_cast<float>(problem.layout().page_tokens);
    if (!std::isfinite(mean[c])) mean[c] = 0.f;
  }
  return mean;
}

/// Logits from stored copies, and how far sums in float32 may be off.
struct Estimate {
  double logit = 0.0;
  double within = 0.0;
};

/// Copies of all pages of a problem, in codes of so many bits, in its frames; the frames between are poisoned. With its
/// mean key, if its first page is full.
struct Copies {
  Copies(StagesUnderTest& under_test, const Problem& problem, const Placed& placed, std::uint32_t bits = 4)
      : layout(problem.layout(), bits),
        mean(under_test.copy_of(problem.options().tokens < layout.page_tokens ? std::vector<float>(layout.head_dim)
                                                                              : mean_key(problem))),
        data(under_test.array((2 * problem.frames().size() + 1) * layout.page_bytes(), std::byte{0xff})) {
    for (std::uint32_t head = 0; head < problem.options().group; ++head) {
      std::vector<double> q;
      double product = 0.0, within = 0.0;
      for (std::uint32_t c = 0; c < layout.head_dim; ++c) {
        q.push_back(double{problem.q(head, c)});
        product += q[c] * double{mean[c]};
        within += std::abs(q[c] * double{mean[c]});
      }
      queries.push_back(rotated(q));
      means.push_back({.logit = product, .within = within});
    }
    derive(
        under_test,
        {.kv = placed.kv, .tokens = problem.options().tokens, .codes = data.data(), .bits = bits, .mean = mean.data()});
  }
  [[nodiscard]] DecodedRow row(const Problem& problem, std::uint32_t token) const {
    const std::uint32_t frame = problem.frames()[token / layout.page_tokens];
    return decode_row(data.data() + frame * layout.page_bytes(), layout, token % layout.page_tokens);
  }
  /// H(k - m) of a token, in float64.
  [[nodiscard]] std::vector<double> copied(const Problem& problem, std::uint32_t token) const {
    std::vector<double> key;
    for (std::uint32_t c = 0; c < layout.head_dim; ++c) key.push_back(problem.k(token, c) - double{mean[c]});
    return rotated(key);
  }
  [[nodiscard]] Estimate estimate(const Problem& problem, const DecodedRow& decoded, std::uint32_t head) const {
    Estimate result = means[head];
    for (std::uint32_t c = 0; c < layout.head_dim; ++c) {
      result.logit += queries[head][c] * decoded.at(c);
      result.within += std::abs(queries[head][c]) * (15.0 * std::abs(decoded.scale) + std::abs(decoded.zero));
    }
    const double scale = double{problem.shape().score_scale()};
    return {.logit = result.logit * scale, .within = 2e-6 * result.within * scale};
  }
  [[nodiscard]] Estimate estimate(const Problem& problem, std::uint32_t token, std::uint32_t head) const {
    return estimate(problem, row(problem, token), head);
  }
  CodeLayout layout;
  std::span<float> mean;
  std::span<std::byte> data;
  std::vector<std::vector<double>> queries;  ///< [group] rotated
  std::vector<Estimate> means;               ///< [group] q.m
};

struct Extremes {
  double least, most;
};
inline Extremes extremes(const std::vector<double>& row) {
  const auto [least, most] = std::ranges::minmax_element(row);
  return {*least, *most};
}

/// What rounding scale and zero to f16 costs a row: of the zero, and of the scale 15 times. And what rotating it in
/// float32 does.
inline double f16_slack(const Extremes& row) {
  return 0x1p-11 * (std::abs(row.least) + row.most - row.least) + 16.0 * 0x1p-25 +
         1e-6 * std::max(std::abs(row.least), std::abs(row.most));
}

/// The same from the key itself.
inline Estimate exact(const Problem& problem, std::uint32_t token, std::uint32_t head) {
  Estimate result{.logit = reference::score(problem, head, token)};
  for (std::uint32_t c = 0; c < problem.options().head_dim; ++c) {
    result.within += std::abs(static_cast<double>(problem.q(head, c)) * problem.k(token, c));
  }
  result.within *= 2e-6 / std::sqrt(static_cast<double>(problem.options().head_dim));
  return result;
}

inline bool close(float got, const Estimate& expected) {
  return std::isnan(expected.logit) ? std::isnan(got) : std::abs(got - expected.logit) <= expected.within;
}

}  // namespace sluice::test::int4_copies
