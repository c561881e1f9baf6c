#include "tests/support/flexprefill_reference.hpp"

#include <algorithm>
#include <cmath>
#include <functional>

#include "sluice/step/prefill_choice.hpp"

namespace sluice::test::reference {
namespace {

constexpr std::uint32_t kBlock = kPrefillBlock;
/// Shares, weights relative to each other, and distances may be off by this much.
constexpr double kSlack = 1e-3;

std::uint32_t blocks_of(std::uint32_t tokens) { return (tokens + kBlock - 1) / kBlock; }

using Vector = std::vector<double>;

/// Fewest of the largest whose sum reaches `share`; all that weigh anything if none does.
std::uint32_t fewest(Vector weights, double share) {
  std::sort(weights.begin(), weights.end(), std::greater<>());
  double sum = 0.0;
  std::uint32_t count = 0;
  for (const double weight : weights) {
    if (weight <= 0.0 || (share < 1.0 && sum >= share)) break;
    sum += weight;
    ++count;
  }
  return count;
}

CountRange fewest_range(const Vector& weights, double share) {
  return {.least = fewest(weights, std::min(share, 1.0) - kSlack), .most = fewest(weights, share + kSlack)};
}

/// A set of which some members are certain.
struct Set {
  explicit Set(std::size_t size) : sure(size), possible(size) {}
  void force(std::size_t i) { sure[i] = possible[i] = 1; }
  [[nodiscard]] std::uint32_t sure_count() const {
    return static_cast<std::uint32_t>(std::count(sure.begin(), sure.end(), 1));
  }
  [[nodiscard]] std::uint32_t possible_count() const {
    return static_cast<std::uint32_t>(std::count(possible.begin(), possible.end(), 1));
  }
  std::vector<char> sure;
  std::vector<char> possible;
};

/// The largest `count` of `weights`, where those that are nearly equal may come in either order.
Set largest(const Vector& weights, CountRange count) {
  Set set(weights.size());
  Vector sorted = weights;
  std::sort(sorted.begin(), sorted.end(), std::greater<>());
  const auto at_least = [&](double limit) {  // How many weigh at least `limit`.
    return std::upper_bound(sorted.begin(), sorted.end(), limit, std::greater<>()) - sorted.begin();
  };
  const auto above = [&](double limit) {
    return std::lower_bound(sorted.begin(), sorted.end(), limit, std::greater<>()) - sorted.begin();
  };
  constexpr double kNothing = 1e-30;  // Float weights underflow.
  for (std::size_t i = 0; i < weights.size(); ++i) {
    set.sure[i] = at_least(weights[i] * (1.0 - kSlack) - kNothing) <= count.least;
    set.possible[i] = above(weights[i] * (1.0 + kSlack) + kNothing) < count.most;
  }
  return set;
}

struct Limits {
  std::uint32_t least = 1;  ///< blocks
  std::uint32_t most = 1;
};

Limits limits_of(const FlexPrefillSpec& spec, std::uint32_t blocks) {
  return {.least = std::max(1u, std::min(blocks_of(spec.min_budget), blocks)),
          .most = spec.max_budget == 0 ? blocks : std::min(blocks_of(spec.max_budget), blocks)};
}

/// Block form: as many blocks as the lines would fill; block 0 first.
Set chosen_blocks(const Vector& lines, Vector sums, double gamma, const Limits& limits, CountRange& count) {
  const CountRange needed = fewest_range(lines, gamma);
  count = {.least = std::clamp(blocks_of(needed.least), limits.least, limits.most),
           .most = std::clamp(blocks_of(needed.most), limits.least, limits.most)};
  sums[0] = 1e30;
  return largest(sums, count);
}

/// If there are more, the `most` with the largest sums, block 0 before all.
Set at_most(const Set& set, const Vector& sums, std::uint32_t most) {
  if (set.possible_count() <= most) return set;
  Set kept(sums.size());
  kept.force(0);
  for (std::size_t i = 1; i < sums.size(); ++i) {
    std::uint32_t before = 1, may_be_before = 1;  // With block 0.
    for (std::size_t j = 1; j < sums.size(); ++j) {
      before += j != i && set.sure[j] != 0 && sums[j] > sums[i] * (1.0 + kSlack) + 1e-30 ? 1 : 0;
      may_be_before += j != i && set.possible[j] != 0 && sums[j] >= sums[i] * (1.0 - kSlack) - 1e-30 ? 1 : 0;
    }
    kept.sure[i] = static_cast<char>(set.sure[i] != 0 && may_be_before < most);
    kept.possible[i] = static_cast<char>(set.possible[i] != 0 && before < most);
  }
  return kept;
}

/// Line form: every block that a line touches; a diagonal touches two unless its distance is a multiple of 128.
Set touched_blocks(const Vector& lines, const Vector& sums, double gamma, bool diagonal, const Limits& limits,
                   CountRange& count) {
  const Set chosen = largest(lines, fewest_range(lines, gamma));
  Set set(sums.size());
  set.force(0);
  for (std::size_t i = 0; i < lines.size(); ++i) {
    for (const std::size_t block : {i / kBlock, (i + (diagonal ? kBlock - 1 : 0)) / kBlock}) {
      if (block >= sums.size()) continue;
      set.sure[block] |= chosen.sure[i];
      set.possible[block] |= chosen.possible[i];
    }
  }
  Set filled = set;
  if (set.sure_count() < limits.least) {
    const Set best = largest(sums, {.least = 0, .most = limits.least});
    for (std::size_t i = 0; i < sums.size(); ++i) filled.possible[i] |= best.possible[i];
  }
  if (set.possible_count() < limits.least) {
    Vector others = sums;
    for (std::size_t i = 0; i < sums.size(); ++i) others[i] = set.possible[i] != 0 ? -1.0 : others[i];
    const Set best = largest(others, {.least = limits.least - set.possible_count(), .most = 0});
    for (std::size_t i = 0; i < sums.size(); ++i)
      filled.sure[i] |= static_cast<char>(best.sure[i] & (others[i] >= 0.0));
  }
  count = {.least = std::min(std::max(limits.least, set.sure_count()), limits.most),
           .most = std::min(std::max(limits.least, set.possible_count()), limits.most)};
  return at_most(filled, sums, limits.most);
}

struct Grid {
  std::uint32_t top = 0;   ///< first query block
  std::uint32_t rows = 0;  ///< query blocks
  std::uint32_t blocks = 0;
  [[nodiscard]] BlockMask empty() const { return BlockMask(rows, std::vector<char>(blocks)); }
};

void add_lines(const Grid& grid, const Set& columns, const Set& offsets, BlockMask& sure, BlockMask& possible) {
  for (std::uint32_t row = 0; row < grid.rows; ++row) {
    for (std::uint32_t block = 0; block <= grid.top + row; ++block) {
      const std::uint32_t offset = grid.top + row - block;
      sure[row][block] |= static_cast<char>(columns.sure[block] | offsets.sure[offset]);
      possible[row][block] |= static_cast<char>(columns.possible[block] | offsets.possible[offset]);
    }
  }
}

/// Where the verdict on the head is open, only what both kinds keep is sure.
void unite(const BlockMask& sure, const BlockMask& possible, bool first, ReferenceChoice& choice) {
  for (std::size_t row = 0; row < sure.size(); ++row) {
    for (std::size_t block = 0; block < sure[row].size(); ++block) {
      choice.sure[row][block] = static_cast<char>(sure[row][block] & (first ? 1 : choice.sure[row][block]));
      choice.possible[row][block] |= possible[row][block];
    }
  }
}

/// Algorithm 4: of all pairs of a query and a key block the fewest that hold gamma of all weight.
void add_flattened(const Prompt& prompt, std::uint32_t head, std::uint32_t first, std::uint32_t count, const Grid& grid,
                   double gamma, BlockMask& sure, BlockMask& possible) {
  Vector all;
  for (std::uint32_t row = 0; row < grid.rows; ++row) {
    const Vector weights = pooled_row(prompt, head, first, count, grid.top + row);
    all.insert(all.end(), weights.begin(), weights.end());
  }
  double total = 0.0;
  for (const double weight : all) total += weight;
  for (double& weight : all) weight /= std::max(total, 1e-300);
  const Set kept = largest(all, fewest_range(all, gamma));
  std::size_t at = 0;
  for (std::uint32_t row = 0; row < grid.rows; ++row) {
    for (std::uint32_t block = 0; block <= grid.top + row; ++block, ++at) {
      sure[row][block] |= kept.sure[at];
      possible[row][block] |= kept.possible[at];
    }
  }
}

}  // namespace

ReferenceChoice select_blocks(const Prompt& prompt, std::uint32_t head, std::uint32_t first, std::uint32_t count,
                              const FlexPrefillSpec& spec) {
  const Grid grid{.top = first / kBlock, .rows = prefill_blocks(first, count), .blocks = blocks_of(first + count)};
  const Limits limits = limits_of(spec, grid.blocks);
  ReferenceChoice choice{
      .from = representative(prompt, head, first, count), .sure = grid.empty(), .possible = grid.empty()};
  const Representative& from = choice.from;
  for (std::uint32_t row = 0; row < grid.rows; ++row) choice.causal += grid.top + row + 1;
  choice.everything = grid.blocks <= limits.least;
  const double tau = spec.tau;
  const double gamma = spec.gamma;
  choice.may_be_query_aware = tau > 0.0 && from.divergence < tau + kSlack;
  choice.may_be_vertical_slash = !(from.divergence < tau - kSlack);

  if (choice.may_be_vertical_slash) {
    BlockMask sure = grid.empty();
    BlockMask possible = grid.empty();
    const auto choose = [&](const Vector& lines, const Vector& sums, bool diagonal, CountRange& found) {
      if (spec.lines) return touched_blocks(lines, sums, gamma, diagonal, limits, found);
      return chosen_blocks(lines, sums, gamma, limits, found);
    };
    const Set columns = choose(from.columns, from.column_blocks, false, choice.columns);
    const Set offsets = choose(from.diagonals, from.offset_blocks, true, choice.diagonals);
    add_lines(grid, columns, offsets, sure, possible);
    unite(sure, possible, true, choice);
  }
  if (choice.may_be_query_aware) {
    BlockMask sure = grid.empty();
    BlockMask possible = grid.empty();
    CountRange least;
    const Limits only_least{.least = limits.least, .most = limits.least};
    add_lines(grid, chosen_blocks(from.columns, from.column_blocks, 0.0, only_least, least),
              chosen_blocks(from.diagonals, from.offset_blocks, 0.0, only_least, least), sure, possible);
    if (spec.flattened) add_flattened(prompt, head, first, count, grid, gamma, sure, possible);
    for (std::uint32_t row = 0; row < grid.rows && !spec.flattened; ++row) {
      const Vector weights = pooled_row(prompt, head, first, count, grid.top + row);
      CountRange fewest = fewest_range(weights, gamma);
      fewest = {.least = std::min(fewest.least, limits.most), .most = std::min(fewest.most, limits.most)};
      const Set kept = largest(weights, fewest);
      for (std::uint32_t block = 0; block < weights.size(); ++block) {
        sure[row][block] |= kept.sure[block];
        possible[row][block] |= kept.possible[block];
      }
    }
    unite(sure, possible, !choice.may_be_vertical_slash, choice);
  }
  // The first key block and the query block's own are always kept.
  for (std::uint32_t row = 0; row < grid.rows; ++row) {
    for (const std::uint32_t block : {0u, grid.top + row}) choice.sure[row][block] = choice.possible[row][block] = 1;
  }
  return choice;
}

}  // namespace sluice::test::reference
