// Double Sparsity (Yang et al., arXiv 2408.07092): the best tokens by a few channels of their keys. Where its parts
// are:
//   labels            labels/label_cache.cpp
//   top-k, attending  sparse_policy.cpp
// The paper chooses channels offline, on a calibration set; here they are the prompt's own. Its labels have 4 bits for
// a fourth of the channels; these are bf16 for an eighth of 128, the same bytes, 1/16 of keys and values. It keeps 1/16
// of the tokens, as this does; each query head has its own.

#include "scheduler/policy/policies.hpp"

namespace sluice::scheduler {

PolicySpec double_sparsity_spec() {
  PolicySpec spec;
  spec.name = "double_sparsity";
  spec.sources = static_cast<std::uint8_t>(Source::exact);
  spec.estimate = Estimate::channels;
  spec.label_channels = 16;
  spec.budget.share = 0.0625f;
  spec.near = {.sink_tokens = 4, .recent_tokens = 0, .share = 0.f};
  return spec;
}

}  // namespace sluice::scheduler
