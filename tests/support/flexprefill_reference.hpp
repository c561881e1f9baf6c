#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "sluice/prefill.hpp"
#include "tests/support/prompt.hpp"

/// FlexPrefill's choice of blocks once more in float64, by its formulas.
///
/// A device rounds, and a choice amplifies: what lies within rounding of a threshold may fall on either side. The
/// reference therefore gives two masks for each head: pairs that every correct device keeps, and pairs that some may.
namespace sluice::test {

/// What one head's representative rows (the chunk's last 128) attend, and what follows from it before any choice.
struct Representative {
  std::vector<double> columns;        ///< [keys] mean attention of every key; sums to 1
  std::vector<double> diagonals;      ///< [keys] attention at every distance, divided by the rows; sums to 1
  std::vector<double> column_blocks;  ///< [key blocks] sums of `columns`
  std::vector<double> offset_blocks;  ///< [key blocks] sums of `diagonals` over distances e with e / 128 equal
  std::vector<double> pooled;         ///< [key blocks] attention of the mean query to the blocks' mean keys
  double divergence = 0.0;            ///< Jensen-Shannon distance of `pooled` and `column_blocks`
};

/// Fewest and most that a device may count.
struct CountRange {
  std::uint32_t least = 0;
  std::uint32_t most = 0;
  [[nodiscard]] bool contains(std::uint32_t count) const noexcept { return least <= count && count <= most; }
};

/// [query blocks of the chunk, key blocks], 1 where a pair is kept.
using BlockMask = std::vector<std::vector<char>>;

struct ReferenceChoice {
  Representative from;
  bool everything = false;  ///< the budget holds the whole prompt: only the masks and `causal` are defined
  bool may_be_query_aware = false;
  bool may_be_vertical_slash = false;
  CountRange columns{};    ///< PrefillChoice::columns
  CountRange diagonals{};  ///< PrefillChoice::diagonals
  BlockMask sure;          ///< every device keeps these
  BlockMask possible;      ///< and none keeps others
  std::uint64_t causal = 0;
};

namespace reference {

/// Scores that are not finite weigh nothing; a row without any other is left out.
[[nodiscard]] Representative representative(const Prompt& prompt, std::uint32_t head, std::uint32_t first,
                                            std::uint32_t count, std::uint32_t most_rows = kPrefillBlock);
[[nodiscard]] double jensen_shannon(std::span<const double> p, std::span<const double> q);
/// Attention of one query block's mean query to the mean keys of blocks 0 .. its own; [block + 1].
[[nodiscard]] std::vector<double> pooled_row(const Prompt& prompt, std::uint32_t head, std::uint32_t first,
                                             std::uint32_t count, std::uint32_t block);
[[nodiscard]] ReferenceChoice select_blocks(const Prompt& prompt, std::uint32_t head, std::uint32_t first,
                                            std::uint32_t count, const FlexPrefillSpec& spec);

}  // namespace reference
}  // namespace sluice::test
