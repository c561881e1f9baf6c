// Drafts that are verified together attend what each of them would, or more.
#include <algorithm>
#include <array>
#include <cmath>

#include "sluice/error.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/engine_drafts.hpp"
#include "tests/support/sanitized.hpp"

using namespace sluice;
using namespace sluice::test;
using namespace sluice::test::drafts;

namespace {

/// Query heads of a KV head, and how many drafts are verified together.
struct Size {
  std::uint32_t group;
  std::uint32_t drafts;
};

}  // namespace

TEST_CASE("rows of a team that attend everything get what they get alone", "[engine][drafts]") {
  // Tokens before it: none, one, to the middle of a page, to its end.
  const auto [size, near, placement, tokens] =
      GENERATE(grid(std::array{Size{4, 2}, Size{4, 8}, Size{1, 32}, Size{8, 3}, Size{32, 1}}, std::array{0u, 5u, 90u},
                    std::array{PlacementMode::hybrid, PlacementMode::stream}, std::array{0u, 1u, 37u, 64u, 126u}));
  CAPTURE(size.group, size.drafts, near, static_cast<int>(placement), tokens);
  const EngineRig rig = engine_rig();
  const AttentionShape shape = shape_of(size.group);
  const Story story(shape, tokens + 3 * size.drafts, 500 + tokens, drafts::kPageTokens);
  EngineOptions options = draft_options(rig, shape, size.drafts, 1, near);
  options.placement = placement;
  options.windows = {0, 5, 40};  // Shorter than some teams, and longer.
  Engine engine(options, rig.device);
  const auto begin = [&] {
    Teller teller{.story = &story, .id = engine.begin(parse_policy("full"))};
    import_story(engine, rig, teller, tokens);
    return teller;
  };
  Teller alone = begin();
  std::vector<Row> want;
  while (alone.at < story.tokens())
    want.push_back(run(engine, rig, {.decode_rows = 1, .unbounded = true}, {{&alone, 1}})[0][0]);
  Teller teller = begin();
  for (const std::uint32_t count : {size.drafts, (size.drafts + 1) / 2, size.drafts, 1u}) {
    const std::uint32_t first = teller.at;
    const std::vector<Row> rows = run(engine, rig, options.largest, {{&teller, count}})[0];
    for (std::uint32_t i = 0; i < count; ++i) {
      CAPTURE(first, i);
      // Both are off by as much.
      REQUIRE(difference(rows[i].out, want[first - tokens + i].out) < 2 * rig.tolerance);
      REQUIRE(difference(rows[i].lse, want[first - tokens + i].lse) < 2 * rig.tolerance);
    }
    if (teller.at + size.drafts > story.tokens()) break;
  }
}

TEST_CASE("a team attends what any of its heads chose, near or far, and no row newer tokens", "[engine][drafts]") {
  struct Case {
    const char* text;
    std::uint32_t sinks, recent, picks;
  };
  constexpr std::array kCases{Case{"none | near=0,sinks=4,recent=9", 4, 9, 0},
                              Case{"exact | int4 | top_k=7 | near=0,sinks=3,recent=1", 3, 1, 7},
                              Case{"exact | int4 | top_k=12 | near=0,sinks=2,recent=20", 2, 20, 12}};
  const auto [policy, size, near, placement] =
      GENERATE_COPY(grid(kCases, std::array{Size{4, 3}, Size{8, 4}, Size{1, 16}}, std::array{0u, 7u, 90u},
                         std::array{PlacementMode::hybrid, PlacementMode::stream}));
  CAPTURE(policy.text, size.group, size.drafts, near, static_cast<int>(placement));
  const EngineRig rig = engine_rig();
  const AttentionShape shape = shape_of(size.group);
  Story story(shape, 260, 520, drafts::kPageTokens), other(shape, 120, 521, drafts::kPageTokens);
  EngineOptions options = draft_options(rig, shape, size.drafts, 2, near);
  options.placement = placement;
  options.windows = {0, 30, 0};
  story.see(options.windows);
  other.see(options.windows);
  Engine engine(options, rig.device);
  Teller teller{.story = &story, .id = engine.begin(parse_policy(policy.text))};
  Teller mate{.story = &other, .id = engine.begin(parse_policy(policy.text))};
  import_story(engine, rig, teller, 190);
  import_story(engine, rig, mate, 2);  // All of it is sinks at first.
  for (std::uint32_t step = 0; step < 4; ++step) {
    const std::uint32_t count = step % 2 == 0 ? size.drafts : size.drafts - 1;
    const std::vector<Part> parts{{&mate, count}, {&teller, size.drafts}};
    const std::vector<std::uint32_t> firsts{mate.at, teller.at};
    const auto rows = run(engine, rig, options.largest, parts);
    for (std::size_t p = 0; p < 2; ++p) {
      const auto drafts = static_cast<std::uint32_t>(rows[p].size());
      for (std::uint32_t i = 0; i < drafts; ++i) {
        CAPTURE(step, p, firsts[p], i);
        const Story::Together team{.first = firsts[p],
                                   .drafts = drafts,
                                   .draft = i,
                                   .sinks = policy.sinks,
                                   .recent = policy.recent,
                                   .picks = policy.picks};
        REQUIRE(error_of(rows[p][i], *parts[p].teller->story, shape, team) < kTolerance);
      }
    }
  }
}

TEST_CASE("an audit finds that rows of a team attend no less than by themselves", "[engine][drafts]") {
  struct Case {
    const char* text;
    double share;  ///< 0: no less than alone
  };
  constexpr std::array kCases{Case{"exact | int4 | top_k=9 | near=0,sinks=2,recent=6", 0.0},
                              Case{"exact | int4 | top_k=12% | near=0,sinks=2,recent=6", 0.0},
                              Case{"pages:share=0.2,min_pages=3 | top_k=all | near=0,sinks=2", 0.0},
                              Case{"pages:share=0.3 | int4 | top_k=11 | near=0,sinks=2", 0.0},
                              Case{"exact | int4 | top_p=0.8 | near=0,sinks=2,recent=6", 0.8},
                              Case{"full", 1.0}};
  const auto [policy, near] = GENERATE_COPY(grid(kCases, std::array{0u, 7u, 90u}));
  CAPTURE(policy.text, near);
  constexpr std::uint32_t kDrafts = 5;
  constexpr std::uint32_t kPrompt = 181;  // Pages end within teams.
  const EngineRig rig = engine_rig();
  const AttentionShape shape = shape_of(4);
  const Story story(shape, kPrompt + 4 * kDrafts, 530, drafts::kPageTokens);
  EngineOptions options = draft_options(rig, shape, kDrafts, 1, near);
  options.largest.audit = true;
  options.policies.push_back(parse_policy(policy.text));
  options.windows = {0, 0, 30};
  const auto audit = [&](std::uint32_t drafts) {
    Engine engine(options, rig.device);
    Bucket bucket = engine.options().largest;
    bucket.drafts = drafts;
    Teller teller{.story = &story, .id = engine.begin(parse_policy(policy.text))};
    import_story(engine, rig, teller, kPrompt);
    // The last team is not whole.
    for (const std::uint32_t count : {kDrafts, kDrafts, kDrafts, kDrafts - 2})
      (void)run(engine, rig, bucket, {{&teller, count}});
    return engine.audit(teller.id);
  };
  const AuditReport alone = audit(1);
  const AuditReport together = audit(kDrafts);
  REQUIRE(together.tokens == 4 * kDrafts - 2);
  REQUIRE(together.dense_tokens == alone.dense_tokens);
  REQUIRE(together.attended_tokens >= alone.attended_tokens);
  REQUIRE(together.heads.size() == alone.heads.size());
  for (std::size_t h = 0; h < alone.heads.size(); ++h) {
    CAPTURE(h);
    REQUIRE(together.heads[h].steps == 4 * kDrafts - 2);
    REQUIRE(together.heads[h].bound_broken == 0);
    REQUIRE(together.heads[h].coverage_min > (policy.share == 0.0 ? alone.heads[h].coverage_min : policy.share) - 5e-3);
    REQUIRE(together.heads[h].overlap > alone.heads[h].overlap - (policy.share == 0.0 ? 1e-9 : 0.05));
  }
}
