#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <vector>

#include "sluice/step/forward_memory.hpp"

namespace sluice::runtime {

/// A piece of an answer that a thread gave, by the clock of the host.
struct FarPiece {
  Stage stage{};
  std::uint32_t layer = 0;
  std::uint32_t thread = 0;
  std::int64_t begin_ns = 0;
  std::int64_t end_ns = 0;
};

/// A layer's question. 0: it has not been seen, or not answered.
struct FarAnswer {
  std::int64_t seen_ns = 0;
  std::int64_t answered_ns = 0;
};

/// What threads did for one forward.
struct FarWork {
  std::vector<FarPiece> pieces;    ///< in no order
  std::vector<FarAnswer> answers;  ///< [layers]
  std::uint64_t dropped = 0;       ///< pieces for which there was no room
};

/// What the threads of the far part do for forwards that are traced, kept for the newest kMostForwards of them, in
/// memory that was reserved before; none where the largest bucket has no traces.
/// Thread safety: `expect` and `take` by the calling thread, while nothing of such a forward is asked or answered; the
/// others by any thread, between its question and the end of its answer.
class FarNotes {
 public:
  explicit FarNotes(const ForwardMemory& memory);

  void expect(std::uint64_t forward) noexcept;
  [[nodiscard]] bool wants(std::uint64_t forward) const noexcept {
    return !slots_.front().pieces.empty() && slot(forward).forward == forward;
  }
  void add(std::uint64_t forward, const FarPiece& piece) noexcept;
  void answer(std::uint64_t forward, std::uint32_t layer, const FarAnswer& answer) noexcept;
  /// Nothing if it was not expected, or so long ago that others have taken its place.
  [[nodiscard]] FarWork take(std::uint64_t forward) const;
  [[nodiscard]] std::uint64_t bytes() const noexcept;

 private:
  struct Slot {
    std::uint64_t forward = 0;
    std::atomic<std::uint64_t> count{0};  ///< of pieces, those without room included
    std::vector<FarPiece> pieces;
    std::vector<FarAnswer> answers;
  };
  [[nodiscard]] const Slot& slot(std::uint64_t forward) const noexcept { return slots_[forward % kMostForwards]; }
  [[nodiscard]] Slot& slot(std::uint64_t forward) noexcept { return slots_[forward % kMostForwards]; }

  std::array<Slot, kMostForwards> slots_;
};

}  // namespace sluice::runtime
