// FlexPrefill (Lai et al., ICLR 2025): a head whose pooled attention is like its true attention chooses per query
// block, others by columns and diagonals; each as few as hold a share of gamma.

#include "cpu/stages/block_choice.hpp"
#include "sluice/step/prefill_choice.hpp"

namespace sluice::cpu {
namespace {

/// What every query block's mean query attends of the mean keys.
void add_pooled_rows(const HeadLook& head, const FlexPrefillSpec& spec, std::uint32_t* bits) {
  const double gamma = static_cast<double>(spec.gamma);
  if (spec.flattened) {
    std::vector<std::vector<double>> all;
    for (std::uint32_t row = 0; row < head.grid.rows; ++row) all.push_back(head.pooled_row(row));
    return add_fewest_of_all(all, gamma, head.grid.words, bits);
  }
  for (std::uint32_t row = 0; row < head.grid.rows; ++row, bits += head.grid.words) {
    add_fewest(head.pooled_row(row), gamma, head.grid.most, bits);
  }
}

}  // namespace

PrefillChoice choose_flexprefill(const HeadLook& head, const FlexPrefillSpec& spec, std::uint32_t* bits) {
  PrefillChoice choice;
  choice.divergence = static_cast<float>(jensen_shannon(head.pooled(), head.column_sums));
  choice.query_aware = choice.divergence < spec.tau ? 1u : 0u;
  BlockSet columns;
  BlockSet offsets;
  if (choice.query_aware != 0) {
    columns = largest_blocks(head.column_sums, head.grid.least);
    offsets = largest_blocks(head.diagonal_sums, head.grid.least);
  } else {
    columns = choose_lines(head.columns, head.column_sums, LineKind::column, spec, head.grid);
    offsets = choose_lines(head.diagonals, head.diagonal_sums, LineKind::diagonal, spec, head.grid);
  }
  choice.columns = columns.count;
  choice.diagonals = offsets.count;
  write_lines(columns, offsets, head.grid, bits);
  if (choice.query_aware != 0) add_pooled_rows(head, spec, bits);
  return choice;
}

}  // namespace sluice::cpu
