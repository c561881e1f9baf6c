// Twilight (Lin et al., arXiv 2502.02770): a generous selector, here Quest's page ranking with 8,192 tokens, whose
// choice is pruned by the attention weights that a 4-bit copy of the keys estimates: each query head keeps the fewest
// tokens that hold 95% of them. The first two layers attend densely.
//   copies, estimates, top-p   copies in codes, score_int4, top_p
// Where the paper is silent: the sink and the newest page are always attended, and count first in the share (see
// sluice/top_p.hpp); they cost a few tokens, and a ranking that misses them loses much. The repository's kernel starts
// its search at the first token's weight and stops at a gap of 1e-5; here it starts at the largest and ends when
// nothing lies between.

#include "scheduler/policy/policies.hpp"
#include "sluice/page_rules.hpp"

namespace sluice::scheduler {

PolicySpec twilight_spec() {
  PolicySpec spec;
  spec.name = "twilight";
  spec.sources = static_cast<std::uint16_t>(Source::pages);
  spec.pages = {.digest = DigestKind::box, .min_pages = 1, .min_tokens = 8192, .share = 0.f};
  spec.estimate = Estimate::int4;
  spec.budget.kind = BudgetKind::top_p;
  spec.budget.mass = 0.95f;
  spec.near = {.sink_tokens = 4, .recent_tokens = 0, .share = 0.f};
  spec.dense_layers = 2;
  spec.page_tokens = 16;
  return spec;
}

}  // namespace sluice::scheduler
