#pragma once

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "cpu/stages/stages.hpp"
#include "scheduler/layer_policy.hpp"
#include "sluice/policy.hpp"
#include "sluice/step/selection.hpp"
#include "tools/cli/synthetic/synthetic.hpp"

namespace sluice::tools {

/// One layer of several sequences, which make a step together: of one shape and page layout, and as many steps. Not
/// empty; the layers belong to the caller.
using LayerBatch = std::vector<const SyntheticLayer*>;

/// Attention of one decode step over one layer of `rows` sequences.
struct StepOutput {
  std::vector<float> out;  ///< [rows, q_heads, head_dim]
  std::vector<float>
      lse;  ///< [rows, q_heads] of what was attended; a bypassed head's estimate of the rest is not in it
};

/// Dense attention on the CPU, over whole pages, all sequences in one call.
class DenseLayer {
 public:
  DenseLayer(LayerBatch batch, const cpu::Host& host) : batch_(std::move(batch)), host_(host) {}
  /// Tokens [0, options.tokens + step] of each sequence, the step's own included.
  void attend(std::uint32_t step, StepOutput& output);

 private:
  LayerBatch batch_;
  cpu::Host host_;
  std::vector<std::vector<PageRun>> runs_;  ///< [rows]
};

/// Wall time of one step by phase, in microseconds. `score` is the part of `select` spent in reading K.
struct PhaseTimes {
  double forecast = 0.0;
  double select = 0.0;
  double score = 0.0;
  double attend = 0.0;
  double observe = 0.0;
  [[nodiscard]] double total() const noexcept { return forecast + select + attend + observe; }
};

/// One policy over one layer, everything attended by the CPU: sinks and recent tokens densely, then what the
/// policy selects. The KV heads of all sequences go over the workers in every phase, as in the pipeline.
class PolicyLayer {
 public:
  /// @throws Error{Errc::unsupported} for a policy that ranks pages or keeps a near share, which are the
  ///         device's part and not measured here.
  PolicyLayer(const PolicySpec& spec, LayerBatch batch, const cpu::Host& host);
  ~PolicyLayer();

  /// Reads the prompt. Once, before the first step.
  void begin();
  /// One decode step; steps come in ascending order.
  PhaseTimes step(std::uint32_t step, StepOutput& output);

  /// Of the last step: [rows, kv_heads].
  [[nodiscard]] const std::vector<SelectionRow>& rows() const noexcept { return rows_; }
  [[nodiscard]] scheduler::SelectCounters counters() const noexcept;
  [[nodiscard]] std::uint32_t bypassed_heads() const noexcept;

 private:
  struct Head;
  void attend(std::uint32_t step, StepOutput& output);
  void apply_bypass(std::uint32_t head);
  /// Indices of heads run over all sequences: that of a head among its sequence's.
  [[nodiscard]] std::uint32_t kv_head(std::uint32_t head) const noexcept { return head % shape_.kv_heads; }
  [[nodiscard]] const SyntheticLayer& layer(std::uint32_t head) const noexcept {
    return *batch_[head / shape_.kv_heads];
  }
  [[nodiscard]] scheduler::LayerPolicy& policy(std::uint32_t head) const noexcept {
    return *policies_[head / shape_.kv_heads];
  }
  [[nodiscard]] std::uint32_t heads() const noexcept { return static_cast<std::uint32_t>(heads_.size()); }

  PolicySpec spec_;
  LayerBatch batch_;
  AttentionShape shape_;
  cpu::Host host_;
  std::vector<std::unique_ptr<scheduler::LayerPolicy>> policies_;  ///< [rows]
  std::vector<std::unique_ptr<Head>> heads_;                       ///< [rows, kv_heads]
  std::vector<SelectionRow> rows_;                                 ///< likewise
  StepOutput near_;
  StepOutput far_;
};

}  // namespace sluice::tools
