#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>

#include "scheduler/history/compact_score.hpp"

namespace sluice::scheduler {

/// The code of an entry before and after a step.
struct ScoreChange {
  ScoreCode before = 0;
  ScoreCode after = 0;
};

/// How a step changes the entries of a score table that it adds weights to, and which codes may have stood there
/// before. Codes up to `dead`, whole octaves, are forgotten: they count as 0.
///
/// Sums are those of float64, which has room for every bit of a code and of a gain, and are rounded once, a middle up:
/// so the codes that become the same one are found by a subtraction. (A code of less than 2^-53 of a gain would be lost
/// on the way, but is forgotten long before a table's unit makes gains of 2^21.)
struct ScoreStep {
  double per_weight = 1.0;  ///< inverse of the table's unit
  ScoreCode dead = 0;

  /// What a weight adds to what is stored.
  [[nodiscard]] float gain(float weight) const noexcept { return static_cast<float>(weight * per_weight); }
  [[nodiscard]] ScoreCode live(ScoreCode code) const noexcept { return code > dead ? code : ScoreCode{0}; }
  /// The code of an entry with code `old` after the step, the nearest. It rises with `old`, not strictly.
  [[nodiscard]] ScoreCode after(ScoreCode old, float gain) const noexcept {
    const double sum = static_cast<double>(from_code(live(old))) + static_cast<double>(gain);
    return live(code_of(std::bit_cast<std::int64_t>(sum) + kHalfStep));
  }

  /// The codes that a step turns into the same one.
  struct Sources {
    ScoreCode first = 0;
    ScoreCode last = 0;
    /// Bits that tell them apart.
    [[nodiscard]] std::uint32_t bits() const noexcept {
      return static_cast<std::uint32_t>(std::bit_width(static_cast<std::uint32_t>(last - first)));
    }
  };
  /// Those that become `now`, which some code does.
  [[nodiscard]] Sources sources(ScoreCode now, float gain) const noexcept {
    // What rounds to `now` lies between the middle below it, which is part of that, and the middle above it. Without
    // branches, which could not be predicted; what is below 0 has the sign bit, and code 0.
    const double begin = middle_above(static_cast<ScoreCode>(now - 1)) - static_cast<double>(gain);
    const double end = middle_above(std::max(now, dead)) - static_cast<double>(gain);
    const ScoreCode below = std::max(code_of(std::bit_cast<std::int64_t>(begin) - 1), dead);
    // Where the last one is forgotten, all those are that there are.
    const ScoreCode last = std::max(code_of(std::bit_cast<std::int64_t>(end) - 1), dead);
    const bool from_0 = (now <= dead) | (begin <= 0.0);
    return {.first = from_0 ? ScoreCode{0} : static_cast<ScoreCode>(below + 1),
            .last = now == kLargestCode ? kLargestCode : last};
  }
  /// Tells most of those that are the only source of what they become, as `sources` would: within an octave, codes stay
  /// as far apart as they are. Below an octave's first one they are closer.
  [[nodiscard]] static bool only_source(ScoreCode old, ScoreCode now) noexcept {
    return ((old ^ now) < kCodesPerOctave) & (old % kCodesPerOctave != 0) &
           (now != 0);  // 0 comes of all forgotten ones.
  }

 private:
  static constexpr int kDropped = 52 - 10;  ///< bits of a float64's mantissa that a code has no room for
  static constexpr std::int64_t kHalfStep = std::int64_t{1} << (kDropped - 1);
  static constexpr std::int64_t kFirst = std::int64_t{1023 - 32} << 10;  ///< of a float64 of 2^-32

  [[nodiscard]] static ScoreCode code_of(std::int64_t bits) noexcept {
    return static_cast<ScoreCode>(std::clamp<std::int64_t>((bits >> kDropped) - kFirst, 0, kLargestCode));
  }
  /// The middle of what `code` and the next one stand for; if that is 0, of 2^-32 and the first.
  [[nodiscard]] static double middle_above(ScoreCode code) noexcept {
    return std::bit_cast<double>(((std::int64_t{code} + kFirst) << kDropped) + kHalfStep);
  }
};

}  // namespace sluice::scheduler
