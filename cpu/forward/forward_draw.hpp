#pragma once

#include "sluice/step/forward_memory.hpp"
#include "sluice/step/select_tasks.hpp"

/// Tokens that are drawn, see sample.hpp.
namespace sluice::cpu {

/// Scores of a task that draws become what it draws by: soft-capped logits, each perturbed by its draw.
void perturb(const AttentionShape& shape, const ScoreInt4Task& task);

/// Of each row that draws: how many of its picks each head draws, which come first then, and by which thresholds.
void keep_drawn(const ForwardMemory& memory, std::uint32_t layer);

/// What a list has drawn, once that is known.
class Drawn {
 public:
  Drawn(const ForwardMemory& memory, const ForwardRow& row, std::uint32_t list) noexcept;
  /// What is added to the logits of a token that the list attends: 0 for those that are attended whatever is drawn.
  [[nodiscard]] float correction(std::uint32_t token) const noexcept;

 private:
  const ForwardMemory& memory_;
  const ForwardRow& row_;
  HeadDraws draws_;
  const float* scores_;               ///< [group, tokens]
  const DrawThresholds* thresholds_;  ///< [group]
};

}  // namespace sluice::cpu
