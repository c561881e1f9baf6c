#pragma once

#include <array>
#include <cstdint>

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

/// Where the time of prompts went, and what their attention computed. Summed over layers and chunks. Times of the device
/// are between events of its stream and exclude what the caller enqueued in between.
struct PromptStats {
  std::uint64_t attend_ns = 0;      ///< device: attention, waits for keys excluded
  std::uint64_t select_ns = 0;      ///< device: FlexPrefill's choice of blocks
  std::uint64_t load_wait_ns = 0;   ///< device: attention waited for keys from host memory
  std::uint64_t flush_ns = 0;       ///< link: chunks on their way to host memory
  std::uint64_t flush_wait_ns = 0;  ///< somebody waited for that; the rest of flush_ns was hidden
  std::uint64_t tables_ns = 0;      ///< what policies build from the prompt, hash tables and score tables, by device and workers
  std::uint64_t digests_ns = 0;     ///< page digests, wherever they were built
  std::uint64_t int4_ns = 0;        ///< 4-bit copies of K, wherever they were built
  std::uint64_t clusters_ns = 0;    ///< k-means on the device
  std::uint64_t index_wait_ns = 0;  ///< a first step waited for any of these four
  std::uint64_t kept_blocks = 0;    ///< (query block, key block) pairs computed where blocks were chosen
  std::uint64_t causal_blocks = 0;  ///< and what dense attention would have computed there
  std::uint64_t sparse_chunks = 0;  ///< (layer, chunk) pairs where blocks were chosen
  std::uint64_t dense_chunks = 0;   ///< and the others

  void merge(const PromptStats& other) noexcept;
};

/// Counters of a runtime or of one sequence, since construction. Decode only unless said otherwise.
/// Token counts are summed over (layer, KV head, step). Identities, which the tests check:
///   attended_tokens == near_tokens + far_tokens + fetched_tokens
///   coverage.count() == audited steps * layers * q_heads
struct Stats {
  std::uint64_t prefill_tokens = 0;   ///< prompt tokens, counted once per token
  std::uint64_t steps = 0;            ///< decode steps (all layers of one token of one sequence)
  std::uint64_t dense_tokens = 0;     ///< what dense attention would have attended
  std::uint64_t attended_tokens = 0;
  std::uint64_t near_tokens = 0;      ///< attended on the device, already there
  std::uint64_t far_tokens = 0;       ///< attended by the CPU in place
  std::uint64_t fetched_tokens = 0;   ///< copied in this step, then attended on the device
  std::uint64_t candidate_tokens = 0; ///< tokens that sources proposed, after the union over the group
  std::uint64_t expanded_per_head = 0;///< candidates before that union, summed over query heads
  std::uint64_t scored_keys = 0;      ///< K rows read for scoring, digests included (two per page)
  std::uint64_t estimated_keys = 0;   ///< 4-bit copies of K rows read
  std::uint64_t near_hits = 0;        ///< candidates that were near already
  std::uint64_t bypassed_heads = 0;   ///< query heads served by the sink bypass, summed over layers and steps

  /// Progressive attention: microbatches of pages per (layer, KV head, step), pages that were attended although enough
  /// had been, and pages that were on the device already or had to be copied there. Identity, where it runs on the
  /// device: pool_hits + pool_misses == pages visited.
  std::uint64_t progressive_iterations = 0;
  std::uint64_t overshoot_pages = 0;
  std::uint64_t pool_hits = 0;
  std::uint64_t pool_misses = 0;

  std::uint64_t far_bytes = 0;        ///< bytes that the CPU read in host memory: K, V, 4-bit copies, centroids, hash lists
  std::uint64_t near_bytes = 0;       ///< K, V and digest bytes that the device read from its memory
  std::uint64_t dense_bytes = 0;      ///< what dense attention would have read
  std::uint64_t h2d_bytes = 0;        ///< over the link to the device: promotions and fetches, prefill included
  std::uint64_t d2h_bytes = 0;        ///< over the link to the host: write-through, prefill included

  std::uint64_t promotions = 0;         ///< pages copied to a near slot to stay there
  std::uint64_t evictions = 0;          ///< pages that lost their slot to another
  std::uint64_t failed_promotions = 0;  ///< copies that failed; the page stayed far, nothing was lost

  std::uint64_t cpu_busy_ns = 0;      ///< host thread in selection, far attention and observation
  std::uint64_t device_wait_ns = 0;   ///< host thread waiting for the device
  PromptStats prompt;
  ShareHistogram coverage;            ///< per (layer, query head, audited step): exp(lse_attended - lse_all)
  ShareHistogram overlap;             ///< likewise: share of the exact 64 best tokens that was attended
  ShareHistogram watched;             ///< likewise, where watched tokens held 1% or more: the share of that attended

  void merge(const Stats& other) noexcept;
};

}  // namespace sluice
