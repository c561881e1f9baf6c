// PyramidKV (Cai et al., arXiv 2406.02069): SnapKV with budgets that fall from the first layer to the last, by the
// paper's beta of 20. Its code lets 8 queries decide; here it is SnapKV's 32, so that the two differ in budgets alone.
// Where its parts are: snapshot_budget in snapshot/snapshot_source.cpp.

#include "scheduler/policy/policies.hpp"

namespace sluice::scheduler {

PolicySpec pyramidkv_spec() {
  PolicySpec spec = snapkv_spec();
  spec.name = "pyramidkv";
  spec.snapshot.pyramid = 20;
  return spec;
}

}  // namespace sluice::scheduler
