// The default policy. LFPS alone has a blind spot: only tokens that it found feed its tables, so a position
// that no earlier query wanted is never found, however much the next query wants it. Four additions close it:
//   pages    ArkVale's cuboid-mean digest ranks pages with the query itself, every step; what it finds once,
//            history follows from then on
//   int4     candidates are told apart by a 4-bit copy of their keys (Twilight), a quarter of the bytes, so that there
//            may be many of them; only what is attended is read whole
//   sharing  a query head may pick what another head of its group found; the row is read for both anyway
//   near     a few of the pages stay on the device, attended densely; they cost no link and no host work
// The bypass stays off: it pays only on models with attention sinks.
//
// Pages of 16 tokens. On a model whose heads attend single tokens (kv, 10 prompts) pages of 16 answer what dense
// attention answers, pages of 32 answer 0.90 at 10,000 tokens and 0.83 at 30,000:
//   sluice eval --model DIR --policies 'full;sluice;sluice | page=32' --tasks kv --lengths 10000,30000 --count 10
//     --seed 4242

#include "scheduler/policy/policies.hpp"

namespace sluice::scheduler {
namespace {

constexpr std::uint8_t kHistoryAndPages =
    static_cast<std::uint8_t>(Source::history) | static_cast<std::uint8_t>(Source::pages);

}  // namespace

PolicySpec sluice_spec() {
  PolicySpec spec;
  spec.name = "sluice";
  spec.sources = kHistoryAndPages;
  spec.history.share_in_group = true;
  spec.pages = {.digest = DigestKind::cuboid_mean, .min_pages = 16, .share = 0.03f};
  spec.estimate = Estimate::int4;
  spec.budget = {.min_tokens = 64, .share = 0.01f};
  spec.near = {.sink_tokens = 4, .recent_tokens = 128, .share = 0.03f};
  spec.page_tokens = 16;
  return spec;
}

// For a GPU, whose layer of attention is over before the tables of 32 heads are fed: they are fed in every 64th step,
// while heavy tokens are noted in each. Every candidate is kept, so that nothing has to be scored before it is attended,
// and a history without pattern is left out. More stays near, since few pages are ranked.
PolicySpec sluice_fast_spec() {
  PolicySpec spec;
  spec.name = "sluice-fast";
  spec.sources = kHistoryAndPages;
  spec.history.share_in_group = true;
  spec.history.alpha = 1.f;
  spec.history.observe_every = 64;
  spec.history.limit = 0.1f;
  spec.pages = {.digest = DigestKind::cuboid_mean, .min_pages = 8, .share = 0.f};
  spec.budget = {.min_tokens = 64, .share = 1.f};
  spec.near = {.sink_tokens = 4, .recent_tokens = 128, .share = 0.10f};
  spec.page_tokens = 16;
  return spec;
}

}  // namespace sluice::scheduler
