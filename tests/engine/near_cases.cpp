// Near rows as a cache of far ones, on every device.
#include "sluice/step/forward.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/engine_named.hpp"
#include "tests/support/engine_rig.hpp"

using namespace sluice;
using namespace sluice::test;

namespace {

constexpr AttentionShape kShape{.layers = 2, .q_heads = 8, .kv_heads = 2, .head_dim = 64};
constexpr std::uint32_t kPlanes = kShape.layers * kShape.kv_heads;
constexpr std::uint32_t kPrompt = 640;  // 40 pages.

EngineOptions options_for(const EngineRig& rig, std::uint32_t near, std::uint32_t promotions) {
  EngineOptions options{
      .shape = kShape, .kv_dtype = rig.kv_dtype, .largest = {.decode_rows = 1}, .threads = 2, .pin_threads = false};
  options.host_bytes = 60 * block_bytes(options);
  options.near_bytes = near * near_block_bytes(options);
  options.import_rows = 160;
  options.promotions = promotions;
  return named(options, {kManyTokens});
}

struct Told {
  std::vector<std::vector<float>> out;
  std::vector<EngineStats> stats;  ///< after each token
};

Told tell(const EngineRig& rig, const Story& story, std::uint32_t near, std::uint32_t promotions) {
  Engine engine(options_for(rig, near, promotions), rig.device);
  Teller teller{.story = &story, .id = engine.begin(parse_policy("exact | int4 | top_k=4 | near=0,sinks=4,recent=16"))};
  import_story(engine, rig, teller, kPrompt);
  ForwardTensors tensors(*rig.device, kShape, 1);
  Told told;
  while (teller.at < story.tokens()) {
    told.out.push_back(run_forward(engine, rig, tensors, {&teller})[0]);
    told.stats.push_back(engine.stats());
  }
  return told;
}

double same(const EngineRig& rig) { return rig.kv_dtype == DType::f32 ? 2e-5 : 2e-3; }

}  // namespace

TEST_CASE("tokens that are attended again and again come near, and nothing else changes", "[engine]") {
  const EngineRig rig = engine_rig();
  Story story(kShape, kPrompt + 40, 3);
  story.repeat_query();
  const Told never = tell(rig, story, 24, 0);
  const Told cached = tell(rig, story, 24, 64);
  for (std::size_t step = 0; step < never.out.size(); ++step) {
    CAPTURE(step);
    REQUIRE(difference(cached.out[step], never.out[step]) < same(rig));
  }
  REQUIRE(never.stats.back().promoted == 0);
  REQUIRE(cached.stats.back().promoted != 0);
  const auto far_since = [](const Told& told, std::size_t step) {
    return told.stats.back().far_tokens - told.stats[step].far_tokens;
  };
  // The same tokens in every step: once they are near, no layer asks.
  REQUIRE(far_since(never, 19) >= std::uint64_t{kPlanes} * 30);
  REQUIRE(far_since(cached, 19) == 0);
  // With near rows that nobody used for long each layer's first turn brings them.
  REQUIRE(far_since(cached, kNearTurn) == 0);
  REQUIRE(cached.stats.back().asked == cached.stats[19].asked);
}

TEST_CASE("attention without pattern hardly moves anything", "[engine]") {
  const EngineRig rig = engine_rig();
  const Story story(kShape, kPrompt + 60, 4);
  const Told told = tell(rig, story, 8, 64);
  REQUIRE(told.stats.back().promoted <= kPlanes * told.out.size());
  REQUIRE(told.stats.back().near_tokens != 0);
}

TEST_CASE("near tokens are those of sequences that live, and the newest tokens' come first", "[engine]") {
  const EngineRig rig = engine_rig();
  const Story story(kShape, kPrompt + 10, 5);
  Engine engine(options_for(rig, 12, 2), rig.device);
  const PolicySpec recent = parse_policy("none | near=0,sinks=0,recent=64");
  Teller first{.story = &story, .id = engine.begin(recent)};
  import_story(engine, rig, first, kPrompt);
  REQUIRE(engine.memory().near_pages_used == 12 * near_block_bytes(engine.options()));
  ForwardTensors tensors(*rig.device, kShape, 1);
  (void)run_forward(engine, rig, tensors, {&first});
  REQUIRE(engine.stats().asked == 0);  // Its window is near.
  engine.end(first.id);
  Teller second{.story = &story, .id = engine.begin(recent)};
  import_story(engine, rig, second, 33);
  REQUIRE(engine.memory().near_pages_used == 33 * near_block_bytes(engine.options()) / engine.options().page_tokens);
}

TEST_CASE("forks attend the same however little is near, whatever the size of pages", "[engine]") {
  const EngineRig rig = engine_rig();
  const std::uint32_t page_tokens = GENERATE(8u, 16u, 64u);
  const Story story(kShape, 230, 6, page_tokens);
  const PolicySpec policy = parse_policy("exact | int4 | top_k=10 | near=0,sinks=3,recent=12");
  std::vector<std::vector<float>> want;
  for (const std::uint32_t near : {0u, 1u, 3u}) {
    CAPTURE(page_tokens, near);
    EngineOptions options = options_for(rig, 0, kMostPromotions);
    options.page_tokens = page_tokens;
    options.largest.decode_rows = 2;
    options.host_bytes = 100 * block_bytes(options);
    options.near_bytes = near * near_block_bytes(options);
    Engine engine(options, rig.device);
    Teller first{.story = &story, .id = engine.begin(policy)};
    import_story(engine, rig, first, 200);
    Teller second{.story = &story, .id = engine.fork(first.id, 197), .at = 197};
    ForwardTensors tensors(*rig.device, kShape, 2);
    for (std::size_t step = 0; first.at < story.tokens(); ++step) {
      const auto out = run_forward(engine, rig, tensors, {&first, &second});
      for (std::size_t row = 0; row < 2; ++row) {
        if (near == 0) want.push_back(out[row]);
        CAPTURE(step, row);
        REQUIRE(difference(out[row], want[2 * step + row]) < same(rig));
      }
    }
    if (near == 0) REQUIRE(engine.stats().promoted == 0);
    REQUIRE(engine.memory().near_pages_used <= near * near_block_bytes(options));
  }
}

TEST_CASE("a window that is near stays near while tokens are decoded", "[engine]") {
  const EngineRig rig = engine_rig();
  const std::uint32_t page_tokens = GENERATE(16u, 64u);
  const Story story(kShape, 400, 7, page_tokens);
  EngineOptions options = options_for(rig, 0, 64);
  options.page_tokens = page_tokens;
  options.host_bytes = 60 * block_bytes(options);
  options.near_bytes = 192 / page_tokens * near_block_bytes(options);
  Engine engine(options, rig.device);
  Teller teller{.story = &story, .id = engine.begin(parse_policy("none | near=0,sinks=4,recent=60"))};
  import_story(engine, rig, teller, 300);
  ForwardTensors tensors(*rig.device, kShape, 1);
  for (std::uint32_t i = 0; i <= kNearTurn; ++i) (void)run_forward(engine, rig, tensors, {&teller});
  const std::uint64_t asked = engine.stats().asked;  // For sinks, which had given way to newer tokens.
  REQUIRE(asked <= (kNearTurn + 1) * kShape.layers);
  while (teller.at < story.tokens()) (void)run_forward(engine, rig, tensors, {&teller});
  REQUIRE(engine.stats().asked == asked);
}
