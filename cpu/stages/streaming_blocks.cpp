// StreamingLLM (Xiao et al., ICLR 2024) as a mask: attention sinks and a window, whatever queries and keys say.

#include <algorithm>

#include "cpu/stages/block_choice.hpp"
#include "sluice/step/prefill_choice.hpp"

namespace sluice::cpu {
namespace {

BlockSet first_blocks(std::uint32_t blocks, std::uint32_t count) {
  BlockSet set{.has = std::vector<std::uint8_t>(blocks), .count = std::clamp(count, 1u, blocks)};
  std::fill_n(set.has.begin(), set.count, std::uint8_t{1});
  return set;
}

}  // namespace

WindowBlocks window_blocks(const ChunkGrid& grid, const StreamingPrefillSpec& spec) {
  return {.columns = first_blocks(grid.blocks, prefill_blocks_of(spec.sinks)),
          .offsets = first_blocks(grid.blocks, window_offsets(spec.window))};
}

PrefillChoice choose_streaming(const ChunkGrid& grid, const StreamingPrefillSpec& spec, std::uint32_t* bits) {
  const WindowBlocks chosen = window_blocks(grid, spec);
  write_lines(chosen.columns, chosen.offsets, grid, bits);
  return {.columns = chosen.columns.count, .diagonals = chosen.offsets.count, .pattern = HeadPattern::a_shape};
}

}  // namespace sluice::cpu
