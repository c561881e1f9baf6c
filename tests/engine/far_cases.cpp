// A budget of far tokens, on every device: what is cut is cut by score, wherever it is attended and beside whom.
#include <array>
#include <cmath>
#include <string>
#include <vector>

#include "sluice/error.hpp"
#include "sluice/page_rules.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/engine_policies.hpp"
#include "tests/support/sanitized.hpp"

using namespace sluice;
using namespace sluice::test;
using namespace sluice::test::policies;

namespace {

constexpr std::uint32_t kPrompt = 280;
const std::string kWindow = " | near=0,sinks=4,recent=12";

}  // namespace

TEST_CASE("a budget of far tokens that binds takes each head's best, near or far, in place or over the link",
          "[engine][far]") {
  enum class Kind : std::uint8_t { picks, mass, pages };
  struct Way {
    const char* text;
    Kind kind;
    std::uint32_t keeps;  ///< tokens or pages of a query head; there are eight in a layer
  };
  constexpr auto kWays = std::to_array<Way>({{"exact | int4 | top_k=40 | far=96", Kind::picks, 12},
                                             {"exact | int4 | top_k=40 | far=max(103, 1%)", Kind::picks, 12},
                                             {"exact | int4 | top_p=0.9 | far=96", Kind::mass, 12},
                                             {"pages:box,pages=9 | top_k=all | far=300", Kind::pages, 2}});
  const auto [way, near, placement] =
      GENERATE_COPY(grid(kWays, std::array{0u, 7u, 60u}, std::array{PlacementMode::hybrid, PlacementMode::stream}));
  CAPTURE(way.text, near, to_string(placement));
  const EngineRig rig = engine_rig();
  const Story story(kShape, kPrompt + 10, 171);
  EngineOptions options = paged_options(rig, 1, near, DigestKind::box);
  options.placement = placement;
  Engine engine(options, rig.device);
  Teller teller{.story = &story, .id = engine.begin(parse_policy(way.text + kWindow))};
  import_story(engine, rig, teller, kPrompt);
  while (teller.at < story.tokens()) {
    const std::uint32_t token = teller.at;
    const std::vector<float> out = decode(engine, rig, teller);
    for (std::uint32_t layer = 0; layer < kShape.layers; ++layer) {
      const std::vector<double> want =
          way.kind == Kind::picks ? story.attended(layer, token, 4, 12, way.keeps)
          : way.kind == Kind::mass
              ? story.attended_by_mass(layer, token, 4, 12, 0.9, way.keeps)
              : story.attended_in_pages(layer, token, {.pages = way.keeps, .sinks = 4, .recent = 12});
      CAPTURE(token, layer);
      REQUIRE(off_in_layer(out, want, layer) < 1e-3);
    }
  }
}

TEST_CASE("policies that choose on the CPU keep to a budget of far tokens as by themselves", "[engine][far]") {
  constexpr std::array kPolicies{"lfps | far=64", "topk | far=3%", "pages:box | progressive=0.99 | near=0 | far=512",
                                 "history+exact | top_p=0.9 | near=0,sinks=2,recent=7 | far=max(80, 1%)",
                                 "tactic:least=64,size=4,recluster=64 | far=256"};
  const auto [text, near] = GENERATE_COPY(grid(kPolicies, std::array{0u, 7u}));
  CAPTURE(text, near);
  const EngineRig rig = engine_rig();
  Story story(kShape, kPrompt + 12, 172);
  if (rig.kv_dtype != DType::f32) story.round_queries();
  const PolicySpec policy = parse_policy(text);
  Beside both(rig, story, policy, paged_options(rig, 1, near, DigestKind::box));
  both.prefill(kPrompt);
  both.decode(story.tokens());
}

TEST_CASE("no layer attends more far tokens than its budget says", "[engine][far]") {
  struct Way {
    const char* text;
    std::uint32_t window;  ///< tokens that are attended whatever is chosen, of a KV head
    std::uint32_t least;   ///< of the budget
    double share;
    bool opens = false;
  };
  constexpr auto kWays = std::to_array<Way>({
      {"exact | int4 | top_k=90 | near=0,sinks=4,recent=12 | far=max(32, 4%)", 16, 32, 0.04},
      {"exact | int4 | top_p=0.99 | near=0,sinks=4,recent=12 | far=40", 16, 40, 0.0},
      {"pages:box,pages=12 | top_k=all | near=0,sinks=4,recent=12 | far=128", 16, 128, 0.0, true},
      {"lfps | far=3%", 4, 0, 0.03},
      {"history | top_k=all | near=0,sinks=4,recent=12 | far=48", 16, 48, 0.0},
      {"pages:box | progressive=1 | near=0,sinks=0,recent=0 | far=260", 0, 260, 0.0},
      {"tactic:least=64,size=4,recluster=64 | far=96", 0, 96, 0.0},
  });
  const auto [way, near] = GENERATE_COPY(grid(kWays, std::array{0u, 60u}));
  CAPTURE(way.text, near);
  const EngineRig rig = engine_rig();
  const Story story(kShape, kPrompt + 9, 173);
  EngineOptions options = paged_options(rig, 1, near, DigestKind::box);
  options.largest.audit = true;
  Engine engine(options, rig.device);
  Teller teller{.story = &story, .id = engine.begin(parse_policy(way.text))};
  prefill(engine, rig, teller, kPrompt);
  std::uint64_t before = 0;
  while (teller.at < story.tokens()) {
    (void)decode(engine, rig, teller);
    const std::uint64_t attended = engine.audit(teller.id).attended_tokens;
    const auto budget = std::max<std::uint64_t>(way.least, std::llround(way.share * teller.at * kShape.kv_heads));
    // Where pages are chosen, the newest is apart, too.
    const std::uint32_t open = way.opens ? 4 + (teller.at - 1) % options.page_tokens + 1 : 0;
    const std::uint64_t apart = std::uint64_t{kShape.kv_heads} * std::max(way.window, open);
    CAPTURE(teller.at, attended - before);
    REQUIRE(attended - before <= kShape.layers * (budget + apart));
    REQUIRE(attended - before > kShape.layers * way.window * kShape.kv_heads);
    before = attended;
  }
}

TEST_CASE("sequences with budgets of far tokens attend the same in a batch and alone", "[engine][far]") {
  const EngineRig rig = engine_rig();
  const auto options = [&](std::uint32_t rows, std::uint32_t near) {
    return paged_options(rig, rows, near, DigestKind::box);
  };
  require_same_in_batch(rig, options, GENERATE(from_range(few<1>(std::array{10u, 0u}))), 12,
                        {{"exact | int4 | top_k=30 | near=0,sinks=4,recent=12 | far=72", 200},
                         {"exact | int4 | top_k=30 | near=0,sinks=4,recent=12", 190},
                         {"exact | int4 | top_p=0.9 | near=0,sinks=4,recent=12 | far=5%", 170},
                         {"lfps | far=64", 143},
                         {"pages:box,pages=5 | top_k=all | near=0 | far=256", 120}});
}

TEST_CASE("an engine sized for a budget of far tokens has room for that, and refuses one that pages do not fit into",
          "[engine][far]") {
  const EngineRig rig = engine_rig();
  const auto sized_for = [&](const char* text) {
    EngineOptions options = named(options_for(rig, 1, 0), {text});
    options.host_bytes = 256 * block_bytes(options);  // 4096 tokens.
    return Engine(options, rig.device).sizes();
  };
  REQUIRE(sized_for("sluice").max_picks == 257);  // One more than it draws.
  REQUIRE(sized_for("sluice | far=80").max_picks == 11);
  REQUIRE(sized_for("sluice | far=all").max_picks == 257);
  REQUIRE(sized_for("quest").max_ranked > sized_for("quest | far=max(128, 1%)").max_ranked);
  REQUIRE(code_of([&] { (void)sized_for("quest | far=127"); }) == Errc::unsupported);
  REQUIRE(code_of([&] { (void)sized_for("sluice | far=7"); }) == Errc::unsupported);
  Engine engine(named(options_for(rig, 1, 0), {"quest | far=128"}), rig.device);
  REQUIRE(code_of([&] { (void)engine.begin(parse_policy("quest | far=1%")); }) == Errc::unsupported);
  (void)engine.begin(parse_policy("quest | far=max(128, 1%)"));
}
