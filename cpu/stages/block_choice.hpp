#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "cpu/stages/flex_choice.hpp"
#include "sluice/prefill.hpp"
#include "sluice/step/prefill_choice.hpp"

namespace sluice::cpu {

/// What one query head of a chunk has to choose by: how its newest queries attend, and pooled scores.
struct HeadLook {
  ChunkGrid grid;
  std::span<const float> columns;               ///< [keys] mean attention of every key
  std::vector<float> diagonals;                 ///< [keys] and at every distance
  std::vector<double> column_sums;              ///< [key blocks]
  std::vector<double> diagonal_sums;            ///< [key blocks] by block offset
  std::function<std::vector<double>()> pooled;  ///< softmax of their mean query and the mean keys: [key blocks]
  /// The same of a query block of the chunk and the blocks that it sees: [grid.top + row + 1].
  std::function<std::vector<double>(std::uint32_t row)> pooled_row;
};

/// The ways to choose, a file each. They write all words of the head's bits [grid.rows, grid.words] and say what came
/// of it but for kept and causal.
PrefillChoice choose_flexprefill(const HeadLook& head, const FlexPrefillSpec& spec, std::uint32_t* bits);
PrefillChoice choose_minference(const HeadLook& head, const MInferenceSpec& spec, std::uint32_t* bits);
/// Looks at nothing.
PrefillChoice choose_streaming(const ChunkGrid& grid, const StreamingPrefillSpec& spec, std::uint32_t* bits);

/// The columns and offsets of StreamingLLM's mask.
struct WindowBlocks {
  BlockSet columns;
  BlockSet offsets;
};
[[nodiscard]] WindowBlocks window_blocks(const ChunkGrid& grid, const StreamingPrefillSpec& spec);

}  // namespace sluice::cpu
