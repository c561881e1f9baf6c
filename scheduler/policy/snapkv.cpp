// SnapKV (Li et al., arXiv 2404.14469): the prompt's last queries decide, once, what of the prompt is kept. Where its
// parts are:
//   scores, pooling, the cut  snapshot/snapshot_source.cpp
//   attending                 sparse_policy.cpp
// The paper evicts what is not kept; here it stays in host memory, and a prompt's next turn, which attends everything
// like any prompt, is looked at anew. Query heads of a group share what they keep, as in kvpress.

#include "scheduler/policy/policies.hpp"

namespace sluice::scheduler {

PolicySpec snapkv_spec() {
  PolicySpec spec;
  spec.name = "snapkv";
  spec.sources = static_cast<std::uint16_t>(Source::snapshot);
  spec.snapshot = {.budget = 1024, .window = 32, .kernel = 7, .pooling = Pooling::max, .pyramid = 1, .floor = 1.f};
  spec.budget.share = 1.f;
  spec.near = {.sink_tokens = 0, .recent_tokens = 0, .share = 0.f};
  return spec;
}

}  // namespace sluice::scheduler
