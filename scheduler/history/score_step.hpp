#pragma once

#include <bit>
#include <cstdint>

#include "scheduler/history/compact_score.hpp"

namespace sluice::scheduler {

/// How a step changes the entries of a score table that it adds weights to, and which codes may have stood there
/// before. Codes up to `dead` are forgotten: they count as 0.
struct ScoreStep {
  double per_weight = 1.0;  ///< inverse of the table's unit
  ScoreCode dead = 0;

  /// What a weight adds to what is stored.
  [[nodiscard]] float gain(float weight) const noexcept { return static_cast<float>(weight * per_weight); }
  [[nodiscard]] ScoreCode live(ScoreCode code) const noexcept { return code > dead ? code : ScoreCode{0}; }
  /// The code of an entry with code `old` after the step. It rises with `old`, not strictly.
  [[nodiscard]] ScoreCode after(ScoreCode old, float gain) const noexcept {
    return live(to_code(from_code(live(old)) + gain));
  }

  /// The codes that a step turns into the same one.
  struct Sources {
    ScoreCode first = 0;
    ScoreCode last = 0;
    /// Bits that tell them apart.
    [[nodiscard]] int bits() const noexcept { return std::bit_width(static_cast<std::uint32_t>(last - first)); }
  };
  /// Those that become `now`, which some code does.
  [[nodiscard]] Sources sources(ScoreCode now, float gain) const noexcept {
    const auto at_most = [&](std::uint32_t old) { return after(static_cast<ScoreCode>(old), gain) <= now; };
    const auto below = [&](std::uint32_t old) { return after(static_cast<ScoreCode>(old), gain) < now; };
    // Scores round to `now` from half a step below it to half a step above.
    const std::uint32_t bits = std::bit_cast<std::uint32_t>(from_code(now));
    const std::uint32_t half = now == 0 ? 0 : 1u << (detail::kDroppedBits - 1);
    const auto code_before = [gain](std::uint32_t after_bits) {
      return floor_code(static_cast<double>(std::bit_cast<float>(after_bits)) - static_cast<double>(gain));
    };
    Sources found{.first = 0, .last = last_that(at_most, code_before(bits + half))};
    if (below(0)) found.first = static_cast<ScoreCode>(last_that(below, code_before(bits - half)) + 1);
    return found;
  }

 private:
  /// The last code that `holds`, as all codes before it do and none behind it; 0 does. Near `guess`, as a rule.
  template <class Holds>
  [[nodiscard]] static ScoreCode last_that(const Holds& holds, std::uint32_t guess) noexcept {
    std::uint32_t in = guess;  // Holds, in the end.
    std::uint32_t out = guess;
    if (holds(guess)) {
      for (std::uint32_t step = 1;; step *= 2) {
        out = in + step;
        if (out > kLargestCode || !holds(out)) break;
        in = out;
      }
      if (out > kLargestCode) out = std::uint32_t{kLargestCode} + 1;
    } else {
      for (std::uint32_t step = 1;; step *= 2) {
        in = out > step ? out - step : 0;
        if (in == 0 || holds(in)) break;
        out = in;
      }
    }
    while (out - in > 1) {
      const std::uint32_t middle = in + (out - in) / 2;
      (holds(middle) ? in : out) = middle;
    }
    return static_cast<ScoreCode>(in);
  }
};

}  // namespace sluice::scheduler
