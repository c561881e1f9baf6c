// LFPS, "Learn from the Past" (Yao, Wang; arXiv 2506.15704), with the paper's parameters. Where its parts are:
//   eq. (4), (7)-(10)        history/group_history.cpp   fill, threshold, expand and update the two tables
//   lazy decay, moments      history/score_table.cpp
//   eq. (5), (6), (11)-(14)  policy/bypass.cpp           heads that put almost all mass on the sinks
//   eq. (1), (2)             policy/sparse_policy.cpp    exact scores of the candidates, top-k, attention set
// Tables, thresholds, top-k and bypass are per query head; keys are read once for the whole group.

#include "scheduler/policy/policies.hpp"

namespace sluice::scheduler {

PolicySpec lfps_spec() {
  PolicySpec spec;
  spec.name = "lfps";
  spec.sources = static_cast<std::uint16_t>(Source::history);
  spec.history = {.alpha = 0.2f,
                  .decay = 0.95f,
                  .init_queries = 32,
                  .local_tokens = 5,
                  .share_in_group = false,
                  .observe_near = true,
                  .observe_every = 1,
                  .limit = 1.f};
  spec.budget = {.min_tokens = 64, .share = 0.02f};
  spec.near = {.sink_tokens = 4, .recent_tokens = 0, .share = 0.f};
  spec.bypass_threshold = 0.85f;
  return spec;
}

}  // namespace sluice::scheduler
