// Laws of every policy that scores candidates: exact top-k, LFPS, page digests and their unions.

#include "tests/scheduler/policy_step.hpp"

using namespace sluice;
using namespace sluice::scheduler;
using namespace sluice::scheduler::test;

TEST_CASE("with every token a candidate and a budget of all, the output is dense attention", "[policy]") {
  const std::string text =
      GENERATE("topk:budget=100%", "exact+history | top_k=all | near=0%,sinks=4,recent=0",
               "exact+history:share_group=on+pages | top_k=all | near=0%", "topk:budget=100%,near=10%");
  const std::uint32_t n = GENERATE(70u, 500u);
  CAPTURE(text, n);
  Step step(text, n);
  const FakeNear near(n, 4, text.find("share_group") != std::string::npos ? 40 : 0);
  step.select(near.set);
  for (std::uint32_t h = 0; h < kGroup; ++h) {
    auto tokens = attended_by(step.row, h);
    const auto near_ones = near_tokens(near.set, n);
    tokens.insert(tokens.end(), near_ones.begin(), near_ones.end());
    std::sort(tokens.begin(), tokens.end());
    REQUIRE(tokens == positions(0, n));
  }
}

TEST_CASE("a budget that holds the context is dense attention, and history learns from it", "[policy]") {
  const std::uint32_t n = GENERATE(5u, 40u, 68u);
  CAPTURE(n);
  Step step("lfps:local=0", n);
  const FakeNear near(n, 4, 0);
  step.select(near.set);
  REQUIRE(step.row.tokens.empty());
  REQUIRE(attended_by(step.row, 0) == positions(4, n));
  REQUIRE(step.kv.rows_scored == n - 4);
  REQUIRE(step.policy->wants_observation(0));
  const std::uint64_t before = step.policy->heap_bytes(0);  // With the step's weights, of which a lesson is made.
  step.policy->observe(0, step.kv);
  REQUIRE(step.policy->heap_bytes(0) != before);
}

TEST_CASE("nothing beyond the sinks: nothing selected, nothing read", "[policy]") {
  const std::string text = GENERATE("topk", "lfps", "history:share_group=on+pages", "full", "streaming");
  const std::uint32_t n = GENERATE(1u, 4u);
  CAPTURE(text, n);
  Step step(text, n);
  const FakeNear near(n, 4, 0);
  step.select(near.set);
  REQUIRE(step.row.attended() == 0);
  REQUIRE(step.kv.rows_scored == 0);
  step.policy->observe(0, step.kv);
}

TEST_CASE("an empty prompt decodes densely until its budget is full, then from history", "[lfps]") {
  Step step("lfps:budget=16,bypass=0", 400);
  auto policy = make("lfps:budget=16,bypass=0");
  policy->begin({.kv_head = 0, .tokens = 0, .queries = 0, .last_q = {}, .kv = &step.kv});
  for (std::uint32_t n = 1; n <= 60; ++n) {
    const FakeNear near(n, 4, 0);
    policy->forecast(0, n);
    const SelectionRow row = select(*policy, step.kv, n, step.q, near.set).row;
    if (n <= 20) {
      REQUIRE(attended_by(row, 2) == positions(4, std::max(n, 4u)));
    } else {
      REQUIRE(attended_by(row, 2).size() <= 16);
      REQUIRE(attended_by(row, 2).size() >= 6);  // 5 local tokens and the new one at least
    }
    policy->observe(0, step.kv);
  }
}

TEST_CASE("a history without contrast attends densely for one step and learns from it", "[lfps]") {
  const std::uint32_t n = 500;
  Step step("lfps:bypass=0", n);
  auto policy = make("lfps:bypass=0");
  policy->begin({.kv_head = 0, .tokens = n - 1, .queries = 0, .last_q = {}, .kv = &step.kv});  // imported prefix
  const FakeNear near(n, 4, 0);
  const SelectionRow first = select(*policy, step.kv, n, step.q, near.set).row;
  REQUIRE(attended_by(first, 0) == positions(4, n));
  REQUIRE(first.tokens.empty());
  policy->observe(0, step.kv);
  REQUIRE(attended_by(select(*policy, step.kv, n, step.q, near.set).row, 0).size() <= 64);
}

TEST_CASE("LFPS attends the best of what it scored", "[lfps]") {
  const std::uint32_t n = GENERATE(300u, 3000u);
  const std::string sources = GENERATE("history:alpha=0.05", "pages", "history:alpha=0.05+pages");
  const bool history = sources != "pages", pages = sources != "history:alpha=0.05";
  CAPTURE(n, sources);
  Step step(sources + " | top_k=30 | near=0%,sinks=4,recent=0", n);
  const FakeNear near(n, 4, 0);
  std::vector<std::uint32_t> ranked;
  if (pages) ranked = {0, 2, 1, 2, 3, 8, 0, 8};  // [group, 2]
  step.select(near.set, ranked);
  REQUIRE(step.counters.scored == step.kv.rows_scored);
  REQUIRE(step.counters.candidates == step.counters.scored);

  // The same candidates without a cut: what each head could choose from.
  Step whole(sources + " | top_k=max(1, 100%) | near=0%,sinks=4,recent=0", n);
  whole.select(near.set, ranked);
  std::uint64_t expanded = 0;
  for (std::uint32_t h = 0; h < kGroup; ++h) {
    const auto candidates = attended_by(whole.row, h);
    const auto chosen = attended_by(step.row, h);
    expanded += candidates.size();
    REQUIRE(chosen == best(candidates, 30, step.logit(h)));
    if (history) REQUIRE(is_subset(positions(n - 6, n), candidates));
    if (!history) REQUIRE(is_subset(positions((n - 1) / kPageTokens * kPageTokens, n), candidates));
    if (pages) {
      const auto page = ranked[h * 2 + 1];
      REQUIRE(is_subset(positions(std::max(page * kPageTokens, 4u), (page + 1) * kPageTokens), candidates));
    }
  }
  REQUIRE(step.counters.expanded_per_head == expanded);
}

TEST_CASE("the output error is bounded by the mass that was left out", "[policy]") {
  const std::string text =
      GENERATE("topk:budget=20", "lfps:budget=20,bypass=0", "history:share_group=on+pages | top_k=20 | near=0");
  const float q_scale = GENERATE(1.f, 5.f);
  const std::uint32_t n = 900;
  CAPTURE(text, q_scale);
  Step step(text, n, 3, q_scale);
  const FakeNear near(n, 4, text.front() == 'h' ? 128 : 0);
  step.select(near.set, text.front() == 'h' ? std::vector<std::uint32_t>{1, 2, 3, 4} : std::vector<std::uint32_t>{});
  const double longest = longest_value(step.kv, n);
  for (std::uint32_t h = 0; h < kGroup; ++h) {
    auto tokens = attended_by(step.row, h);
    const auto near_ones = near_tokens(near.set, n);
    tokens.insert(tokens.end(), near_ones.begin(), near_ones.end());
    const Attended sparse = attend(step.kv, step.q.data(), h, tokens);
    const Attended dense = attend(step.kv, step.q.data(), h, positions(0, n));
    REQUIRE(distance(sparse.out, dense.out) <= 2.0 * (1.0 - sparse.mass / dense.mass) * longest + 1e-12);
  }
}

TEST_CASE("a shared group attends the union of what its heads chose from the union", "[sluice]") {
  const std::uint32_t n = 2000;
  const std::vector<std::uint32_t> ranked = {1, 5, 9, 20, 33, 40, 2, 60};
  const FakeNear near(n, 4, 128);
  Step shared("history:share_group=on+pages | top_k=40", n);
  shared.select(near.set, ranked);
  REQUIRE(shared.row.members.empty());

  Step whole("history+pages | top_k=max(1, 100%)", n);
  whole.select(near.set, ranked);
  std::vector<std::uint32_t> united = whole.row.tokens, expected;
  for (std::uint32_t h = 0; h < kGroup; ++h) {
    const auto mine = best(united, 40, shared.logit(h));
    unite(expected, mine);
  }
  REQUIRE(shared.row.tokens == expected);
  REQUIRE(expected.size() > 40);
}

TEST_CASE("near candidates are observed but not attended", "[sluice]") {
  const std::uint32_t n = 1000;
  const FakeNear near(n, 4, n);

  Step following("lfps:bypass=0,observe_near=on", n);
  following.select(near.set);
  REQUIRE(following.row.attended() == 0);
  REQUIRE(following.counters.near_hits == following.counters.candidates);
  REQUIRE(following.counters.scored == following.counters.candidates);

  Step forgetting("lfps:bypass=0,observe_near=off", n);
  forgetting.select(near.set);
  REQUIRE(forgetting.row.attended() == 0);
  REQUIRE(forgetting.counters.near_hits == following.counters.near_hits);
  REQUIRE(forgetting.kv.rows_scored == 0);

  // What is foreseen next shows who learnt: one history was fed, the other stands still.
  const auto learns = [n](Step& step) {
    const Proposal before = proposal(*step.policy, step.kv, step.q, n);
    step.policy->observe(0, step.kv);
    return proposal(*step.policy, step.kv, step.q, n) != before;
  };
  REQUIRE_FALSE(learns(forgetting));
  REQUIRE(learns(following));
}

TEST_CASE("observed weights come from the best of all candidates, near ones included", "[lfps]") {
  const std::uint32_t n = 800;
  const FakeNear far(n, 4, 0), near(n, 4, 150);
  Step a("lfps:budget=20,bypass=0", n), b("lfps:budget=20,bypass=0", n);
  a.select(far.set);
  b.select(near.set);
  REQUIRE(b.counters.near_hits > 0);
  a.policy->observe(0, a.kv);
  b.policy->observe(0, b.kv);
  REQUIRE(proposal(*a.policy, a.kv, a.q, n) == proposal(*b.policy, b.kv, b.q, n));
  // Attended: the best of the far ones, so what is near makes room for more.
  Step whole("lfps:budget=100%,min_tokens=1,bypass=0", n);
  whole.select(near.set);
  for (std::uint32_t h = 0; h < kGroup; ++h) {
    REQUIRE(attended_by(b.row, h) == best(attended_by(whole.row, h), 20, b.logit(h)));
  }
}

TEST_CASE("sinks and a window that cut words and pages are recognised, whatever a page's size", "[policy]") {
  const std::uint32_t page_tokens = GENERATE(8u, 16u, 64u, 128u, 256u);
  const std::uint32_t n = 1500, sinks = 70, recent = 301;
  const FakeNear near(n, sinks, recent, page_tokens);
  auto policy = make_layer_policy(parse_policy("topk:budget=100%,sinks=70"), kShape, page_tokens, LayerId{0});
  Step step("topk:budget=100%", n);
  const SelectionRow row = select(*policy, step.kv, n, step.q, near.set).row;
  std::vector<std::uint32_t> expected;
  for (std::uint32_t t = 0; t < n; ++t) {
    if (!near.set.contains(t)) expected.push_back(t);
  }
  REQUIRE(row.tokens == expected);
}

TEST_CASE("a step repeated from select gives the same selection", "[policy]") {
  const std::string text = GENERATE("topk", "lfps", "history:share_group=on+pages",
                                    "history:observe_near=off+pages");
  CAPTURE(text);
  const std::uint32_t n = 1200;
  Step step(text, n);
  const FakeNear near(n, 4, 128);
  const std::vector<std::uint32_t> ranked =
      text.front() == 'h' ? std::vector<std::uint32_t>{4, 5, 6, 7} : std::vector<std::uint32_t>{};
  step.select(near.set, ranked);
  const SelectionRow first = step.row;
  step.select(near.set, ranked);
  REQUIRE(first.tokens == step.row.tokens);
  REQUIRE(first.members == step.row.members);
  REQUIRE(first.scores == step.row.scores);
}

TEST_CASE("a budget of far tokens cuts each head's choice by score", "[policy][far]") {
  const std::string text = GENERATE("topk:budget=40", "history:alpha=0.05 | top_k=40 | near=0%,sinks=4,recent=0",
                                    "history:alpha=0.05,share_group=on | top_k=40 | near=0%,sinks=4,recent=0",
                                    "exact | top_p=0.99 | near=0%,sinks=4,recent=0");
  const std::uint32_t n = GENERATE(500u, 900u);
  CAPTURE(text, n);
  Step free(text, n), bound(text + " | far=max(24, 6%)", n);
  const std::uint32_t most = std::max(24u, static_cast<std::uint32_t>(std::lround(0.06 * n))) / kGroup;
  const FakeNear near(n, 4, 30);
  free.select(near.set);
  bound.select(near.set);
  REQUIRE(free.row.tokens.size() > bound.row.tokens.size());
  REQUIRE(bound.row.tokens.size() <= most * kGroup);
  const bool united = bound.row.members.empty();
  for (std::uint32_t h = 0; h < kGroup; ++h) {
    const auto kept = attended_by(bound.row, h);
    const auto chosen = best(attended_by(free.row, h), most, bound.logit(h));
    REQUIRE(is_subset(chosen, kept));
    if (!united) REQUIRE(kept == chosen);
  }
}

TEST_CASE("a history that tells nothing, and a context that top_k holds, keep to the budget of far tokens",
          "[policy][far]") {
  const std::uint32_t n = 500;
  const std::string text =
      GENERATE("lfps:bypass=0 | far=40", "lfps:bypass=0,budget=600 | far=40", "topk:budget=600,far=40");
  CAPTURE(text);
  Step step("topk", n);  // For its keys and queries.
  auto policy = make(text);
  policy->begin({.kv_head = 0, .tokens = n - 1, .queries = 0, .last_q = {}, .kv = &step.kv});
  const FakeNear near(n, 4, 0);
  for (int again = 0; again < 2; ++again) {
    const SelectionRow row = select(*policy, step.kv, n, step.q, near.set).row;
    REQUIRE(row.runs.empty());
    for (std::uint32_t h = 0; h < kGroup; ++h) {
      const auto attended = attended_by(row, h);
      REQUIRE(attended.size() <= 10);
      if (again == 0) REQUIRE(attended == best(positions(4, n), 10, step.logit(h)));
    }
    policy->observe(0, step.kv);
  }
  // As many as there are: no cut.
  policy = make(text.substr(0, text.size() - 2) + "9000");
  policy->begin({.kv_head = 0, .tokens = n - 1, .queries = 0, .last_q = {}, .kv = &step.kv});
  REQUIRE(attended_by(select(*policy, step.kv, n, step.q, near.set).row, 0) == positions(4, n));
}
