#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <span>
#include <vector>

#include "tests/support/backend_under_test.hpp"
#include "tests/support/prune_reference.hpp"
#include "tests/support/reference.hpp"

/// What cases of 4-bit copies share.
namespace sluice::test::int4_copies {

inline constexpr float kInf = std::numeric_limits<float>::infinity();
inline constexpr float kUntouched = 1234.f;

/// 4-bit copies of all pages of a problem, in its frames; the frames between are poisoned.
struct Copies {
  Copies(BackendUnderTest& under_test, const Problem& problem, const Placed& placed)
      : layout(problem.layout()),
        data(under_test.array((2 * problem.frames().size() + 1) * layout.page_bytes(), std::byte{0xff})) {
    std::vector<CodesTask> tasks;
    for (std::uint32_t page = 0; page < problem.frames().size(); ++page) {
      const std::uint32_t left = problem.options().tokens - page * layout.page_tokens;
      tasks.push_back({.page = placed.kv.page(page),
                       .rows = std::min(left, layout.page_tokens),
                       .out = data.data() + problem.frames()[page] * layout.page_bytes()});
    }
    under_test.backend().make_codes(tasks, problem.layout(), under_test.stream());
  }
  [[nodiscard]] DecodedRow row(const Problem& problem, std::uint32_t token) const {
    const std::uint32_t frame = problem.frames()[token / layout.page_tokens];
    return decode_row(data.data() + frame * layout.page_bytes(), layout, token % layout.page_tokens);
  }
  Int4Layout layout;
  std::span<std::byte> data;
};

struct Extremes {
  double least, most;
};
inline Extremes extremes(const Problem& problem, std::uint32_t token) {
  Extremes found{problem.k(token, 0), problem.k(token, 0)};
  for (std::uint32_t c = 1; c < problem.options().head_dim; ++c) {
    found = {std::min(found.least, problem.k(token, c)), std::max(found.most, problem.k(token, c))};
  }
  return found;
}

/// What rounding scale and zero to f16 costs a row: of the zero, and of the scale 15 times.
inline double f16_slack(const Extremes& row) {
  return 0x1p-11 * (std::abs(row.least) + row.most - row.least) + 16.0 * 0x1p-25;
}

/// Logits from the stored copies, and how far sums in float32 may be off.
struct Estimate {
  double logit = 0.0;
  double within = 0.0;
};
inline Estimate estimate(const Problem& problem, const DecodedRow& row, std::uint32_t head) {
  Estimate result;
  for (std::uint32_t c = 0; c < problem.options().head_dim; ++c) {
    result.logit += problem.q(head, c) * row.at(c);
    result.within += std::abs(problem.q(head, c)) * (15.0 * std::abs(row.scale) + std::abs(row.zero));
  }
  const double root = std::sqrt(static_cast<double>(problem.options().head_dim));
  return {.logit = result.logit / root, .within = 2e-6 * result.within / root};
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
