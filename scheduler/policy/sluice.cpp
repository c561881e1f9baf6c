// The default policy. LFPS alone has a blind spot: only tokens that it found feed its tables, so a position
// that no earlier query wanted is never found, however much the next query wants it. Three additions close it:
//   pages    ArkVale's cuboid-mean digest ranks pages with the query itself, every step; what it finds once,
//            history follows from then on
//   sharing  a query head may pick what another head of its group found; the K row is read for both anyway
//   near     a tenth of the pages stays on the device, attended densely; it costs no link and no host work
// The bypass stays off: it pays only on models with attention sinks.

#include "scheduler/policy/policies.hpp"

namespace sluice::scheduler {

PolicySpec sluice_spec() {
  PolicySpec spec;
  spec.name = "sluice";
  spec.sources = static_cast<std::uint8_t>(Source::history) | static_cast<std::uint8_t>(Source::pages);
  spec.history.share_in_group = true;
  spec.pages = {.digest = DigestKind::cuboid_mean, .min_pages = 8, .share = 0.03f};
  spec.budget = {.min_tokens = 64, .share = 0.02f};
  spec.near = {.sink_tokens = 4, .recent_tokens = 128, .share = 0.10f};
  return spec;
}

// The same for a GPU, whose layer of attention is over before the tables of 32 heads are fed: they are fed in every
// 64th step, while heavy tokens are noted in each. Every candidate is kept, so that nothing has to be scored before it
// is attended, and a history without pattern is left out.
PolicySpec sluice_fast_spec() {
  PolicySpec spec = sluice_spec();
  spec.name = "sluice-fast";
  spec.history.alpha = 1.f;
  spec.history.observe_every = 64;
  spec.history.limit = 0.1f;
  spec.pages = {.digest = DigestKind::cuboid_mean, .min_pages = 8, .share = 0.f};
  spec.budget.share = 1.f;
  return spec;
}

}  // namespace sluice::scheduler
