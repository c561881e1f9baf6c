// Policies that are refused, and what is said of them.

#include <limits>
#include <string>

#include "scheduler/layer_policy.hpp"
#include "sluice/page_rules.hpp"
#include "tests/scheduler/complaints.hpp"

using namespace sluice;
using scheduler::test::complaint;
using scheduler::test::complaint_of;
using scheduler::test::expect;

TEST_CASE("stages that do not go together say why and what would", "[policy_text]") {
  expect(complaint("history | fitted=0.9"), {"fitted needs", "clusters | fitted=0.9"});
  expect(complaint("clusters+pages | fitted=0.9"), {"fitted needs"});
  expect(complaint("history+pages | progressive=0.95"), {"progressive walks", "pages | progressive=0.95"});
  expect(complaint("pages | progressive=0.95,rule=certified"), {"digest box", "pages:box"});
  expect(complaint("pages | sampled"), {"sampled corrects", "lsh | sampled"});
  expect(complaint("pages | int4 | sample=64"), {"sample draws among all tokens", "exact | int4 | sample=128"});
  expect(complaint("pages | int3 | top_p=0.9"), {"int3 estimates all tokens", "exact | int3 | sample=256"});
  expect(complaint("psa | int3"), {"needs exact alone", "or int4"});
  expect(complaint("tactic | int3"), {"needs exact alone"});
  expect(complaint("exact | int3 | verified=0.1"), {"top_k, top_p or sample"});
  expect(complaint("history | int3 | top_k=9"), {"needs exact alone"});
  expect(complaint("lsh | int4 | sampled"), {"estimate candidates", "scores as it goes"});
  expect(complaint("tactic | hadamard"), {"estimate candidates", "int4 before fitted"});
  expect(complaint("tactic | int4 | far=5000"), {"no budget of far tokens", "drop far"});
  expect(complaint("psa | int4 | far=5000"), {"no budget of far tokens", "drop far"});
  expect(complaint("psa | hadamard"), {"estimate candidates", "progressive do"});
  expect(complaint("pages:box | int4 | progressive=0.9,rule=certified"), {"bounds keys", "drop int4"});
  expect(complaint("pages | progressive=0.9 | bypass=0.8"), {"bypass works with"});
  expect(complaint("exact | hadamard | top_k=8 | bypass=0.8,check=on"), {"what keys weigh", "check=off"});
  expect(complaint("all | top_p=0.9"), {"write exact instead"});
  expect(complaint("none | int4"), {"name one"});
  expect(complaint("full | bypass=0.9"), {"does not search"});
  expect(complaint("lsh | sampled | far=100"), {"sample that is cut by score", "top_k"});
  expect(complaint("exact | hadamard | top_p=0.9"), {"which keys come first", "int4"});
  expect(complaint("exact | hadamard | verified=0.1"), {"which keys come first", "top_k"});
  expect(complaint("history+pages | hadamard"), {"history learns from scores", "drop history"});
  expect(complaint("clusters | hadamard | fitted=0.9"), {"scores as it goes"});
  expect(complaint("labels | sampled"), {"sampled corrects", "needs lsh alone"});
  expect(complaint("labels | verified=0.1"), {"needs exact alone"});
  expect(complaint("labels | int4 | sample=64"), {"sample draws among all tokens"});
  expect(complaint("all+labels"), {"source all already attends every token"});
  expect(complaint("full | hadamard"), {"write exact instead"});
  expect(complaint("pages | verified=0.1"), {"verified samples", "exact | verified=0.1"});
  expect(complaint("vattention | far=100"), {"sample that is cut by score", "top_k"});
  expect(complaint("vattention | bypass=0.9"), {"bypass works with"});
  expect(complaint("exact | within=4"), {"needs exact alone", "exact | skewed=20% | within=4"});
  expect(complaint("exact+pages | skewed=20% | within=4"), {"needs exact alone"});
  expect(complaint("exact | skewed=20%"), {"for within", "within=4"});
  expect(complaint("exact | rehearsed"), {"rehearsed queries", "drop rehearsed"});
  expect(complaint("full | rehearsed"), {"rehearsed queries", "drop rehearsed"});
  expect(complaint("infinigen | dense=0"), {"before the first", "dense=1"});
  expect(complaint("infinigen | bypass=0.9"), {"bypass works with"});
  REQUIRE(unsupported_reasons(parse_policy("exact | int4 | top_p=0.9 | bypass=0.9")).empty());
  PolicySpec spec = parse_policy("lsh | sampled");
  spec.sources = static_cast<std::uint16_t>(Source::history);
  spec.estimate = Estimate::int4;
  REQUIRE(unsupported_reasons(spec).size() == 2);
}

TEST_CASE("complaints name the word, where it is, and what exists", "[policy_text]") {
  expect(complaint("lfsp"), {"\"lfsp\" at character 1", "full, topk, streaming", "all, exact, history"});
  expect(complaint(""), {"full, topk"});
  expect(complaint("lfps:alhpa=0.3"), {"\"alhpa\" at character 6", "alpha, decay, init"});
  expect(complaint("lfps:alpha=0.3x"), {"\"0.3x\" at character 12 is not a number"});
  expect(complaint("lfps:alpha="), {"\"\" at character 12 is not a number"});
  expect(complaint("lfps:local=-1"), {"\"-1\" at character 12 is not a whole number"});
  expect(complaint("lfps:budget=max(64, x%)"), {"\"x%\" at character 21 is not a share"});
  expect(complaint("lfps:budget=max(64)"), {"\"max(64)\"", "max(64, 2%)"});
  expect(complaint("lfps:budget=max(64, 2%"), {"max(64, 2%)"});
  expect(complaint("lfps:budget=2%%"), {"not a share"});
  expect(complaint("lfps:init=99999999999"), {"not a whole number"});
  expect(complaint("lfps:alpha"), {"\"alpha\" at character 6 is not key=value"});
  expect(complaint("lfps:"), {"not key=value"});
  expect(complaint("lfps:alpha=0.3,"), {"at character 16 is not key=value"});
  expect(complaint("pages:digest=cube"), {"\"cube\"", "box", "cuboid_mean"});
  expect(complaint("history:share_group=maybe"), {"neither on nor off"});
  expect(complaint("history+lhs"), {"\"lhs\" at character 9", "clusters, lsh"});
  expect(complaint("history+history"), {"\"history\" at character 9 is named twice"});
  expect(complaint("history:digest=box"), {"\"digest\" at character 9 is no key of history", "alpha, decay"});
  expect(complaint("exact:alpha=1"), {"no options"});
  expect(complaint("pages:cube"), {"\"cube\" at character 7 is no digest"});
  expect(complaint("pages | topp=0.9"), {"\"topp\" at character 9 is no stage", "top_k, top_p"});
  expect(complaint("pages |"), {"is no stage"});
  expect(complaint("pages | top_p"), {"\"top_p\" at character 9 needs a value"});
  expect(complaint("pages | top_p=0.9,rule=mean"), {"\"rule=mean\" at character 19", "no options"});
  expect(complaint("pages | int4=1"), {"\"1\" at character 14", "no value"});
  expect(complaint("pages | progressive=0.9,rule=max"), {"\"max\" at character 30 is no rule", "certified"});
  expect(complaint("labels:channels"), {"\"channels\" at character 8", "channels, budget"});
  expect(complaint("labels:channels=x"), {"\"x\" at character 17 is not a whole number"});
  expect(complaint("exact | channels=9"), {"\"channels\" at character 9 is no stage"});
  expect(complaint("exact | hadamard=2"), {"\"2\" at character 18", "no value"});
  expect(complaint("exact | skewed=20% | rehearsed=1 | within=4"), {"\"1\" at character 32", "no value"});
  expect(complaint("exact | skewed=20% | within=4,budget=1"), {"\"budget\"", "no key of within", "alpha, most"});
  expect(complaint("snapshot:pooling=min"), {"\"min\" at character 18 is no pooling", "max, mean"});
  expect(complaint("snapshot:alpha=1"), {"\"alpha\" at character 10 is no key of snapshot", "budget, window, kernel"});
  expect(complaint("exact | verified=0.1,mass=1"),
         {"\"mass\" at character 22 is no key of verified", "delta, heavy, sample"});
  expect(complaint("pages | bypass=sing:0.8"), {"\"sing\" at character 16 is no bypass"});
}

TEST_CASE("what a policy sets twice is refused where it comes again", "[policy_text]") {
  expect(complaint("lfps:near=0,near=1%"), {"\"near\" at character 13", "twice"});
  expect(complaint("full | near=0,sinks=4,sinks=5"), {"\"sinks\" at character 23", "twice"});
  expect(complaint("history:alpha=0.3,alpha=0.3 | top_k=9"), {"\"alpha\" at character 19", "twice"});
  expect(complaint("lfps:near=0 | near=1%"), {"\"near\" at character 15", "before it"});
  expect(complaint("lfps | far=9 | far=all"), {"\"far\" at character 16", "before it"});
  expect(complaint("exact | int4 | top_k=4 | top_k=5"), {"\"top_k\" at character 26", "before it"});
  // Of stages that take each other's place.
  expect(complaint("exact | int4 | top_k=4 | top_p=0.9"), {"\"top_p\" at character 26", "before it"});
  expect(complaint("exact | int4 | top_k=4 | sample=64"), {"\"sample\" at character 26", "before it"});
  expect(complaint("exact | int4 | sample=64 | top_p=0.9"), {"\"top_p\" at character 28", "before it"});
  expect(complaint("exact | int4 | int3 | top_k=4"), {"\"int3\" at character 16", "before it"});
  expect(complaint("exact | int4 | hadamard | top_k=4"), {"\"hadamard\" at character 16", "before it"});
  // A stage takes the place of a preset's, once.
  REQUIRE(parse_policy("topk | top_k=5").budget.min_tokens == 5);
  REQUIRE(parse_policy("twilight | top_k=5 | near=1%").budget.min_tokens == 5);
  expect(complaint("twilight | top_k=5 | near=1% | top_k=6"), {"\"top_k\" at character 32", "before it"});
}

TEST_CASE("options that the policy never reads are refused", "[policy_text]") {
  expect(complaint("topk:alpha=0.3"), {"\"alpha\" at character 6 means nothing here", "history"});
  expect(complaint("lfps:digest=box"), {"means nothing here", "pages"});
  expect(complaint("streaming:budget=64"), {"means nothing here"});
  expect(complaint("full:bypass=0.9"), {"means nothing here"});
  expect(complaint("topk:rule=mean"), {"means nothing here", "progressive"});
  expect(complaint("topk:delta=0.1"), {"means nothing here", "verified"});
  expect(complaint("topk:floor=0.1"), {"means nothing here", "snapshot"});
  expect(complaint("topk:ratio=10%"), {"means nothing here", "skewed"});
  expect(complaint("infinigen:budget=400"), {"write most=COUNT"});
  expect(complaint("infinigen:mass=0.9"), {"no share of the softmax mass"});
  expect(complaint("vattention:mass=0.9"), {"\"0.9\"", "no share of the softmax mass"});
  REQUIRE(complaint("full:near=20%,sinks=2,recent=9,dense=1").empty());
}

TEST_CASE("values out of range are refused with field and range", "[policy_text]") {
  expect(complaint("lfps:alpha=0"), {"history.alpha is 0", "(0, 10]"});
  expect(complaint("lfps:alpha=nan"), {"\"nan\" at character 12 is not a number"});
  expect(complaint("lfps:alpha=10.1"), {"history.alpha"});
  expect(complaint("lfps:decay=1"), {"history.decay is 1", "(0, 0.998]"});
  expect(complaint("lfps:decay=0.999"), {"history.decay", "(0, 0.998]"});
  expect(complaint("lfps:init=257"), {"history.init_queries is 257", "[1, 256]"});
  expect(complaint("lfps:local=4097"), {"history.local_tokens"});
  expect(complaint("lfps:budget=0"), {"budget.min_tokens is 0"});
  expect(complaint("lfps:budget=101%"), {"budget.share is 1.01"});
  expect(complaint("infinigen:alpha=0"), {"budget.alpha is 0", "(0, 1000]"});
  expect(complaint("infinigen:ratio=0%"), {"skewed_share is 0", "(0, 1]"});
  expect(complaint("lfps:bypass=1.5"), {"bypass_threshold"});
  expect(complaint("lfps:variance=0"), {"bypass_guards.variance is 0", "(0, infinity]"});
  expect(complaint("lfps:growth=-1"), {"bypass_guards.growth is -1", "[0, infinity]"});
  expect(complaint("lfps:variance=wide"), {"\"wide\"", "is not a number"});
  expect(complaint("lfps | bypass=off,growth=two"), {"is not a number"});
  expect(complaint("pages:pages=0"), {"pages.min_pages is 0"});
  expect(complaint("pages:pages=-2%"), {"\"-2%\" at character 13 is not a share"});
  expect(complaint("full:sinks=4097"), {"near.sink_tokens"});
  expect(complaint("full:recent=1048577"), {"near.recent_tokens"});
  expect(complaint("full:near=1.1"), {"near.share"});
  expect(complaint("all+pages"), {"source all already attends every token"});
  expect(complaint("pages | top_p=0"), {"budget.mass is 0", "(0, 1]"});
  expect(complaint("pages | top_p=nan"), {"\"nan\" at character 15 is not a share"});
  expect(complaint("pages | top_k=0"), {"budget.min_tokens is 0"});
  expect(complaint("pages | progressive=0.9,microbatch=0"), {"budget.microbatch is 0"});
  expect(complaint("clusters:size=0"), {"clusters.tokens_per_cluster is 0"});
  expect(complaint("clusters:near_window=70%"), {"clusters.near_window is 0.7", "far_window"});
  expect(complaint("clusters:near_window=1%"), {"clusters.head_share is 0.015"});
  expect(complaint("lsh:bits=17"), {"lsh.bits is 17", "[1, 16]"});
  expect(complaint("lsh:tables=1"), {"lsh.min_collisions is 2"});
  expect(complaint("labels:channels=0"), {"labels.channels is 0", "[1, 256]"});
  expect(complaint("labels:channels=257"), {"labels.channels is 257"});
  expect(complaint("labels:budget=0"), {"labels.min_tokens is 0"});
  expect(complaint("snapkv:budget=0"), {"snapshot.budget is 0"});
  expect(complaint("snapkv:window=257"), {"snapshot.window is 257", "[1, 256]"});
  expect(complaint("snapkv:kernel=4"), {"snapshot.kernel is 4", "odd"});
  expect(complaint("snapkv:pyramid=0"), {"snapshot.pyramid is 0"});
  expect(complaint("adakv:floor=101%"), {"snapshot.floor is 1.01"});
  expect(complaint("exact | verified=1"), {"budget.error is 1", "(0, 1)"});
  expect(complaint("vattention:delta=0"), {"budget.delta is 0", "(0, 0.5]"});
  expect(complaint("vattention:sample=0"), {"budget.sample is 0"});
  expect(complaint("vattention:heavy=0"), {"budget.min_tokens is 0"});
  expect(complaint("sluice | page=12"), {"page_tokens is 12", "power of two"});
  expect(complaint("sluice | dense=0,every=2000"), {"dense_every is 2000"});

  PolicySpec spec = parse_policy("pages | top_p=0.9");
  spec.budget.mass = std::numeric_limits<float>::quiet_NaN();
  REQUIRE_THROWS_AS(validate(spec), Error);
  spec.sources |= static_cast<std::uint16_t>(Source::all);
  spec.budget.mass = 0.9f;
  REQUIRE_THROWS_AS(validate(spec), Error);
  REQUIRE_THROWS_AS(
      scheduler::make_layer_policy(spec, {.layers = 1, .q_heads = 1, .kv_heads = 1, .head_dim = 16}, 32, LayerId{0}),
      Error);
}

TEST_CASE("what does not go with scores of the caller is refused, with what would", "[policy_text]") {
  for (const char* const estimate : {"int4", "int3", "hadamard"})
    expect(complaint(std::string("scores | top_k=9 | ") + estimate),
           {"nothing is left to estimate", "write exact instead of scores"});
  expect(complaint("scores+exact | top_k=9"), {"nothing beside it", "drop the other sources"});
  expect(complaint("all+scores"), {"drop"});
  expect(complaint("scores:budget=9"), {"\"budget=9\" at character 8", "no options"});
  for (const char* const sample : {"sample=9", "sample=9,error=5%"})
    expect(complaint(std::string("scores | ") + sample), {"estimates of logits", "write top_k or top_p"});
  expect(complaint("scores | top_k=9 | bypass=0.8"), {"bypass=off"});
  expect(complaint("scores | fitted=0.8"), {"clusters"});
  expect(complaint("scores | verified=0.1"), {"exact alone"});
  expect(complaint("scores | skewed=20% | within=4"), {"nothing is left to estimate"});
  const PolicySpec spec = parse_policy("scores | top_k=9");
  REQUIRE_THROWS_AS(
      scheduler::make_layer_policy(spec, {.layers = 1, .q_heads = 1, .kv_heads = 1, .head_dim = 16}, 32, LayerId{0}),
      Error);
}

TEST_CASE("windows of the fit that overlap are refused, as no context would be long enough for them", "[policy_text]") {
  expect(complaint("clusters:near_window=10%,far_window=10.5%,window=1% | fitted=0.9"), {"far_window", "window_share"});
  REQUIRE_NOTHROW(parse_policy("clusters:near_window=10%,far_window=12%,window=1% | fitted=0.9"));
}

TEST_CASE("a count of tokens is refused where none are chosen", "[policy_text]") {
  expect(complaint("full | top_k=99"), {"\"99\" at character 14 means nothing here"});
  expect(complaint("all | top_k=99"), {"means nothing here"});
  expect(complaint("none | top_k=2%"), {"means nothing here"});
  expect(complaint("streaming | near=3% | top_k=all"), {"means nothing here"});
}

TEST_CASE("budgets of far tokens that say nothing or do nothing are refused", "[policy_text]") {
  expect(complaint("full | far=99"), {"\"99\" at character 12 means nothing here"});
  expect(complaint("none | far=2%"), {"means nothing here"});
  expect(complaint("full:far=9"), {"means nothing here"});
  expect(complaint("sluice | far=0"), {"far is 0", "none"});
  expect(complaint("sluice | far=0%"), {"far is 0"});
  expect(complaint("sluice | far=101%"), {"far.share is 1.01", "[0, 1]"});
  expect(complaint("sluice | far=3000000000"), {"far.min_tokens"});
  expect(complaint("sluice | far=some"), {"\"some\" at character 14 is not a whole number"});
  expect(complaint("sluice | far"), {"\"far\" at character 10 needs a value"});
  expect(complaint("sluice | far=9,share=1%"), {"no options"});
  PolicySpec spec = parse_policy("sluice");
  spec.far.share = std::numeric_limits<float>::quiet_NaN();
  REQUIRE_THROWS_AS(validate(spec), Error);
  spec = parse_policy("magicpig");
  spec.far.share = 0.5f;
  REQUIRE(unsupported_reasons(spec).size() == 1);
  spec.sources = 0;
  REQUIRE_FALSE(unsupported_reasons(spec).empty());
}

TEST_CASE("a value that names nothing is refused with its field", "[policy_text]") {
  const auto refused = [](const auto& spoil) {
    PolicySpec spec = parse_policy("lfps");
    spoil(spec);
    return complaint_of([&] { validate(spec); });
  };
  expect(refused([](PolicySpec& spec) { spec.history.tables = static_cast<HistoryTables>(3); }),
         {"history.tables is 3", "[0, 2]"});
  expect(refused([](PolicySpec& spec) { spec.estimate = static_cast<Estimate>(6); }), {"estimate is 6", "[0, 4]"});
  expect(refused([](PolicySpec& spec) { spec.budget.kind = static_cast<BudgetKind>(8); }), {"budget.kind is 8"});
  expect(refused([](PolicySpec& spec) { spec.budget.rule = static_cast<ProgressRule>(4); }), {"budget.rule is 4"});
  expect(refused([](PolicySpec& spec) { spec.snapshot.pooling = static_cast<Pooling>(2); }), {"snapshot.pooling is 2"});
  expect(refused([](PolicySpec& spec) { spec.pages.digest = static_cast<DigestKind>(2); }), {"pages.digest is 2"});
}
