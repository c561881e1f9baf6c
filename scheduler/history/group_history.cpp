#include "scheduler/history/group_history.hpp"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>

#include "scheduler/fast_exp.hpp"
#include "scheduler/history/prompt_attention.hpp"
#include "scheduler/prefetch.hpp"

namespace sluice::scheduler {
namespace {

// Eq. (9) widens a candidate j to j - 1, j, j + 1, j + 2.
constexpr std::uint32_t kBefore = 1;
constexpr std::uint32_t kAfter = 2;
constexpr std::uint32_t kWidth = kBefore + 1 + kAfter;

/// Candidates this far ahead are fetched into the cache: two lines each, more than a core keeps in flight anyway.
constexpr std::size_t kPrefetchAhead = 12;

}  // namespace

GroupHistory::GroupHistory(const HistoryOptions& options, std::uint32_t group, std::uint32_t sinks)
    : options_(options), sinks_(sinks), heads_(group) {}

void GroupHistory::begin(const PromptContext& prompt) {
  const auto group = static_cast<std::uint32_t>(heads_.size());
  fresh_ = false;
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
  fresh_ = true;
  tokens_ = forecast_ = tokens;
  blank_ = false;
  looked_at_ = 0;
  by_position_.reset(tokens);
  by_distance_.reset(tokens);
  const std::uint32_t off = tokens > sinks_ ? tokens - sinks_ : 0;
  for (Head& head : heads_) {
    head.vertical.extend(off);
    head.slash.extend(off);
    const ScoreTable::Cut vertical = head.vertical.cut(options_.alpha);
    const ScoreTable::Cut slash = head.slash.cut(options_.alpha);
    blank_ |= vertical.uniform && slash.uniform;
    find_candidates(head, vertical, slash);
    expand(head, vertical, slash);
  }
  const bool limited = options_.limit < 1.f;
  if (!options_.share_in_group && !limited) return;
  united_.reset(tokens);
  for (const Head& head : heads_) united_.unite(head.expanded);
  if (limited && united_.size() > static_cast<double>(options_.limit) * tokens) forget_candidates();
}

void GroupHistory::forget_candidates() {
  for (TokenSet* set : {&united_, &by_position_, &by_distance_}) set->reset(tokens_);
  for (Head& head : heads_) {
    head.expanded.reset(tokens_);
    head.candidates.clear();
    head.heat.clear();
  }
}

void GroupHistory::follow(std::uint32_t tokens) {
  if (tokens == tokens_) return;
  tokens_ = tokens;
  for (Head& head : heads_) {
    head.vertical.extend(tokens - std::min(tokens, sinks_));
    head.slash.extend(tokens - std::min(tokens, sinks_));
  }
}

void GroupHistory::unite_followed(TokenSet& set) const {
  set.unite(by_position_);
  set.unite_shifted(by_distance_, tokens_ - forecast_);
}

void GroupHistory::note(std::uint32_t token) {
  const std::uint32_t moved = tokens_ - forecast_;
  const auto widened = [&](std::uint32_t at, TokenSet& set) {
    const std::uint32_t begin = std::max(at, sinks_ + kBefore) - kBefore;
    set.add_range(begin, std::min(at + kAfter + 1, forecast_));
  };
  widened(token, by_position_);
  if (token >= moved + sinks_) widened(token - moved, by_distance_);
}

/// Eq. (7): CAND = { j : SV[j] > tauV or SS[n - 1 - j] > tauS }.
void GroupHistory::find_candidates(Head& head, const ScoreTable::Cut& vertical, const ScoreTable::Cut& slash) {
  found_.reset(tokens_);
  if (!vertical.uniform) {
    looked_at_ += head.vertical.for_each_above(vertical.threshold, [&](std::uint32_t i) { found_.add(sinks_ + i); });
  }
  if (!slash.uniform) {
    looked_at_ += head.slash.for_each_above(slash.threshold, [&](std::uint32_t e) { found_.add(tokens_ - 1 - e); });
  }
  head.candidates.resize(found_.size());
  std::uint32_t* to = head.candidates.data();
  found_.for_each([&](std::uint32_t token) { *to++ = token; });
}

/// Eq. (9): EXP = { j + o : j in CAND, SV[j + o] > mean(SV) or SS[n - 1 - j - o] > mean(SS) }. Notes the
/// candidates' heat on the way, while their table rows are in the cache.
void GroupHistory::expand(Head& head, const ScoreTable::Cut& vertical, const ScoreTable::Cut& slash) {
  head.expanded.reset(tokens_);
  const bool followed = options_.observe_every > 1;
  head.heat.resize(head.candidates.size());
  const std::uint32_t last = tokens_ - 1;
  const float* v = head.vertical.stored();
  const float* s = head.slash.stored();
  const auto v_unit = static_cast<float>(head.vertical.unit());
  const auto s_unit = static_cast<float>(head.slash.unit());
  const auto& candidates = head.candidates;
  for (std::size_t i = 0; i < candidates.size(); ++i) {
    if (i + kPrefetchAhead < candidates.size()) {
      prefetch(v + (candidates[i + kPrefetchAhead] - sinks_));
      prefetch(s + (last - candidates[i + kPrefetchAhead]));
    }
    const std::uint32_t j = candidates[i];
    head.heat[i] = v[j - sinks_] * v_unit + s[last - j] * s_unit;
    if (j >= sinks_ + kBefore && j + kAfter <= last) {
      const float* v4 = v + (j - kBefore - sinks_);
      const float* s4 = s + (last - j - kAfter);
      constexpr std::uint32_t kBit[kWidth] = {1, 2, 4, 8};
      std::uint32_t v_above = 0;
      std::uint32_t s_above = 0;
#pragma omp simd reduction(| : v_above, s_above)
      for (std::uint32_t o = 0; o < kWidth; ++o) {
        v_above |= v4[o] > vertical.mean ? kBit[o] : 0u;
        s_above |= s4[kWidth - 1 - o] > slash.mean ? kBit[o] : 0u;
      }
      head.expanded.add_bits(j - kBefore, v_above | s_above);
      if (followed) {
        by_position_.add_bits(j - kBefore, v_above);
        by_distance_.add_bits(j - kBefore, s_above);
      }
    } else {
      const std::uint32_t to = std::min(j + kAfter, last);
      for (std::uint32_t t = std::max(j, sinks_ + kBefore) - kBefore; t <= to; ++t) {
        const bool by_position = v[t - sinks_] > vertical.mean;
        const bool by_distance = s[last - t] > slash.mean;
        if (by_position || by_distance) head.expanded.add(t);
        if (followed && by_position) by_position_.add(t);
        if (followed && by_distance) by_distance_.add(t);
      }
    }
  }
}

void GroupHistory::hot_pages(std::uint32_t page_tokens, std::uint32_t limit, std::vector<HotPage>& hot) {
  if (limit == 0 || tokens_ == 0) return;
  const int page_shift = std::countr_zero(page_tokens);  // A division per candidate would cost more than the rest.
  page_heat_.resize((std::size_t{tokens_} + page_tokens - 1) >> page_shift, 0.f);
  const std::size_t first = hot.size();
  for (const Head& head : heads_) {
    for (std::size_t i = 0; i < head.candidates.size();) {
      const std::uint32_t page = head.candidates[i] >> page_shift;
      float heat = std::numeric_limits<float>::min();  // Never 0: that marks a page unseen.
      for (; i < head.candidates.size() && head.candidates[i] >> page_shift == page; ++i) heat += head.heat[i];
      if (page_heat_[page] == 0.f) hot.push_back({.page = page, .heat = 0.f});
      page_heat_[page] += heat;
    }
  }
  for (std::size_t i = first; i < hot.size(); ++i) {
    hot[i].heat = page_heat_[hot[i].page];
    page_heat_[hot[i].page] = 0.f;
  }
  const auto begin = hot.begin() + static_cast<std::ptrdiff_t>(first);
  const auto keep = begin + static_cast<std::ptrdiff_t>(std::min<std::size_t>(limit, hot.size() - first));
  std::partial_sort(begin, keep, hot.end(), [](const HotPage& a, const HotPage& b) {
    return a.heat != b.heat ? a.heat > b.heat : a.page < b.page;
  });
  hot.erase(keep, hot.end());
}

void GroupHistory::observe(std::uint32_t h, std::span<const std::uint32_t> tokens, std::span<const float> scores) {
  float top = -std::numeric_limits<float>::infinity();
  for (const float score : scores) top = score > top && std::isfinite(score) ? score : top;
  weights_.resize(scores.size());
  float* weights = weights_.data();
  const float* in = scores.data();
  const std::size_t count = scores.size();
  double sum = 0.0;
#pragma omp simd reduction(+ : sum)
  for (std::size_t i = 0; i < count; ++i) {
    // +inf minus a finite top is +inf: not below zero, hence no weight. NaN fails both comparisons.
    const float x = in[i] - top;
    weights[i] = x <= 0.f ? fast_exp(x) : 0.f;
    sum += weights[i];
  }
  if (!(sum > 0.0)) return;
  const auto scale = static_cast<float>(0.5 / sum);
  fresh_ = false;
  Head& head = heads_[h];
  head.vertical.decay(options_.decay);
  head.slash.decay(options_.decay);
  indices_.resize(count);
  std::uint32_t* const indices = indices_.data();
#pragma omp simd
  for (std::size_t i = 0; i < count; ++i) {
    weights[i] *= scale;
    indices[i] = tokens[i] - sinks_;
  }
  head.vertical.add(indices_, weights);
#pragma omp simd
  for (std::size_t i = 0; i < count; ++i) indices[i] = tokens_ - 1 - tokens[i];
  head.slash.add(indices_, weights);
}

std::uint64_t GroupHistory::Head::heap_bytes() const noexcept {
  return vertical.heap_bytes() + slash.heap_bytes() + expanded.heap_bytes() +
         scheduler::heap_bytes(candidates, heat);
}

std::uint64_t GroupHistory::heap_bytes() const noexcept {
  return united_.heap_bytes() + by_position_.heap_bytes() + by_distance_.heap_bytes() + found_.heap_bytes() +
         scheduler::heap_bytes(heads_, page_heat_, weights_, indices_);
}

}  // namespace sluice::scheduler
