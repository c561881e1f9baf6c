// Policies as text: presets, parsing, ranges, words.

#include <initializer_list>
#include <string>
#include <vector>

#include "scheduler/layer_policy.hpp"
#include "sluice/error.hpp"
#include "tests/support/catch.hpp"

using namespace sluice;

namespace {

std::string complaint(const std::string& text) {
  try {
    (void)parse_policy(text);
  } catch (const Error& error) {
    REQUIRE(error.code() == Errc::invalid_argument);
    return error.what();
  }
  return "";
}

/// Every part occurs in the message.
void expect(const std::string& message, std::initializer_list<const char*> parts) {
  for (const std::string part : parts) {
    CAPTURE(message, part);
    REQUIRE(message.find(part) != std::string::npos);
  }
}

}  // namespace

TEST_CASE("presets are valid, parse to themselves and have distinct words", "[policy_text]") {
  const std::vector<std::string> order = {"full", "topk", "streaming", "lfps", "sluice", "sluice-fast"};
  REQUIRE(policy_presets().size() == order.size());
  std::vector<std::string> words;
  for (std::size_t i = 0; i < order.size(); ++i) {
    const PolicyPreset& preset = policy_presets()[i];
    REQUIRE(preset.spec.name == order[i]);
    REQUIRE_FALSE(preset.summary.empty());
    REQUIRE(parse_policy(order[i]) == preset.spec);
    REQUIRE_NOTHROW(validate(preset.spec));
    words.push_back(to_string(preset.spec));
  }
  REQUIRE(words == std::vector<std::string>{
                       "all | near=4 sinks+10%",
                       "exact | top_k=max(64, 2%) | near=4 sinks",
                       "none | near=4 sinks+1020 recent",
                       "history(alpha=0.2) | top_k=max(64, 2%) | near=4 sinks | bypass=0.85",
                       "history(alpha=0.2, shared)+pages(cuboid_mean) | top_k=max(64, 2%) | near=10%",
                       "history(alpha=1, shared, limit=10%, every 64 steps)+pages(cuboid_mean, 8) | top_k=all | near=10%",
                   });
}

TEST_CASE("sluice-fast is a composition of sluice's stages", "[policy_text]") {
  PolicySpec composed = parse_policy("sluice:budget=100%,observe_every=64,pages=8,limit=10%,alpha=1");
  composed.name = "sluice-fast";
  REQUIRE(composed == parse_policy("sluice-fast"));
}

TEST_CASE("every key reaches its field", "[policy_text]") {
  const PolicySpec spec = parse_policy(
      "sluice:alpha=0.3,decay=0.9,init=16,local=7,share_group=off,observe_near=false,observe_every=4,limit=10%,digest=box,"
      "pages=5|4%,budget=100|3%,bypass=0.9,near=25%,sinks=8,recent=64,dense=2");
  REQUIRE(spec.history == HistoryOptions{.alpha = 0.3f,
                                         .decay = 0.9f,
                                         .init_queries = 16,
                                         .local_tokens = 7,
                                         .share_in_group = false,
                                         .observe_near = false,
                                         .observe_every = 4,
                                         .limit = 0.1f});
  REQUIRE(spec.pages == PageSourceOptions{.digest = DigestKind::box, .min_pages = 5, .share = 0.04f});
  REQUIRE(spec.budget == BudgetOptions{.min_tokens = 100, .share = 0.03f});
  REQUIRE(spec.near == NearOptions{.sink_tokens = 8, .recent_tokens = 64, .share = 0.25f});
  REQUIRE(spec.bypass_threshold == 0.9f);
  REQUIRE(spec.dense_layers == 2);
  REQUIRE(to_string(spec) ==
          "history(alpha=0.3, decay=0.9, init=16, local=7, far only, limit=10%, every 4 steps)+pages(box, max(5, 4%)) | top_k=max(100, 3%) | "
          "near=8 sinks+64 recent+25% | bypass=0.9 | dense=2");
}

TEST_CASE("a budget is a fixed count, a share above the preset's floor, or the larger of both", "[policy_text]") {
  using B = BudgetOptions;
  REQUIRE(parse_policy("topk:budget=256").budget == B{.min_tokens = 256, .share = 0.f});
  REQUIRE(parse_policy("topk:budget=5%").budget == B{.min_tokens = 64, .share = 0.05f});
  REQUIRE(parse_policy("topk:budget=0.05").budget == B{.min_tokens = 64, .share = 0.05f});
  REQUIRE(parse_policy("topk:budget=16|0.05").budget == B{.min_tokens = 16, .share = 0.05f});
  REQUIRE(parse_policy("topk:budget=5%,min_tokens=8").budget == B{.min_tokens = 8, .share = 0.05f});
  REQUIRE(parse_policy("sluice:pages=6").pages.share == 0.f);
  REQUIRE(parse_policy("sluice:pages=6").pages.min_pages == 6);
  REQUIRE(parse_policy("sluice:pages=6%,min_pages=2").pages == PageSourceOptions{.min_pages = 2, .share = 0.06f});
}

TEST_CASE("sources compose freely, whatever the order of the keys", "[policy_text]") {
  const PolicySpec spec = parse_policy("topk:pages=4,sources=history+pages,alpha=0.4");
  REQUIRE(spec.uses(Source::history));
  REQUIRE(spec.uses(Source::pages));
  REQUIRE_FALSE(spec.uses(Source::exact));
  REQUIRE(parse_policy("sluice:sources=none").sources == 0);
}

TEST_CASE("complaints name the word, where it is, and what exists", "[policy_text]") {
  expect(complaint("lfsp"), {"\"lfsp\"", "full, topk, streaming, lfps, sluice"});
  expect(complaint(""), {"full, topk"});
  expect(complaint("lfps:alhpa=0.3"), {"\"alhpa\" at character 6", "alpha, decay, init"});
  expect(complaint("lfps:alpha=0.3x"), {"\"0.3x\" at character 12 is not a number"});
  expect(complaint("lfps:alpha="), {"\"\" at character 12 is not a number"});
  expect(complaint("lfps:local=-1"), {"\"-1\" at character 12 is not a whole number"});
  expect(complaint("lfps:budget=64|x%"), {"\"x%\" at character 16 is not a share"});
  expect(complaint("lfps:budget=2%%"), {"not a share"});
  expect(complaint("lfps:init=99999999999"), {"not a whole number"});
  expect(complaint("lfps:alpha"), {"\"alpha\" at character 6 is not key=value"});
  expect(complaint("lfps:"), {"not key=value"});
  expect(complaint("lfps:alpha=0.3,"), {"at character 16 is not key=value"});
  expect(complaint("sluice:digest=cube"), {"\"cube\"", "box, cuboid_mean"});
  expect(complaint("sluice:share_group=maybe"), {"neither on nor off"});
  expect(complaint("topk:sources=exact+lsh"), {"\"lsh\" at character 20", "history"});
}

TEST_CASE("options that the sources never read are refused", "[policy_text]") {
  expect(complaint("topk:alpha=0.3"), {"\"alpha\" at character 6 means nothing here", "history"});
  expect(complaint("lfps:digest=box"), {"means nothing here", "pages"});
  expect(complaint("streaming:budget=64"), {"means nothing here"});
  expect(complaint("full:bypass=0.9"), {"means nothing here"});
  REQUIRE(complaint("full:near=20%,sinks=2,recent=9,dense=1").empty());
}

TEST_CASE("values out of range are refused with field and range", "[policy_text]") {
  expect(complaint("lfps:alpha=0"), {"history.alpha is 0", "(0, 10]"});
  expect(complaint("lfps:alpha=nan"), {"history.alpha is nan"});
  expect(complaint("lfps:alpha=10.1"), {"history.alpha"});
  expect(complaint("lfps:decay=1"), {"history.decay is 1", "(0, 1)"});
  expect(complaint("lfps:init=257"), {"history.init_queries is 257", "[1, 256]"});
  expect(complaint("lfps:local=4097"), {"history.local_tokens"});
  expect(complaint("lfps:budget=0"), {"budget.min_tokens is 0"});
  expect(complaint("lfps:budget=101%"), {"budget.share is 1.01"});
  expect(complaint("lfps:bypass=1.5"), {"bypass_threshold"});
  expect(complaint("sluice:pages=0"), {"pages.min_pages is 0"});
  expect(complaint("sluice:pages=-2%"), {"pages.share is -0.02"});
  expect(complaint("full:sinks=4097"), {"near.sink_tokens"});
  expect(complaint("full:recent=1048577"), {"near.recent_tokens"});
  expect(complaint("full:near=1.1"), {"near.share"});
  expect(complaint("full:sources=all+pages"), {"source all already attends every token"});

  PolicySpec spec = parse_policy("lfps");
  spec.sources = 128;
  REQUIRE_THROWS_AS(validate(spec), Error);
  REQUIRE_THROWS_AS(
      scheduler::make_layer_policy(spec, {.layers = 1, .q_heads = 1, .kv_heads = 1, .head_dim = 16}, 32, LayerId{0}),
      Error);
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
  REQUIRE(budget_tokens({.min_tokens = 1, .share = 1.f}, 12345) == 12345);
  REQUIRE(budget_tokens({.min_tokens = 0x7fff'ffffu, .share = 0.f}, 7) == 7);
  REQUIRE(budget_pages({.min_pages = 8, .share = 0.03f}, 3) == 3);
  REQUIRE(budget_pages({.min_pages = 8, .share = 0.03f}, 128) == 8);
  REQUIRE(budget_pages({.min_pages = 8, .share = 0.03f}, 4096) == 123);
}
