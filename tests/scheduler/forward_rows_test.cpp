// What rows and teams of drafts choose from.
#include "scheduler/plan/forward_rows.hpp"

#include <algorithm>
#include <vector>

#include "sluice/forward_tasks.hpp"
#include "tests/support/catch.hpp"

using namespace sluice;
using namespace sluice::scheduler;

namespace {

constexpr std::uint32_t kPage = 16;

/// Every token before the team that a row attends by itself whatever is chosen, the team attends, too.
bool windows_cover(const ForwardRow& team, const ForwardRow& alone) {
  for (std::uint32_t token = 0; token < team.tokens; ++token) {
    if (alone.in_window(token) && !team.in_window(token)) return false;
  }
  return true;
}

/// And as many that are chosen, of the same candidates or fewer.
bool choices_cover(const ForwardRow& team, const ForwardRow& alone) {
  if (team.whole() || team.recent_begin == team.sink_end) return true;
  if (team.page_picks != 0 && team.page_picks < std::min(alone.page_picks, team.pages)) return false;
  if (team.page_picks != 0 && alone.page_picks == 0) return false;
  const std::uint32_t most =
      team.page_picks != 0 ? team.page_picks * kPage : team.recent_begin - team.sink_end;
  return team.picks >= std::min(alone.picks, most) && team.mass == alone.mass;
}

}  // namespace

TEST_CASE("a team chooses from no less than each of its rows, and as many", "[plan][drafts]") {
  const auto* const text = GENERATE("sluice", "full", "none | near=0,sinks=4,recent=9", "quest | near=0",
                                    "exact | int4 | top_k=7 | near=0,sinks=3,recent=1",
                                    "exact | int4 | top_k=12% | near=0,sinks=2,recent=40",
                                    "exact | int4 | top_p=0.8 | near=0,sinks=2,recent=6",
                                    "pages:share=0.2,min_pages=3 | top_k=all | near=0,sinks=20",
                                    "pages:share=0.3 | int4 | top_k=11 | near=0,recent=40",
                                    "pages:pages=3 | int4 | top_p=0.7 | near=0,sinks=2");
  CAPTURE(text);
  const PolicySpec policy = parse_policy(text);
  for (std::uint32_t tokens = 0; tokens < 400; ++tokens) {
    for (std::uint32_t drafts = 1; drafts <= 32; drafts += drafts < 4 ? 1 : 7) {
      const ForwardRow team = forward_team(policy, tokens, drafts, kPage);
      CAPTURE(tokens, drafts);
      REQUIRE(team.tokens == tokens);
      REQUIRE(team.drafts == drafts);
      REQUIRE((team.sink_end <= team.recent_begin && team.recent_begin <= tokens));
      REQUIRE(team.pages * kPage <= tokens);
      for (std::uint32_t draft = 0; draft < drafts; ++draft) {
        const ForwardRow alone = forward_row(policy, tokens + draft + 1, kPage);
        CAPTURE(draft);
        if (!windows_cover(team, alone)) REQUIRE(windows_cover(team, alone));
        if (!choices_cover(team, alone)) REQUIRE(choices_cover(team, alone));
      }
    }
  }
}

TEST_CASE("a policy of the CPU chooses for a team from what its first row would choose from alone", "[plan][drafts]") {
  const auto* const text = GENERATE("history+pages:share=0.2 | top_p=0.9 | near=0,sinks=4,recent=3",
                                    "history+pages:share=0.1,min_pages=1 | top_k=20 | near=0", "lfps",
                                    "pages | progressive=0.8 | near=0,sinks=4,recent=16");
  CAPTURE(text);
  const PolicySpec policy = parse_policy(text);
  for (std::uint32_t tokens = 0; tokens < 1500; ++tokens) {
    const ForwardRow alone = forward_row(policy, tokens + 1, kPage);
    const ForwardRow team = forward_team(policy, tokens, 5, kPage);
    if (team.asks == 1 && team.pages == alone.pages && team.page_picks == alone.page_picks) continue;
    CAPTURE(tokens, alone.pages, alone.page_picks, team.pages, team.page_picks);
    FAIL("it chooses from others");
  }
}

TEST_CASE("what a team lists all of its rows see, and its edge is the rest of what each sees", "[plan][drafts]") {
  const std::uint32_t window = GENERATE(0u, 1u, 3u, 8u, 31u, 40u);
  for (std::uint32_t tokens = 0; tokens < 60; ++tokens) {
    for (std::uint32_t drafts = 1; drafts <= 32; drafts += drafts < 4 ? 1 : 7) {
      CAPTURE(window, tokens, drafts);
      const ForwardRow row = forward_team(parse_policy("full"), tokens, drafts, kPage).in(0, window);
      const ForwardEdge edge = edge_of(row, window);
      REQUIRE(edge.count() <= ForwardEdge::kMost);
      for (std::uint32_t draft = 0; draft < drafts; ++draft) {
        const std::uint32_t newest = tokens + draft;
        std::vector<std::uint32_t> seen(newest + 1, 0);
        for (std::uint32_t token = 0; token < tokens; ++token) seen[token] += row.in_window(token) ? 1 : 0;
        for (std::uint32_t i = 0; i < edge.count(); ++i) {
          if (edge.sees(draft, edge.token(i))) ++seen.at(edge.token(i));
        }
        for (std::uint32_t token = 0; token <= newest; ++token) {
          const std::uint32_t want = window == 0 || newest - token < window ? 1 : 0;
          if (seen[token] != want) REQUIRE(seen[token] == want);
        }
      }
    }
  }
}
