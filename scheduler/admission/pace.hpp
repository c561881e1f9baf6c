#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace sluice::scheduler {

/// What the time of a forward goes by: one of its rows that decode and its chunks of prompts.
struct PacedForward {
  std::uint32_t decode_rows = 0;
  std::uint32_t chunk_tokens = 0;
  double chunk_pairs = 0.0;  ///< (query, key) pairs of these chunks, causal

  /// A chunk of `tokens` tokens with `first` tokens before it.
  [[nodiscard]] static double pairs(std::uint32_t first, std::uint32_t tokens) noexcept {
    return static_cast<double>(tokens) * (first + 0.5 * (tokens + 1.0));
  }
};

/// How long forwards take, learnt from those that ran: seconds = base + decode * rows + token * chunk_tokens + pair *
/// chunk_pairs, no coefficient below 0, fitted to the newest kKept forwards with chunks and as many without. A forward
/// that took far longer than the others say (a stalled machine) hardly counts. It times whatever the caller times: with
/// a model around the attention, its products count, too, which no plan of Sluice knows of.
/// Pure, no clock. Thread safety: calls must not overlap.
class Pace {
 public:
  static constexpr std::uint32_t kKept = 64;
  /// Chunks begin with as many tokens, and then at most double what was ever tried: beyond what was seen, a straight
  /// line may be wrong.
  static constexpr std::uint32_t kFirstChunk = 64;

  /// A forward that was finished, and how long it took. Times that are not finite or not above 0 are ignored.
  void observe(const PacedForward& forward, double seconds) noexcept;
  /// What a forward would take; 0 if nothing was observed.
  [[nodiscard]] double seconds(const PacedForward& forward) const noexcept;
  /// The most tokens that a chunk with `first` tokens before it may have beside these rows and chunks, so that the
  /// forward takes `slowdown` times as long as with the rows alone at most: `most` if no row decodes; otherwise at
  /// least `least`, so that prompts go on whatever they cost, and at most `most`.
  [[nodiscard]] std::uint32_t chunk(const PacedForward& beside, std::uint32_t first, std::uint32_t least,
                                    std::uint32_t most, double slowdown) const noexcept;

 private:
  static constexpr std::size_t kTerms = 4;
  using Terms = std::array<double, kTerms>;
  struct Sample {
    Terms terms{};
    double seconds = 0.0;
  };
  [[nodiscard]] static Terms terms_of(const PacedForward& forward) noexcept;
  /// Calls `visit` with each sample that is kept.
  template <class Visit>
  void for_each(const Visit& visit) const;
  void fit() noexcept;
  /// The coefficients, by least squares with weights.
  template <class Weight>
  void solve(const Weight& weight) noexcept;

  /// A ring; those with chunks do not push out those without, which say what a chunk costs.
  struct Ring {
    std::array<Sample, kKept> samples;
    std::size_t added = 0;
  };
  std::array<Ring, 2> rings_{};  ///< without and with a chunk
  Terms coefficients_{};
  std::uint32_t largest_ = 0;  ///< chunk that was observed
};

}  // namespace sluice::scheduler
