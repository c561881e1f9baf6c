// Who keeps what of a ScoredSet: top-k, top-p or all.

#include <algorithm>
#include <array>
#include <cmath>
#include <functional>
#include <limits>
#include <utility>

#include "scheduler/fast_exp.hpp"
#include "scheduler/policy/scored_set.hpp"
#include "sluice/order_key.hpp"

namespace sluice::scheduler {

std::uint32_t order_key(float score) noexcept {
  return score == score ? order_key_of_number(score) : 1u;
}

TopKCut top_k_cut(std::span<const std::uint32_t> keys, std::uint32_t k, std::vector<std::uint32_t>& pool) {
  // A histogram over sign, exponent and three mantissa bits finds the bin with the k-th key; only its members are
  // ordered. One pass without comparisons, where sorting algorithms mispredict.
  constexpr std::uint32_t kShift = 20;
  std::array<std::uint32_t, 1u << (32 - kShift)> bins{};
  for (const std::uint32_t key : keys) ++bins[key >> kShift];
  std::size_t bin = bins.size() - 1;
  for (; bins[bin] < k; --bin) k -= bins[bin];

  pool.clear();
  for (const std::uint32_t key : keys) {
    if (key >> kShift == bin) pool.push_back(key);
  }
  const auto nth = pool.begin() + static_cast<std::ptrdiff_t>(k - 1);
  std::nth_element(pool.begin(), nth, pool.end(), std::greater<>());
  const std::uint32_t key = *nth;
  const auto above = static_cast<std::uint32_t>(std::count_if(pool.begin(), nth, [key](auto x) { return x > key; }));
  return {.key = key, .ties = k - above};
}

void ScoredSet::choose(std::uint32_t k, std::uint32_t group) {
  attended_.assign(tokens_.size(), 0);
  for (std::uint32_t h = 0; h < group; ++h) choose_head(h, group, k, far_, attended_);
  if (far_ == heads_) {
    observed_ = attended_;
    return;
  }
  observed_.assign(tokens_.size(), 0);
  for (std::uint32_t h = 0; h < group; ++h) choose_head(h, group, k, heads_, observed_);
}

void ScoredSet::choose_all() {
  attended_ = far_;
  observed_ = heads_;
}

void ScoredSet::choose_head(std::uint32_t h, std::uint32_t group, std::uint32_t k,
                            const std::vector<std::uint32_t>& allowed, std::vector<std::uint32_t>& chosen) {
  const std::size_t count = tokens_.size();
  std::uint32_t candidates = 0;
  for (std::size_t i = 0; i < count; ++i) candidates += (allowed[i] >> h) & 1;
  if (candidates <= k) {
    for (std::size_t i = 0; i < count; ++i) chosen[i] |= allowed[i] & (1u << h);
    return;
  }
  if (k == 0) return;
  keys_.resize(count);
  const float* scores = scores_.data() + h;
  std::uint32_t* keys = keys_.data();
#pragma omp simd
  for (std::size_t i = 0; i < count; ++i) {
    keys[i] = order_key(scores[i * group]) & (0u - ((allowed[i] >> h) & 1));
  }
  const TopKCut cut = top_k_cut(keys_, k, pool_);
#pragma omp simd
  for (std::size_t i = 0; i < count; ++i) chosen[i] |= static_cast<std::uint32_t>(keys[i] > cut.key) << h;
  std::uint32_t ties = cut.ties;
  for (std::size_t i = 0; ties != 0; ++i) {
    if (keys[i] != cut.key) continue;
    chosen[i] |= 1u << h;
    --ties;
  }
}

void ScoredSet::choose_mass(float share, const AttendedAnyway& anyway, std::uint32_t group) {
  attended_.assign(tokens_.size(), 0);
  observed_.assign(tokens_.size(), 0);
  for (std::uint32_t h = 0; h < group; ++h) choose_head_mass(h, group, share, anyway);
}

void ScoredSet::keep_best(std::uint32_t k, std::uint32_t group) {
  const std::vector<std::uint32_t> from = std::exchange(attended_, std::vector<std::uint32_t>(tokens_.size(), 0));
  for (std::uint32_t h = 0; h < group; ++h) choose_head(h, group, k, from, attended_);
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
    keys_[i] = order_key(score);
    weighed_.push_back({.key = keys_[i], .weight = weight});
  }
  const std::uint32_t cut = weighed_.empty() ? kKeepNone : top_p_cut(weighed_, static_cast<double>(share), first);
  for (std::size_t i = 0; i < count; ++i) {
    const std::uint32_t bit = i < begin || i >= end || keys_[i] >= cut ? 1u << h : 0;
    observed_[i] |= heads_[i] & bit;
    attended_[i] |= far_[i] & bit;
  }
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
