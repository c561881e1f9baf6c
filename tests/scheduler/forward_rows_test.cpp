// What rows and teams of drafts choose from.
#include "scheduler/plan/forward_rows.hpp"

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "sluice/page_rules.hpp"
#include "sluice/step/forward_tasks.hpp"
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
  const bool by_mass = alone.mass == 0.f ? team.mass == 0.f || alone.most == 0 : team.mass == alone.mass;
  return team.picks >= std::min(alone.picks, most) && by_mass && team.most >= alone.most;
}

}  // namespace

TEST_CASE("a team chooses from no less than each of its rows, and as many", "[plan][drafts]") {
  const auto* const text = GENERATE(
      "sluice", "full", "none | near=0,sinks=4,recent=9", "quest | near=0",
      "exact | int4 | sample=max(9, 7%),error=10%,most=50 | near=0,sinks=4,recent=9",
      "exact | int4 | top_k=7 | near=0,sinks=3,recent=1", "scores | top_k=9 | near=0,sinks=3,recent=1",
      "scores | top_p=0.8 | near=0", "exact | int4 | top_k=12% | near=0,sinks=2,recent=40",
      "exact | int4 | top_p=0.8 | near=0,sinks=2,recent=6", "pages:share=0.2,min_pages=3 | top_k=all | near=0,sinks=20",
      "pages:share=0.3 | int4 | top_k=11 | near=0,recent=40", "pages:pages=3 | int4 | top_p=0.7 | near=0,sinks=2");
  CAPTURE(text);
  const char* const far = GENERATE("", "far=40", "far=max(96, 7%)", "far=3%");
  const std::string given = text;
  const bool chooses = given != "full" && given.compare(0, 4, "none") != 0;
  if (*far != 0 && !chooses) return;
  CAPTURE(far);
  const PolicySpec policy = parse_policy(*far == 0 ? given : given + " | " + far);
  if (least_far_tokens(policy, {.page_tokens = kPage}) > policy.far.min_tokens && *far != 0) return;
  for (std::uint32_t tokens = 0; tokens < 400; ++tokens) {
    for (std::uint32_t drafts = 1; drafts <= 32; drafts += drafts < 4 ? 1 : 7) {
      const ForwardRow team = forward_team(policy, tokens, drafts, {.page_tokens = kPage});
      CAPTURE(tokens, drafts);
      REQUIRE(team.tokens == tokens);
      REQUIRE(team.drafts == drafts);
      REQUIRE((team.sink_end <= team.recent_begin && team.recent_begin <= tokens));
      REQUIRE(team.pages * kPage <= tokens);
      for (std::uint32_t draft = 0; draft < drafts; ++draft) {
        const ForwardRow alone = forward_row(policy, tokens + draft + 1, {.page_tokens = kPage});
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
                                    "pages | progressive=0.8 | near=0,sinks=4,recent=16",
                                    "pages:rank=layer | top_k=all | near=0,sinks=4,recent=16");
  CAPTURE(text);
  const PolicySpec policy = parse_policy(text);
  for (std::uint32_t tokens = 0; tokens < 1500; ++tokens) {
    const ForwardRow alone = forward_row(policy, tokens + 1, {.page_tokens = kPage});
    const ForwardRow team = forward_team(policy, tokens, 5, {.page_tokens = kPage});
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
      const ForwardRow row = forward_team(parse_policy("full"), tokens, drafts, {.page_tokens = kPage}).in(0, window);
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

namespace {

constexpr RowShape kLayer{.page_tokens = kPage, .q_heads = 8, .kv_heads = 2};

/// Far tokens that a row of a policy with sinks=4,recent=9 may attend at most, all KV heads together and over all that
/// its heads choose. Where it attends everything, those of full pages outside of that window.
std::uint64_t most_far(const PolicySpec& policy, const ForwardRow& row) {
  const std::uint64_t between = row.recent_begin - row.sink_end;
  std::uint64_t each = row.picks;
  if (row.mass > 0.f || row.asks != 0) each = row.most;
  if (row.in_pages() && !row.ranks()) each = row.page_picks * kPage;
  if (policy.uses(Source::pages) && row.whole() && row.tokens > 13) {
    const std::uint32_t begin = std::min(row.tokens - 9, (row.tokens - 1) / kPage * kPage);
    return kLayer.kv_heads * std::uint64_t{begin - std::min(begin, 4u)};
  }
  return kLayer.kv_heads * std::min<std::uint64_t>(between, kLayer.group() * each);
}

std::uint64_t budget_of(const FarOptions& far, std::uint32_t tokens) {
  return std::max<std::uint64_t>(far.min_tokens, std::llround(double{far.share} * tokens * kLayer.kv_heads));
}

}  // namespace

TEST_CASE("a row's heads together choose no more far tokens than have a budget, whatever the length", "[plan][far]") {
  const std::string policy_text =
      GENERATE("exact | int4 | top_k=max(20, 5%)", "exact | int4 | top_p=0.9", "pages:box,budget=128 | top_k=all",
               "pages:pages=9 | int4 | top_k=60", "pages:pages=9 | int4 | top_p=0.9", "history | top_k=99",
               "pages | progressive=0.9", "exact | top_k=all", "pages:rank=layer,pages=9 | top_k=all");
  const std::string far = GENERATE("max(256, 3%)", "257", "300", "max(400, 11%)");
  CAPTURE(policy_text, far);
  const std::string near = " | near=0,sinks=4,recent=9";
  const PolicySpec policy = parse_policy(policy_text + near + " | far=" + far);
  const PolicySpec free = parse_policy(policy_text + near);
  REQUIRE(least_far_tokens(policy, kLayer) <= 256);
  bool bound = false;
  for (std::uint32_t tokens = 0; tokens < 2500; tokens += tokens < 300 ? 1 : 37) {
    CAPTURE(tokens);
    const ForwardRow row = forward_row(policy, tokens, kLayer);
    const ForwardRow without = forward_row(free, tokens, kLayer);
    const std::uint64_t budget = budget_of(policy.far, tokens);
    REQUIRE(most_far(policy, row) <= budget);
    bound = bound || most_far(free, without) > budget;
    REQUIRE(row.picks <= without.picks);
    const auto needs = forward_needs(policy, tokens, kLayer);
    REQUIRE(needs.picks >= row.picks);
    if (needs.ranked != 0) REQUIRE(needs.ranked >= (row.asks != 0 ? 0 : row.page_picks));
    for (const std::uint32_t drafts : {2u, 7u, 32u}) {
      const ForwardRow team = forward_team(policy, tokens, drafts, kLayer);
      CAPTURE(drafts);
      if (team.asks == 0) REQUIRE(most_far(policy, team) <= budget_of(policy.far, tokens + drafts));
    }
  }
  REQUIRE(bound);
}

TEST_CASE("rows choose on the device of what histories propose, where copies of keys tell the rest",
          "[plan][forecast]") {
  const PolicySpec policy = parse_policy("history | int4 | top_k=max(20, 5%) | near=0,sinks=4,recent=20");
  REQUIRE(forecasts(policy));
  REQUIRE(chooser(policy) == Chooser::cpu);
  for (const char* const other :
       {"lfps", "history | top_k=20", "history | top_p=0.9", "history | int4 | top_k=20 | bypass=0.8",
        "history+pages | int4 | top_k=20", "history+exact | int4 | top_k=20", "exact | int4 | top_k=20"}) {
    CAPTURE(other);
    REQUIRE_FALSE(forecasts(parse_policy(other)));
  }
  for (const std::uint32_t tokens : {1u, 24u, 25u, 40u, 1'000u}) {
    CAPTURE(tokens);
    const ForwardRow asks = forward_row(policy, tokens, kLayer);
    ForwardRow row = asks;
    choose_proposed(policy, 3, kLayer, row);
    REQUIRE(row.proposed == (tokens > 24 ? 4 : 0));
    REQUIRE(row.asks == (tokens > 24 ? 0 : 1));
    REQUIRE(row.picks == std::min(tokens < 25 ? 0 : tokens - 24, tokens > 400 ? tokens / 20 : 20));
    REQUIRE(forward_needs(policy, tokens, kLayer).picks >= row.picks);
    REQUIRE(forward_needs(policy, tokens, kLayer).bucket.top_k);
    REQUIRE(row.in(0, 7).proposed == 0);  // Rows of a layer with a window.
    RowShape large = kLayer;
    large.page_tokens = 32;  // The open page is more than what is recent.
    ForwardRow same = asks;
    choose_proposed(policy, 3, large, same);
    REQUIRE(same.proposed == 0);
    ForwardRow team = forward_team(policy, tokens, 2, kLayer);
    choose_proposed(policy, 3, kLayer, team);
    REQUIRE(team.proposed == 0);
  }
}

TEST_CASE("or as much of that as holds a share of the mass", "[plan][forecast]") {
  const PolicySpec policy = parse_policy("history | int4 | top_p=0.9 | near=0,sinks=4,recent=20");
  REQUIRE(forecasts(policy));
  REQUIRE(copies_open_page(policy, 16));
  REQUIRE_FALSE(copies_open_page(policy, 32));
  REQUIRE_FALSE(copies_open_page(parse_policy("history | int4 | top_k=9 | near=0,sinks=4,recent=20"), 16));
  REQUIRE_FALSE(copies_open_page(parse_policy("exact | int4 | top_p=0.9 | near=0,sinks=4,recent=20"), 16));
  REQUIRE(forward_needs(policy, 1'000, kLayer).picks == 0);
  for (const std::uint32_t tokens : {24u, 25u, 1'000u}) {
    CAPTURE(tokens);
    ForwardRow row = forward_row(policy, tokens, kLayer);
    choose_proposed(policy, 3, kLayer, row);
    REQUIRE(row.proposed == (tokens > 24 ? 4 : 0));
    REQUIRE(row.asks == (tokens > 24 ? 0 : 1));
    REQUIRE(row.picks == 0);
    REQUIRE(row.mass == (tokens > 24 ? 0.9f : 0.f));
    REQUIRE(row.most == kNone);
  }
  // No more than far tokens have a budget for; of none the device would choose without asking.
  const PolicySpec bound = parse_policy("history | int4 | top_p=0.9 | near=0,sinks=4,recent=20 | far=120");
  ForwardRow row = forward_row(bound, 1'000, kLayer);
  choose_proposed(bound, 3, kLayer, row);
  REQUIRE(row.most == 120 / kLayer.q_heads);
  row = forward_row(bound, 1'000, kLayer);
  row.most = 0;
  choose_proposed(bound, 3, kLayer, row);
  REQUIRE((row.proposed == 0 && row.asks == 1));
}

TEST_CASE("rows choose among clusters of their first tokens and attend all others", "[plan][clusters]") {
  const PolicySpec policy = parse_policy("tactic | int4 | near=0,sinks=4,recent=20");
  REQUIRE(chooser(policy) == Chooser::device);
  REQUIRE(clusters_on_device(policy));
  REQUIRE(chooser(parse_policy("tactic")) == Chooser::cpu);
  REQUIRE_FALSE(clusters_on_device(parse_policy("clusters | int4 | top_p=0.9 | near=0")));
  const ForwardNeeds needs = forward_needs(policy, 5'000, kLayer);
  REQUIRE(needs.bucket.unbounded);
  REQUIRE(needs.clusters >= 4'000 / 32 + 1);
  REQUIRE(forward_unserved(policy, {.unbounded = true}, {.shape = kLayer, .max_window = 99}).find("among clusters") !=
          std::string::npos);
  REQUIRE(forward_unserved(policy, {.unbounded = true}, {.shape = kLayer, .max_window = 99, .cluster_sequences = 1})
              .empty());
  for (const std::uint32_t clustered : {4'000u, 4'990u}) {
    ForwardRow row = forward_row(policy, 5'000, kLayer);
    choose_clusters(policy, 3, 125, clustered, row);
    REQUIRE(row.clusters.slot == 3);
    REQUIRE(row.clusters.count == 125);
    REQUIRE(row.clusters.samples.tokens == clustered);
    REQUIRE(row.sink_end == 4);
    REQUIRE(row.recent_begin == std::min(clustered, 4'980u));
    REQUIRE(row.mass == 0.9f);
    REQUIRE_FALSE(row.ranks());
    REQUIRE(row.in(0, 100).clusters.count == 0);
  }
  // Too few for the machinery.
  for (const std::uint32_t clustered : {0u, 300u, 511u}) {
    ForwardRow row = forward_row(policy, 600, kLayer);
    choose_clusters(policy, 3, clustered / 32, clustered, row);
    REQUIRE(row.whole());
    REQUIRE(row.clusters.count == 0);
    REQUIRE(row.mass == 0.f);
  }
}

TEST_CASE("rows take pages by copies of their keys, all but the newest, until they have a share", "[plan][pages]") {
  const PolicySpec policy = parse_policy("psa:microbatch=3,rule=mean | int4 | near=0,sinks=4,recent=2");
  REQUIRE(chooser(policy) == Chooser::device);
  REQUIRE(chooser(parse_policy("psa")) == Chooser::cpu);
  REQUIRE(may_be_dense(policy));
  const std::uint32_t page = kLayer.page_tokens;
  const ForwardNeeds needs = forward_needs(policy, 5'000, kLayer);
  REQUIRE((needs.bucket.unbounded && needs.bucket.pages && !needs.bucket.top_k));
  REQUIRE(needs.ranked > 5'000);  // However many there is room for.
  const ForwardLimits limits{.shape = kLayer, .max_window = 9999, .digests = policy.pages.digest};
  REQUIRE(forward_unserved(policy, {.unbounded = true, .pages = true}, limits).empty());
  REQUIRE(forward_unserved(policy, {.pages = true}, limits).find("share of the mass") != std::string::npos);
  for (const std::uint32_t tokens : {1u, page, page + 1, 10 * page, 10 * page + 1, 10 * page + 5}) {
    CAPTURE(tokens);
    const ForwardRow row = forward_row(policy, tokens, kLayer);
    if (tokens <= page) {
      REQUIRE((row.microbatch == 0 && row.mass == 0.f));
      continue;
    }
    REQUIRE(row.pages == (tokens - 1) / page);
    REQUIRE(row.page_picks == 0);
    REQUIRE_FALSE(row.in_pages());
    REQUIRE(row.ranks());
    REQUIRE((row.sink_end == 4 && row.recent_begin == std::min(tokens - 2, row.pages * page)));
    REQUIRE((row.mass == 0.95f && row.microbatch == 3 && row.rule == ProgressRule::mean && row.most == kNone));
    REQUIRE((row.in(0, 7).microbatch == 0 && row.in(0, 7).mass == 0.f));
    const ForwardRow team = forward_team(policy, tokens - 1, 4, kLayer);
    REQUIRE((team.microbatch == 3 && team.mass == 0.95f && team.pages == row.pages && team.drafts == 4));
  }
}

TEST_CASE("tokens are chosen by copies of as many bits as the engine has", "[plan]") {
  const PolicySpec four = parse_policy("exact | int4 | sample=9 | near=0");
  const PolicySpec three = parse_policy("exact | int3 | sample=9 | near=0");
  REQUIRE((code_bits(four) == 4 && code_bits(three) == 3 && code_bits(parse_policy("lfps")) == 0));
  REQUIRE((code_bits_for(three) == 3 && code_bits_for(parse_policy("lfps")) == 4));
  REQUIRE(chooser(three) == Chooser::device);
  const ForwardRow row = forward_row(three, 1'000, kLayer), same = forward_row(four, 1'000, kLayer);
  REQUIRE((row.picks == 10 && row.draws.any() && row.picks == same.picks && row.recent_begin == same.recent_begin));
  ForwardLimits limits{.shape = kLayer, .max_window = 9999};
  REQUIRE(forward_unserved(four, {}, limits).empty());
  REQUIRE(forward_unserved(three, {}, limits).find("copies of keys of 3 bits, and the engine's have 4") !=
          std::string::npos);
  limits.code_bits = 3;
  REQUIRE(forward_unserved(three, {}, limits).empty());
  REQUIRE(forward_unserved(four, {}, limits).find("write int3") != std::string::npos);
  REQUIRE(forward_unserved(parse_policy("lfps | near=0"), {}, limits).empty());
}

TEST_CASE("with `far=all`, or a budget that does not bind, rows are as without it", "[plan][far]") {
  const std::string text = GENERATE("exact | int4 | top_k=max(20, 5%)", "exact | int4 | top_p=0.9", "quest",
                                    "pages:pages=9 | int4 | top_k=40", "lfps", "psa");
  const std::string far = GENERATE("all", "2000000000");
  CAPTURE(text, far);
  const auto same = [](const ForwardRow& a, const ForwardRow& b) {
    return a.tokens == b.tokens && a.sink_end == b.sink_end && a.recent_begin == b.recent_begin && a.pages == b.pages &&
           a.page_picks == b.page_picks && a.picks == b.picks && a.mass == b.mass && a.asks == b.asks;
  };
  const PolicySpec policy = parse_policy(text + " | far=" + far), free = parse_policy(text);
  for (std::uint32_t tokens = 0; tokens < 3000; tokens += 7) {
    CAPTURE(tokens);
    REQUIRE(same(forward_row(policy, tokens, kLayer), forward_row(free, tokens, kLayer)));
    REQUIRE(same(forward_team(policy, tokens, 5, kLayer), forward_team(free, tokens, 5, kLayer)));
    REQUIRE(forward_row(free, tokens, kLayer).most == kNone);
  }
}

TEST_CASE("a budget of far tokens that is less than a page or a token per head is refused with the least that works",
          "[plan][far]") {
  const Bucket any{.unbounded = true, .pages = true};
  const auto refused = [&](const char* text) {
    const PolicySpec policy = parse_policy(text);
    return forward_unserved(policy, any, {.shape = kLayer, .max_window = 9999, .digests = policy.pages.digest});
  };
  REQUIRE(refused("quest | far=127").find("far=128") != std::string::npos);
  REQUIRE(refused("quest | far=9%").find("far=max(128, SHARE)") != std::string::npos);
  REQUIRE(refused("psa | far=255").find("far=256") != std::string::npos);
  REQUIRE(refused("sluice | far=7").find("far=8") != std::string::npos);
  REQUIRE(refused("lfps | far=7").find("a token") != std::string::npos);
  for (const char* const text : {"quest | far=128", "quest | far=max(128, 1%)", "psa | far=256", "sluice | far=8",
                                 "sluice | far=0.1%", "lfps | far=8", "quest", "psa"})
    REQUIRE(refused(text).empty());
}
