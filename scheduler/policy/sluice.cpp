// The default policy: every key has a 4-bit code, and each query head draws 256 tokens by their estimated weight and
// divides by the chance that they were drawn (see sluice/sample.hpp). On a GPU all codes of a layer are read at the rate
// of its memory. What has been attended before and comes again is brought near by the engine, which is no part of the
// policy; draws that do not change make it come again.
//
// How many: on two models that others have trained, KL to dense attention is within two floors from 256 on (64: up to 9,
// 128: up to 3.6), where a floor is that of dense attention itself, summed in another order. docs/accuracy.md has the
// table, and the command that makes it.

#include "scheduler/policy/policies.hpp"

namespace sluice::scheduler {

PolicySpec sluice_spec() {
  PolicySpec spec;
  spec.name = "sluice";
  spec.sources = static_cast<std::uint16_t>(Source::exact);
  spec.estimate = Estimate::int4;
  spec.budget = {.kind = BudgetKind::drawn, .min_tokens = 256, .share = 0.f};
  spec.near = {.sink_tokens = 4, .recent_tokens = 128, .share = 0.f};
  spec.page_tokens = 32;
  return spec;
}

}  // namespace sluice::scheduler
