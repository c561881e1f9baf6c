#include "sluice/stats.hpp"

#include <algorithm>
#include <cmath>

#include "sluice/audit.hpp"

namespace sluice {

void ShareHistogram::add(double share) noexcept {
  if (std::isnan(share)) share = 0.0;  // An audit that could not be computed covers nothing.
  share = std::clamp(share, 0.0, 1.0);
  const auto bin = std::min<std::size_t>(static_cast<std::size_t>(share * 1000.0), bins_.size() - 1);
  ++bins_[bin];
  ++count_;
  sum_ += share;
  min_ = std::min(min_, share);
}

void ShareHistogram::merge(const ShareHistogram& other) noexcept {
  for (std::size_t i = 0; i < bins_.size(); ++i) bins_[i] += other.bins_[i];
  count_ += other.count_;
  sum_ += other.sum_;
  min_ = std::min(min_, other.min_);
}

double ShareHistogram::share_above(double share) const noexcept {
  if (count_ == 0) return 0.0;
  const auto first = static_cast<std::size_t>(std::ceil(std::clamp(share, 0.0, 0.999) * 1000.0));
  std::uint64_t seen = 0;
  for (std::size_t i = first; i < bins_.size(); ++i) seen += bins_[i];
  return static_cast<double>(seen) / static_cast<double>(count_);
}

double ShareHistogram::percentile(double fraction) const noexcept {
  if (count_ == 0) return 0.0;
  const auto rank = static_cast<std::uint64_t>(std::ceil(std::clamp(fraction, 0.0, 1.0) * static_cast<double>(count_)));
  std::uint64_t seen = 0;
  for (std::size_t i = 0; i < bins_.size(); ++i) {
    seen += bins_[i];
    if (seen >= std::max<std::uint64_t>(rank, 1)) return static_cast<double>(i) / 1000.0;
  }
  return 1.0;
}

void PromptStats::merge(const PromptStats& other) noexcept {
  attend_ns += other.attend_ns;
  select_ns += other.select_ns;
  load_wait_ns += other.load_wait_ns;
  flush_ns += other.flush_ns;
  flush_wait_ns += other.flush_wait_ns;
  tables_ns += other.tables_ns;
  digests_ns += other.digests_ns;
  int4_ns += other.int4_ns;
  clusters_ns += other.clusters_ns;
  index_wait_ns += other.index_wait_ns;
  kept_blocks += other.kept_blocks;
  causal_blocks += other.causal_blocks;
  sparse_chunks += other.sparse_chunks;
  dense_chunks += other.dense_chunks;
}

void Stats::merge(const Stats& other) noexcept {
  prefill_tokens += other.prefill_tokens;
  steps += other.steps;
  dense_tokens += other.dense_tokens;
  attended_tokens += other.attended_tokens;
  near_tokens += other.near_tokens;
  far_tokens += other.far_tokens;
  fetched_tokens += other.fetched_tokens;
  candidate_tokens += other.candidate_tokens;
  expanded_per_head += other.expanded_per_head;
  scored_keys += other.scored_keys;
  estimated_keys += other.estimated_keys;
  near_hits += other.near_hits;
  bypassed_heads += other.bypassed_heads;
  progressive_iterations += other.progressive_iterations;
  overshoot_pages += other.overshoot_pages;
  pool_hits += other.pool_hits;
  pool_misses += other.pool_misses;
  far_bytes += other.far_bytes;
  near_bytes += other.near_bytes;
  dense_bytes += other.dense_bytes;
  h2d_bytes += other.h2d_bytes;
  d2h_bytes += other.d2h_bytes;
  promotions += other.promotions;
  evictions += other.evictions;
  failed_promotions += other.failed_promotions;
  cpu_busy_ns += other.cpu_busy_ns;
  device_wait_ns += other.device_wait_ns;
  prompt.merge(other.prompt);
  coverage.merge(other.coverage);
  overlap.merge(other.overlap);
  watched.merge(other.watched);
}

void AuditReport::merge_totals(const AuditReport& other) noexcept {
  coverage.merge(other.coverage);
  overlap.merge(other.overlap);
  watched.merge(other.watched);
  attended_tokens += other.attended_tokens;
  dense_tokens += other.dense_tokens;
  bypassed_heads += other.bypassed_heads;
  tokens += other.tokens;
}

}  // namespace sluice
