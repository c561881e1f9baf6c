// Policies as text: presets, what words mean, and that they parse back.

#include <random>
#include <string>
#include <utility>
#include <vector>

#include "scheduler/layer_policy.hpp"
#include "sluice/page_rules.hpp"
#include "tests/scheduler/complaints.hpp"

using namespace sluice;
using scheduler::test::complaint;
using scheduler::test::expect;

TEST_CASE("presets are valid, parse to themselves and have distinct words", "[policy_text]") {
  const std::vector<std::pair<std::string, std::string>> expected = {
      {"full", "all | near=10%,sinks=4,recent=0"},
      {"topk", "exact | top_k=max(64, 2%) | near=0%,sinks=4,recent=0"},
      {"streaming", "none | near=0%,sinks=4,recent=1020"},
      {"quest", "pages:box,budget=1024 | top_k=all | near=0%,sinks=0,recent=0 | dense=2 | page=16"},
      {"arkvale", "pages:budget=1280 | top_k=all | near=0%,sinks=64,recent=64 | dense=2 | page=32"},
      {"psa", "pages | progressive=0.95 | near=0%,sinks=0,recent=0 | page=32"},
      {"twilight", "pages:box,budget=8192 | int4 | top_p=0.95 | near=0%,sinks=4,recent=0 | dense=2 | page=16"},
      {"tactic", "clusters | fitted=0.9 | near=0%,sinks=0,recent=0"},
      {"magicpig", "lsh | sampled | near=0%,sinks=4,recent=64 | dense=0,every=16"},
      {"double_sparsity", "labels | top_k=all | near=0%,sinks=4,recent=0"},
      {"snapkv", "snapshot | top_k=all | near=0%,sinks=0,recent=0"},
      {"pyramidkv", "snapshot:pyramid=20 | top_k=all | near=0%,sinks=0,recent=0"},
      {"adakv", "snapshot:floor=20% | top_k=all | near=0%,sinks=0,recent=0"},
      {"vattention", "exact | verified=0.1 | near=0%,sinks=128,recent=128"},
      {"adamas", "exact | hadamard | top_k=128 | near=0%,sinks=4,recent=0 | dense=2"},
      {"infinigen", "exact | skewed=20% | rehearsed | within=4,most=max(1, 20%) | near=0%,sinks=0,recent=1 | dense=2"},
      {"lfps", "history | top_k=max(64, 2%) | near=0%,sinks=4,recent=0 | bypass=sink:0.85"},
      {"sluice", "exact | int4 | sample=256 | near=0%,sinks=4,recent=128 | page=32"},
  };
  REQUIRE(policy_presets().size() == expected.size());
  for (std::size_t i = 0; i < expected.size(); ++i) {
    const PolicyPreset& preset = policy_presets()[i];
    REQUIRE(preset.spec.name == expected[i].first);
    REQUIRE_FALSE(preset.summary.empty());
    REQUIRE(parse_policy(expected[i].first) == preset.spec);
    REQUIRE_NOTHROW(validate(preset.spec));
    REQUIRE(to_string(preset.spec) == expected[i].second);
  }
}

TEST_CASE("a composition's words parse back to it", "[policy_text]") {
  const std::vector<std::string> texts = {
      "full",
      "topk",
      "streaming",
      "quest",
      "arkvale",
      "psa",
      "twilight",
      "tactic",
      "magicpig",
      "lfps",
      "sluice",
      "history+pages | top_p=0.95",
      "pages:quest,budget=8192 | int4 | top_p=0.9",
      "clusters | fitted=0.9",
      "clusters:size=16,iterations=3,recluster=128,least=64,candidates=100,head=1%,near_window=20%,far_window=0.5,"
      "window=1% "
      "| top_k=32",
      "lsh:bits=8,tables=75,collisions=1,recent_prompt=9,seed=12345678901 | sampled | dense=0,every=16",
      "lsh+clusters+pages:cuboid_mean,pages=max(3, 1%)+history:init=7 | int4 | top_k=max(8, 3%) | bypass=sink:0.85 | "
      "near=0%",
      "double_sparsity:budget=2%",
      "double_sparsity:channels=8,budget=max(32, 3%)",
      "lsh+pages+labels:channels=7,budget=90 | top_k=9 | bypass=sink:0.85 | far=900",
      "labels:budget=8192 | int4 | top_p=0.95 | near=0%,sinks=4,recent=0 | dense=2",
      "history+labels:budget=all | top_p=0.9",
      "snapkv:window=9,kernel=1,pyramid=7 | top_k=30",
      "snapshot:budget=99,pooling=mean,floor=3%+exact | int4 | top_p=0.7",
      "adamas | page=8",
      "vattention:heavy=99,delta=1%",
      "infinigen:alpha=5,most=400,ratio=10%",
      "infinigen | dense=1 | far=2%",
      "exact | skewed=0.3 | within=2.5",
      "clusters:size=16 | int4 | fitted=0.8 | near=0%",
      "exact | int3 | sample=256",
      "exact | int3 | top_k=max(8, 3%)",
      "exact | int4 | verified=3%,delta=0.2,heavy=max(9, 5%),sample=7%",
      "exact | int4 | sample=max(32, 1%),seed=4,redraw=9,draws=group,error=3%,most=400 | near=0%",
      "sluice:error=2.5%",
      "pages:box | progressive=98%,microbatch=7,rule=certified | page=32",
      "lfps:alpha=0.3 | bypass=off | near=20%,sinks=1,recent=2",
      "sluice | far=max(4096, 1%)",
      "exact | int4 | top_p=0.9 | far=1% | near=0%",
      "topk:far=2%,budget=7",
      "psa | far=5000",
      "psa | int4",
      "pages:box | int4 | progressive=98%,microbatch=7,rule=median | near=0%",
      "history+pages | top_p=0.95 | far=99",
      "lfps | far=all",
      "scores",
      "scores | top_k=max(2048, 1%) | near=0%,sinks=0,recent=1 | dense=3",
      "scores | top_p=0.9 | far=2%",
      "none | near=3%"};
  for (const std::string& text : texts) {
    CAPTURE(text);
    PolicySpec spec = parse_policy(text);
    CAPTURE(to_string(spec));
    PolicySpec again = parse_policy(to_string(spec));
    again.name = spec.name;
    REQUIRE(again == spec);
  }
}

TEST_CASE("blanks mean nothing, and stages come in any order", "[policy_text]") {
  PolicySpec tight = parse_policy("history:alpha=0.3+pages:box|int4|top_p=0.95|near=10%,sinks=2");
  PolicySpec loose = parse_policy("  history : alpha = 0.3 + pages : box |near = 10% , sinks = 2|  top_p = 95% | int4 ");
  tight.name = loose.name = "";
  REQUIRE(tight == loose);
  REQUIRE(tight.estimate == Estimate::int4);
  REQUIRE(tight.budget.kind == BudgetKind::top_p);
  REQUIRE(tight.budget.mass == 0.95f);
  REQUIRE(tight.near.sink_tokens == 2);
}

TEST_CASE("stages change a preset, whose composition then bears the whole text as its name", "[policy_text]") {
  const PolicySpec spec = parse_policy("quest:budget=256 | int4 | top_p=0.9 | dense=0");
  REQUIRE(spec.name == "quest:budget=256 | int4 | top_p=0.9 | dense=0");
  REQUIRE(spec.pages == PageSourceOptions{.digest = DigestKind::box, .min_pages = 1, .min_tokens = 256, .share = 0.f});
  REQUIRE(spec.dense_layers == 0);
  REQUIRE(spec.page_tokens == 16);
  REQUIRE(parse_policy("lfps:alpha=0.3").name == "lfps");
}

TEST_CASE("every key reaches its field", "[policy_text]") {
  const PolicySpec spec = parse_policy(
      "history:alpha=0.3,decay=0.9,init=16,local=7,share_group=off,observe_near=false,observe_every=4,limit=10%,"
      "tables=slash,expand=off+pages:box,"
      "pages=max(5,4%) | int4 | top_k=max(100,3%) | far=max(4000,2%) | bypass=0.9 | near=25%,sinks=8,recent=64 | "
      "dense=2,every=5 | page=16");
  REQUIRE(spec.history == HistoryOptions{.alpha = 0.3f,
                                         .decay = 0.9f,
                                         .init_queries = 16,
                                         .local_tokens = 7,
                                         .share_in_group = false,
                                         .observe_near = false,
                                         .observe_every = 4,
                                         .limit = 0.1f,
                                         .tables = HistoryTables::slash,
                                         .expand = false});
  REQUIRE(spec.pages == PageSourceOptions{.digest = DigestKind::box, .min_pages = 5, .share = 0.04f});
  REQUIRE(spec.budget == BudgetOptions{.min_tokens = 100, .share = 0.03f});
  REQUIRE(spec.far == FarOptions{.min_tokens = 4000, .share = 0.02f});
  REQUIRE(spec.near == NearOptions{.sink_tokens = 8, .recent_tokens = 64, .share = 0.25f});
  REQUIRE(spec.bypass_threshold == 0.9f);
  REQUIRE(spec.dense_layers == 2);
  REQUIRE(spec.dense_every == 5);
  REQUIRE(
      to_string(spec) ==
      "history:alpha=0.3,decay=0.9,init=16,local=7,observe_near=off,observe_every=4,limit=10%,tables=slash,expand=off+"
      "pages:box,pages=max(5, 4%) | "
      "int4 | top_k=max(100, 3%) | far=max(4000, 2%) | near=25%,sinks=8,recent=64 | bypass=sink:0.9 | "
      "dense=2,every=5 | page=16");
}

TEST_CASE("a budget is a fixed count, a share above the preset's floor, or the larger of both", "[policy_text]") {
  using B = BudgetOptions;
  REQUIRE(parse_policy("topk:budget=256").budget == B{.min_tokens = 256, .share = 0.f});
  REQUIRE(parse_policy("topk:budget=5%").budget == B{.min_tokens = 64, .share = 0.05f});
  REQUIRE(parse_policy("topk:budget=0.05").budget == B{.min_tokens = 64, .share = 0.05f});
  REQUIRE(parse_policy("topk:budget=max(16, 0.05)").budget == B{.min_tokens = 16, .share = 0.05f});
  REQUIRE(parse_policy("topk:budget=5%,min_tokens=8").budget == B{.min_tokens = 8, .share = 0.05f});
  REQUIRE(parse_policy("pages:pages=6").pages.share == 0.f);
  REQUIRE(parse_policy("pages:pages=6").pages.min_pages == 6);
  REQUIRE(parse_policy("pages:pages=6%,min_pages=2").pages == PageSourceOptions{.min_pages = 2, .share = 0.06f});
}

TEST_CASE("what a method calls its budget", "[policy_text]") {
  REQUIRE(parse_policy("quest:budget=512").pages.min_tokens == 512);
  REQUIRE(parse_policy("quest:budget=512").budget.share == 1.f);
  REQUIRE(parse_policy("pages:pages=7").pages == PageSourceOptions{.min_pages = 7, .share = 0.f});
  expect(complaint("quest:budget=0"), {"\"0\" at character 14", "at least one token"});
  expect(complaint("quest:mass=0.9"), {"\"0.9\"", "no share of the softmax mass"});
}

TEST_CASE("budgets are clamped to what there is and rounded to nearest", "[policy_text]") {
  using scheduler::budget_pages;
  using scheduler::budget_tokens;
  const BudgetOptions budget{.min_tokens = 64, .share = 0.02f};
  REQUIRE(budget_tokens(budget, 0) == 0);
  REQUIRE(budget_tokens(budget, 10) == 10);
  REQUIRE(budget_tokens(budget, 64) == 64);
  REQUIRE(budget_tokens(budget, 3200) == 64);
  REQUIRE(budget_tokens(budget, 5000) == 100);  // 0.02f is a little less than 2%
  REQUIRE(budget_tokens(budget, 131072) == 2621);
  REQUIRE(budget_tokens(BudgetOptions{.min_tokens = 1, .share = 1.f}, 12345) == 12345);
  REQUIRE(budget_tokens(BudgetOptions{.min_tokens = 0x7fff'ffffu, .share = 0.f}, 7) == 7);
  REQUIRE(budget_pages({.min_pages = 8, .share = 0.03f}, 3, 16) == 3);
  REQUIRE(budget_pages({.min_pages = 8, .share = 0.03f}, 128, 16) == 8);
  REQUIRE(budget_pages({.min_pages = 8, .share = 0.03f}, 4096, 16) == 123);
  REQUIRE(budget_pages({.min_pages = 1, .min_tokens = 1000, .share = 0.f}, 4096, 16) == 63);
  REQUIRE(budget_pages({.min_pages = 1, .min_tokens = 1000, .share = 0.f}, 4096, 32) == 32);
}

TEST_CASE("whatever numbers a policy has, its words parse back to it", "[policy_text]") {
  std::mt19937 rng(7);
  const auto share = [&rng](float low, float high) { return std::uniform_real_distribution<float>(low, high)(rng); };
  for (int i = 0; i < 1000; ++i) {
    PolicySpec spec = parse_policy("history+pages+clusters+lsh | top_k=64");
    spec.history.alpha = share(0.01f, 10.f);
    spec.history.decay = share(0.01f, 0.99f);
    spec.history.limit = share(0.f, 1.f);
    spec.pages.min_pages = 1 + static_cast<std::uint32_t>(rng() % 100);
    spec.pages.share = i % 3 == 0 ? 1.f : share(0.f, 1.f);
    spec.clusters.head_share = share(0.001f, 0.01f);
    spec.clusters.near_window = share(0.1f, 0.3f);
    spec.clusters.far_window = share(0.5f, 0.9f);
    spec.clusters.window_share = share(0.001f, 0.1f);
    spec.budget.min_tokens = 1 + static_cast<std::uint32_t>(rng() % 100);
    spec.budget.share = i % 4 == 0 ? 1.f : share(0.f, 1.f);
    spec.near.share = share(0.f, 1.f);
    spec.far = {.min_tokens = static_cast<std::uint32_t>(rng() % 5000), .share = share(0.f, 1.f)};
    if (i % 5 == 0) spec.far = {};
    spec.bypass_threshold = share(0.01f, 1.f);
    CAPTURE(to_string(spec));
    PolicySpec again = parse_policy(to_string(spec));
    again.name = spec.name;
    REQUIRE(again == spec);
  }
}

TEST_CASE("what a policy does not read has its default, so that its words parse back to it", "[policy_text]") {
  const std::string text = GENERATE("quest:budget=256 | top_p=0.9", "twilight | top_k=8",
                                    "psa:microbatch=9,rule=mean | top_k=8", "tactic:mass=0.5 | top_k=8",
                                    "psa:microbatch=2,rule=mean | top_p=0.8", "vattention | top_k=max(9, 9%)");
  CAPTURE(text);
  const PolicySpec spec = parse_policy(text);
  CAPTURE(to_string(spec));
  PolicySpec again = parse_policy(to_string(spec));
  again.name = spec.name;
  REQUIRE(again == spec);
}

TEST_CASE("far tokens have a budget in tokens, a share of what is visible, the larger of both, or none",
          "[policy_text]") {
  using F = FarOptions;
  REQUIRE(parse_policy("sluice").far == F{});
  REQUIRE(parse_policy("sluice | far=4K").far == F{.min_tokens = 4096, .share = 0.f});
  REQUIRE(parse_policy("sluice | far=1%").far == F{.min_tokens = 0, .share = 0.01f});
  REQUIRE(parse_policy("sluice | far=max(512, 0.5%)").far == F{.min_tokens = 512, .share = 0.005f});
  REQUIRE(parse_policy("sluice | far=all").far == F{});
  REQUIRE(parse_policy("sluice | far=100%").far == F{});
  REQUIRE(to_string(parse_policy("topk | far=1%")) == "exact | top_k=max(64, 2%) | far=1% | near=0%,sinks=4,recent=0");
  REQUIRE(to_string(parse_policy("topk:far=900")) == "exact | top_k=max(64, 2%) | far=900 | near=0%,sinks=4,recent=0");
  // Of a policy that attends everything from now on nothing is left of it.
  PolicySpec whole = parse_policy("topk | far=900");
  whole.sources = static_cast<std::uint16_t>(Source::all);
  REQUIRE(unsupported_reasons(whole).size() == 1);
}

TEST_CASE("a budget of far tokens is shared out evenly over the query heads of a layer", "[policy_text]") {
  using scheduler::far_tokens_per_head;
  using scheduler::tokens_per_head;
  constexpr scheduler::RowShape kShape{.page_tokens = 16, .q_heads = 32, .kv_heads = 8};
  REQUIRE(far_tokens_per_head({}, 1000, kShape) == 1000);
  REQUIRE(far_tokens_per_head({.min_tokens = 320, .share = 0.f}, 1000, kShape) == 10);
  REQUIRE(far_tokens_per_head({.min_tokens = 351, .share = 0.f}, 1000, kShape) == 10);
  REQUIRE(far_tokens_per_head({.min_tokens = 31, .share = 0.f}, 1000, kShape) == 0);
  REQUIRE(far_tokens_per_head({.min_tokens = 0x7fff'ffffu, .share = 0.f}, 1000, kShape) == 1000);
  REQUIRE(far_tokens_per_head({.share = 0.01f}, 131'072, kShape) == 327);  // 1% of 8 x 131,072, over 32 heads.
  REQUIRE(far_tokens_per_head({.min_tokens = 320, .share = 0.01f}, 1000, kShape) == 10);
  REQUIRE(far_tokens_per_head({.share = 0.5f}, 0x7fff'ffffu, kShape) == 268'435'455);
  REQUIRE(far_tokens_per_head({.share = 0.01f}, 0, kShape) == 0);
  REQUIRE(tokens_per_head(parse_policy("topk | far=320"), 5000, kShape) == 10);
  REQUIRE(tokens_per_head(parse_policy("topk | far=max(320, 4%)"), 5000, kShape) == 50);
  REQUIRE(tokens_per_head(parse_policy("topk | far=90%"), 5000, kShape) == 100);
}
