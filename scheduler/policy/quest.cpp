// Quest (Tang et al., arXiv 2406.10774): pages of 16 tokens, ranked by an upper bound of q.k from the elementwise
// maximum and minimum of their keys, per query head; the best 1,024 tokens' worth are attended whole. The open page is
// always attended, as in the CUDA code; sinks are not forced; the first two layers attend densely.
//   digest, ranking   digests, score_pages, top_k

#include "scheduler/policy/policies.hpp"
#include "sluice/page_rules.hpp"

namespace sluice::scheduler {

PolicySpec quest_spec() {
  PolicySpec spec;
  spec.name = "quest";
  spec.sources = static_cast<std::uint16_t>(Source::pages);
  spec.pages = {.digest = DigestKind::box, .min_pages = 1, .min_tokens = 1024, .share = 0.f};
  spec.budget.share = 1.f;
  spec.near = {.sink_tokens = 0, .recent_tokens = 0, .share = 0.f};
  spec.dense_layers = 2;
  spec.page_tokens = 16;
  return spec;
}

}  // namespace sluice::scheduler
