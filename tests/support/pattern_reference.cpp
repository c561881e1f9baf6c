#include "tests/support/pattern_reference.hpp"

#include <algorithm>
#include <array>

#include "sluice/step/prefill_choice.hpp"

namespace sluice::test::reference {
namespace {

constexpr std::uint32_t kBlock = kPrefillBlock;
constexpr double kSlack = 1e-3;

using Vector = std::vector<double>;

struct Grid {
  Grid(std::uint32_t first, std::uint32_t count)
      : top(first / kBlock), rows(prefill_blocks(first, count)), blocks((first + count + kBlock - 1) / kBlock) {}
  [[nodiscard]] BlockMask empty() const { return BlockMask(rows, std::vector<char>(blocks)); }
  std::uint32_t top;
  std::uint32_t rows;
  std::uint32_t blocks;
};

struct Members {
  std::vector<char> sure;
  std::vector<char> possible;
};

/// The `count` largest that weigh anything; block 0 of lines is the largest of all.
Members largest(Vector weights, std::uint32_t count, bool first_forced) {
  if (first_forced) weights[0] = 1e30;
  Members set{.sure = std::vector<char>(weights.size()), .possible = std::vector<char>(weights.size())};
  for (std::size_t i = 0; i < weights.size(); ++i) {
    std::uint32_t above = 0, reach = 0;
    for (std::size_t j = 0; j < weights.size(); ++j) {
      above += weights[j] > weights[i] * (1.0 + kSlack) + 1e-30 ? 1u : 0u;
      reach += j != i && weights[j] >= weights[i] * (1.0 - kSlack) - 1e-30 ? 1u : 0u;
    }
    set.possible[i] = static_cast<char>(above < count);
    set.sure[i] = static_cast<char>(reach < count && (first_forced || weights[i] > 1e-30));
  }
  return set;
}

struct Masks {
  BlockMask sure;
  BlockMask possible;
};

Masks columns_and_diagonals(const Grid& grid, const Representative& from, const MInferenceSpec& spec) {
  const auto blocks = [](std::uint32_t tokens) { return std::max(1u, (tokens + kBlock - 1) / kBlock); };
  const Members columns = largest(from.column_blocks, blocks(spec.columns), true);
  const Members offsets = largest(from.offset_blocks, blocks(spec.diagonals), true);
  Masks masks{.sure = grid.empty(), .possible = grid.empty()};
  for (std::uint32_t row = 0; row < grid.rows; ++row) {
    for (std::uint32_t block = 0; block <= grid.top + row; ++block) {
      const std::uint32_t offset = grid.top + row - block;
      masks.sure[row][block] = static_cast<char>(columns.sure[block] | offsets.sure[offset]);
      masks.possible[row][block] = static_cast<char>(columns.possible[block] | offsets.possible[offset]);
    }
  }
  return masks;
}

Masks pooled_blocks(const Prompt& prompt, std::uint32_t head, std::uint32_t first, std::uint32_t count,
                    const MInferenceSpec& spec) {
  const Grid grid(first, count);
  Masks masks{.sure = grid.empty(), .possible = grid.empty()};
  for (std::uint32_t row = 0; row < grid.rows; ++row) {
    const Members kept =
        largest(pooled_row(prompt, head, first, count, grid.top + row), (spec.blocks + kBlock - 1) / kBlock, false);
    std::copy(kept.sure.begin(), kept.sure.end(), masks.sure[row].begin());
    std::copy(kept.possible.begin(), kept.possible.end(), masks.possible[row].begin());
    for (const std::uint32_t block : {0u, grid.top + row}) masks.sure[row][block] = masks.possible[row][block] = 1;
  }
  return masks;
}

/// What the last queries attend of the last query block's pairs.
double held(const Representative& from, const std::vector<char>& row) {
  double sum = 0.0;
  for (std::size_t block = 0; block < row.size(); ++block) sum += row[block] != 0 ? from.column_blocks[block] : 0.0;
  return sum;
}

}  // namespace

BlockMask streaming(std::uint32_t first, std::uint32_t count, const StreamingPrefillSpec& spec) {
  const Grid grid(first, count);
  BlockMask mask = grid.empty();
  for (std::uint32_t row = 0; row < grid.rows; ++row) {
    mask[row][0] = 1;
    for (std::uint32_t query = (grid.top + row) * kBlock; query < (grid.top + row + 1) * kBlock; ++query) {
      for (std::uint32_t key = 0; key <= query; ++key) {
        if ((key < spec.sinks || query - key < spec.window) && key / kBlock < grid.blocks) mask[row][key / kBlock] = 1;
      }
    }
  }
  return mask;
}

PatternChoice minference(const Prompt& prompt, std::uint32_t head, std::uint32_t first, std::uint32_t count,
                         const MInferenceSpec& spec) {
  const Grid grid(first, count);
  const Representative from = representative(prompt, head, first, count, 64);
  const BlockMask window = streaming(first, count, spec.a_shape);
  // In the order in which nearly equal ones are taken.
  const std::array<HeadPattern, 3> patterns{HeadPattern::a_shape, HeadPattern::vertical_slash,
                                            HeadPattern::block_sparse};
  const std::array<Masks, 3> masks{Masks{.sure = window, .possible = window}, columns_and_diagonals(grid, from, spec),
                                   pooled_blocks(prompt, head, first, count, spec)};
  // The last query block by the mean of the last 64 queries, not of its own.
  std::array<std::vector<char>, 3> least{masks[0].sure.back(), masks[1].sure.back(), {}};
  std::array<std::vector<char>, 3> most{masks[0].possible.back(), masks[1].possible.back(), {}};
  const Members by_mean = largest(from.pooled, (spec.blocks + kBlock - 1) / kBlock, false);
  least[2] = by_mean.sure;
  most[2] = by_mean.possible;
  least[2][0] = most[2][0] = least[2].back() = most[2].back() = 1;

  PatternChoice choice{.sure = grid.empty(), .possible = grid.empty()};
  for (std::uint32_t row = 0; row < grid.rows; ++row) choice.causal += grid.top + row + 1;
  double surely = 0.0, maybe = 0.0;
  for (std::size_t i = 0; i < 3; ++i) {
    surely = std::max(surely, held(from, least[i]));
    maybe = std::max(maybe, held(from, most[i]));
  }
  const double margin = static_cast<double>(kPatternMargin);
  bool earlier = false;  // One that is surely taken.
  for (std::size_t i = 0; i < 3; ++i) {
    const bool asked = spec.pattern == patterns[i];
    const bool may = spec.pattern == HeadPattern::best && !earlier && held(from, most[i]) >= surely - margin - kSlack;
    earlier |= held(from, least[i]) >= maybe - margin + kSlack;
    if (!asked && !may) continue;
    const bool alone = choice.may_be.empty();
    choice.may_be.push_back(patterns[i]);
    for (std::uint32_t row = 0; row < grid.rows; ++row) {
      for (std::uint32_t block = 0; block <= grid.top + row; ++block) {
        char& sure = choice.sure[row][block];
        sure = static_cast<char>(masks[i].sure[row][block] & (alone ? 1 : sure));
        choice.possible[row][block] |= masks[i].possible[row][block];
      }
    }
  }
  return choice;
}

}  // namespace sluice::test::reference
