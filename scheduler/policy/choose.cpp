// Who keeps what of a ScoredSet: top-k, top-p or all.

#include <algorithm>
#include <array>
#include <cmath>
#include <functional>
#include <limits>
#include <numeric>
#include <utility>

#include "scheduler/fast_exp.hpp"
#include "scheduler/policy/scored_set.hpp"
#include "sluice/step/order_key.hpp"
#include "sluice/step/top_k.hpp"

namespace sluice::scheduler {

std::uint32_t candidate_key(float score) noexcept { return std::max(order_key(score), 1u); }

void ScoredSet::choose(std::uint32_t k, std::uint32_t group, KvReader& kv) {
  attended_.assign(tokens_.size(), 0);
  choose_best(k, group, far_, kv, attended_);
  if (far_ == heads_) {
    observed_ = attended_;
    return;
  }
  observed_.assign(tokens_.size(), 0);
  choose_best(k, group, heads_, kv, observed_);
}

void ScoredSet::choose_all() {
  attended_ = far_;
  observed_ = heads_;
}

void ScoredSet::choose_best(std::uint32_t k, std::uint32_t group, const std::vector<std::uint32_t>& allowed,
                            KvReader& kv, std::vector<std::uint32_t>& chosen) {
  constexpr std::size_t kMany = 4'096;
  best_.resize(group);
  const auto find = [&](std::uint32_t h) { find_best(h, k, group, allowed); };
  if (tokens_.size() < kMany) {
    for (std::uint32_t h = 0; h < group; ++h) find(h);
  } else {
    kv.each(group, find);
  }
  std::uint32_t whole = 0;
  for (std::uint32_t h = 0; h < group; ++h) {
    if (best_[h].whole) whole |= 1u << h;
    for (const std::uint32_t place : best_[h].places) chosen[place] |= 1u << h;
  }
  if (whole == 0) return;
  for (std::size_t i = 0; i < chosen.size(); ++i) chosen[i] |= allowed[i] & whole;
}

void ScoredSet::find_best(std::uint32_t h, std::uint32_t k, std::uint32_t group,
                          const std::vector<std::uint32_t>& allowed) {
  Best& best = best_[h];
  const std::size_t count = tokens_.size();
  const float* scores = scores_.data() + h;
  std::size_t candidates = 0;
  for (std::size_t i = 0; i < count; ++i) candidates += (allowed[i] >> h) & 1;
  best.whole = candidates <= k;
  best.places.resize(best.whole ? 0 : k);
  if (best.whole) return;
  best.values.resize(count);
  if (candidates == count) {
    for (std::size_t i = 0; i < count; ++i) best.values[i] = scores[i * group];
    (void)select_top_k(best.values.data(), static_cast<std::uint32_t>(count), k, best.places.data());
    return;
  }
  best.candidates.resize(count);
  std::size_t kept = 0;  // Written always, kept if the bit is set: which bits are set cannot be predicted.
  for (std::size_t i = 0; i < count; ++i) {
    best.candidates[kept] = static_cast<std::uint32_t>(i);
    best.values[kept] = scores[i * group];
    kept += (allowed[i] >> h) & 1;
  }
  (void)select_top_k(best.values.data(), static_cast<std::uint32_t>(kept), k, best.places.data());
  for (std::uint32_t& place : best.places) place = best.candidates[place];
}

void ScoredSet::choose_mass(float share, const AttendedAnyway& anyway, std::uint32_t group) {
  attended_.assign(tokens_.size(), 0);
  observed_.assign(tokens_.size(), 0);
  for (std::uint32_t h = 0; h < group; ++h) choose_head_mass(h, group, share, anyway);
}

void ScoredSet::keep_best(std::uint32_t k, std::uint32_t group, KvReader& kv) {
  const std::vector<std::uint32_t> from = std::exchange(attended_, std::vector<std::uint32_t>(tokens_.size(), 0));
  choose_best(k, group, from, kv, attended_);
}

void ScoredSet::choose_head_mass(std::uint32_t h, std::uint32_t group, float share, const AttendedAnyway& anyway) {
  constexpr float kNothing = -std::numeric_limits<float>::infinity();
  const std::size_t count = tokens_.size();
  const auto before = [this](std::uint32_t position) {
    return static_cast<std::size_t>(std::lower_bound(tokens_.begin(), tokens_.end(), position) - tokens_.begin());
  };
  // Tokens [begin, end) are to be chosen from, the others are attended anyway: those of [end, recent) if they are
  // candidates.
  const std::size_t begin = before(anyway.sink_end);
  const std::size_t recent = before(anyway.recent_begin);
  const std::size_t end = std::min(before(anyway.open), recent);
  const float* scores = scores_.data() + h;
  const auto weighs = [&](std::size_t i) {
    return (((heads_[i] >> h) & 1) != 0 || i < begin || i >= recent) && scores[i * group] > kNothing;
  };
  float top = kNothing;
  for (std::size_t i = 0; i < count; ++i) top = weighs(i) && scores[i * group] > top ? scores[i * group] : top;
  keys_.assign(count, 0);
  weighed_.clear();
  double first = 0.0;
  for (std::size_t i = 0; i < count; ++i) {
    if (!weighs(i)) continue;
    const float score = scores[i * group];
    const float weight = score == top ? 1.f : fast_exp(score - top);
    if (i < begin || i >= end) {
      first += static_cast<double>(weight);
      continue;
    }
    keys_[i] = candidate_key(score);
    weighed_.push_back({.key = keys_[i], .weight = weight});
  }
  const std::uint32_t cut = weighed_.empty() ? kKeepNone : top_p_cut(weighed_, static_cast<double>(share), first);
  for (std::size_t i = 0; i < count; ++i) {
    const std::uint32_t bit = i < begin || i >= end || keys_[i] >= cut ? 1u << h : 0;
    observed_[i] |= heads_[i] & bit;
    attended_[i] |= far_[i] & bit;
  }
}

void ScoredSet::drop(std::uint32_t heads) noexcept {
  active_ &= ~heads;
  for (std::uint32_t& of : heads_) of &= ~heads;
  for (std::uint32_t& of : far_) of &= ~heads;
}

std::span<const float> ScoredSet::scores_by(const float* q, KvReader& kv, std::uint32_t group,
                                            std::vector<float>& out) const {
  out.resize(tokens_.size() * group);
  if (tokens_.empty()) return out;
  if (estimated_) {
    kv.estimate(q, tokens_, out.data());
  } else {
    kv.score(q, tokens_, out.data());
  }
  return out;
}

std::span<const float> ScoredSet::log_sums(std::uint32_t group, std::vector<float>& out) const {
  out.assign(group, -std::numeric_limits<float>::infinity());
  for (std::uint32_t h = 0; h < group; ++h) {
    float top = out[h];
    for (std::size_t i = h; i < scores_.size(); i += group) top = std::max(top, scores_[i]);
    float sum = 0.f;
    for (std::size_t i = h; i < scores_.size(); i += group) sum += fast_exp(std::min(scores_[i] - top, 0.f));
    if (std::isfinite(top)) out[h] = top + std::log(sum);
  }
  return out;
}

}  // namespace sluice::scheduler
