#include "tools/cli/eval_synthetic.hpp"

#include <span>
#include <string>

#include "cpu/host_device.hpp"
#include "cpu/topology.hpp"
#include "cpu/workers.hpp"
#include "tools/cli/bench_device.hpp"
#include "tools/cli/bench_shapes.hpp"
#include "tools/cli/interrupt.hpp"
#include "tools/cli/report.hpp"

namespace sluice::tools {
namespace {

constexpr std::uint32_t kWarmUp = 2;
constexpr std::uint32_t kImportChunk = 4096;

}  // namespace

void check(const NeedleOptions& options) {
  SyntheticOptions synthetic;
  synthetic.tokens = options.tokens;
  synthetic.steps = kWarmUp + options.steps;
  synthetic.needles = options.needles;
  synthetic.sinks = options.sinks;
  check_needles(synthetic);
  check_sinks(synthetic);
}

AttentionShape needle_shape() {
  AttentionShape shape = named_shape("llama-3.1-8b");
  shape.layers = 1;
  return shape;
}

namespace {

void score_needles(const NeedleOptions& options, const RuntimeFlags& flags, const std::vector<PolicySpec>& policies,
                   const std::shared_ptr<Device>& given, std::span<NeedleScore> scores, ProgressBar& bar) {
  const cpu::Topology topology;
  const auto builders = std::make_shared<const cpu::Workers>(topology, cpu::WorkersOptions{});
  std::shared_ptr<Device> device = given;
  if (!device) device = std::make_shared<cpu::HostDevice>(builders);
  const AttentionShape shape = needle_shape();

  std::size_t done = 0;
  for (const auto& [page_tokens, group] : by_page_size(policies, flags)) {
    SyntheticOptions synthetic{
        .shape = shape,
        .layout = {.page_tokens = page_tokens, .head_dim = shape.head_dim, .dtype = DType::bf16},
        .tokens = options.tokens,
        .steps = kWarmUp + options.steps};
    synthetic.seed = options.seed;
    synthetic.needles = options.needles;
    synthetic.sinks = options.sinks;
    const SyntheticLayer layer(synthetic, topology, builders);
    const DeviceSteps steps(layer, *device);
    std::vector<PolicySpec> specs;
    for (const std::size_t p : group) specs.push_back(policies[p]);
    RuntimeFlags own = flags;
    own.options.page_tokens = page_tokens;
    own.options.kv_dtype = DType::bf16;
    own.options.prefill_chunk = kImportChunk;
    RuntimeOptions runtime = sized(own, shape, specs, options.tokens + synthetic.steps);
    for (const std::uint32_t every : {0u, 1u}) {
      runtime.audit_every = every;
      DeviceDecode decode(runtime, layer, steps, device);
      for (const std::size_t p : group) {
        bar.update(done++, 2 * policies.size(), "needles: " + policies[p].name);
        PolicySpec policy = policies[p];
        policy.dense_layers = policy.dense_every = 0;  // The only layer is one that the policy works in.
        const StepTimes run = decode.run(policy, kWarmUp, options.steps);
        NeedleScore& score = scores[p];
        if (every == 0) {
          score.layer_us = percentile(run.layer_us, 0.5);
        } else {
          score.page_tokens = page_tokens;
          score.audited = run.stats;
          score.link_bytes = run.link_bytes;
        }
      }
    }
  }
}

}  // namespace

std::vector<NeedleScore> evaluate_needles(const NeedleOptions& options, const RuntimeFlags& flags,
                                          const std::vector<PolicySpec>& policies,
                                          const std::shared_ptr<Device>& device, ProgressBar& bar) {
  std::vector<NeedleScore> scores(policies.size());
  try {
    score_needles(options, flags, policies, device, scores, bar);
  } catch (const Interrupted&) {  // Whoever has no page size is not finished.
  }
  return scores;
}

}  // namespace sluice::tools
