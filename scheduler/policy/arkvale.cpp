// ArkVale (Chen et al., NeurIPS 2024): pages of 32 tokens, ranked by a shrunken box around their keys, 1,280 tokens'
// worth attended whole; two sink pages and two window pages are always near; the first two layers attend densely.
// The published code ranks one set of pages for a whole layer; here each query head ranks its own and the group
// attends the union, as every page source here does.

#include "scheduler/policy/policies.hpp"
#include "sluice/page_rules.hpp"

namespace sluice::scheduler {

PolicySpec arkvale_spec() {
  PolicySpec spec;
  spec.name = "arkvale";
  spec.sources = static_cast<std::uint8_t>(Source::pages);
  spec.pages = {.digest = DigestKind::cuboid_mean, .min_pages = 1, .min_tokens = 1280, .share = 0.f};
  spec.budget.share = 1.f;
  spec.near = {.sink_tokens = 64, .recent_tokens = 64, .share = 0.f};
  spec.dense_layers = 2;
  spec.page_tokens = 32;
  return spec;
}

}  // namespace sluice::scheduler
