#include "sluice/audit.hpp"

#include <algorithm>
#include <cmath>

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
