#pragma once

#include <cstdint>

#include "sluice/forward_memory.hpp"
#include "sluice/select_verbs.hpp"

/// What a row that chooses asks of the verbs of a Backend, the same on every device. `list` is row * kv_heads + KV
/// head, `plane` that head's of the layer.
namespace sluice {

/// Scores of its pages by their digests; of none, unless it ranks any.
[[nodiscard]] constexpr ScorePagesTask rank_task(const ForwardMemory& m, const ForwardRow& row, std::uint32_t list,
                                                 std::uint32_t plane) noexcept {
  return {.q = m.q + std::uint64_t{list} * m.shape.group() * m.shape.head_dim,
          .digests = row.pages == 0 ? nullptr : m.digest_of(plane, 0),
          .frames = m.list_of(row.pages == 0 ? 0 : row.list),
          .pages = row.pages,
          .out = m.page_scores_of(list, row.asks != 0 && row.page_picks == 0)};
}

/// Estimates of its tokens, or of those in its pages; of none, unless it ranks tokens.
[[nodiscard]] constexpr ScoreInt4Task estimate_task(const ForwardMemory& m, const ForwardRow& row, std::uint32_t list,
                                                    std::uint32_t plane) noexcept {
  const bool ranks = row.list != kNone && row.ranks();
  const bool pages = ranks && row.in_pages();
  return {.q = m.q + std::uint64_t{list} * m.shape.group() * m.shape.head_dim,
          .copies = m.codes + m.far_page(plane, 0) * Int4Layout(m.layout).page_bytes(),
          .frames = m.list_of(ranks ? row.list : 0),
          .tokens = ranks ? row.tokens : 0,
          .lists = pages ? m.ranked_of(list, false) : nullptr,
          .listed = pages ? row.page_picks : 0,
          .sinks = pages ? row.sink_end : 0,
          .recent = pages ? row.recent_begin : kNone,
          .out = m.scores + std::uint64_t{list} * m.shape.group() * m.score_room()};
}

/// Of the values of such a row, those to choose from.
struct ForwardCandidates {
  std::uint32_t begin = 0;
  std::uint32_t end = 0;
};
[[nodiscard]] constexpr ForwardCandidates candidates_of(const ForwardMemory& m, const ForwardRow& row) noexcept {
  if (row.in_pages()) return {.begin = 0, .end = row.page_picks * m.layout.page_tokens};
  return {.begin = row.sink_end, .end = row.recent_begin};
}

}  // namespace sluice
