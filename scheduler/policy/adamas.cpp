// Adamas (Yan et al., arXiv 2510.18413): the best tokens by 2-bit codes of their keys' Hadamard transforms. Where its
// parts are:
//   codes, distances  labels/hadamard_codes.cpp
//   top-k, attending  sparse_policy.cpp
// The paper keeps 64 or 128 tokens whatever the context; this keeps 128. Its first two layers attend everything. Its
// code takes the nearest query head's distance for all heads of a group; here each query head has its own tokens. Where
// buckets end its code has as numbers for one model, and in standard deviations for others, of which 2 bits leave one.

#include "scheduler/policy/policies.hpp"

namespace sluice::scheduler {

PolicySpec adamas_spec() {
  PolicySpec spec;
  spec.name = "adamas";
  spec.sources = static_cast<std::uint16_t>(Source::exact);
  spec.estimate = Estimate::hadamard;
  spec.budget.min_tokens = 128;
  spec.budget.share = 0.f;
  spec.near = {.sink_tokens = 4, .recent_tokens = 0, .share = 0.f};
  spec.dense_layers = 2;
  return spec;
}

}  // namespace sluice::scheduler
