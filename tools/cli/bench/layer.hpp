#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "cpu/backend/backend.hpp"
#include "cpu/threads/workers.hpp"
#include "scheduler/layer_policy.hpp"
#include "sluice/policy.hpp"
#include "sluice/selection.hpp"
#include "tools/cli/synthetic/synthetic.hpp"

namespace sluice::tools {

/// Attention of one decode step over one layer.
struct StepOutput {
  std::vector<float> out;  ///< [q_heads, head_dim]
  std::vector<float> lse;  ///< [q_heads] of what was attended; a bypassed head's estimate of the rest is not in it
};

/// Dense attention on the CPU, as Backend::attend does it over whole pages.
class DenseLayer {
 public:
  DenseLayer(const SyntheticLayer& layer, cpu::Backend& backend) : layer_(layer), backend_(backend) {}
  /// Tokens [0, options.tokens + step], the step's own included.
  void attend(std::uint32_t step, StepOutput& output);

 private:
  const SyntheticLayer& layer_;
  cpu::Backend& backend_;
  std::vector<PageRun> runs_;
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
/// policy selects. KV heads go over the workers in every phase, as in the pipeline.
class PolicyLayer {
 public:
  /// @throws Error{Errc::unsupported} for a policy that ranks pages or keeps a near share, which are the
  ///         device's part and not measured here.
  PolicyLayer(const PolicySpec& spec, const SyntheticLayer& layer, cpu::Backend& backend, const cpu::Workers& workers);
  ~PolicyLayer();

  /// Reads the prompt. Once, before the first step.
  void begin();
  /// One decode step; steps come in ascending order.
  PhaseTimes step(std::uint32_t step, StepOutput& output);

  /// Of the last step: [kv_heads].
  [[nodiscard]] const std::vector<SelectionRow>& rows() const noexcept { return rows_; }
  [[nodiscard]] scheduler::SelectCounters counters() const noexcept;
  [[nodiscard]] std::uint32_t bypassed_heads() const noexcept;

 private:
  struct Head;
  void attend(std::uint32_t step, StepOutput& output);
  void apply_bypass(std::uint32_t kv_head);

  PolicySpec spec_;
  const SyntheticLayer& layer_;
  cpu::Backend& backend_;
  const cpu::Workers& workers_;
  std::unique_ptr<scheduler::LayerPolicy> policy_;
  std::vector<std::unique_ptr<Head>> heads_;
  std::vector<SelectionRow> rows_;
  StepOutput near_;
  StepOutput far_;
};

}  // namespace sluice::tools
