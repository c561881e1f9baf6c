#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "scheduler/heap_bytes.hpp"
#include "scheduler/layer_policy.hpp"

namespace sluice::scheduler {

/// Which query heads of one KV head need no attending (LFPS section 4.3): their mass sits on the sinks, so the
/// rest is served by its mean value. Mean key, mean value and spread are those of the prompt, frozen.
///
/// r = A_sink / (A_sink + max(A_glob, A_loc)) estimates the sinks' share r_true of the softmax; A_glob is the
/// log-normal mean of all keys beyond the sinks, A_loc the mass of the last few. A head is bypassed if r exceeds the
/// threshold and neither of the guards speaks against it, see BypassGuards.
///
/// Guaranteed, with D the largest distance between two values: |out - dense| <= (1 - min(r, r_true)) * D, because both
/// outputs are averages of values that hold what is near, the sinks among it, in the same proportions and give it at
/// least that weight. Where r <= r_true the error is less than (1 - threshold) * D.
/// Only estimated: that r_true is near r. A_sink, A_loc and the mean logit are exact, so that the rest is never taken
/// for less than the mass of the last few; but a single key that answers the query is not seen, nor keys that
/// spread more along this query than along the prompt's last one. Then the error may reach (1 - r_true) * D.
class SinkBypass {
 public:
  SinkBypass(float threshold, const AttentionShape& shape, std::uint32_t sinks, std::uint32_t local_tokens,
             const BypassGuards& guards = {});

  /// Reads every K and V row of the prompt beyond the sinks once.
  void begin(const PromptContext& prompt);

  /// Fills `bypass` for the heads whose sink share exceeds the threshold and returns their bits. Merged with
  /// the near partial over the sinks, `bypass` gives r * vsink + (1 - r) * vbar, eq. (6) and (14). With a near
  /// set beyond the sinks the estimate is scaled to the tokens that are far.
  /// Reads the K rows of sinks and local tokens and adds them to `counters.scored`.
  /// With rows behind: the heads that each of them would bypass, too, with a mass for each row.
  [[nodiscard]] std::uint32_t test(const HeadContext& head, Bypass& bypass, SelectCounters& counters);

  /// Takes back from `bypass` the heads whose scored candidates beyond the sinks weigh so much that these no longer
  /// hold the threshold; `scores` [candidates, group] are by the query of row `row` of the newest test: 0 is that of
  /// `head`, the others those behind. A score that is no number takes its head back. What no candidate is stays unseen.
  void confirm(std::uint32_t row, std::span<const float> scores, Bypass& bypass) const;

  /// Estimates for one query of head `h`: mean logit and log-normal variance over the prompt's offloaded keys.
  struct Logits {
    double mean = 0.0;
    double variance = 0.0;
  };
  [[nodiscard]] Logits logits(std::uint32_t h, const float* q) const;
  [[nodiscard]] std::uint64_t heap_bytes() const noexcept {
    return scheduler::heap_bytes(mean_key_, mean_value_, spread_, sink_mass_);
  }
  /// What the test of a KV head holds at most.
  [[nodiscard]] static std::uint64_t most_heap_bytes(const AttentionShape& shape) noexcept {
    return shape.head_dim * (sizeof(double) + sizeof(float)) + (shape.group() + kMostGroup) * sizeof(double);
  }

 private:
  struct Row {
    const float* q = nullptr;  ///< [group, head_dim]
    std::uint32_t tokens = 0;  ///< visible
  };
  /// The heads that a row would bypass; lse[h] of these.
  [[nodiscard]] std::uint32_t test_row(const Row& row, const HeadContext& head, float* lse, SelectCounters& counters);

  [[nodiscard]] bool holds(double sink, double rest) const noexcept;

  double threshold_;
  std::uint32_t group_, head_dim_, sinks_, local_tokens_;
  BypassGuards guards_;
  AttentionShape shape_;
  std::uint32_t prompt_tokens_ = 0;   ///< offloaded tokens that the means stand for; 0: no bypass
  std::vector<double> mean_key_;      ///< [head_dim]
  std::vector<float> mean_value_;     ///< [head_dim]
  std::vector<double> sink_mass_;     ///< [rows, group] log of A_sink by the queries that were tested last
  std::vector<double> spread_;        ///< [group] rho = var_j(s_j of the last prompt query) / ||q||^2; < 0: unknown
};

}  // namespace sluice::scheduler
