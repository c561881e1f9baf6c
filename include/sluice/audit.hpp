#pragma once

#include <array>
#include <cstdint>
#include <vector>

namespace sluice {

/// Distribution of a quantity in [0, 1], in 1,000 equal bins; a percentile is exact to 0.001.
class ShareHistogram {
 public:
  void add(double share) noexcept;
  void merge(const ShareHistogram& other) noexcept;
  [[nodiscard]] std::uint64_t count() const noexcept { return count_; }
  [[nodiscard]] double mean() const noexcept { return count_ == 0 ? 0.0 : sum_ / static_cast<double>(count_); }
  [[nodiscard]] double min() const noexcept { return count_ == 0 ? 0.0 : min_; }
  /// Share of the samples that are at least `share`, exact to 0.001; 0 if there are none.
  [[nodiscard]] double share_above(double share) const noexcept;
  /// Value below which `fraction` of the samples lie; 0 if there are none.
  [[nodiscard]] double percentile(double fraction) const noexcept;

 private:
  std::array<std::uint64_t, 1000> bins_{};
  std::uint64_t count_ = 0;
  double sum_ = 0.0;
  double min_ = 1.0;
};

/// What a policy attended against exact attention, for one (layer, query head); means over the audited steps.
struct HeadAudit {
  std::uint64_t steps = 0;
  double coverage = 0.0;           ///< share of the exact softmax that was attended
  double coverage_min = 1.0;
  double overlap = 0.0;            ///< share of the AuditReport::top_k largest scores' tokens that was attended
  double error = 0.0;              ///< L2 norm of output minus exact output
  double relative_error = 0.0;     ///< the same over the norm of the exact output
  double error_bound = 0.0;        ///< 2 (1 - coverage) max |v|: what renormalised attention over a subset stays below
  std::uint64_t bound_broken = 0;  ///< steps whose error was above it by more than rounding: a defect, or values that
                                   ///< were estimated (a bypass, MagicPIG's correction)
  std::uint64_t watched_steps = 0; ///< steps in which watched tokens held at least 1% of the softmax
  double watched_mass = 0.0;       ///< their exact share, mean over those steps
  double watched_kept = 0.0;       ///< the attended part of that share, relative to it
};

/// What audits of a sequence found; see Engine::audit.
struct AuditReport {
  static constexpr std::uint32_t top_k = 64;
  std::uint32_t layers = 0;
  std::uint32_t q_heads = 0;
  std::vector<HeadAudit> heads;  ///< [layers, q_heads]; empty if nothing was audited

  // Over all layers, query heads and audited tokens:
  ShareHistogram coverage;
  ShareHistogram overlap;
  ShareHistogram watched;              ///< share of the watched tokens' mass that was attended, where they held 1%
  std::uint64_t attended_tokens = 0;   ///< by the query heads of a group together, summed over layers and KV heads
  std::uint64_t dense_tokens = 0;      ///< and those that there were
  std::uint64_t bypassed_heads = 0;    ///< query heads that attended nothing, summed over layers
  std::uint64_t tokens = 0;            ///< audited

  [[nodiscard]] const HeadAudit& at(std::uint32_t layer, std::uint32_t head) const { return heads[layer * q_heads + head]; }
  void merge_totals(const AuditReport& other) noexcept;
};

}  // namespace sluice
