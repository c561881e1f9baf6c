#include "scheduler/history/group_history.hpp"

#include <algorithm>
#include <limits>

#include "scheduler/history/prompt_attention.hpp"
#include "scheduler/prefetch.hpp"

namespace sluice::scheduler {
namespace {

// Eq. (9) widens a candidate j to j - 1, j, j + 1, j + 2.
constexpr std::uint32_t kBefore = 1;
constexpr std::uint32_t kAfter = 2;
constexpr std::uint32_t kWidth = kBefore + 1 + kAfter;

/// Of a table that is not asked: nothing is above.
constexpr ScoreTable::Cut kSilent{
    .mean = std::numeric_limits<ScoreCode>::max(), .threshold = std::numeric_limits<ScoreCode>::max(), .uniform = true};

/// Candidates this far ahead are fetched into the cache: two lines each, more than a core keeps in flight anyway.
constexpr std::size_t kPrefetchAhead = 12;

/// Candidates are looked up again where they are asked for: one set per thread serves all heads.
TokenSet& candidates_of_thread() {
  thread_local TokenSet candidates;
  return candidates;
}

/// The members, ascending, in memory of the thread.
const std::vector<std::uint32_t>& listed(const TokenSet& set) {
  thread_local std::vector<std::uint32_t> list;
  list.resize(set.size());
  std::uint32_t* to = list.data();
  set.for_each([&](std::uint32_t token) { *to++ = token; });
  return list;
}

}  // namespace

GroupHistory::GroupHistory(const HistoryOptions& options, std::uint32_t group, std::uint32_t sinks)
    : options_(options), sinks_(sinks), heads_(group) {}

void GroupHistory::begin(const PromptContext& prompt) {
  const auto group = static_cast<std::uint32_t>(heads_.size());
  fresh_ = stale_ = in_lesson_ = false;
  journal_.begin(prompt.tokens);
  // A decode step adds half a unit of weight per table, so a table's stationary sum is 0.5 / (1 - decay).
  // C makes the prompt's rows add up to exactly that.
  const double stationary = 1.0 / (2.0 * (1.0 - static_cast<double>(options_.decay)));
  const PromptAttention sums = attend_prompt(prompt, group, sinks_, options_.init_queries);
  if (sums.rows == 0) return;
  const auto factor = static_cast<float>(stationary / sums.rows);
  const std::size_t off = sums.by_position.size() / group;
  std::vector<float> scores(off);
  const auto scaled = [&](const std::vector<float>& from, std::size_t h) -> std::span<const float> {
    for (std::size_t i = 0; i < off; ++i) scores[i] = from[h * off + i] * factor;
    return scores;
  };
  for (std::size_t h = 0; h < group; ++h) {
    heads_[h].vertical.assign(scaled(sums.by_position, h));
    heads_[h].slash.assign(scaled(sums.by_distance, h));
  }
}

void GroupHistory::forecast(std::uint32_t tokens) {
  if (fresh_ && tokens == tokens_) return;
  fresh_ = false;
  tokens_ = forecast_ = tokens;
  blank_ = false;
  if (follows()) {
    by_position_.reset(tokens);
    by_distance_.reset(tokens);
  }
  const std::uint32_t off = tokens > sinks_ ? tokens - sinks_ : 0;
  for (Head& head : heads_) {
    head.vertical.extend(off);
    head.slash.extend(off);
    head.vertical_cut = options_.tables == HistoryTables::slash ? kSilent : head.vertical.cut(options_.alpha);
    head.slash_cut = options_.tables == HistoryTables::vertical ? kSilent : head.slash.cut(options_.alpha);
    blank_ |= head.vertical_cut.uniform && head.slash_cut.uniform;
    TokenSet& found = candidates_of_thread();
    find_candidates(head, found);
    expand(head, found);
  }
  const bool limited = options_.limit < 1.f;
  if (options_.share_in_group || limited) {
    united_.reset(tokens);
    for (const Head& head : heads_) united_.unite(head.expanded);
    if (limited && united_.size() > static_cast<double>(options_.limit) * tokens) forget_candidates();
  }
  stale_ = false;  // Only now: should there be no memory, it is to be done again.
  fresh_ = true;
}

void GroupHistory::forget_candidates() {
  for (TokenSet* set : {&united_, &by_position_, &by_distance_}) set->reset(tokens_);
  for (Head& head : heads_) {
    head.expanded.reset(tokens_);
    head.vertical_cut = head.slash_cut = {};
  }
}

void GroupHistory::follow(std::uint32_t tokens) {
  if (tokens == tokens_) return;
  for (Head& head : heads_) {
    head.vertical.extend(tokens - std::min(tokens, sinks_));
    head.slash.extend(tokens - std::min(tokens, sinks_));
  }
  tokens_ = tokens;  // Only now: should there be no memory, it is to be done again.
}

void GroupHistory::unite_followed(TokenSet& set) const {
  set.unite(by_position_);
  set.unite_shifted(by_distance_, tokens_ - forecast_);
}

void GroupHistory::note(std::uint32_t token) {
  widen(token);
  journal_.note({.step = tokens_, .token = token});
}

void GroupHistory::widen(std::uint32_t token) {
  const std::uint32_t moved = tokens_ - forecast_;
  const auto widened = [&](std::uint32_t at, TokenSet& set) {
    const std::uint32_t before = options_.expand ? kBefore : 0;
    const std::uint32_t begin = std::max(at, sinks_ + before) - before;
    set.add_range(begin, std::min(at + (options_.expand ? kAfter : 0) + 1, forecast_));
  };
  widened(token, by_position_);
  if (token >= moved + sinks_) widened(token - moved, by_distance_);
}

/// Eq. (7): CAND = { j : SV[j] > tauV or SS[n - 1 - j] > tauS }.
void GroupHistory::find_candidates(const Head& head, TokenSet& found) const {
  found.reset(forecast_);
  if (!head.vertical_cut.uniform) {
    head.vertical.for_each_above(head.vertical_cut.threshold, [&](std::uint32_t i) { found.add(sinks_ + i); });
  }
  if (!head.slash_cut.uniform) {
    head.slash.for_each_above(head.slash_cut.threshold, [&](std::uint32_t e) { found.add(forecast_ - 1 - e); });
  }
}

/// Eq. (9): EXP = { j + o : j in CAND, SV[j + o] > mean(SV) or SS[n - 1 - j - o] > mean(SS) }; o = 0 alone if the
/// options do not expand.
void GroupHistory::expand(Head& head, const TokenSet& found) {
  head.expanded.reset(tokens_);
  const std::vector<std::uint32_t>& candidates = listed(found);
  const ScoreCode v_mean = head.vertical_cut.mean;
  const ScoreCode s_mean = head.slash_cut.mean;
  const std::uint32_t last = tokens_ - 1;
  const std::uint32_t wanted = options_.expand ? (1u << kWidth) - 1 : 1u << kBefore;
  const ScoreCode* v = head.vertical.stored();
  const ScoreCode* s = head.slash.stored();
  for (std::size_t i = 0; i < candidates.size(); ++i) {
    if (i + kPrefetchAhead < candidates.size()) {
      prefetch(v + (candidates[i + kPrefetchAhead] - sinks_));
      prefetch(s + (last - candidates[i + kPrefetchAhead]));
    }
    const std::uint32_t j = candidates[i];
    if (j >= sinks_ + kBefore && j + kAfter <= last) {
      const ScoreCode* v4 = v + (j - kBefore - sinks_);
      const ScoreCode* s4 = s + (last - j - kAfter);
      std::uint32_t v_above = 0;
      std::uint32_t s_above = 0;
      for (std::uint32_t o = 0; o < kWidth; ++o) {
        // The borrow, as a branch could not be predicted.
        v_above |= (std::uint32_t{v_mean} - v4[o]) >> 31 << o;
        s_above |= (std::uint32_t{s_mean} - s4[kWidth - 1 - o]) >> 31 << o;
      }
      v_above &= wanted;
      s_above &= wanted;
      head.expanded.add_bits(j - kBefore, v_above | s_above);
      if (follows()) {
        by_position_.add_bits(j - kBefore, v_above);
        by_distance_.add_bits(j - kBefore, s_above);
      }
    } else {
      const std::uint32_t to = std::min(j + kAfter, last);
      for (std::uint32_t t = std::max(j, sinks_ + kBefore) - kBefore; t <= to; ++t) {
        if (!options_.expand && t != j) continue;
        const bool by_position = v[t - sinks_] > v_mean;
        const bool by_distance = s[last - t] > s_mean;
        if (by_position || by_distance) head.expanded.add(t);
        if (follows() && by_position) by_position_.add(t);
        if (follows() && by_distance) by_distance_.add(t);
      }
    }
  }
}

std::uint64_t GroupHistory::Head::heap_bytes() const noexcept {
  return vertical.heap_bytes() + slash.heap_bytes() + expanded.heap_bytes();
}

std::uint64_t GroupHistory::heap_bytes() const noexcept {
  return united_.heap_bytes() + by_position_.heap_bytes() + by_distance_.heap_bytes() + journal_.heap_bytes() +
         scheduler::heap_bytes(heads_);
}

std::uint64_t GroupHistory::most_heap_bytes(const HistoryOptions& options, std::uint32_t group,
                                            std::uint32_t tokens) noexcept {
  const std::uint64_t set = TokenSet::most_heap_bytes(tokens);
  const std::uint64_t head = sizeof(Head) + 2 * ScoreTable::most_heap_bytes(tokens) + set;
  std::uint64_t bytes = group * head + HistoryJournal::most_heap_bytes(most_lesson_bytes(group, tokens));
  if (options.share_in_group || options.limit < 1.f) bytes += set;
  if (options.observe_every > 1) bytes += 2 * set + HistoryJournal::kMostNotes * sizeof(HistoryJournal::Note);
  return bytes;
}

}  // namespace sluice::scheduler
