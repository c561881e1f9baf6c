#include "cpu/stages/flex_choice.hpp"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <numeric>
#include <utility>

#include "sluice/step/prefill_choice.hpp"
#include "sluice/step/top_p.hpp"

namespace sluice::cpu {
namespace {

/// The fewest lines, largest first, that hold a share of all weight: those above `least`, and so many that equal it.
struct Fewest {
  float least = std::numeric_limits<float>::infinity();
  std::uint32_t above = 0;
  std::uint32_t equal = 0;
  [[nodiscard]] std::uint32_t count() const noexcept { return above + equal; }
};

Fewest fewest(std::span<const float> lines, double share) {
  thread_local std::vector<Weighed> pool;
  pool.clear();
  double total = 0.0;
  for (const float line : lines) {
    if (!(line > 0.f)) continue;
    pool.push_back({.key = std::bit_cast<std::uint32_t>(line), .weight = line});  // Positive: bits order like values.
    total += static_cast<double>(line);
  }
  Fewest found;
  if (pool.empty()) return found;
  found.least = std::bit_cast<float>(top_p_cut(pool, share));
  double above = 0.0;
  for (const float line : lines) {
    if (line > found.least) {
      ++found.above;
      above += static_cast<double>(line);
    } else if (line == found.least) {
      ++found.equal;
    }
  }
  if (share >= 1.0) return found;
  // Counted, not divided: the number of ties is small, but their weight may be a subnormal.
  std::uint32_t needed = 1;
  for (above += static_cast<double>(found.least); above < share * total && needed < found.equal; ++needed) {
    above += static_cast<double>(found.least);
  }
  found.equal = needed;
  return found;
}

void insert(BlockSet& set, std::uint32_t block) noexcept {
  set.count += set.has[block] == 0 ? 1u : 0u;
  set.has[block] = 1;
}

/// Blocks by descending sum, equal ones by index.
std::vector<std::uint32_t> by_sum(std::span<const double> sums) {
  std::vector<std::uint32_t> order(sums.size());
  std::iota(order.begin(), order.end(), 0u);
  std::stable_sort(order.begin(), order.end(), [&](std::uint32_t a, std::uint32_t b) { return sums[a] > sums[b]; });
  return order;
}

BlockSet touched_blocks(std::span<const float> lines, std::span<const double> sums, LineKind kind, const Fewest& chosen,
                        const ChunkGrid& grid) {
  BlockSet set{.has = std::vector<std::uint8_t>(grid.blocks), .count = 0};
  insert(set, 0);
  std::uint32_t equal = chosen.equal;
  for (std::uint32_t i = 0; i < lines.size(); ++i) {
    const bool tie = lines[i] == chosen.least && equal != 0;
    if (!(lines[i] > chosen.least) && !tie) continue;
    equal -= tie ? 1u : 0u;
    insert(set, i / kPrefillBlock);
    const std::uint32_t next = i / kPrefillBlock + 1;
    if (kind == LineKind::diagonal && i % kPrefillBlock != 0 && next < grid.blocks) insert(set, next);
  }
  for (const std::uint32_t block : by_sum(sums)) {
    if (set.count >= grid.least) break;
    insert(set, block);
  }
  if (set.count <= grid.most) return set;
  std::vector<double> touched(sums.begin(), sums.end());
  for (std::uint32_t i = 0; i < touched.size(); ++i) touched[i] = set.has[i] != 0 ? touched[i] : -1.0;
  return largest_blocks(touched, grid.most);
}

}  // namespace

ChunkGrid::ChunkGrid(std::uint32_t first, std::uint32_t count, const FlexPrefillSpec& spec) noexcept
    : top(first / kPrefillBlock),
      rows(prefill_blocks(first, count)),
      blocks(prefill_blocks_of(first + count)),
      words(prefill_mask_words(first + count)),
      least(std::max(1u, std::min(prefill_blocks_of(spec.min_budget), blocks))),
      most(spec.max_budget == 0 ? blocks : std::clamp(prefill_blocks_of(spec.max_budget), least, blocks)) {}

ChunkGrid::ChunkGrid(std::uint32_t first, std::uint32_t count, const PrefillSpec& spec) noexcept
    : ChunkGrid(first, count,
                spec.mode == PrefillMode::streaming || spec.mode == PrefillMode::minference
                    ? FlexPrefillSpec{.min_budget = 0}
                    : spec.flex) {}

void soften(std::span<double> scores) noexcept {
  double top = -std::numeric_limits<double>::infinity();
  for (double& score : scores) {
    if (!std::isfinite(score)) score = -std::numeric_limits<double>::infinity();
    top = std::max(top, score);
  }
  double sum = 0.0;
  for (double& score : scores) {
    score = std::isfinite(score) ? std::exp(score - top) : 0.0;
    sum += score;
  }
  for (double& score : scores) score = sum > 0.0 ? score / sum : 0.0;
}

std::vector<double> block_sums(std::span<const float> lines) {
  std::vector<double> sums(div_up(lines.size(), kPrefillBlock));
  for (std::size_t i = 0; i < lines.size(); ++i) sums[i / kPrefillBlock] += static_cast<double>(lines[i]);
  return sums;
}

double jensen_shannon(std::span<const double> p, std::span<const double> q) noexcept {
  double sum = 0.0;
  for (std::size_t i = 0; i < p.size(); ++i) {
    const double middle = 0.5 * (p[i] + q[i]);
    if (p[i] > 0.0) sum += 0.5 * p[i] * std::log(p[i] / middle);
    if (q[i] > 0.0) sum += 0.5 * q[i] * std::log(q[i] / middle);
  }
  constexpr double kMost = 0.832554611157698;  // sqrt(ln 2); sums may round beyond.
  return std::min(std::sqrt(std::max(sum, 0.0)), kMost);
}

BlockSet largest_blocks(std::span<const double> sums, std::uint32_t count) {
  std::vector<double> forced(sums.begin(), sums.end());
  forced[0] = std::numeric_limits<double>::infinity();
  const std::vector<std::uint32_t> order = by_sum(forced);
  BlockSet set{.has = std::vector<std::uint8_t>(sums.size()), .count = 0};
  for (std::uint32_t i = 0; i < std::min<std::size_t>(count, order.size()); ++i) insert(set, order[i]);
  return set;
}

BlockSet choose_lines(std::span<const float> lines, std::span<const double> sums, LineKind kind,
                      const FlexPrefillSpec& spec, const ChunkGrid& grid) {
  const Fewest chosen = fewest(lines, static_cast<double>(spec.gamma));
  if (spec.lines) return touched_blocks(lines, sums, kind, chosen, grid);
  return largest_blocks(sums, std::clamp(prefill_blocks_of(chosen.count()), grid.least, grid.most));
}

void write_lines(const BlockSet& columns, const BlockSet& offsets, const ChunkGrid& grid,
                 std::uint32_t* bits) noexcept {
  std::fill_n(bits, std::size_t{grid.rows} * grid.words, 0u);
  for (std::uint32_t row = 0; row < grid.rows; ++row, bits += grid.words) {
    const std::uint32_t own = grid.top + row;
    for (std::uint32_t block = 0; block <= own; ++block) {
      const std::uint32_t keep = columns.has[block] | offsets.has[own - block];
      bits[block / 32] |= keep << block % 32;
    }
  }
}

void add_fewest(std::span<const double> weights, double gamma, std::uint32_t most, std::uint32_t* row_bits) {
  double sum = 0.0;
  for (const std::uint32_t block : by_sum(weights)) {
    if (!(weights[block] > 0.0) || (gamma < 1.0 && sum >= gamma) || most-- == 0) break;
    row_bits[block / 32] |= 1u << block % 32;
    sum += weights[block];
  }
}

void add_fewest_of_all(std::span<const std::vector<double>> weights, double gamma, std::uint32_t words,
                       std::uint32_t* bits) {
  std::vector<double> all;
  std::vector<std::pair<std::uint32_t, std::uint32_t>> places;  // (query block, key block)
  double total = 0.0;
  for (std::uint32_t row = 0; row < weights.size(); ++row) {
    for (std::uint32_t block = 0; block < weights[row].size(); ++block) {
      all.push_back(weights[row][block]);
      places.emplace_back(row, block);
      total += weights[row][block];
    }
  }
  double sum = 0.0;
  for (const std::uint32_t i : by_sum(all)) {
    if (!(all[i] > 0.0) || (gamma < 1.0 && sum >= gamma * total)) break;
    bits[std::size_t{places[i].first} * words + places[i].second / 32] |= 1u << places[i].second % 32;
    sum += all[i];
  }
}

}  // namespace sluice::cpu
