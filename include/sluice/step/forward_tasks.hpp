#pragma once

#include <cstdint>

#include "sluice/step/forward_memory.hpp"
#include "sluice/step/select_tasks.hpp"
#include "sluice/tensor.hpp"

/// What a row that chooses asks of a stage, the same on every device. `list` is row * kv_heads + KV
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
          .copies = m.codes + m.far_page(plane, 0) * m.code_page_bytes(),
          .mean = ranks ? m.key_mean_of(row.list, plane) : nullptr,
          .frames = m.list_of(ranks ? row.list : 0),
          .tokens = ranks ? row.tokens : 0,
          .lists = pages ? m.ranked_of(list, false) : nullptr,
          .listed = pages ? row.page_picks : 0,
          .sinks = ranks ? row.sink_end : 0,
          .recent = ranks ? row.recent_begin : kNone,
          .bits = m.code_bits,
          .draws = ranks ? row.draws.of(list % m.shape.kv_heads, m.own_group()) : HeadDraws{},
          .out = m.scores + std::uint64_t{list} * m.shape.group() * m.score_room()};
}

/// The same as far as copies are read: of none where the caller brings scores, which take the place of estimates.
[[nodiscard]] constexpr ScoreInt4Task copies_task(const ForwardMemory& m, const ForwardRow& row, std::uint32_t list,
                                                  std::uint32_t plane) noexcept {
  ScoreInt4Task task = estimate_task(m, row, list, plane);
  if (row.scored()) task.tokens = 0;
  return task;
}

/// The caller's scores of a scored row and a KV head, of query head `head` of the list: float32, by token.
[[nodiscard]] constexpr const std::byte* brought_scores(const ForwardMemory& m, const TensorView& scores,
                                                        const ForwardRow& row, std::uint32_t kv_head,
                                                        std::uint32_t head) noexcept {
  const std::uint32_t last = row.drafts == 0 ? 0 : row.drafts - 1;
  const std::uint32_t draft = m.asker(head).draft;
  return scores.row(row.scores + (draft < last ? draft : last), scores.heads == 1 ? 0 : kv_head);
}
/// Of estimates that a row chooses by; the caller's scores are taken as they are.
[[nodiscard]] constexpr float softcap_of(const ForwardMemory& m, const ForwardRow& row) noexcept {
  return row.scored() ? 0.f : m.shape.softcap;
}

/// What its query heads choose of its clusters; without scratch memory.
[[nodiscard]] constexpr ChooseClustersTask clusters_task(const ForwardMemory& m, const ForwardRow& row,
                                                         std::uint32_t list, std::uint32_t plane) noexcept {
  if (row.list == kNone || row.clusters.count == 0) return {};
  const std::uint64_t head = std::uint64_t{list} * m.shape.group();
  return {.q = m.q + head * m.shape.head_dim,
          .centroids = m.centroids_of(row.clusters.slot, plane),
          .starts = m.cluster_starts_of(row.clusters.slot, plane),
          .members = m.cluster_members_of(row.clusters.slot, plane),
          .clusters = row.clusters.count,
          .samples = row.clusters.samples,
          .copies = m.codes + m.far_page(plane, 0) * m.code_page_bytes(),
          .mean = m.key_mean_of(row.list, plane),
          .frames = m.list_of(row.list),
          .tokens = row.tokens,
          .sinks = row.sink_end,
          .recent = row.recent_begin,
          .mass = row.mass,
          .masks = m.masks + head * m.mask_words(),
          .mask_words = m.mask_words()};
}

/// What its query heads take of its pages until they have their share; without scratch memory.
[[nodiscard]] constexpr ChoosePagesTask pages_task(const ForwardMemory& m, const ForwardRow& row, std::uint32_t list,
                                                   std::uint32_t plane) noexcept {
  if (row.list == kNone || row.microbatch == 0) return {};
  return {.page_scores = rank_task(m, row, list, plane).out,
          .scores = estimate_task(m, row, list, plane).out,
          .pages = row.pages,
          .tokens = row.tokens,
          .sinks = row.sink_end,
          .recent = row.recent_begin,
          .mass = row.mass,
          .microbatch = row.microbatch,
          .rule = row.rule,
          .masks = m.masks + std::uint64_t{list} * m.shape.group() * m.mask_words(),
          .mask_words = m.mask_words()};
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

/// Tokens that some rows of a team see and others do not: their own, and where rows see the newest `window` tokens the
/// oldest that the first of them see. What its rows have listed all of them see.
struct ForwardEdge {
  std::uint32_t old_begin = 0;
  std::uint32_t old_count = 0;
  std::uint32_t first = 0;  ///< of their own
  std::uint32_t drafts = 0;
  std::uint32_t window = 0;  ///< 0: they see all tokens up to their own

  static constexpr std::uint32_t kMost = 63;  ///< of 32 drafts
  [[nodiscard]] constexpr std::uint32_t count() const noexcept { return old_count + drafts; }
  [[nodiscard]] constexpr std::uint32_t token(std::uint32_t i) const noexcept {
    return i < old_count ? old_begin + i : first + (i - old_count);
  }
  [[nodiscard]] constexpr bool sees(std::uint32_t draft, std::uint32_t token) const noexcept {
    return token <= first + draft && (window == 0 || first + draft - token < window);
  }
};
[[nodiscard]] constexpr ForwardEdge edge_of(const ForwardRow& row, std::uint32_t window) noexcept {
  const auto begin_of = [&](std::uint32_t newest) { return window == 0 || newest < window ? 0 : newest - window + 1; };
  const std::uint32_t begin = begin_of(row.tokens);
  const std::uint32_t last = begin_of(row.tokens + row.drafts - 1);
  const std::uint32_t end = last < row.tokens ? last : row.tokens;
  return {.old_begin = begin,
          .old_count = end > begin ? end - begin : 0,
          .first = row.tokens,
          .drafts = row.drafts,
          .window = window};
}

}  // namespace sluice
