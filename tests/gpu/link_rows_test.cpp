// Few far rows over the link: the same as what the CPU attends, of every choice and type, in graphs, too.
#include <algorithm>
#include <cmath>
#include <memory>
#include <string>

#include "tests/gpu/link_rows.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/engine_named.hpp"

using namespace sluice;
using namespace sluice::test;
using namespace sluice::test::links;

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
  EngineOptions options = named({.shape = kAlone, .kv_dtype = rig.kv_dtype, .threads = 2, .pin_threads = false},
                                {"exact | int4 | top_k=64 | near=0,sinks=4,recent=508"});
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
                             "exact | int4 | top_k=40 | near=0,sinks=4,recent=24",
                             "exact | int4 | sample=12 | near=0,sinks=4,recent=20");
  CAPTURE(near, link_rows, text);
  const EngineRig rig = rig_of(link_rows);
  const Story story(kShape, 360, 91);
  EngineOptions options = options_for(rig, 1, 40, near);
  options.policies.push_back(parse_policy(text));
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
