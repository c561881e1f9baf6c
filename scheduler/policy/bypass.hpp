#pragma once

#include <cstdint>
#include <vector>

#include "scheduler/layer_policy.hpp"

namespace sluice::scheduler {

/// Which query heads of one KV head need no attending (LFPS section 4.3): their mass sits on the sinks, so the
/// rest is served by its mean value. Mean key, mean value and spread are those of the prompt, frozen.
class SinkBypass {
 public:
  SinkBypass(float threshold, const AttentionShape& shape, std::uint32_t sinks, std::uint32_t local_tokens);

  /// Reads every K and V row of the prompt beyond the sinks once.
  void begin(const PromptContext& prompt);

  /// Fills `bypass` for the heads whose sink share exceeds the threshold and returns their bits. Merged with
  /// the near partial over the sinks, `bypass` gives r * vsink + (1 - r) * vbar, eq. (6) and (14). With a near
  /// set beyond the sinks the estimate is scaled to the tokens that are far.
  /// Reads the K rows of sinks and local tokens and adds them to `counters.scored`.
  [[nodiscard]] std::uint32_t test(const HeadContext& head, Bypass& bypass, SelectCounters& counters);

  /// Estimates for one query of head `h`: mean logit and log-normal variance over the prompt's offloaded keys.
  struct Logits {
    double mean = 0.0;
    double variance = 0.0;
  };
  [[nodiscard]] Logits logits(std::uint32_t h, const float* q) const;

 private:
  double threshold_;
  std::uint32_t group_, head_dim_, sinks_, local_tokens_;
  std::uint32_t prompt_tokens_ = 0;   ///< offloaded tokens that the means stand for; 0: no bypass
  std::vector<double> mean_key_;      ///< [head_dim]
  std::vector<float> mean_value_;     ///< [head_dim]
  std::vector<double> spread_;        ///< [group] rho = var_j(s_j of the last prompt query) / ||q||^2; < 0: unknown
  std::vector<std::uint32_t> probe_;  // scratch
  std::vector<float> scores_;         // scratch
};

}  // namespace sluice::scheduler
