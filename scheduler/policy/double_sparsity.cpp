// Double Sparsity (Yang et al., arXiv 2408.07092): the best tokens by a few channels of their keys. Its parts:
//   labels, top-k     labels/label_cache.cpp
//   attending         sparse_policy.cpp
// The paper chooses channels offline, on a calibration set; here they are the prompt's own. Like those of its code
// labels are an eighth of 128 channels, but in bf16 instead of 4 bits: 1/16 of keys and values. It keeps 1/16 of the
// tokens, as this does; each query head has its own.

#include "scheduler/policy/policies.hpp"

namespace sluice::scheduler {

PolicySpec double_sparsity_spec() {
  PolicySpec spec;
  spec.name = "double_sparsity";
  spec.sources = static_cast<std::uint16_t>(Source::labels);
  spec.labels = {.channels = 16, .min_tokens = 64, .share = 0.0625f};
  spec.budget.share = 1.f;
  spec.near = {.sink_tokens = 4, .recent_tokens = 0, .share = 0.f};
  return spec;
}

}  // namespace sluice::scheduler
