#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace sluice::scheduler {

/// What the time of a forward goes by: its rows that decode and its chunks of prompts.
struct PacedForward {
  std::uint32_t decode_rows = 0;
  std::uint32_t chunk_tokens = 0;
  double chunk_keys = 0.0;   ///< that these chunks see
  double chunk_pairs = 0.0;  ///< (query, key) pairs of these chunks, causal

  /// Adds a chunk of `tokens` tokens with `first` tokens before it.
  void add_chunk(std::uint32_t first, std::uint32_t tokens) noexcept {
    chunk_tokens += tokens;
    chunk_keys += static_cast<double>(first) + tokens;
    chunk_pairs += static_cast<double>(tokens) * (first + 0.5 * (tokens + 1.0));
  }
};

/// How long forwards take, learnt from those that ran: seconds = base + decode * rows + [chunk, if there is one] +
/// token * chunk_tokens + key * chunk_keys + pair * chunk_pairs, no coefficient below 0, fitted to the newest kKept
/// forwards with chunks and as many without. A forward that took far longer than the others say (a stalled machine)
/// hardly counts. It times whatever the caller times: with a model around the attention, its products count, too, which
/// no plan of Sluice knows of.
/// Pure, no clock. Thread safety: calls must not overlap.
class Pace {
 public:
  static constexpr std::uint32_t kKept = 64;

  /// A forward that was finished, and how long it took. Times that are not finite or not above 0 are ignored.
  void observe(const PacedForward& forward, double seconds) noexcept;
  /// What a forward would take; 0 if nothing was observed.
  [[nodiscard]] double seconds(const PacedForward& forward) const noexcept;
  /// Tokens of chunks of the largest forward that is kept.
  [[nodiscard]] std::uint32_t largest() const noexcept;

 private:
  static constexpr std::size_t kTerms = 6;
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
};

}  // namespace sluice::scheduler
