#include "tools/cli/eval/synthetic.hpp"

#include <span>
#include <string>

#include "cpu/device/host_device.hpp"
#include "cpu/machine/topology.hpp"
#include "cpu/threads/workers.hpp"
#include "tools/cli/bench/device.hpp"
#include "tools/cli/bench/shapes.hpp"
#include "tools/cli/synthetic/synthetic_forwards.hpp"
#include "tools/cli/text/interrupt.hpp"
#include "tools/cli/text/report.hpp"

namespace sluice::tools {
namespace {

constexpr std::uint32_t kWarmUp = 2;

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

AttentionShape needle_shape() { return named_shape("llama-3.1-8b"); }

namespace {

void score_needles(const NeedleOptions& options, const EngineFlags& flags, const std::vector<PolicySpec>& policies,
                   const std::shared_ptr<Device>& given, std::span<NeedleScore> scores, ProgressBar& bar) {
  const cpu::Topology topology;
  const auto builders = std::make_shared<const cpu::Workers>(topology, cpu::WorkersOptions{});
  std::shared_ptr<Device> device = given;
  if (!device) device = std::make_shared<cpu::HostDevice>(builders);
  const AttentionShape shape = needle_shape();

  std::size_t done = 0;
  for (const EngineGroup& group : by_engine(policies, flags)) {
    SyntheticOptions synthetic{
        .shape = shape,
        .layout = {.page_tokens = group.page_tokens, .head_dim = shape.head_dim, .dtype = DType::bf16},
        .tokens = options.tokens,
        .steps = kWarmUp + options.steps};
    synthetic.seed = options.seed;
    synthetic.needles = options.needles;
    synthetic.sinks = options.sinks;
    const SyntheticLayer layer(synthetic, topology, builders);
    const DeviceSteps steps(layer, *device);
    for (const std::size_t p : group.policies) {
      SyntheticForwardsOptions forwards{.policy = policies[p],
                                        .near_share = options.near,
                                        .placement = flags.placement,
                                        .fetch_share = share_for(flags.placement, flags.fetch_share),
                                        .handover = flags.handover,
                                        .threads = flags.threads};
      forwards.policy.dense_layers = forwards.policy.dense_every = 0;  // The only layer is one that it works in.
      forwards.policy.rehearsed = false;  // There is no layer before: as if it had been, without an error.
      for (const bool audit : {false, true}) {
        bar.update(done++, 2 * policies.size(), "needles: " + policies[p].name);
        forwards.audit = audit;
        SyntheticForwards run(forwards, layer, steps, device);
        std::vector<double> us = run.time(kWarmUp + options.steps);
        NeedleScore& score = scores[p];
        if (!audit) {
          us.erase(us.begin(), us.begin() + kWarmUp);
          score.layer_us = percentile(us, 0.5);
          continue;
        }
        score.layout = synthetic.layout;
        const std::uint64_t count = kWarmUp + options.steps;
        score.decoded = {.tokens = count,
                         .dense_tokens = count * options.tokens + count * (count + 1) / 2,
                         .stats = run.engine().stats(),
                         .audited = run.engine().audit(run.sequence()),
                         .code_bits = run.engine().options().code_bits};
      }
    }
  }
}

}  // namespace

std::vector<NeedleScore> evaluate_needles(const NeedleOptions& options, const EngineFlags& flags,
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
