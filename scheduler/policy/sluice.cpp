// The default policy: every key is estimated by its 4-bit copy (Twilight's), and the tokens with the largest estimates
// are attended as they are. Digests of pages miss single keys that stand out, which heads that recall a fact look for;
// one code per key does not. On a GPU all codes of a layer are read at the rate of its memory. What has been attended
// before and comes again is brought near by the engine, which is no part of the policy.
//
// On two small models with retrieval tasks (niah, multikey, kv of 2,048 and 8,192 tokens, 8 prompts each) it answers
// what dense attention answers, all of it, and covers as much or more of the softmax than candidates from history and
// pages, told apart by the same codes, do:
//   sluice eval --model DIR --tasks niah,multikey,kv --lengths 2K,8K --count 8 --seed 4242 --policies
//     'full;sluice;history:share_group=on+pages:pages=max(16, 3%) | int4 | top_k=max(64, 1%) | near=0%'

#include "scheduler/policy/policies.hpp"

namespace sluice::scheduler {

PolicySpec sluice_spec() {
  PolicySpec spec;
  spec.name = "sluice";
  spec.sources = static_cast<std::uint8_t>(Source::exact);
  spec.estimate = Estimate::int4;
  spec.budget = {.min_tokens = 64, .share = 0.01f};
  spec.near = {.sink_tokens = 4, .recent_tokens = 128, .share = 0.f};
  spec.page_tokens = 16;
  return spec;
}

}  // namespace sluice::scheduler
