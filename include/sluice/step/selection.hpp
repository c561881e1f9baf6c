#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "sluice/step/page.hpp"

namespace sluice {

/// What one KV head attends: whole or partial pages, single tokens, or both. The two parts are disjoint.
///
/// `tokens` is ascending and unique. `members[i]` has bit h set if the group's query head h attends
/// token i; empty `members` means that every head attends every token (the union over the group).
/// `scores` [tokens, group], if not empty, holds the score of every (token, head), so that the
/// attending kernel need not read K again.
struct SelectionRow {
  std::vector<PageRun> runs;           ///< ascending by page, at most one run per page
  std::vector<std::uint32_t> tokens;   ///< positions in the sequence
  std::vector<std::uint32_t> members;  ///< [tokens] or empty
  std::vector<float> scores;           ///< [tokens, group] or empty

  void clear() noexcept {
    runs.clear();
    tokens.clear();
    members.clear();
    scores.clear();
  }
  [[nodiscard]] std::uint64_t attended() const noexcept {
    std::uint64_t sum = tokens.size();
    for (const PageRun& run : runs) sum += run.tokens();
    return sum;
  }
};

/// A replacement for the attention over everything that was not selected, for query heads that need
/// no attending at all (LFPS section 4.3): the mean value, weighted by its estimated mass.
struct Bypass {
  std::uint32_t heads = 0;    ///< bit h: the group's query head h is bypassed; it attends none of the row
  std::vector<float> out;     ///< [group, head_dim]; rows of heads that are not bypassed are undefined
  std::vector<float> lse;     ///< [group], and as many for each row behind, see HeadContext; likewise
};

/// Selection of one layer of one sequence: one row per KV head.
struct Selection {
  std::vector<SelectionRow> rows;  ///< [kv_heads]
  std::vector<Bypass> bypass;      ///< [kv_heads] or empty
};

}  // namespace sluice
