// Policies that rank pages by their digests, on every device.
#include <atomic>
#include <chrono>
#include <cstdint>
#include <thread>

#include "sluice/error.hpp"
#include "sluice/page_rules.hpp"
#include "sluice/step/forward.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/engine_policies.hpp"
#include "tests/support/sanitized.hpp"

using namespace sluice;
using namespace sluice::test;
using namespace sluice::test::policies;

TEST_CASE("policies that rank pages attend what they attend by themselves, near or far", "[engine]") {
  struct Case {
    const char* text;
    std::uint32_t near;
  };
  const auto& [text, near] = GENERATE(values<Case>({
      {"pages:pages=3 | int4 | top_k=9 | near=0,sinks=3,recent=21", 7},
      {"pages:pages=3 | top_k=20 | near=0,sinks=3,recent=5", 0},
      {"psa | page=16", 7},
      {"psa | int4 | page=16", 7},
      {"pages:quest | int4 | progressive=0.8,microbatch=2,rule=mean | near=0,sinks=4,recent=9 | dense=1", 0},
      {"pages | int4 | progressive=0.7,microbatch=1,rule=median | near=0,sinks=21,recent=40", 7},
      {"pages:quest | progressive=0.8,rule=certified,microbatch=2 | near=0,sinks=4,recent=9", 0},
      {"history:share_group=on+pages:pages=2 | int4 | top_k=24 | near=0,sinks=4,recent=16", 7},
      {"history+pages:quest,pages=2 | top_k=24 | near=0,sinks=4,recent=9", 0},
      {"pages:pages=2+lsh | top_p=0.7 | near=0,sinks=2,recent=3", 7},
      {"pages:budget=64 | top_k=all | near=0,sinks=4,recent=9 | bypass=0.5", 0},
      {"pages:rank=layer,pages=3 | top_k=all | near=0,sinks=4,recent=9", 7},
      {"arkvale:rank=layer,budget=48,dense=1 | page=16 | far=max(300, 5%)", 0},
  }));
  CAPTURE(text, near);
  const EngineRig rig = engine_rig();
  Story story(kShape, 300, 97);
  if (rig.kv_dtype != DType::f32) story.round_queries();
  const PolicySpec policy = parse_policy(text);
  Beside both(rig, story, policy, paged_options(rig, 1, near, policy.pages.digest));
  both.decode(40);  // From nothing: pages fill while few are there.
  both.prefill(243);
  both.decode(260);
}

TEST_CASE("pages that are fetched again and again come near, and what is attended stays the same", "[engine]") {
  constexpr std::uint32_t kPrompt = 243, kTokens = 275;
  const EngineRig rig = engine_rig();
  Story story(kShape, kTokens, 101);
  if (rig.kv_dtype != DType::f32) story.round_queries();
  // Nearly all pages in every step, by one query head of a group or another: as much as pages can recur.
  const PolicySpec policy = parse_policy("pages:pages=10 | top_k=all | near=0,sinks=16,recent=16");
  const auto options = [&](std::uint32_t near) {
    EngineOptions all = paged_options(rig, 1, near, policy.pages.digest);
    all.placement = PlacementMode::stream;
    return all;
  };
  Engine cached(options(20), rig.device);
  Engine bare(options(0), rig.device);
  Teller teller{.story = &story, .id = cached.begin(policy)};
  Teller other{.story = &story, .id = bare.begin(policy)};
  prefill(cached, rig, teller, kPrompt);
  prefill(bare, rig, other, kPrompt);
  // Another prompt takes the places of the first, and leaves them empty.
  Teller passing{.story = &story, .id = cached.begin(policy)};
  prefill(cached, rig, passing, kPrompt);
  cached.end(passing.id);
  const auto fetched = [&](Engine& engine, Teller& by, std::vector<float>& out) {
    const std::uint64_t before = engine.stats().fetched_tokens;
    out = decode(engine, rig, by);
    return engine.stats().fetched_tokens - before;
  };
  std::uint64_t first = 0, last = 0;
  for (bool begins = true; teller.at < kTokens; begins = false) {
    CAPTURE(teller.at);
    std::vector<float> out, want;
    last = fetched(cached, teller, out);
    if (begins) first = last;
    // Without near memory they cross the link in every step.
    REQUIRE(fetched(bare, other, want) > std::uint64_t{kShape.layers} * kShape.kv_heads * kPrompt / 2);
    REQUIRE(difference(out, want) < tolerance(rig));
  }
  REQUIRE(first > std::uint64_t{kShape.layers} * kShape.kv_heads * kPrompt / 2);
  REQUIRE(10 * last < first);
}

TEST_CASE("what the CPU chooses again and again comes near, and what is chosen stays the same", "[engine]") {
  constexpr std::uint32_t kPrompt = 243, kTokens = 283;
  const EngineRig rig = engine_rig();
  Story story(kShape, kTokens, 103);
  story.repeat_query();  // The same is chosen in every step.
  if (rig.kv_dtype != DType::f32) story.round_queries();
  const PolicySpec policy = parse_policy(GENERATE("psa | page=16", "exact | top_k=40 | near=0,sinks=4,recent=16",
                                                  "history | top_k=40 | near=0,sinks=4,recent=16"));
  CAPTURE(policy.name);
  struct Step {
    std::vector<float> out;
    std::uint64_t near, fetched;
  };
  // With room for so many pages; a second sequence shares the prompt, and both go on in one batch.
  const auto decoded = [&](std::uint32_t near, std::uint32_t promotions) {
    EngineOptions options = paged_options(rig, 2, near, policy.pages.digest);
    options.promotions = promotions;
    options.placement = PlacementMode::stream;
    options.largest.audit = true;
    Engine engine(options, rig.device);
    Teller teller{.story = &story, .id = engine.begin(policy)};
    prefill(engine, rig, teller, kPrompt);
    Teller other{.story = &story, .id = engine.fork(teller.id, kPrompt), .at = kPrompt};
    // Others' prompts take the places of the first, and leave them empty.
    std::vector<Teller> passing;
    for (int i = 0; i < 3; ++i) {
      passing.push_back({.story = &story, .id = engine.begin(policy)});
      prefill(engine, rig, passing.back(), kPrompt);
    }
    for (const Teller& each : passing) engine.end(each.id);
    std::vector<Step> steps;
    while (teller.at < kTokens) {
      const EngineStats before = engine.stats();
      auto out = run(engine, rig, {&teller, &other}, {1, 1}, false);
      const EngineStats after = engine.stats();
      REQUIRE(after.far_tokens == 0);
      REQUIRE(difference(out[0], out[1]) < tolerance(rig));
      steps.push_back({.out = std::move(out[0]),
                       .near = after.near_tokens - before.near_tokens,
                       .fetched = after.fetched_tokens - before.fetched_tokens});
    }
    return std::pair(std::move(steps), engine.audit(teller.id));
  };
  const auto [bare, chosen] = decoded(0, kMostPromotions);
  const auto [fetched, fetched_audit] = decoded(40, 0);  // Nothing comes near but new tokens.
  require_same_audit(fetched_audit, chosen);
  for (const std::uint32_t near : {5u, 40u}) {  // Less than what is chosen, and room for everything.
    CAPTURE(near);
    const auto [cached, audit] = decoded(near, kMostPromotions);
    require_same_audit(audit, chosen);
    for (std::size_t i = 0; i < bare.size(); ++i) {
      CAPTURE(i);
      REQUIRE(difference(cached[i].out, bare[i].out) < tolerance(rig));
      REQUIRE(bare[i].near == 0);
      REQUIRE(cached[i].near + cached[i].fetched == bare[i].fetched);
      REQUIRE(difference(fetched[i].out, bare[i].out) < tolerance(rig));
      REQUIRE(fetched[i].near + fetched[i].fetched == bare[i].fetched);
    }
    // Rows of 8 bits cross the link in every step.
    if (rig.kv_dtype == DType::fp8_e4m3) continue;
    REQUIRE(cached.back().fetched < bare.back().fetched);
    if (near != 40) continue;
    REQUIRE(20 * cached.back().fetched < cached.front().fetched);
    REQUIRE(20 * cached.back().fetched < fetched.back().fetched);
  }
}

TEST_CASE("progressive attention stops at the same pages in both placements, however late answers are", "[engine]") {
  constexpr std::uint32_t kPrompt = 243, kTokens = 252;
  const auto [near, text] = GENERATE(grid(std::array{0u, 7u}, std::array{"psa | page=16", "psa | int4 | page=16"}));
  CAPTURE(near, text);
  const EngineRig rig = engine_rig();
  Story story(kShape, kTokens, 99);
  if (rig.kv_dtype != DType::f32) story.round_queries();
  const PolicySpec policy = parse_policy(text);
  struct Decoded {
    std::vector<std::uint64_t> attended;  ///< by step
    std::vector<std::vector<float>> out;
  };
  const auto decoded = [&](PlacementMode placement, unsigned seed) {
    std::atomic<unsigned> state{seed};
    EngineOptions options = paged_options(rig, 1, near, policy.pages.digest);
    options.placement = placement;
    options.before_answer = [&] {
      std::this_thread::sleep_for(std::chrono::microseconds((state.fetch_add(1) * 2654435761u >> 16) % 300));
    };
    Engine engine(options, rig.device);
    Teller teller{.story = &story, .id = engine.begin(policy)};
    prefill(engine, rig, teller, kPrompt);
    Decoded all;
    while (teller.at < kTokens) {
      const EngineStats before = engine.stats();
      all.out.push_back(decode(engine, rig, teller));
      const EngineStats after = engine.stats();
      all.attended.push_back(after.near_tokens + after.far_tokens + after.fetched_tokens - before.near_tokens -
                             before.far_tokens - before.fetched_tokens);
    }
    return all;
  };
  const Decoded first = decoded(PlacementMode::hybrid, 1);
  // It stops early: what all steps attend is less than what there is.
  REQUIRE(first.attended.front() < std::uint64_t{kShape.layers} * kShape.kv_heads * kPrompt);
  for (unsigned run = 0; run < 10; ++run) {
    const PlacementMode placement = run % 2 == 0 ? PlacementMode::stream : PlacementMode::hybrid;
    CAPTURE(run);
    const Decoded again = decoded(placement, run + 2);
    REQUIRE(again.attended == first.attended);
    for (std::size_t i = 0; i < first.out.size(); ++i) REQUIRE(difference(again.out[i], first.out[i]) < tolerance(rig));
  }
}

TEST_CASE("of ranked pages a group attends all tokens, or what its heads keep of them", "[engine]") {
  struct Case {
    DigestKind digest;
    std::uint32_t near, sinks, recent, pages;
    double mass;  ///< 1: all of them, whole pages
  };
  const auto& [digest, near, sinks, recent, pages, mass] =
      GENERATE(values<Case>({{DigestKind::box, 0, 0, 1, 1, 1.0},
                             {DigestKind::box, 5, 19, 23, 4, 0.9},
                             {DigestKind::box, 0, 4, 1, 4, 0.9},
                             {DigestKind::cuboid_mean, 5, 0, 23, 4, 1.0},
                             {DigestKind::cuboid_mean, 0, 4, 23, 1, 0.9},
                             {DigestKind::cuboid_mean, 5, 19, 1, 4, 1.0}}));
  CAPTURE(static_cast<int>(digest), near, sinks, recent, pages);
  const EngineRig rig = engine_rig();
  const Story story(kShape, 149, 98);
  PolicySpec policy = parse_policy(mass < 1.0 ? "pages | int4 | top_p=0.9 | near=0" : "pages | top_k=all | near=0");
  policy.pages = {.digest = digest, .min_pages = pages, .share = 0.f};
  policy.near.sink_tokens = sinks;
  policy.near.recent_tokens = recent;
  Engine engine(paged_options(rig, 1, near, digest), rig.device);
  Teller teller{.story = &story, .id = engine.begin(policy)};
  import_story(engine, rig, teller, 141);
  while (teller.at < story.tokens()) {
    const std::uint32_t token = teller.at;
    const std::vector<float> got = decode(engine, rig, teller);
    for (std::uint32_t layer = 0; layer < kShape.layers; ++layer) {
      const std::vector<double> want = story.attended_in_pages(
          layer, token,
          {.page_tokens = 16, .digest = digest, .pages = pages, .sinks = sinks, .recent = recent, .mass = mass});
      CAPTURE(token, layer);
      REQUIRE(off_in_layer(got, want, layer) < 1e-3);
    }
  }
}

TEST_CASE("sequences that rank pages attend the same in a batch and alone", "[engine]") {
  const EngineRig rig = engine_rig();
  const auto options = [&](std::uint32_t rows, std::uint32_t near) {
    return paged_options(rig, rows, near, DigestKind::box);
  };
  require_same_in_batch(rig, options, GENERATE(from_range(few<1>(std::array{10u, 0u}))), 18,
                        {{"pages:quest,budget=80 | top_k=all | near=0,sinks=0,recent=0", 200},
                         {"exact | int4 | top_k=30 | near=0,sinks=4,recent=12", 90},
                         {"pages:quest,pages=3 | int4 | top_p=0.8 | near=0,sinks=4,recent=9", 170},
                         {"history+pages:quest,pages=2 | top_k=24 | near=0,sinks=4,recent=9", 143},
                         {"full", 64},
                         {"pages:quest | int4 | progressive=0.8 | near=0,sinks=4,recent=9", 131},
                         {"pages:quest | progressive=0.8 | near=0,sinks=4,recent=9", 5}});
}

TEST_CASE("pages that are written again get new digests, and those that are shared keep theirs", "[engine]") {
  const EngineRig rig = engine_rig();
  const Story first(kShape, 260, 61);
  const Story second(kShape, 260, 62);
  const PolicySpec policy = parse_policy(GENERATE("pages:quest,budget=32 | top_k=all | near=0,sinks=0,recent=0",
                                                  "pages:quest,pages=2 | top_k=9 | near=0,sinks=0,recent=0"));
  constexpr std::uint32_t kDrafts = 5;
  // What a sequence attends that has only ever had these tokens: of `first` up to `until`, then of `second`.
  const auto fresh = [&](std::uint32_t until, std::uint32_t tokens) {
    Engine engine(paged_options(rig, 1, 0, DigestKind::box), rig.device);
    Teller teller{.story = &first, .id = engine.begin(policy)};
    import_story(engine, rig, teller, until);
    teller.story = &second;
    std::vector<std::vector<float>> out;
    while (teller.at < tokens) out.push_back(decode(engine, rig, teller));
    return out;
  };
  Engine engine(paged_options(rig, kDrafts, 5, DigestKind::box), rig.device);
  Teller parent{.story = &first, .id = engine.begin(policy)};
  import_story(engine, rig, parent, 230);
  for (const std::uint32_t kept : {208u, 215u, 229u}) {
    CAPTURE(kept);
    const auto want = fresh(kept, 250);
    Teller child{.story = &second, .id = engine.fork(parent.id, kept), .at = kept};
    Teller again{.story = &first, .id = engine.fork(parent.id, 230), .at = 230};
    while (again.at < 245) (void)decode(engine, rig, again);
    engine.truncate(again.id, kept);
    again.story = &second;
    again.at = kept;
    for (std::uint32_t token = kept; token < 250; ++token) {
      REQUIRE(difference(decode(engine, rig, child), want[token - kept]) < tolerance(rig));
      REQUIRE(difference(decode(engine, rig, again), want[token - kept]) < tolerance(rig));
    }
    engine.end(child.id);
    engine.end(again.id);
  }
  // Nor did any of that change what the parent attends; drafts across the end of a page, where the device chooses.
  const auto want = [&] {
    Engine alone(paged_options(rig, 1, 0, DigestKind::box), rig.device);
    Teller teller{.story = &first, .id = alone.begin(policy)};
    import_story(alone, rig, teller, 230);
    std::vector<std::vector<float>> out;
    while (teller.at < 250) out.push_back(decode(alone, rig, teller));
    return out;
  }();
  const std::uint32_t at_once = policy.budget.share >= 1.f ? kDrafts : 1;
  ForwardTensors tensors(*rig.device, kShape, engine.options().largest.rows());
  while (parent.at < 250) {
    const std::uint32_t count = std::min(at_once, 250 - parent.at);
    for (std::uint32_t i = 0; i < count; ++i) tensors.set(i, first, parent.at + i);
    const PlanItem item{.sequence = parent.id, .tokens = count};
    (void)run_batch(engine, rig, tensors, {&item, 1}, engine.options().largest);
    for (std::uint32_t i = 0; i < count; ++i)
      REQUIRE(difference(tensors.out(i), want[parent.at + i - 230]) < tolerance(rig));
    parent.at += count;
  }
}
