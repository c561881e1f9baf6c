#include "scheduler/policy/bypass.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <span>

namespace sluice::scheduler {
namespace {

constexpr std::uint32_t kPassedTokensAtOnce = 1024;

double squared_norm(const float* q, std::uint32_t head_dim) {
  double sum = 0.0;
  for (std::uint32_t c = 0; c < head_dim; ++c) sum += static_cast<double>(q[c]) * q[c];
  return sum;
}

/// log(sum of exp) of column `h` of `scores` [rows, group]; -inf if there are no rows, NaN if one is no number.
double log_mass(std::span<const float> scores, std::uint32_t group, std::uint32_t h) {
  double top = -std::numeric_limits<double>::infinity();
  for (std::size_t i = h; i < scores.size(); i += group) {
    if (std::isnan(scores[i])) return scores[i];
    top = std::max<double>(top, scores[i]);
  }
  if (!std::isfinite(top)) return top;
  double sum = 0.0;
  for (std::size_t i = h; i < scores.size(); i += group) sum += std::exp(scores[i] - top);
  return top + std::log(sum);
}

std::uint32_t far_tokens(const NearSet& near, std::uint32_t begin, std::uint32_t end) {
  const std::uint32_t from = std::max(begin, near.sink_end);
  return std::max(from, std::min(end, near.recent_begin)) - from;
}

/// Tokens that are scored at once.
struct Probe {
  std::vector<std::uint32_t> tokens;
  std::vector<float> scores;  ///< [tokens, group]
};

Probe& probe_of_thread() {
  thread_local Probe probe;
  return probe;
}

}  // namespace

SinkBypass::SinkBypass(float threshold, const AttentionShape& shape, std::uint32_t sinks, std::uint32_t local_tokens,
                       const BypassGuards& guards)
    : threshold_(threshold),
      group_(shape.group()),
      head_dim_(shape.head_dim),
      sinks_(sinks),
      local_tokens_(local_tokens),
      guards_(guards),
      shape_(shape) {}

void SinkBypass::begin(const PromptContext& prompt) {
  mean_key_.assign(head_dim_, 0.0);
  mean_value_.assign(head_dim_, 0.f);
  spread_.assign(group_, -1.0);
  prompt_tokens_ = prompt.queries > 0 && prompt.tokens > sinks_ ? prompt.tokens - sinks_ : 0;
  if (prompt_tokens_ == 0) return;

  std::vector<double> value_sum(head_dim_, 0.0);
  std::vector<float> row(head_dim_);
  for (std::uint32_t token = sinks_; token < prompt.tokens; ++token) {
    prompt.kv->key(token, row.data());
    for (std::uint32_t c = 0; c < head_dim_; ++c) mean_key_[c] += row[c];
    prompt.kv->value(token, row.data());
    for (std::uint32_t c = 0; c < head_dim_; ++c) value_sum[c] += row[c];
  }
  for (std::uint32_t c = 0; c < head_dim_; ++c) {
    mean_key_[c] /= prompt_tokens_;
    mean_value_[c] = static_cast<float>(value_sum[c] / prompt_tokens_);
  }

  const float* q = prompt.last_q.data() + std::size_t{prompt.queries - 1} * group_ * head_dim_;
  Probe& probe = probe_of_thread();
  std::vector<double> square_sum(group_, 0.0);
  std::vector<double> mean(group_);
  for (std::uint32_t h = 0; h < group_; ++h) mean[h] = logits(h, q + std::size_t{h} * head_dim_).mean;
  probe.scores.resize(std::size_t{kPassedTokensAtOnce} * group_);
  for (std::uint32_t begin = sinks_; begin < prompt.tokens; begin += kPassedTokensAtOnce) {
    probe.tokens.resize(std::min(kPassedTokensAtOnce, prompt.tokens - begin));
    std::iota(probe.tokens.begin(), probe.tokens.end(), begin);
    prompt.kv->score(q, probe.tokens, probe.scores.data());
    for (std::size_t i = 0; i < probe.tokens.size() * group_; ++i) {
      const double from_mean = probe.scores[i] - mean[i % group_];
      square_sum[i % group_] += from_mean * from_mean;
    }
  }
  for (std::uint32_t h = 0; h < group_; ++h) {
    const double norm = squared_norm(q + std::size_t{h} * head_dim_, head_dim_);
    if (norm > 0.0) spread_[h] = square_sum[h] / prompt_tokens_ / norm;
  }
}

SinkBypass::Logits SinkBypass::logits(std::uint32_t h, const float* q) const {
  double dot = 0.0;
  for (std::uint32_t c = 0; c < head_dim_; ++c) dot += q[c] * mean_key_[c];
  // A soft-cap narrows what spreads around the mean, so that the mass of the rest is not taken for less than it is.
  return {.mean = shape_.capped(dot * static_cast<double>(shape_.score_scale())),
          .variance = spread_[h] * squared_norm(q, head_dim_)};
}

std::uint32_t SinkBypass::test(const HeadContext& head, Bypass& bypass, SelectCounters& counters) {
  bypass.heads = 0;
  const std::size_t floats = std::size_t{group_} * head_dim_;
  const auto rows = static_cast<std::uint32_t>(1 + head.behind.size() / floats);
  const std::uint32_t last = head.tokens + rows - 1;
  if (prompt_tokens_ == 0 || sinks_ == 0 || head.tokens <= sinks_) return 0;
  if (last - sinks_ > (1.0 + static_cast<double>(guards_.growth)) * prompt_tokens_) return 0;
  bypass.out.resize(floats);
  bypass.lse.resize(std::size_t{rows} * group_);
  sink_mass_.assign(bypass.lse.size(), 0.0);
  std::uint32_t heads = ~0u >> (32 - group_);
  for (std::uint32_t row = 0; row < rows && heads != 0; ++row) {
    const float* const q = row == 0 ? head.q : head.behind.data() + (row - 1) * floats;
    heads &= test_row({.q = q, .tokens = head.tokens + row}, head, bypass.lse.data() + row * group_, counters);
  }
  for (std::uint32_t h = 0; h < group_; ++h) {
    if ((heads >> h & 1) != 0) std::ranges::copy(mean_value_, bypass.out.data() + std::size_t{h} * head_dim_);
  }
  return bypass.heads = heads;
}

std::uint32_t SinkBypass::test_row(const Row& row, const HeadContext& head, float* lse, SelectCounters& counters) {
  const std::uint32_t off = row.tokens - sinks_;
  const std::uint32_t local = std::min(local_tokens_, off);
  Probe& probe = probe_of_thread();
  probe.tokens.resize(sinks_ + local);
  std::iota(probe.tokens.begin(), probe.tokens.begin() + sinks_, 0u);
  std::iota(probe.tokens.begin() + sinks_, probe.tokens.end(), row.tokens - local);
  probe.scores.resize(probe.tokens.size() * group_);
  head.kv->score(row.q, probe.tokens, probe.scores.data());
  counters.scored += probe.tokens.size();

  std::uint32_t heads = 0;
  double far_share = -1.0;  // Counted for the first bypassed head only.
  for (std::uint32_t h = 0; h < group_; ++h) {
    if (spread_[h] < 0.0) continue;
    const Logits estimate = logits(h, row.q + std::size_t{h} * head_dim_);
    if (!(estimate.variance <= static_cast<double>(guards_.variance))) continue;  // NaN too.
    const std::span<const float> scores = probe.scores;
    const double sink = log_mass(scores.first(std::size_t{sinks_} * group_), group_, h);
    const double local_mass = log_mass(scores.subspan(std::size_t{sinks_} * group_), group_, h);
    const double rest = std::max(local_mass, std::log(off) + estimate.mean + estimate.variance / 2);
    sink_mass_[(row.tokens - head.tokens) * group_ + h] = sink;
    if (!holds(sink, rest)) continue;
    if (far_share < 0.0) far_share = static_cast<double>(far_tokens(*head.near, sinks_, row.tokens)) / off;
    heads |= 1u << h;
    lse[h] = static_cast<float>(rest + std::log(far_share));  // Nothing far: log(0), the empty partial.
  }
  return heads;
}

bool SinkBypass::holds(double sink, double rest) const noexcept {
  // r = A_sink / (A_sink + rest), eq. (6). Written so that NaN does not bypass.
  return 1.0 / (1.0 + std::exp(rest - sink)) > threshold_;
}

void SinkBypass::confirm(std::uint32_t row, std::span<const float> scores, Bypass& bypass) const {
  for (std::uint32_t h = 0; h < group_; ++h) {
    if ((bypass.heads >> h & 1) == 0) continue;
    if (!holds(sink_mass_[row * group_ + h], log_mass(scores, group_, h))) bypass.heads &= ~(1u << h);
  }
}

}  // namespace sluice::scheduler
