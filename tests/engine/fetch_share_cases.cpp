// Lists of far rows that the device and the CPU share, on every device: the same as where one of them attends all.
#include <algorithm>
#include <array>
#include <cmath>

#include "scheduler/plan/forward_rows.hpp"
#include "sluice/error.hpp"
#include "sluice/page_rules.hpp"
#include "sluice/step/fetch_share.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/engine_drafts.hpp"
#include "tests/support/engine_plain.hpp"
#include "tests/support/engine_policies.hpp"
#include "tests/support/sanitized.hpp"

using namespace sluice;
using namespace sluice::test;

namespace {

EngineOptions sharing(EngineOptions options, float share) {
  options.fetch_share = share;
  return options;
}

std::string windows_of(std::uint32_t sinks, std::uint32_t recent) {
  return "near=0,sinks=" + std::to_string(sinks) + ",recent=" + std::to_string(recent);
}

}  // namespace

TEST_CASE("a list is cut where its length says, whatever the share", "[engine]") {
  const float share = GENERATE(0.f, 0.3f, 0.5f, 0.99f, 1.f);
  const std::uint32_t far = GENERATE(1u, 15u, 63u, 64u, 65u, 127u, 160u, 300u);
  CAPTURE(share, far);
  const EngineRig rig = engine_rig();
  Engine engine(sharing(plain::options_for(rig, 1, 40, 0), share), rig.device);
  const Story story(plain::kShape, 324, 23);
  const std::uint32_t sinks = far / 5;
  Teller teller{.story = &story, .id = engine.begin(parse_policy("none | " + windows_of(sinks, far - sinks)))};
  import_story(engine, rig, teller, 320);
  ForwardTensors tensors(*rig.device, plain::kShape, 1);
  while (teller.at < story.tokens()) {
    const auto out = run_forward(engine, rig, tensors, {&teller});
    REQUIRE(plain::error_of(out[0], story, teller.at - 1, sinks, far - sinks, 0) < plain::kTolerance);
  }
  constexpr std::uint64_t kLists = 4 * plain::kShape.layers * plain::kShape.kv_heads;
  const std::uint32_t fetched = fetched_rows(far, fetch_share_of(share));
  const EngineStats stats = engine.stats();
  REQUIRE(stats.near_tokens == 0);
  REQUIRE(stats.fetched_tokens == kLists * fetched);
  REQUIRE(stats.far_tokens == kLists * (far - fetched));
  REQUIRE((stats.asked == 0) == (far == fetched));
}

TEST_CASE("what was chosen is attended by both, beside what is near", "[engine]") {
  struct Choice {
    std::uint32_t sinks, recent, picks;
  };
  const auto [choice, near, share] =
      GENERATE(grid(std::array{Choice{0, 1, 1}, Choice{4, 16, 24}, Choice{20, 40, 100}, Choice{4, 8, 400}},
                    std::array{0u, 6u, 100u}, std::array{0.3f, 0.99f, 1.f}));
  CAPTURE(choice.sinks, choice.recent, choice.picks, near, share);
  const EngineRig rig = engine_rig();
  const Story story(plain::kShape, 316, 21);
  const PolicySpec policy = parse_policy("exact | int4 | top_k=" + std::to_string(choice.picks) + " | " +
                                         windows_of(choice.sinks, choice.recent));
  const auto told = [&](float of) {
    Engine engine(sharing(plain::options_for(rig, 1, 40, near), of), rig.device);
    Teller teller{.story = &story, .id = engine.begin(policy)};
    import_story(engine, rig, teller, 300);
    ForwardTensors tensors(*rig.device, plain::kShape, 1);
    while (teller.at < story.tokens()) {
      const auto out = run_forward(engine, rig, tensors, {&teller});
      REQUIRE(plain::error_of(out[0], story, teller.at - 1, choice.sinks, choice.recent, choice.picks) <
              plain::kTolerance);
    }
    return engine.stats();
  };
  const EngineStats whole = told(0.f);
  const EngineStats shared = told(share);
  REQUIRE(whole.fetched_tokens == 0);
  REQUIRE(shared.near_tokens == whole.near_tokens);
  REQUIRE(shared.promoted == whole.promoted);
  REQUIRE(shared.far_tokens + shared.fetched_tokens == whole.far_tokens);
  REQUIRE(static_cast<float>(shared.fetched_tokens) <= share * static_cast<float>(whole.far_tokens) + 0.5f);
  if (share == 1.f) REQUIRE(shared.asked == 0);
  if (near == 0 && choice.picks >= 100) REQUIRE(shared.fetched_tokens != 0);
}

TEST_CASE("lists for which the CPU chooses stay with it, those of layers with windows do not", "[engine]") {
  using namespace policies;
  constexpr std::array kPolicies{"lfps",
                                 "magicpig",
                                 "topk",
                                 "exact | int4 | top_p=0.9 | near=0",
                                 "full | near=0",
                                 "quest",
                                 "exact | top_k=30 | near=0,sinks=4,recent=0 | bypass=0.8"};
  const auto [text, near, share] = GENERATE_COPY(grid(few<5>(kPolicies), std::array{0u, 7u}, std::array{0.4f, 1.f}));
  const bool windows = GENERATE(false, true);
  CAPTURE(text, near, share, windows);
  const EngineRig rig = engine_rig();
  Story story(kShape, 292, 77);
  if (rig.kv_dtype != DType::f32) story.round_queries();
  const PolicySpec policy = parse_policy(text);
  EngineOptions options = paged_options(rig, 2, near, DigestKind::box);
  options.largest.audit = true;
  if (windows) options.windows = {0, 150, 0};
  Engine in_place(options, rig.device);
  Engine engine(sharing(options, share), rig.device);
  Teller want{.story = &story, .id = in_place.begin(policy)};
  Teller teller{.story = &story, .id = engine.begin(policy)};
  prefill(in_place, rig, want, 270);
  prefill(engine, rig, teller, 270);
  while (teller.at < story.tokens()) {
    CAPTURE(teller.at);
    REQUIRE(difference(decode(engine, rig, teller), decode(in_place, rig, want)) < tolerance(rig));
  }
  const EngineStats here = engine.stats();
  const EngineStats there = in_place.stats();
  REQUIRE(here.near_tokens == there.near_tokens);
  REQUIRE(here.far_tokens + here.fetched_tokens == there.far_tokens);
  REQUIRE(there.fetched_tokens == 0);
  const bool cpu_chooses = scheduler::chooser(policy) == scheduler::Chooser::cpu;
  if (near == 0) REQUIRE((here.fetched_tokens == 0) == (cpu_chooses && !windows && policy.dense_every == 0));
  require_same_audit(engine.audit(teller.id), in_place.audit(want.id));
}

TEST_CASE("a batch of all kinds of policies shares its lists as each does alone", "[engine]") {
  using namespace policies;
  const EngineRig rig = engine_rig();
  const auto options = [&](std::uint32_t rows, std::uint32_t near) {
    return sharing(policies::options_for(rig, rows, near), 0.4f);
  };
  require_same_in_batch(rig, options, GENERATE(from_range(few<1>(std::array{10u, 0u}))), 14,
                        {{"lfps", 200},
                         {"exact | int4 | top_k=30 | near=0,sinks=4,recent=60", 130},
                         {"magicpig", 170},
                         {"topk", 33},
                         {"none | near=0,sinks=4,recent=90", 120}});
}

TEST_CASE("rows of teams attend over the link and in place what they attend in place", "[engine][drafts]") {
  using namespace drafts;
  const auto [group, near, share] = GENERATE(grid(std::array{4u, 7u}, std::array{0u, 7u}, std::array{0.4f, 1.f}));
  const std::string text =
      GENERATE("exact | int4 | top_k=20 | near=0,sinks=4,recent=60", "exact | int4 | top_p=0.9 | near=0", "full");
  CAPTURE(group, near, share, text);
  const EngineRig rig = engine_rig();
  const AttentionShape shape = shape_of(group);
  constexpr std::uint32_t kDrafts = 4;
  const Story story(shape, 230, 520), other(shape, 150, 521);
  EngineOptions options = draft_options(rig, shape, kDrafts, 2, near);
  options.windows = {0, 100, 0};
  const auto told = [&](float of) {
    Engine engine(sharing(options, of), rig.device);
    Teller teller{.story = &story, .id = engine.begin(parse_policy(text))};
    Teller mate{.story = &other, .id = engine.begin(parse_policy(text))};
    import_story(engine, rig, teller, 200);
    import_story(engine, rig, mate, 60);
    std::vector<Row> rows;
    for (std::uint32_t step = 0; step < 5; ++step) {
      for (auto& part : drafts::run(engine, rig, options.largest, {{&mate, 1 + step % kDrafts}, {&teller, kDrafts}}))
        rows.insert(rows.end(), part.begin(), part.end());
    }
    REQUIRE((engine.stats().fetched_tokens == 0) == (of == 0.f));
    return rows;
  };
  const std::vector<Row> want = told(0.f);
  const std::vector<Row> got = told(share);
  REQUIRE(got.size() == want.size());
  for (std::size_t i = 0; i < got.size(); ++i) {
    CAPTURE(i);
    REQUIRE(difference(got[i].out, want[i].out) < 2 * rig.tolerance);
    REQUIRE(difference(got[i].lse, want[i].lse) < 2 * rig.tolerance);
  }
}

TEST_CASE("far rows of every type are shared, those with scales, too", "[engine][fp8]") {
  using namespace policies;
  const EngineRig rig = engine_rig();
  const DType dtype = GENERATE_REF(from_range(rig.kv_dtypes));
  const auto [near, text] = GENERATE(grid(
      std::array{0u, 9u}, std::array{"full | near=0", "exact | int4 | top_k=40 | near=0,sinks=4,recent=40"}));
  CAPTURE(to_string(dtype), near, text);
  Story story(kShape, 282, 501);
  story.leave_grid(502);
  story.round_queries();
  EngineRig other{.device = nullptr, .queue = nullptr, .kv_dtype = dtype};
  const EngineOptions options = options_for(other, 1, near);
  std::vector<std::vector<float>> told[2];
  for (const float share : {0.f, 0.4f}) {
    Engine engine(sharing(options, share), rig.device);
    Teller teller{.story = &story, .id = engine.begin(parse_policy(text))};
    prefill(engine, rig, teller, 270);
    while (teller.at < story.tokens()) told[share == 0.f ? 0 : 1].push_back(decode(engine, rig, teller));
    REQUIRE((engine.stats().fetched_tokens == 0) == (share == 0.f));
    REQUIRE(engine.stats().far_tokens != 0);
  }
  for (std::size_t i = 0; i < told[0].size(); ++i) REQUIRE(difference(told[0][i], told[1][i]) < 4e-3);
}

TEST_CASE("a key that is not a number shows, on whichever side of the cut", "[engine]") {
  using namespace plain;
  const EngineRig rig = engine_rig();
  const auto near = GENERATE(0u, 2u);
  const auto poisoned = GENERATE(3u, 60u, 95u, 99u);
  CAPTURE(near, poisoned);
  Engine engine(sharing(options_for(rig, 1, 40, near), 0.5f), rig.device);
  Story story(kShape, 110, 12);
  for (std::uint32_t layer = 0; layer < kShape.layers; ++layer) story.poison(layer, poisoned);
  Teller teller{.story = &story,
                .id = engine.begin(parse_policy("exact | int4 | top_k=all | near=0,sinks=0,recent=1"))};
  import_story(engine, rig, teller, 100);
  ForwardTensors tensors(*rig.device, kShape, 1);
  while (teller.at < 105) {
    const auto out = run_forward(engine, rig, tensors, {&teller});
    for (const float x : out[0]) REQUIRE(std::isnan(x));
  }
}

TEST_CASE("more rows than a launch has room for share their lists", "[engine]") {
  const EngineRig rig = engine_rig();
  const AttentionShape shape{.layers = 1, .q_heads = 8, .kv_heads = 8, .head_dim = 64};
  constexpr std::uint32_t kRows = 140;
  EngineOptions options{.shape = shape,
                        .kv_dtype = rig.kv_dtype,
                        .fetch_share = 0.5f,
                        .policies = {parse_policy("none | near=0,sinks=4,recent=200")},
                        .largest = {.decode_rows = kRows},
                        .sequences = kRows,
                        .threads = 2,
                        .pin_threads = false};
  options.host_bytes = 8 * kRows * block_bytes(options);
  options.near_bytes = 12 * near_block_bytes(options);
  Engine engine(options, rig.device);
  const Story story(shape, 105, 61);
  std::vector<Teller> tellers{{.story = &story, .id = engine.begin(parse_policy("none | near=0,sinks=3,recent=70"))}};
  import_story(engine, rig, tellers[0], 100);
  std::vector<Teller*> rows;
  for (std::uint32_t row = 1; row < kRows; ++row)  // At other lengths, so that rows differ.
    tellers.push_back({.story = &story, .id = engine.fork(tellers[0].id, 50 + row % 50), .at = 50 + row % 50});
  for (Teller& teller : tellers) rows.push_back(&teller);
  ForwardTensors tensors(*rig.device, shape, kRows);
  for (int step = 0; step < 3; ++step) {
    const auto out = run_forward(engine, rig, tensors, rows);
    for (std::uint32_t row = 0; row < kRows; ++row) {
      CAPTURE(step, row);
      REQUIRE(plain::worst(out[row], story.attended(0, tellers[row].at - 1, 3, 70, 0), 0) < plain::kTolerance);
    }
  }
  REQUIRE(engine.stats().fetched_tokens != 0);
}

TEST_CASE("forwards of fewer lists than fetch_lists leave them to the CPU", "[engine]") {
  constexpr std::uint32_t kRows = 3;
  const EngineRig rig = engine_rig();
  EngineOptions options = sharing(plain::options_for(rig, kRows, 40 * kRows, 6), 0.5f);
  options.fetch_lists = 2 * plain::kShape.kv_heads;
  Engine engine(options, rig.device);
  const Story story(plain::kShape, 320, 37);
  const PolicySpec policy = parse_policy("none | " + windows_of(4, 190));
  std::vector<Teller> tellers;
  for (std::uint32_t row = 0; row < kRows; ++row) {
    tellers.push_back({.story = &story, .id = engine.begin(policy)});
    import_story(engine, rig, tellers.back(), 300);
  }
  // Buckets of one, two, and again fewer rows: what one leaves in memory changes nothing for the next.
  for (const std::uint32_t rows : {1u, 2u, 3u, 1u, 2u}) {
    CAPTURE(rows);
    ForwardTensors tensors(*rig.device, plain::kShape, rows);
    std::vector<SequenceId> ids;
    for (std::uint32_t row = 0; row < rows; ++row) {
      tensors.set(row, story, tellers[row].at++);
      ids.push_back(tellers[row].id);
    }
    Bucket bucket = engine.options().largest;
    bucket.decode_rows = rows;
    const std::uint64_t before = engine.stats().fetched_tokens;
    (void)run_batch(engine, rig, tensors, one_each(ids), bucket);
    for (std::uint32_t row = 0; row < rows; ++row)
      REQUIRE(plain::error_of(tensors.out(row), story, tellers[row].at - 1, 4, 190, 0) < plain::kTolerance);
    REQUIRE((engine.stats().fetched_tokens != before) == (rows >= 2));
  }
}

TEST_CASE("an automatic share is none without a GPU or many rows, and is told", "[engine]") {
  const EngineRig rig = engine_rig();
  EngineOptions options = sharing(plain::options_for(rig, 128 / plain::kShape.kv_heads, 40, 6), kFetchAuto);
  options.sequences = options.largest.decode_rows;
  const Engine engine(options, rig.device);
  const Engine streams([&] {
    EngineOptions changed = options;
    changed.placement = PlacementMode::stream;
    return changed;
  }(), rig.device);
  REQUIRE(streams.options().fetch_share == 0.f);
  const double link = rig.device ? rig.device->rates(8 * KiB).link_gbps : 0.0;
  REQUIRE((engine.options().fetch_share > 0.f) == (link > 0.0));
  REQUIRE(engine.options().fetch_share < 1.f);
  REQUIRE(engine.options().fetch_lists == (link > 0.0 ? 128 : 0));
  REQUIRE(memory_needed(options, rig.device.get()).buffers == engine.memory().buffers);
  --options.largest.decode_rows;
  REQUIRE(Engine(options, rig.device).options().fetch_share == 0.f);
}

TEST_CASE("a trace of shared lists has what both attend, and waits where the answer is wanted", "[engine]") {
  const EngineRig rig = engine_rig();
  EngineOptions options = sharing(plain::options_for(rig, 1, 40, 0), 0.3f);
  options.largest.trace = true;
  Engine engine(options, rig.device);
  const Story story(plain::kShape, 310, 91);
  Teller teller{.story = &story, .id = engine.begin(parse_policy("none | near=0,sinks=4,recent=196"))};
  import_story(engine, rig, teller, 300);
  ForwardTensors tensors(*rig.device, plain::kShape, 1);
  const PageLayout far{.head_dim = plain::kShape.head_dim, .dtype = rig.kv_dtype};
  const std::uint64_t token = far.page_bytes() / far.page_tokens;
  constexpr std::uint32_t kFetched = 48;  // 76 / 256 of 200, in units of 16.
  REQUIRE(fetched_rows(200, fetch_share_of(0.3f)) == kFetched);
  while (teller.at < story.tokens()) {
    tensors.set(0, story, teller.at++);
    const PlanItem item{.sequence = teller.id};
    const Batch batch = run_batch(engine, rig, tensors, {&item, 1}, engine.options().largest);
    const ForwardTrace& trace = engine.trace(batch);
    const auto bytes = [&](Stage stage, Lane lane) {
      std::uint64_t sum = 0;
      for (const WorkItem& each : trace.work) sum += each.stage == stage && each.lane == lane ? each.read : 0;
      return sum;
    };
    const std::uint64_t lists = std::uint64_t{plain::kShape.layers} * plain::kShape.kv_heads;
    REQUIRE(bytes(Stage::fetch, Lane::link) == lists * kFetched * token);
    REQUIRE(bytes(Stage::attend_far, Lane::cpu) == lists * (200 - kFetched) * token);
    REQUIRE(std::ranges::count(trace.spans, Stage::fetch, &TraceSpan::stage) == plain::kShape.layers);
    // The device's last wait is its merge: no stall begins before the fetch has ended.
    for (const TraceStall& stall : trace.stalls) {
      if (stall.actor != Actor::device || waited_for(stall.cause) != Actor::workers) continue;
      for (const TraceSpan& span : trace.spans) {
        if (span.stage == Stage::fetch && span.layer == stall.layer) REQUIRE(stall.begin_us >= span.end_us - 1e-6);
      }
    }
  }
}

TEST_CASE("a share that is none is refused, and what it takes is known before", "[engine]") {
  const EngineRig rig = engine_rig();
  const EngineOptions options = plain::options_for(rig, 1, 40, 6);
  const auto build = [&](float share, PlacementMode placement) {
    EngineOptions changed = sharing(options, share);
    changed.placement = placement;
    (void)Engine(changed, rig.device);
  };
  const auto require_refused = [&](float share, PlacementMode placement, const char* remedy) {
    const auto [code, text] = refusal_of([&] { build(share, placement); });
    CAPTURE(text);
    REQUIRE(code == Errc::invalid_argument);
    REQUIRE(text.find(remedy) != std::string::npos);
  };
  for (const float share : {-0.1f, 1.01f, NAN, INFINITY}) {
    CAPTURE(share);
    require_refused(share, PlacementMode::hybrid, "it must be in [0, 1]");
  }
  require_refused(0.3f, PlacementMode::stream, "leave it 0, or place hybrid");
  build(0.f, PlacementMode::stream);
  const EngineMemoryUse without = memory_needed(sharing(options, 0.f), rig.device.get());
  const EngineMemoryUse with = memory_needed(sharing(options, 0.3f), rig.device.get());
  REQUIRE(with.buffers > without.buffers);
  REQUIRE(with.pinned == without.pinned);
  Engine engine(sharing(options, 0.3f), rig.device);
  REQUIRE(engine.memory().buffers == with.buffers);
  REQUIRE(engine.memory().pinned == with.pinned);
  REQUIRE(engine.options().fetch_share == 0.3f);
}
