// Few far rows that the device attends itself, over the link, so that nobody is asked for them: the same as what the
// CPU attends, whoever waits for it, and however late it is.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <memory>
#include <string>
#include <thread>

#include "gpu/kernels/compiled.hpp"
#include "sluice/cuda.hpp"
#include "sluice/error.hpp"
#include "tests/gpu/forward_graph.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/engine_plain.hpp"
#include "tests/support/engine_rests.hpp"

using namespace sluice;
using namespace sluice::test;
using namespace sluice::test::plain;
using namespace std::chrono_literals;

namespace {

constexpr std::uint32_t kRoom = 32;  ///< far rows that a thread block has room for: short sequences have one

/// A device that attends so many far rows of a layer.
EngineRig rig_of(std::uint32_t link_rows) {
  EngineRig rig = engine_rig();
  rig.device = make_cuda_device({.link_rows = link_rows});
  rig.queue = rig.device->create_stream("caller");
  rig.stream = rig.queue->native_handle();
  return rig;
}

/// Far rows of a KV head that are attended so, at most.
std::uint32_t most_of(std::uint32_t link_rows, std::uint32_t lists) {
  return gpu::compiled_for() >= gpu::Compiled::clusters ? std::min(link_rows / lists, kRoom) : 0;
}

std::string windows_of(std::uint32_t sinks, std::uint32_t recent) {
  return "near=0,sinks=" + std::to_string(sinks) + ",recent=" + std::to_string(recent);
}

std::vector<float> decode(Engine& engine, const EngineRig& rig, Teller& teller, ForwardTensors& tensors,
                          ForwardGraph* graph = nullptr) {
  tensors.set(0, *teller.story, teller.at++);
  const Batch batch = engine.plan(one_each({&teller.id, 1}), engine.options().largest, rig.stream);
  graph != nullptr ? graph->replay() : tensors.attend(engine, rig.stream);
  engine.finish(batch);
  rig.synchronize();
  return tensors.out(0);
}

}  // namespace

TEST_CASE("few far rows cross the link, more are the CPU's", "[engine][gpu][link]") {
  const std::uint32_t link_rows = GENERATE(0u, 1u, 2u, 33u, 256u);
  const std::uint32_t far = GENERATE(1u, 2u, 15u, 16u, 17u, 31u, 32u, 33u, 34u, 64u, 300u);
  CAPTURE(link_rows, far);
  const EngineRig rig = rig_of(link_rows);
  Engine engine(options_for(rig, 1, 40, 0), rig.device);
  const Story story(kShape, 324, 23);
  const std::uint32_t sinks = far / 5;
  Teller teller{.story = &story, .id = engine.begin(parse_policy("none | " + windows_of(sinks, far - sinks)))};
  import_story(engine, rig, teller, 320);
  ForwardTensors tensors(*rig.device, kShape, 1);
  while (teller.at < story.tokens()) {
    const auto out = decode(engine, rig, teller, tensors);
    REQUIRE(error_of(out, story, teller.at - 1, sinks, far - sinks, 0) < kTolerance);
  }
  const std::uint64_t all = std::uint64_t{4} * kShape.layers * kShape.kv_heads * far;
  const bool few = far <= most_of(link_rows, kShape.kv_heads);
  const EngineStats stats = engine.stats();
  REQUIRE(stats.near_tokens == 0);
  REQUIRE(stats.fetched_tokens == (few ? all : 0));
  REQUIRE(stats.far_tokens == (few ? 0 : all));
  REQUIRE(stats.asked == (few ? 0 : std::uint64_t{4} * kShape.layers));
}

TEST_CASE("far rows of a long sequence are few where no thread block finds too many", "[engine][gpu][link]") {
  const EngineRig rig = rig_of(256);
  constexpr AttentionShape kAlone{.layers = 2, .q_heads = 2, .kv_heads = 2, .head_dim = 128};
  constexpr std::uint32_t kTokens = 9'000, kSteps = 70, kRecent = 40;
  const bool clusters = most_of(256, kAlone.kv_heads) != 0;
  EngineOptions options{.shape = kAlone, .kv_dtype = rig.kv_dtype, .max_picks = 64, .threads = 2, .pin_threads = false};
  options.host_bytes = 640 * block_bytes(options);
  options.import_rows = 3000;
  Engine engine(options, rig.device);
  const Story story(kAlone, kTokens + kSteps, 33);
  ForwardTensors tensors(*rig.device, kAlone, 1);
  const std::size_t row = std::size_t{kAlone.q_heads} * kAlone.head_dim;
  const auto require_right = [&](const std::vector<float>& out, const Teller& teller, std::uint32_t sinks,
                                 std::uint32_t recent, std::uint32_t picks) {
    for (std::uint32_t layer = 0; layer < kAlone.layers; ++layer)
      REQUIRE(worst(out, story.attended(layer, teller.at - 1, sinks, recent, picks), layer * row) < rig.tolerance);
  };
  // Sixty-two, all over the sequence.
  Teller spread{.story = &story, .id = engine.begin(parse_policy("exact | int4 | top_k=60 | " + windows_of(1, 1)))};
  import_story(engine, rig, spread, kTokens);
  for (std::uint32_t step = 0; step < 8; ++step) require_right(decode(engine, rig, spread, tensors), spread, 1, 1, 60);
  REQUIRE((engine.stats().asked == 0) == clusters);
  engine.end(spread.id);
  // Forty, of one chunk of 64 tokens or of two, which different thread blocks look after.
  Teller recent{.story = &story, .id = engine.begin(parse_policy("none | " + windows_of(0, kRecent)))};
  import_story(engine, rig, recent, kTokens);
  std::uint32_t took = 0;
  while (recent.at < story.tokens()) {
    CAPTURE(recent.at);
    const std::uint64_t asked = engine.stats().asked;
    require_right(decode(engine, rig, recent, tensors), recent, 0, kRecent, 0);
    const std::uint32_t newest = std::min((recent.at - 1) % 64 + 1, kRecent);
    const bool few = clusters && std::max(newest, kRecent - newest) <= kRoom;
    REQUIRE(engine.stats().asked - asked == (few ? 0 : kAlone.layers));
    took += few ? 1 : 0;
  }
  REQUIRE((took > 0) == clusters);
  REQUIRE(took < kSteps);
}

TEST_CASE("what was chosen is attended near and over the link as near and by the CPU, and comes near as soon",
          "[engine][gpu][link]") {
  const std::uint32_t head_dim = GENERATE(64u, 96u, 128u);
  const std::uint32_t near = GENERATE(0u, 6u, 100u);
  const auto [text, sinks, recent, picks] = GENERATE(table<const char*, std::uint32_t, std::uint32_t, std::uint32_t>(
      {{"exact | int4 | top_k=3 | near=0,sinks=1,recent=2", 1, 2, 3},
       {"exact | int4 | top_k=24 | near=0,sinks=4,recent=16", 4, 16, 24}}));
  CAPTURE(head_dim, near, text);
  AttentionShape shape = kShape;
  shape.head_dim = head_dim;
  const Story story(shape, 380, 21);
  const auto told = [&](std::uint32_t link_rows, std::vector<float>& all) {
    const EngineRig rig = rig_of(link_rows);
    EngineOptions options = options_for(rig, 1, 40, near);
    options.shape = shape;
    options.host_bytes = 40 * block_bytes(options);
    options.near_bytes = near * near_block_bytes(options);
    Engine engine(options, rig.device);
    Teller teller{.story = &story, .id = engine.begin(parse_policy(text))};
    import_story(engine, rig, teller, 300);
    ForwardTensors tensors(*rig.device, shape, 1);
    while (teller.at < story.tokens()) {
      const auto out = decode(engine, rig, teller, tensors);
      all.insert(all.end(), out.begin(), out.end());
      const std::size_t row = std::size_t{shape.q_heads} * head_dim;
      for (std::uint32_t layer = 0; layer < shape.layers; ++layer)
        REQUIRE(worst(out, story.attended(layer, teller.at - 1, sinks, recent, picks), layer * row) < rig.tolerance);
    }
    return engine.stats();
  };
  std::vector<float> here, there;
  const EngineStats linked = told(256, here);
  const EngineStats asking = told(0, there);
  REQUIRE(difference(here, there) < 2e-3);
  REQUIRE(asking.fetched_tokens == 0);
  REQUIRE(linked.near_tokens == asking.near_tokens);
  REQUIRE(linked.promoted == asking.promoted);
  REQUIRE(linked.far_tokens + linked.fetched_tokens == asking.far_tokens);
  REQUIRE(linked.asked <= asking.asked);
  const bool clusters = gpu::compiled_for() >= gpu::Compiled::clusters;
  if (near == 6 && picks == 3 && clusters) REQUIRE((linked.fetched_tokens > 0) == (head_dim != 96));
}

TEST_CASE("few far rows of every type cross the link, those with scales, too", "[engine][gpu][link][fp8]") {
  const DType dtype = GENERATE(DType::bf16, DType::f16, DType::fp8_e4m3);
  const std::uint32_t head_dim = GENERATE(64u, 128u);
  const std::uint32_t recent = GENERATE(1u, 9u, 20u, 28u);
  CAPTURE(to_string(dtype), head_dim, recent);
  AttentionShape shape = kShape;
  shape.head_dim = head_dim;
  Story story(shape, 190, 501);
  story.leave_grid(502);
  story.round_queries();
  story.round_rows(dtype);
  const EngineRig rig = rig_of(256);
  EngineOptions options = options_for(rig, 1, 40, 0);
  options.shape = shape;
  options.kv_dtype = dtype;
  options.host_bytes = 40 * block_bytes(options);
  Engine engine(options, rig.device);
  Teller teller{.story = &story, .id = engine.begin(parse_policy("none | " + windows_of(4, recent)))};
  import_story(engine, rig, teller, 180);
  ForwardTensors tensors(*rig.device, shape, 1);
  const std::size_t row = std::size_t{shape.q_heads} * head_dim;
  while (teller.at < story.tokens()) {
    const auto out = decode(engine, rig, teller, tensors);
    for (std::uint32_t layer = 0; layer < shape.layers; ++layer)
      REQUIRE(worst(out, story.attended(layer, teller.at - 1, 4, recent, 0), layer * row) < 4e-3);
  }
  REQUIRE((engine.stats().asked == 0) == (4 + recent <= most_of(256, shape.kv_heads)));
}

TEST_CASE("a captured forward whose few far rows cross the link is the forward, bit by bit", "[engine][gpu][link]") {
  const std::uint32_t near = GENERATE(0u, 5u, 9u);
  const std::uint32_t link_rows = GENERATE(20u, 256u);
  const auto text = GENERATE(as<std::string>{}, "exact | int4 | top_k=3 | near=0,sinks=1,recent=2",
                             "exact | int4 | top_k=40 | near=0,sinks=4,recent=24", rests::kTopK);
  CAPTURE(near, link_rows, text);
  const EngineRig rig = rig_of(link_rows);
  const Story story(kShape, 360, 91);
  EngineOptions options = options_for(rig, 1, 40, near);
  make_room_for(parse_policy(text), story.tokens(), options);
  const auto told = [&](bool graphs) {
    Engine engine(options, rig.device);
    ForwardTensors tensors(*rig.device, kShape, 1);
    std::unique_ptr<ForwardGraph> graph;
    if (graphs) graph = std::make_unique<ForwardGraph>(engine, tensors, static_cast<cudaStream_t>(rig.stream));
    Teller teller{.story = &story, .id = engine.begin(parse_policy(text))};
    import_story(engine, rig, teller, 300);
    std::vector<float> all;
    while (teller.at < story.tokens()) {
      const auto out = decode(engine, rig, teller, tensors, graph.get());
      all.insert(all.end(), out.begin(), out.end());
      if (!graph || teller.at % 7 != 3) continue;
      graph->replay();  // Without a plan.
      rig.synchronize();
      REQUIRE(std::isnan(tensors.out(0).front()));
    }
    return all;
  };
  const auto want = told(false);
  REQUIRE(std::ranges::none_of(want, [](float x) { return std::isnan(x); }));
  REQUIRE(told(true) == want);
}

TEST_CASE("rows of a batch have their share of what crosses the link", "[engine][gpu][link]") {
  const std::uint32_t link_rows = GENERATE(0u, 39u, 40u, 256u);
  CAPTURE(link_rows);
  const EngineRig rig = rig_of(link_rows);
  Engine engine(options_for(rig, 2, 60, 0), rig.device);
  const Story stories[] = {Story(kShape, 140, 12), Story(kShape, 140, 13)};
  const PolicySpec few = parse_policy("none | " + windows_of(2, 8));
  const PolicySpec many = parse_policy("none | " + windows_of(2, 60));
  Teller tellers[] = {{.story = &stories[0], .id = engine.begin(few)},
                      {.story = &stories[1], .id = engine.begin(many)}};
  for (Teller& teller : tellers) import_story(engine, rig, teller, 130);
  ForwardTensors tensors(*rig.device, kShape, 2);
  while (tellers[0].at < 140) {
    const auto out = run_forward(engine, rig, tensors, {&tellers[0], &tellers[1]});
    REQUIRE(error_of(out[0], stories[0], tellers[0].at - 1, 2, 8, 0) < kTolerance);
    REQUIRE(error_of(out[1], stories[1], tellers[1].at - 1, 2, 60, 0) < kTolerance);
  }
  const std::uint64_t lists = std::uint64_t{10} * kShape.layers * kShape.kv_heads;
  const bool crosses = most_of(link_rows, 2 * kShape.kv_heads) >= 10;
  REQUIRE(engine.stats().fetched_tokens == (crosses ? 10 * lists : 0));
  REQUIRE(engine.stats().far_tokens == (crosses ? 62 : 72) * lists);
  REQUIRE(engine.stats().asked == std::uint64_t{10} * kShape.layers);
}

TEST_CASE("few far rows that are no numbers show, and others do not", "[engine][gpu][link]") {
  const std::uint32_t near = GENERATE(0u, 2u);
  CAPTURE(near);
  const EngineRig rig = rig_of(256);
  Engine engine(options_for(rig, 1, 40, near), rig.device);
  Story story(kShape, 140, 12);
  story.poison(1, 131);  // Among the recent tokens of some steps.
  Teller teller{.story = &story, .id = engine.begin(parse_policy("none | near=0,sinks=2,recent=4"))};
  import_story(engine, rig, teller, 125);
  ForwardTensors tensors(*rig.device, kShape, 1);
  const std::size_t row = std::size_t{kShape.q_heads} * kShape.head_dim;
  while (teller.at < story.tokens()) {
    const auto out = decode(engine, rig, teller, tensors);
    const std::uint32_t token = teller.at - 1;
    const bool sees = token >= 131 && token < 135;
    for (std::size_t i = 0; i < 3 * row; ++i) REQUIRE(std::isnan(out[i]) == (sees && i / row == 1));
  }
  if (most_of(256, kShape.kv_heads) != 0) REQUIRE(engine.stats().asked == 0);
}

TEST_CASE("a rest is less what crosses the link", "[engine][gpu][link][rest]") {
  const std::uint32_t near = GENERATE(0u, 4u);
  CAPTURE(near);
  const EngineRig rig = rig_of(256);
  const Story story = rests::story_of(rig, 220, 903);
  Engine engine(rests::resting(rig, 1, near), rig.device);
  const char* const text = "exact | int4 | top_k=3 | rest=mean | near=0,sinks=1,recent=4";
  Teller teller{.story = &story, .id = engine.begin(parse_policy(text))};
  import_story(engine, rig, teller, 200);
  rests::goes_on(engine, rig, teller, {.sinks = 1, .recent = 4, .picks = 3}, 20);
  if (most_of(256, kShape.kv_heads) != 0) REQUIRE(engine.stats().fetched_tokens > 0);
}

TEST_CASE("layers whose far rows are few wait for no thread, and those that ask find it, whoever waits",
          "[engine][gpu][link][handover]") {
  const Handover mode = GENERATE(Handover::device, Handover::stream, Handover::host);
  CAPTURE(to_string(mode));
  const EngineRig rig = rig_of(256);
  if (most_of(256, kShape.kv_heads) == 0 || (mode == Handover::stream && !rig.device->info().stream_waits)) return;
  std::atomic<bool> stalls{false};
  EngineOptions options = options_for(rig, 1, 60, 0);
  options.handover = mode;
  options.windows = {20, 0, 20};  // Of the second layer alone far rows may be many.
  options.host_bytes *= 3;
  options.answer_timeout = 300ms;
  options.before_answer = [&] {
    if (stalls.exchange(false)) std::this_thread::sleep_for(1500ms);
  };
  Engine engine(options, rig.device);
  Story story(kShape, 130, 5);
  story.see(options.windows);
  Teller few{.story = &story, .id = engine.begin(parse_policy("none | near=0,sinks=2,recent=6"))};
  Teller many{.story = &story, .id = engine.begin(parse_policy("none | near=0,sinks=2,recent=60"))};
  for (Teller* const teller : {&few, &many}) import_story(engine, rig, *teller, 100);
  ForwardTensors tensors(*rig.device, kShape, 1);
  const std::size_t row = std::size_t{kShape.q_heads} * kShape.head_dim;
  const auto require_right = [&](const std::vector<float>& out, std::uint32_t token, std::uint32_t recent,
                                 std::uint32_t layers) {
    for (std::uint32_t layer = 0; layer < layers; ++layer) {
      CAPTURE(layer);
      REQUIRE(worst(out, story.attended(layer, token, 2, recent, 0), layer * row) < kTolerance);
    }
  };
  std::uint64_t asked = 0, fetched = 0;
  for (std::uint32_t step = 0; few.at < story.tokens(); ++step) {
    CAPTURE(step);
    stalls = true;  // Whoever answers would sleep: nobody is asked.
    const auto of_few = decode(engine, rig, few, tensors);
    require_right(of_few, few.at - 1, 6, 3);
    REQUIRE(stalls);
    REQUIRE(engine.stats().asked == asked);
    fetched += 20 + 8 + 20;
    if (step % 4 == 2) {  // The question of the second layer is answered late.
      tensors.set(0, story, many.at);
      const Batch batch = engine.plan(one_each({&many.id, 1}), engine.options().largest, rig.stream);
      tensors.attend(engine, rig.stream);
      rig.synchronize();
      const auto out = tensors.out(0);
      require_right(out, many.at, 60, 1);
      for (std::size_t i = row; i < 3 * row; ++i) REQUIRE(std::isnan(out[i]));
      REQUIRE(code_of([&] { engine.finish(batch); }) == Errc::device);
      ++asked;
      fetched += 20;
    }
    stalls = false;
    const auto of_many = decode(engine, rig, many, tensors);
    require_right(of_many, many.at - 1, 60, 3);
    ++asked;
    fetched += 20 + 20;
    REQUIRE(engine.stats().asked == asked);
    REQUIRE(engine.stats().fetched_tokens == fetched * kShape.kv_heads);
  }
}

TEST_CASE("a forward with few far rows that is cancelled leaves the others as they are", "[engine][gpu][link]") {
  const EngineRig rig = rig_of(256);
  Engine engine(options_for(rig, 1, 40, 3), rig.device);
  const Story story(kShape, 130, 15);
  Teller teller{.story = &story, .id = engine.begin(parse_policy("exact | int4 | top_k=3 | near=0,sinks=1,recent=2"))};
  import_story(engine, rig, teller, 100);
  ForwardTensors tensors(*rig.device, kShape, 1);
  while (teller.at < story.tokens()) {
    const Batch batch = engine.plan(one_each({&teller.id, 1}), engine.options().largest, rig.stream);
    if (teller.at % 2 == 0) {  // After a layer of it.
      tensors.set(0, story, teller.at);
      tensors.attend_layer(engine, engine.options().largest, 0, rig.stream);
    }
    engine.cancel(batch);
    const auto out = decode(engine, rig, teller, tensors);
    REQUIRE(error_of(out, story, teller.at - 1, 1, 2, 3) < kTolerance);
  }
}

TEST_CASE("an audit knows of few far rows", "[engine][gpu][link]") {
  std::vector<AuditReport> reports;
  const Story story(kShape, 320, 25);
  for (const std::uint32_t link_rows : {256u, 0u}) {
    const EngineRig rig = rig_of(link_rows);
    EngineOptions options = options_for(rig, 1, 40, 3);
    options.largest.audit = true;
    Engine engine(options, rig.device);
    Teller teller{.story = &story,
                  .id = engine.begin(parse_policy("exact | int4 | top_k=5 | near=0,sinks=2,recent=6"))};
    import_story(engine, rig, teller, 300);
    ForwardTensors tensors(*rig.device, kShape, 1);
    while (teller.at < story.tokens()) (void)decode(engine, rig, teller, tensors);
    if (link_rows != 0 && most_of(link_rows, kShape.kv_heads) != 0) REQUIRE(engine.stats().fetched_tokens > 0);
    reports.push_back(engine.audit(teller.id));
  }
  REQUIRE(reports[0].attended_tokens == reports[1].attended_tokens);
  REQUIRE(reports[0].heads.size() == reports[1].heads.size());
  for (std::size_t i = 0; i < reports[0].heads.size(); ++i) {
    CAPTURE(i);
    REQUIRE(reports[0].heads[i].coverage == Approx(reports[1].heads[i].coverage).margin(2e-3));
    REQUIRE(reports[0].heads[i].error == Approx(reports[1].heads[i].error).margin(2e-2));
  }
}

TEST_CASE("a trace knows what crossed the link, and of no answer", "[engine][gpu][link]") {
  const EngineRig rig = rig_of(256);
  EngineOptions options = options_for(rig, 1, 40, 3);
  options.largest.trace = true;
  Engine engine(options, rig.device);
  const Story story(kShape, 330, 91);
  Teller teller{.story = &story, .id = engine.begin(parse_policy("exact | int4 | top_k=5 | near=0,sinks=2,recent=6"))};
  import_story(engine, rig, teller, 300);
  ForwardTensors tensors(*rig.device, kShape, 1);
  const PageLayout far{.head_dim = kShape.head_dim, .dtype = rig.kv_dtype};
  const double token = static_cast<double>(far.page_bytes() / far.page_tokens);
  const PlanItem item{.sequence = teller.id};
  while (teller.at < story.tokens()) {
    const EngineStats before = engine.stats();
    tensors.set(0, story, teller.at++);
    const Batch batch = run_batch(engine, rig, tensors, {&item, 1}, options.largest);
    const EngineStats after = engine.stats();
    double linked = 0.0, asked = 0.0;
    for (const WorkItem& work : engine.trace(batch).work) {
      const double bytes = static_cast<double>(work.bytes());
      if (work.stage == Stage::attend && work.lane == Lane::link) linked += bytes;
      if (work.stage == Stage::attend_far) asked += bytes;
    }
    const double margin = token * kShape.layers;  // A layer's tokens are rounded.
    REQUIRE(linked == Approx(token * static_cast<double>(after.fetched_tokens - before.fetched_tokens)).margin(margin));
    REQUIRE(asked == Approx(token * static_cast<double>(after.far_tokens - before.far_tokens)).margin(margin));
  }
  if (most_of(256, kShape.kv_heads) != 0) REQUIRE(engine.stats().fetched_tokens > 0);
}
