#pragma once

#include <cstdint>

#include "scheduler/admission/pace.hpp"

namespace sluice::scheduler {

/// What prompts may take of the time of rows that decode beside them, so that these come `slowdown` times as slowly as
/// alone, at most, on the average.
///
/// A forward with a chunk may cost much however short the chunk is: its kernels are not replayed, a prompt's keys are
/// gathered for every chunk anew. Then short chunks in every forward would hardly get on. So a chunk is long enough for
/// its tokens to take kWorth times what its being there costs, and if that is more than one forward's share, the
/// forwards before it save for it.
/// Pure, no clock. Thread safety: calls must not overlap.
class PromptShare {
 public:
  /// Chunks begin with as many tokens, and are then at most a quarter longer than those the pace knows: beyond these a
  /// straight line may be wrong, and what is far above it would be taken for a machine that stalled.
  static constexpr std::uint32_t kFirstChunk = 64;
  static constexpr double kWorth = 2.0;
  /// That is not worth a forward as long as so many slowed down.
  static constexpr double kMostStall = 8.0;
  /// After as many forwards without a chunk there is one, whatever it costs.
  static constexpr std::uint32_t kMostWaits = 64;

  /// Tokens, at most `most`, of the first chunk of a forward that has `rows` that decode; `first` tokens lie before it.
  /// `most` if no row decodes; 0 if it is to wait, and otherwise at least `least`.
  [[nodiscard]] std::uint32_t first_chunk(const Pace& pace, std::uint32_t rows, std::uint32_t first,
                                          std::uint32_t least, std::uint32_t most, double slowdown) noexcept;
  /// Of another chunk beside what the forward has, as far as its share goes.
  [[nodiscard]] std::uint32_t next_chunk(const Pace& pace, const PacedForward& beside, std::uint32_t first,
                                         std::uint32_t most) const noexcept;
  /// A forward was finished; `prompts`: there were some to read. What it cost is what the pace says: a machine that
  /// stalled is no fault of the prompt.
  void settle(const Pace& pace, const PacedForward& forward, bool prompts, double slowdown) noexcept;

 private:
  [[nodiscard]] static std::uint32_t trusted(const Pace& pace) noexcept;

  double saved_ = 0.0;         ///< seconds
  double share_ = 0.0;         ///< what chunks of the open forward may cost
  std::uint32_t waited_ = 0;  ///< forwards, for a chunk
};

}  // namespace sluice::scheduler
