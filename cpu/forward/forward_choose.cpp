// What a row that chooses attends: pages are ranked, tokens estimated and chosen, and what is chosen is told apart,
// near rows here and far rows there.
#include <algorithm>
#include <vector>

#include "cpu/forward/forward_draw.hpp"
#include "cpu/forward/forward_layer.hpp"
#include "cpu/forward/forward_marks.hpp"
#include "sluice/step/forward_tasks.hpp"
#include "sluice/step/order_key.hpp"
#include "sluice/step/top_k.hpp"

namespace sluice::cpu {
namespace {

/// The token that value `i` of a query head's row stands for.
std::uint32_t token_of(const ForwardMemory& m, const ForwardRow& row, const std::uint32_t* ranked, std::uint32_t i) {
  if (!row.in_pages()) return i;
  return ranked[i / m.layout.page_tokens] * m.layout.page_tokens + i % m.layout.page_tokens;
}

/// What query head `h` of all rows' has chosen, whose pages are `ranked`.
void mark_head(const ForwardMemory& m, const ForwardRow& row, std::uint64_t h, const std::uint32_t* ranked,
               Marks& marks) {
  const ForwardCandidates candidates = candidates_of(m, row);
  const auto set = [&](std::uint32_t value) { marks.set(token_of(m, row, ranked, value)); };
  const float* const scores = m.scores + h / m.shape.group() * m.shape.group() * m.score_room() +
                              h % m.shape.group() * std::uint64_t{row.tokens};
  const std::uint32_t picks = row.draws.any() ? m.thresholds[h].drawn : row.picks;
  for (std::uint32_t i = 0; i < picks; ++i) {
    const std::uint32_t value = candidates.begin + m.picks[h * m.max_picks + i];
    if (row.proposed == 0 || order_key(scores[value]) != 0) set(value);
  }
  const bool whole_pages = row.in_pages() && !row.ranks();
  for (std::uint32_t i = candidates.begin; i < candidates.end && (row.mass > 0.f || whole_pages); ++i) {
    if (whole_pages || (m.masks[h * m.mask_words() + i / 32] >> i % 32 & 1) != 0) set(i);
  }
}

}  // namespace

Marks marks_of(const ForwardMemory& m, const ForwardRow& row, std::uint32_t index) {
  Marks marks(row.tokens);
  marks.set(0, std::min(row.sink_end, row.tokens));
  marks.set(row.recent_begin, row.tokens);
  if (row.asks != 0) return marks;
  const std::uint32_t* const ranked = m.ranked_of(index, false);
  for (std::uint32_t h = 0; h < m.shape.group(); ++h)
    mark_head(m, row, first_head(m, index) + h, row.in_pages() ? ranked + std::uint64_t{h} * row.page_picks : nullptr,
              marks);
  return marks;
}

namespace {

/// A list's rows, told apart; the far ones, which are counted where a late worker may look, are returned.
std::uint32_t tell_apart(const ForwardMemory& m, const ForwardRow& row, std::uint32_t plane, std::uint32_t index) {
  const std::uint64_t room = m.list_room();
  const Drawn drawn(m, row, index);
  std::uint32_t near = 0;
  std::uint32_t far = 0;
  marks_of(m, row, index).for_each([&](std::uint32_t token) {
    const std::uint32_t at = m.row_of(row.list, token);
    const std::uint32_t place = m.near_row_of(plane, at);
    if (row.draws.any())
      (place != kNone ? m.near_corrections_of(index)[near] : m.far_corrections_of(index)[far]) =
          drawn.correction(token);
    if (place != kNone) {
      if (m.keeps_near(row)) m.near_rows[m.near_row(plane, place)].used = static_cast<std::uint32_t>(m.state->forward);
      m.near_lists[index * room + near++] = m.near_entry(plane, place);
    } else {
      m.far_rows[index * room + far++] = at;
      m.far_windows[index] |= !row.whole() && row.in_window(token) ? 1 : 0;
    }
  });
  m.near_counts[index] = near;
  return far;
}

}  // namespace

void rank(const Host& host, const ForwardMemory& m, std::uint32_t layer) {
  if (!runs(m)) return;
  for_each_head(m, layer, [&](const ForwardRow& row, std::uint32_t head, std::uint32_t index) {
    if (row.pages == 0) return;
    const ScorePagesTask task = rank_task(m, row, index, m.plane(layer, head));
    score_pages(host, {&task, 1}, m.shape, m.layout.dtype);
    std::uint32_t* const ranked = m.ranked_of(index, row.asks != 0);
    for (std::uint32_t h = 0; h < m.shape.group() && row.page_picks != 0; ++h)
      (void)select_top_k(task.out + std::uint64_t{h} * row.pages, row.pages, row.page_picks,
                         ranked + std::uint64_t{h} * row.page_picks);
  });
}

void score(const Host& host, const ForwardMemory& m, const ForwardLayer& layer) {
  if (!runs(m)) return;
  spread_scores(m, layer);
  std::vector<ScoreInt4Task> tasks;  // Of all heads: each alone would not keep many threads busy.
  for_each_head(m, layer.layer, [&](const ForwardRow& row, std::uint32_t head, std::uint32_t index) {
    if (row.ranks() && !row.scored()) tasks.push_back(estimate_task(m, row, index, m.plane(layer.layer, head)));
  });
  score_int4(host, tasks, m.shape, m.layout);
  for (const ScoreInt4Task& task : tasks) perturb(m.shape, task);
}

void choose(const Host& host, const ForwardMemory& m, std::uint32_t layer) {
  if (!runs(m)) return;
  std::vector<TopKTask> counts;
  std::vector<TopPTask> shares;
  std::vector<ChoosePagesTask> pages;
  for_each_head(m, layer, [&](const ForwardRow& row, std::uint32_t head, std::uint32_t index) {
    if (!row.ranks()) return;
    if (row.microbatch != 0) return pages.push_back(pages_task(m, row, index, m.plane(layer, head)));
    const ScoreInt4Task task = estimate_task(m, row, index, m.plane(layer, head));
    const std::uint32_t values = task.row(m.layout.page_tokens);
    const ForwardCandidates candidates = candidates_of(m, row);
    for (std::uint32_t g = 0; g < m.shape.group(); ++g) {
      const std::uint64_t h = first_head(m, index) + g;
      const float* const scores = task.out + std::uint64_t{g} * values;
      if (row.mass > 0.f) {
        shares.push_back({.values = {scores, values},
                          .p = row.mass,
                          .softcap = softcap_of(m, row),
                          .begin = candidates.begin,
                          .end = candidates.end,
                          .most = row.most,
                          .mask = m.masks + h * m.mask_words()});
      } else {
        counts.push_back({.values = {scores + candidates.begin, candidates.end - candidates.begin},
                          .k = row.picks,
                          .out = m.picks + h * m.max_picks});
      }
    }
  });
  top_k(host, counts);
  keep_drawn(m, layer);
  top_p(host, shares);
  choose_pages(host, pages, m.shape, m.layout);
}

void split(const Workers& workers, const ForwardMemory& m, std::uint32_t layer) {
  if (!runs(m)) return;
  const std::uint32_t lists = m.bucket.decode_rows * m.shape.kv_heads;
  std::fill_n(m.near_counts, lists, 0);
  std::fill_n(m.far_windows, lists, 0);
  const auto put_far_count = [](const ForwardMemory& of, std::uint32_t index, std::uint32_t count,
                                std::uint32_t fetched, bool drawn) {
    of.far_listed[index] = count;
    if (of.fetches()) of.fetch_heads[index] = fetched != 0 ? ~0u : 0;
    const std::uint32_t in_place = (count - fetched) | (drawn ? kDrawnBit : 0);
    shared(of.far_counts[index]).store(in_place, std::memory_order_relaxed);  // A late worker may look.
  };
  for (std::uint32_t i = 0; i < lists; ++i) put_far_count(m, i, 0, 0, false);
  for_each_plane(
      workers, m, layer,
      [put_far_count](const ForwardMemory& of, const ForwardRow& row, std::uint32_t plane, std::uint32_t index) {
        const std::uint32_t far = tell_apart(of, row, plane, index);
        // Who chooses for a row adds to what it has.
        put_far_count(of, index, far, row.asks == 0 ? of.fetched_of(far) : 0, row.draws.any());
      });
  std::uint64_t in_place = 0;
  std::uint32_t choices = 0;
  for_each_head(m, layer, [&](const ForwardRow& row, std::uint32_t, std::uint32_t index) {
    const std::uint32_t fetched = row.asks == 0 ? m.fetched_of(m.far_listed[index]) : 0;
    in_place += m.far_listed[index] - fetched;
    m.state->fetched_tokens += fetched;
    choices += row.asks;
    m.state->near_tokens += m.near_counts[index];
  });
  m.state->far_tokens += in_place;
  if (in_place == 0 && choices == 0) return;
  if (m.handover == Handover::stream)
    shared(m.mailbox->gate.word).store(ForwardGate::closed(m.state->asked + 1), std::memory_order_relaxed);
  shared(m.mailbox->question.forward).store(m.state->forward, std::memory_order_relaxed);
  shared(m.mailbox->question.layer).store(layer, std::memory_order_relaxed);
  shared(m.mailbox->question.drafts).store(m.drafts, std::memory_order_relaxed);
  shared(m.mailbox->question.choices).store(choices, std::memory_order_relaxed);
  shared(m.mailbox->question.lists).store(lists, std::memory_order_relaxed);
  shared(m.mailbox->question.asked).store(++m.state->asked, std::memory_order_release);
}

}  // namespace sluice::cpu
