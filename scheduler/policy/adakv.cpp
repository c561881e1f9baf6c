// Ada-KV (Feng et al., arXiv 2407.11550): SnapKV with a layer's budget shared over its KV heads by their scores, a
// fifth of each head's part being its own. Where its parts are: SharedBudget in snapshot/snapshot_source.cpp. Of
// PyramidKV, too: adakv:pyramid=20.

#include "scheduler/policy/policies.hpp"

namespace sluice::scheduler {

PolicySpec adakv_spec() {
  PolicySpec spec = snapkv_spec();
  spec.name = "adakv";
  spec.snapshot.floor = 0.2f;
  return spec;
}

}  // namespace sluice::scheduler
