// The default policy: every key is estimated by its 4-bit copy (Twilight's), and the tokens with the largest estimates
// are attended as they are. Digests of pages miss single keys that stand out, which heads that recall a fact look for;
// one code per key does not. On a GPU all codes of a layer are read at the rate of its memory. What has been attended
// before and comes again is brought near by the engine, which is no part of the policy.
//
// All that is not attended is one token more, of the weight that the codes say and the mean of the values: so few
// tokens are enough. On two small models with 32,000 tokens it differs as little from dense attention as four times as
// many tokens do with that mean, and ten times less than these without:
//   sluice eval --model DIR --tasks kv,multi,table --lengths 32000 --count 16 --paired --policies
//     'full;sluice;sluice | top_k=max(64, 1%);sluice | top_k=max(64, 1%) | rest=none'

#include "scheduler/policy/policies.hpp"

namespace sluice::scheduler {

PolicySpec sluice_spec() {
  PolicySpec spec;
  spec.name = "sluice";
  spec.sources = static_cast<std::uint8_t>(Source::exact);
  spec.estimate = Estimate::int4;
  spec.budget = {.min_tokens = 64, .share = 0.0025f};
  spec.rest = RestKind::mean;
  spec.near = {.sink_tokens = 4, .recent_tokens = 128, .share = 0.f};
  spec.page_tokens = 32;
  return spec;
}

}  // namespace sluice::scheduler
