#pragma once

#include <cstdint>

#include "sluice/prefill.hpp"
#include "sluice/step/prefill_choice.hpp"

namespace sluice::scheduler {

/// A chunk of a prompt, as far as the work of its attention goes.
struct ChunkWork {
  std::uint32_t first = 0;
  std::uint32_t count = 0;
  [[nodiscard]] double key_blocks() const noexcept;
  [[nodiscard]] double query_blocks() const noexcept;
  /// (query block, key block) pairs of dense attention, per query head.
  [[nodiscard]] double pairs() const noexcept;
};

/// PrefillMode::automatic for one sequence: where to choose blocks. A choice costs time whether it helps or not, so
/// each is a bet against what was won before, and against a small share of dense attention's time that may be lost over
/// all layers: on prompts without structure the whole stays within that share of dense attention, on others bets are won
/// from the first layer on. A layer that lost rests for some chunks. Pure: decides by what it was told, not by clocks.
class PrefillBets {
 public:
  PrefillBets() = default;
  /// As one was that had this balance.
  explicit PrefillBets(double balance) noexcept : balance_(balance) {}
  [[nodiscard]] double balance() const noexcept { return balance_; }

  /// Whether to choose blocks for this chunk of a layer; call once each. `rest` is the layer's own.
  [[nodiscard]] bool bet(const ChunkWork& work, std::uint32_t layer, std::uint32_t layers, const PrefillCosts& costs,
                         std::uint32_t& rest) noexcept;
  /// What a choice came to, over all query heads of the layer.
  void settle(std::uint64_t kept, std::uint64_t causal, std::uint32_t q_heads, std::uint32_t& rest) noexcept;

 private:
  double balance_ = 0.0;  ///< block pairs of one query head and layer, in units of dense attention's time
};

}  // namespace sluice::scheduler
