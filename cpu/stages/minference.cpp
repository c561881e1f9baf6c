// MInference (Jiang et al., NeurIPS 2024): a head is an A-shape, which is static, or goes by the columns and diagonals
// that its last queries attend most (Algorithm 2), or by pooled scores of every query block (Algorithm 3).

#include <algorithm>
#include <array>

#include "cpu/stages/block_choice.hpp"
#include "sluice/step/prefill_choice.hpp"

namespace sluice::cpu {
namespace {

/// Blocks of columns and of offsets that all query blocks have, and how many more each chooses by pooled scores.
struct PatternBlocks {
  HeadPattern pattern{};
  BlockSet columns;
  BlockSet offsets;
  std::uint32_t of_row = 0;
};

PatternBlocks blocks_of(const HeadLook& head, HeadPattern pattern, const MInferenceSpec& spec) {
  const auto lines = [&](const std::vector<double>& sums, std::uint32_t tokens) {
    return largest_blocks(sums, std::clamp(prefill_blocks_of(tokens), 1u, head.grid.blocks));
  };
  if (pattern == HeadPattern::a_shape) {
    WindowBlocks window = window_blocks(head.grid, spec.a_shape);
    return {.pattern = pattern, .columns = std::move(window.columns), .offsets = std::move(window.offsets)};
  }
  if (pattern == HeadPattern::block_sparse) {
    WindowBlocks own = window_blocks(head.grid, {.sinks = 1, .window = 1});
    return {.pattern = pattern,
            .columns = std::move(own.columns),
            .offsets = std::move(own.offsets),
            .of_row = prefill_blocks_of(spec.blocks)};
  }
  return {.pattern = pattern,
          .columns = lines(head.column_sums, spec.columns),
          .offsets = lines(head.diagonal_sums, spec.diagonals)};
}

void add_largest(const std::vector<double>& weights, std::uint32_t count, std::uint32_t* row_bits) {
  add_fewest(weights, 1.0, count, row_bits);
}

/// How much of what the last queries attend lies in the blocks that the last query block keeps.
double held(const HeadLook& head, const PatternBlocks& blocks) {
  const std::uint32_t own = head.grid.blocks - 1;
  std::vector<std::uint32_t> bits(head.grid.words);
  if (blocks.of_row != 0) add_largest(head.pooled(), blocks.of_row, bits.data());
  double sum = 0.0;
  for (std::uint32_t block = 0; block <= own; ++block) {
    const std::uint32_t kept =
        blocks.columns.has[block] | blocks.offsets.has[own - block] | (bits[block / 32] >> block % 32 & 1u);
    sum += kept != 0 ? head.column_sums[block] : 0.0;
  }
  return sum;
}

/// The paper searches offline, over all queries of samples; here the last queries of the prompt itself decide.
PatternBlocks best(const HeadLook& head, const MInferenceSpec& spec) {
  std::array<PatternBlocks, 3> all{blocks_of(head, HeadPattern::a_shape, spec),
                                   blocks_of(head, HeadPattern::vertical_slash, spec),
                                   blocks_of(head, HeadPattern::block_sparse, spec)};
  std::array<double, 3> holds{};
  for (std::size_t i = 0; i < all.size(); ++i) holds[i] = held(head, all[i]);
  const double enough = std::ranges::max(holds) - static_cast<double>(kPatternMargin);
  const auto first = std::ranges::find_if(holds, [&](double share) { return share >= enough; });
  return std::move(all[static_cast<std::size_t>(first - holds.begin())]);
}

}  // namespace

PrefillChoice choose_minference(const HeadLook& head, const MInferenceSpec& spec, std::uint32_t* bits) {
  const PatternBlocks blocks =
      spec.pattern == HeadPattern::best ? best(head, spec) : blocks_of(head, spec.pattern, spec);
  write_lines(blocks.columns, blocks.offsets, head.grid, bits);
  for (std::uint32_t row = 0; row < head.grid.rows && blocks.of_row != 0; ++row) {
    add_largest(head.pooled_row(row), blocks.of_row, bits + std::size_t{row} * head.grid.words);
  }
  return {.query_aware = blocks.of_row != 0 ? 1u : 0u,
          .columns = blocks.columns.count,
          .diagonals = blocks.offsets.count,
          .pattern = blocks.pattern};
}

}  // namespace sluice::cpu
