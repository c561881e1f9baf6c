// What `sluice bench cpu` is about to time, held against attention in float64 and against dense attention.
#include "tools/cli/bench/attention_check.hpp"

#include <algorithm>
#include <cmath>
#include <string>

#include "cpu/stages/rows.hpp"
#include "sluice/error.hpp"

namespace sluice::tools {
namespace {

/// Largest relative error (L2, per query head) that a correct kernel makes: bf16 keys are exact in the
/// reference too, so only the accumulation differs.
constexpr double kTolerance = 2e-3;

/// Dense attention of one query head in float64.
std::vector<float> reference(const SyntheticLayer& layer, std::uint32_t q_head, std::uint32_t step) {
  const SyntheticOptions& options = layer.options();
  const std::uint32_t dim = options.shape.head_dim;
  const std::uint32_t kv_head = q_head / options.shape.group();
  const KvView view = layer.view(kv_head);
  const float* q = layer.query(kv_head, step) + std::size_t{q_head % options.shape.group()} * dim;
  const std::uint32_t n = options.tokens + step + 1;
  std::vector<float> row(dim);
  const auto read = [&](const std::byte* at, std::uint32_t token, std::uint32_t half) {
    const float* const scale = options.layout.scaled() ? view.scales(token) + half : nullptr;
    cpu::read_row(cpu::fastest_kernels(), options.layout, at, scale, row.data());
  };
  std::vector<double> score(n);
  for (std::uint32_t j = 0; j < n; ++j) {
    read(view.k_row(j), j, 0);
    for (std::uint32_t c = 0; c < dim; ++c) score[j] += static_cast<double>(q[c]) * row[c];
    score[j] /= std::sqrt(static_cast<double>(dim));
  }
  const double top = *std::max_element(score.begin(), score.end());
  double mass = 0.0;
  std::vector<double> sum(dim);
  for (std::uint32_t j = 0; j < n; ++j) {
    const double weight = std::exp(score[j] - top);
    mass += weight;
    read(view.v_row(j), j, 1);
    for (std::uint32_t c = 0; c < dim; ++c) sum[c] += weight * row[c];
  }
  std::vector<float> out(dim);
  for (std::uint32_t c = 0; c < dim; ++c) out[c] = static_cast<float>(sum[c] / mass);
  return out;
}

void require_close(const float* got, const float* want, std::uint32_t dim, const std::string& what) {
  const double error = relative_error({got, dim}, {want, dim});
  if (error <= kTolerance) return;  // NaN fails too.
  throw Error(Errc::device, "bench cpu: " + what + " is wrong (relative error " + std::to_string(error) +
                                "); nothing was timed. Try SLUICE_CPU_ISA=generic and report this");
}

void check_dense(const LayerBatch& batch, const StepOutput& dense) {
  const AttentionShape& shape = batch.front()->options().shape;
  for (std::size_t row = 0; row < batch.size(); ++row) {
    for (const std::uint32_t head : {0u, shape.q_heads - 1}) {
      const std::vector<float> want = reference(*batch[row], head, 0);
      require_close(&dense.out[(row * shape.q_heads + head) * shape.head_dim], want.data(), shape.head_dim,
                    "dense attention of sequence " + std::to_string(row));
    }
  }
}

/// `what`: the policy, for errors.
void check_whole_budget(const LayerBatch& batch, BenchMachine& machine, PolicySpec spec, const StepOutput& dense,
                        const std::string& what) {
  const AttentionShape& shape = batch.front()->options().shape;
  for (const SyntheticLayer* each : batch) {
    spec.budget.min_tokens = std::max(spec.budget.min_tokens, each->options().tokens + each->options().steps);
  }
  // By a share of the mass a history's candidates are never all.
  if (spec.budget.kind == BudgetKind::top_p) spec.budget.kind = BudgetKind::top_k;
  spec.bypass_threshold = 0.f;
  PolicyLayer whole(spec, batch, machine.host);
  whole.begin();
  StepOutput output;
  whole.step(0, output);
  for (std::size_t head = 0; head < batch.size() * shape.q_heads; ++head) {
    const std::size_t at = head * shape.head_dim;
    require_close(&output.out[at], &dense.out[at], shape.head_dim, what + " at full budget");
  }
}

/// The first step of a batch, against the same of a sequence alone.
void check_alone(const LayerBatch& batch, BenchMachine& machine, const PolicySpec& spec, const std::string& what) {
  const AttentionShape& shape = batch.front()->options().shape;
  PolicyLayer together(spec, batch, machine.host);
  together.begin();
  StepOutput all;
  together.step(0, all);
  for (std::size_t row = 0; row < batch.size(); ++row) {
    PolicyLayer alone(spec, {batch[row]}, machine.host);
    alone.begin();
    StepOutput one;
    alone.step(0, one);
    for (std::size_t head = 0; head < shape.q_heads; ++head) {
      require_close(&all.out[(row * shape.q_heads + head) * shape.head_dim], &one.out[head * shape.head_dim],
                    shape.head_dim, what + " of sequence " + std::to_string(row) + " in a batch");
    }
  }
}

}  // namespace

void check_attention(const LayerBatch& batch, BenchMachine& machine, const std::vector<PolicySpec>& specs) {
  StepOutput dense;
  DenseLayer(batch, machine.host).attend(0, dense);
  check_dense(batch, dense);
  for (const PolicySpec& spec : specs) {
    const std::string what = "policy '" + spec.name + "'";
    if (spec.uses(Source::history) || spec.uses(Source::exact)) {
      check_whole_budget(batch, machine, spec, dense, what);
    }
    if (batch.size() != 1) check_alone(batch, machine, spec, what);
  }
}

}  // namespace sluice::tools
