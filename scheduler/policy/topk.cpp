// Exact top-k, the oracle of the sparse-attention papers, in LFPS's convention: sinks are always attended,
// every query head keeps its k best of the rest. It reads all keys in every step, so it shows what a
// selection could reach, not what one should deploy. Its LayerPolicy is the sparse one with every
// token as a candidate.

#include "scheduler/policy/policies.hpp"

namespace sluice::scheduler {

PolicySpec topk_spec() {
  PolicySpec spec;
  spec.name = "topk";
  spec.sources = static_cast<std::uint16_t>(Source::exact);
  spec.budget = {.min_tokens = 64, .share = 0.02f};
  spec.near = {.sink_tokens = 4, .recent_tokens = 0, .share = 0.f};
  return spec;
}

}  // namespace sluice::scheduler
