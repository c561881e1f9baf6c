#include "runtime/far/far_choice.hpp"

#include <algorithm>
#include <functional>
#include <limits>
#include <numeric>

#include "cpu/stages/rows.hpp"
#include "sluice/error.hpp"
#include "sluice/step/partial.hpp"

namespace sluice::runtime {

namespace {

/// The query heads of a team that attend a token which `members` of its first row's `own` heads chose.
std::uint32_t team_members(std::uint32_t members, std::uint32_t own, std::uint32_t group, std::uint32_t bypassed) {
  std::uint32_t others = 0;
  for (std::uint32_t first = own; first < group; first += own) others |= (~0u >> (32 - own) & ~bypassed) << first;
  return members | others;
}

}  // namespace

FarChoice::FarChoice(const ForwardMemory& memory, const cpu::Kernels& kernels, std::chrono::milliseconds timeout)
    : memory_(memory),
      kernels_(kernels),
      timeout_(timeout),
      lists_(std::uint64_t{memory.largest.decode_rows} * memory.shape.kv_heads),
      calls_(lists_.size()) {
  failures_.reserve(kMostForwards);  // What fails for want of memory must be known all the same.
}

void FarChoice::expect(std::uint64_t forward, std::uint64_t after, std::vector<ChoosingRow> rows) {
  if (!rows.empty()) used_.store(true, std::memory_order_relaxed);
  const auto proposed = std::ranges::count_if(rows, [](const ChoosingRow& row) { return row.window.proposed != 0; });
  Ahead& ahead = ahead_[forward % kMostForwards];
  ahead.claims.store(0);
  if (!comes([&] { return ahead.busy.load() == 0; }, timeout_))
    throw Error(Errc::timeout, "a thread in which a history proposes for an earlier token has not come back within " +
                                   std::to_string(timeout_.count()) +
                                   " ms; repeat the call when it may have, or destroy the engine");
  const std::lock_guard lock(mutex_);
  rows_[forward % kMostForwards] = {.forward = forward, .rows = std::move(rows)};
  ahead.after.store(after, std::memory_order_relaxed);
  ahead.items.store(static_cast<std::uint32_t>(proposed) * memory_.layer_heads(), std::memory_order_relaxed);
  if (proposed != 0) ahead.claims.store(forward << Ahead::kBits, std::memory_order_release);
}

void FarChoice::propose_item(std::uint64_t forward, std::uint32_t item) noexcept {
  const std::vector<ChoosingRow>& rows = rows_[forward % kMostForwards].rows;
  const std::uint32_t kv_heads = memory_.shape.kv_heads;
  const auto proposed = static_cast<std::uint32_t>(
      std::ranges::count_if(rows, [](const ChoosingRow& row) { return row.window.proposed != 0; }));
  const std::uint32_t layer = item / (proposed * kv_heads);
  std::uint32_t left = item / kv_heads % proposed;
  const auto row =
      std::ranges::find_if(rows, [&](const ChoosingRow& each) { return each.window.proposed != 0 && left-- == 0; });
  const ForwardRow here = row->window.in(layer, memory_.window_in(layer));
  if (here.proposed != 0) row->policy->propose(forward, layer, item % kv_heads, here, timeout_);
}

bool FarChoice::asks(const ChoosingRow& row, std::uint32_t layer) const noexcept {
  const ForwardRow here = row.window.in(layer, memory_.window_in(layer));
  if (here.proposed == 0) return here.asks != 0;
  bool any = false;
  for (std::uint32_t kv = 0; kv < memory_.shape.kv_heads; ++kv)
    any |= memory_.proposal_of(here.proposed - 1, layer, kv).asks != 0;
  return any;
}

void FarChoice::forget(std::uint64_t forward) noexcept {
  const std::lock_guard lock(mutex_);
  Rows& of = rows_[forward % kMostForwards];
  if (of.forward != forward) return;
  ahead_[forward % kMostForwards].claims.store(0, std::memory_order_relaxed);
  for (const ChoosingRow& row : of.rows) row.policy->forget(forward);
  of.rows.clear();
  std::erase_if(failures_, [&](const Failure& failure) { return failure.forward == forward; });
}

FarChoice::Failure FarChoice::failure(std::uint64_t forward) {
  if (!used_.load(std::memory_order_relaxed)) return {};
  const std::lock_guard lock(mutex_);
  const auto first = std::ranges::min_element(failures_, {}, &Failure::forward);
  return first == failures_.end() || first->forward > forward ? Failure{} : *first;
}

void FarChoice::note_failure(std::uint64_t forward, SequenceId sequence, const char* reason) noexcept {
  const std::lock_guard lock(mutex_);
  if (std::ranges::find(failures_, forward, &Failure::forward) != failures_.end()) return;
  failures_.push_back({.forward = forward, .sequence = sequence, .reason = {}});  // One of each forward in flight.
  try {
    failures_.back().reason = reason;
  } catch (const std::exception&) {
    failures_.back().reason = "no memory";  // Short enough to need none.
  }
}

std::vector<std::shared_ptr<SequencePolicy>> FarChoice::policies() noexcept {
  try {
    std::vector<std::shared_ptr<SequencePolicy>> all;
    const std::lock_guard lock(mutex_);
    for (const Rows& of : rows_) {
      for (const ChoosingRow& row : of.rows) {
        if (std::ranges::find(all, row.policy) == all.end()) all.push_back(row.policy);
      }
    }
    return all;
  } catch (const std::exception&) {
    return {};  // They learn when they choose again.
  }
}

FarChoice::Place FarChoice::place_of(std::uint64_t forward, std::uint32_t layer, std::uint32_t item) const noexcept {
  for (const ChoosingRow& row : rows_[forward % kMostForwards].rows) {
    if (!asks(row, layer)) continue;
    if (item < memory_.shape.kv_heads) return {.row = &row, .kv_head = item};
    item -= memory_.shape.kv_heads;
  }
  return {};
}

bool FarChoice::chooses(const FarQuestion& question, std::uint32_t list) const noexcept {
  const std::vector<ChoosingRow>& rows = rows_[question.forward % kMostForwards].rows;
  const auto row = std::ranges::lower_bound(rows, list / memory_.shape.kv_heads, {}, &ChoosingRow::index);
  return row != rows.end() && row->index == list / memory_.shape.kv_heads && asks(*row, question.layer);
}

std::uint32_t FarChoice::choose(const FarQuestion& question, std::uint32_t item) noexcept {
  const Place place = place_of(question.forward, question.layer, item);
  const std::uint32_t list = list_of(place);
  ChosenList& chosen = lists_[list];
  const std::uint32_t group = memory_.shape.group() * question.drafts;
  const std::uint64_t first = std::uint64_t{list} * group;
  float missing = kEmptyLse;
  try {
    choose_for(question, place, chosen);
  } catch (const std::exception& error) {
    note_failure(question.forward, place.row->sequence, error.what());
    chosen.rows.clear();
    chosen.members.clear();
    chosen.selected.clear();
    chosen.bypass.heads = 0;
    missing = std::numeric_limits<float>::quiet_NaN();
  }
  chosen.asked = question.asked;
  const bool fetched = memory_.fetches_chosen && hand_over(list, chosen);
  if (!fetched) far_tokens_.fetch_add(chosen.selected.attended(), std::memory_order_relaxed);
  const auto count = static_cast<std::uint32_t>(chosen.rows.size());
  std::atomic_ref(memory_.far_counts[list]).store(count, std::memory_order_relaxed);
  if (count != 0) return list;  // Whoever attends it completes it.
  std::fill_n(memory_.far_out + first * memory_.shape.head_dim, group * memory_.shape.head_dim, 0.f);
  std::fill_n(memory_.far_lse + first, group, missing);
  complete(question, chosen, list);
  return list;
}

void FarChoice::choose_for(const FarQuestion& question, const Place& place, ChosenList& chosen) {
  const ForwardMemory m = memory_.teams(question.drafts);
  const std::uint64_t first = std::uint64_t{place.row->index} * m.shape.q_heads * m.shape.head_dim;
  scheduler::SelectCounters counters;
  chosen.selected.clear();
  chosen.bypass.heads = 0;
  const ForwardRow& row = place.row->window;
  SequencePolicy::Asked asked{.forward = question.forward,
                              .layer = question.layer,
                              .kv_head = place.kv_head,
                              .row = row,
                              .drafts = question.drafts,
                              .q = memory_.far_q + first,
                              .rehearsed = memory_.rehearsed_q == nullptr ? nullptr : memory_.rehearsed_q + first,
                              .timeout = timeout_,
                              .caller = {.calls = &calls_, .caller = list_of(place), .question = question}};
  const std::size_t own = m.own_group();  // The first row's.
  if (row.page_picks != 0) {
    asked.ranked_pages = {m.ranked_of(list_of(place), true), own * row.page_picks};
  } else if (row.pages != 0) {
    asked.page_scores = m.page_scores_of(list_of(place) - place.kv_head, true);
    asked.page_scores_stride = std::uint64_t{m.shape.group()} * m.max_pages;
  }
  place.row->policy->choose(asked, chosen.selected, chosen.bypass, counters);
  // The device reads keys anyway, and so do the rows behind a team's first.
  if ((memory_.fetches_chosen || question.drafts > 1) && !place.row->policy->corrects_scores())
    chosen.selected.scores.clear();
  list(question, place, chosen);
  if (place.row->audit) note(question, place, chosen);
  scored_.fetch_add(counters.scored, std::memory_order_relaxed);
}

void FarChoice::note(const FarQuestion& question, const Place& place, const ChosenList& chosen) const {
  const auto of_selected = [&](const std::vector<std::uint32_t>& all) {
    return std::span(all).last(chosen.selected.attended());
  };
  const std::uint32_t own = memory_.shape.group();
  for (std::uint32_t draft = 0; draft < std::max(place.row->window.drafts, 1u); ++draft) {
    ChoiceNote& note = place.row->audit->note(place.row->audited + draft, question.layer, place.kv_head);
    note.bypassed = chosen.bypass.heads;
    const std::span<const std::uint32_t> rows = of_selected(chosen.rows);
    note.rows.assign(rows.begin(), rows.end());
    note.members.clear();
    if (chosen.members.empty()) continue;
    for (const std::uint32_t members : of_selected(chosen.members))
      note.members.push_back(members >> draft * own & ~0u >> (32 - own));
  }
}

void FarChoice::list(const FarQuestion& question, const Place& place, ChosenList& chosen) const {
  const ForwardMemory m = memory_.teams(question.drafts);
  const std::uint32_t at = list_of(place);
  const std::uint32_t page_tokens = memory_.layout.page_tokens;
  const std::uint32_t* const blocks = place.row->policy->blocks();
  const std::uint32_t* const listed = m.far_rows + std::uint64_t{at} * m.list_room();
  const SelectionRow& selected = chosen.selected;
  chosen.rows.assign(listed, listed + memory_.far_counts[at]);
  for (const PageRun& run : selected.runs) {
    for (std::uint32_t row = run.begin; row < run.end; ++row)
      chosen.rows.push_back(blocks[run.page] * page_tokens + row);
  }
  const std::size_t whole = chosen.rows.size();
  for (const std::uint32_t token : selected.tokens)
    chosen.rows.push_back(blocks[token / page_tokens] * page_tokens + token % page_tokens);
  chosen.members.clear();
  if (!selected.members.empty()) {
    chosen.members.assign(whole, ~0u >> (32 - m.shape.group()));
    for (const std::uint32_t members : selected.members)
      chosen.members.push_back(team_members(members, m.own_group(), m.shape.group(), chosen.bypass.heads));
  }
  chosen.scores.clear();
  if (!selected.scores.empty()) score(question.layer, at, place.kv_head, chosen);
}

/// The selection comes with scores: what lies before it in the list needs them, too.
void FarChoice::score(std::uint32_t layer, std::uint32_t list, std::uint32_t kv_head, ChosenList& chosen) const {
  const std::uint32_t group = memory_.shape.group();
  const std::size_t whole = chosen.rows.size() - chosen.selected.tokens.size();
  chosen.scores.resize(whole * group);
  chosen.keys.resize(whole);
  const std::uint32_t plane = memory_.plane(layer, kv_head);
  const bool scaled = memory_.far_layout.scaled();
  if (scaled) chosen.scales.resize(whole);
  for (std::size_t i = 0; i < whole; ++i) {
    chosen.keys[i] = memory_.far_key(plane, chosen.rows[i]);
    if (scaled) chosen.scales[i] = memory_.far_scales(plane, chosen.rows[i]);
  }
  cpu::kernels_for(kernels_, memory_.far_layout.dtype)
      .score({.q = memory_.far_q + std::uint64_t{list} * group * memory_.shape.head_dim,
              .scale = memory_.shape.score_scale(),
              .softcap = memory_.shape.softcap,
              .k = chosen.keys.data(),
              .scales = chosen.scales.data(),
              .count = static_cast<std::uint32_t>(whole),
              .group = group,
              .head_dim = memory_.shape.head_dim,
              .out = chosen.scores.data()});
  chosen.scores.insert(chosen.scores.end(), chosen.selected.scores.begin(), chosen.selected.scores.end());
}

/// Tokens that come with scores of their own are attended where these are.
bool FarChoice::hand_over(std::uint32_t list, ChosenList& chosen) noexcept {
  ForwardChosen& header = memory_.chosen[list];
  header.count = header.heads = header.members = 0;
  if (!chosen.scores.empty())
    kept_.fetch_add(chosen.rows.size() - chosen.selected.attended(), std::memory_order_relaxed);
  const bool fetched = chosen.scores.empty() && !chosen.rows.empty();
  if (fetched) write_chosen(list, chosen, header);
  std::atomic_ref(header.asked).store(chosen.asked, std::memory_order_release);  // The device looks for it.
  return fetched;
}

void FarChoice::write_chosen(std::uint32_t list, ChosenList& chosen, ForwardChosen& header) const noexcept {
  const std::size_t count = chosen.rows.size();
  std::uint32_t* const rows = memory_.chosen_rows + list * memory_.chosen_room();
  for (std::size_t i = 0; i < count; ++i) rows[i] = memory_.far_entry(chosen.rows[i]);
  header.count = static_cast<std::uint32_t>(count);
  header.heads = ~0u;
  if (!chosen.members.empty()) {
    header.members = 1;
    std::ranges::copy(chosen.members, rows + count);
    header.heads = std::reduce(chosen.members.begin(), chosen.members.end(), 0u, std::bit_or<>());
  }
  chosen.rows.clear();
  chosen.members.clear();
}

std::uint64_t FarChoice::heap_bytes() const noexcept { return scheduler::heap_bytes(lists_); }

const ChosenList* FarChoice::find(std::uint64_t asked, std::uint32_t list) const noexcept {
  return lists_[list].asked == asked ? &lists_[list] : nullptr;
}

void FarChoice::complete(const FarQuestion& question, const ChosenList& chosen, std::uint32_t list) noexcept {
  const std::uint32_t own = memory_.shape.group();
  const std::uint32_t group = own * question.drafts;
  const std::uint32_t head_dim = memory_.shape.head_dim;
  for (std::uint32_t h = 0; h < group; ++h) {
    const std::uint64_t at = std::uint64_t{list} * group + h;
    float& lse = memory_.far_lse[at];
    const auto attends = [&](std::uint32_t members) { return (members >> h & 1) != 0; };
    const bool any = chosen.members.empty() ? !chosen.rows.empty() : std::ranges::any_of(chosen.members, attends);
    // Keys were attended and weigh nothing that is a number; kEmptyLse says that there are none.
    if (any && !(lse > kEmptyLse)) lse = std::numeric_limits<float>::quiet_NaN();
    if ((chosen.bypass.heads >> h % own & 1) == 0 || h >= chosen.bypass.lse.size()) continue;
    float* const mean = const_cast<float*>(chosen.bypass.out.data()) + std::size_t{h % own} * head_dim;
    float mass = chosen.bypass.lse[h];
    cpu::merge_into({.out = memory_.far_out + at * head_dim, .lse = &lse}, {.out = mean, .lse = &mass}, 1, head_dim);
  }
}

}  // namespace sluice::runtime
