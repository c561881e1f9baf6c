// Sequences that begin with pages of others, on every device: they attend what they would without.
#include "tests/support/engine_prefix.hpp"

#include "scheduler/plan/forward_rows.hpp"
#include "sluice/error.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/sanitized.hpp"

using namespace sluice;
using namespace sluice::test;
using namespace sluice::test::policies;
using namespace sluice::test::prefixes;

namespace {

constexpr std::uint32_t kPrompt = 230;
constexpr std::uint32_t kDecoded = 12;

EngineOptions options_with(const EngineRig& rig, const PolicySpec& policy, std::uint32_t near) {
  return policy.uses(Source::pages) ? paged_options(rig, 1, near, policy.pages.digest) : options_for(rig, 1, near);
}

/// The prompt's rest, then tokens: what each attends.
std::vector<std::vector<float>> tell(Engine& engine, const EngineRig& rig, Teller& teller) {
  prefill(engine, rig, teller, kPrompt);
  std::vector<std::vector<float>> out;
  while (teller.at < kPrompt + kDecoded) out.push_back(decode(engine, rig, teller));
  return out;
}

/// Where keys are attended in the same parts, the host device gives the same bits.
double same(const EngineRig& rig, std::uint32_t near) {
  return near == 0 && rig.kv_dtype == DType::f32 ? 0.0 : tolerance(rig);
}

}  // namespace

TEST_CASE("what a sequence attends does not depend on whether its prefix was found", "[engine][prefix]") {
  constexpr std::array kPolicies{"full:near=0",
                                 "lfps",
                                 "magicpig | dense=0",
                                 "labels:channels=8,budget=24 | top_k=max(1, 100%) | near=0",
                                 "adakv:budget=60,window=16",
                                 "exact | hadamard | top_k=24 | near=0",
                                 "tactic:least=64,size=4,recluster=64",
                                 "exact | int4 | top_p=0.9 | near=0,sinks=4,recent=6",
                                 "pages:pages=3 | int4 | top_k=9 | near=0,sinks=3,recent=21",
                                 "psa | page=16",
                                 "history:share_group=on+pages:pages=2 | int4 | top_k=24 | near=0,sinks=4,recent=16",
                                 "none | near=0,sinks=4,recent=20",
                                 "exact | int4 | top_k=20 | near=0,sinks=4,recent=6",
                                 "exact | top_k=20 | near=0",
                                 "pages:quest,budget=80 | top_k=all | near=0,sinks=0,recent=0",
                                 "pages:pages=3 | top_k=20 | near=0,sinks=3,recent=5",
                                 "history | top_k=9 | near=0",
                                 "exact | top_k=30 | near=0 | bypass=0.3"};
  const auto [text, near] = GENERATE_COPY(grid(few<8>(kPolicies), std::array{0u, 7u, 90u}));
  CAPTURE(text, near);
  const EngineRig rig = engine_rig();
  Story story(kShape, kPrompt + kDecoded, 201);
  if (rig.kv_dtype != DType::f32) story.round_queries();
  const PolicySpec policy = parse_policy(text);
  const EngineOptions options = options_with(rig, policy, near);
  Engine without(options, rig.device);
  Teller alone{.story = &story, .id = without.begin(policy)};
  const auto want = tell(without, rig, alone);

  Engine engine(options, rig.device);
  const Ids ids = ids_of(kPrompt);
  Teller first = begin_named(engine, story, text, ids);
  REQUIRE(first.at == 0);
  const auto own = tell(engine, rig, first);
  // Beside the one that it shares with, and after that has ended; all but the queries that the policy begins with.
  const std::uint32_t found = (kPrompt - std::max(scheduler::prompt_queries(policy), 1u)) / 16 * 16;
  for (const bool ended : {false, true}) {
    CAPTURE(ended);
    if (ended) engine.end(first.id);
    REQUIRE(engine.match_prefix(policy, ids) == found);
    Teller second = begin_named(engine, story, text, ids);
    REQUIRE(second.at == found);
    const auto out = tell(engine, rig, second);
    for (std::size_t i = 0; i < want.size(); ++i) {
      CAPTURE(i);
      REQUIRE(difference(own[i], want[i]) <= same(rig, near));
      REQUIRE(difference(out[i], want[i]) <= same(rig, near));
    }
    engine.end(second.id);
  }
  REQUIRE(engine.stats().matched_tokens == 2 * found);
  REQUIRE(engine.memory().far_pages_used == 0);
  REQUIRE(engine.memory().far_pages_cached == kPrompt / 16 * block_bytes(options));
}

TEST_CASE("rows of a prompt behind pages that were found attend all of them", "[engine][prefix]") {
  const EngineRig rig = engine_rig();
  Story story(kShape, 200, 202);
  if (rig.kv_dtype != DType::f32) story.round_queries();
  Engine engine(options_for(rig, 1, GENERATE(0u, 7u)), rig.device);
  const Ids ids = ids_of(190);
  Teller first = begin_named(engine, story, kFull, ids);
  prefill(engine, rig, first, 190);
  Teller second = begin_named(engine, story, kFull, ids);
  REQUIRE(second.at == 176);
  ForwardTensors tensors(*rig.device, kShape, engine.options().largest.rows());
  for (std::uint32_t i = 0; i < 14; ++i) tensors.set(i, story, 176 + i);
  const PlanItem item{.sequence = second.id, .tokens = 14, .prefill = true};
  (void)run_batch(engine, rig, tensors, {&item, 1}, engine.options().largest);
  for (std::uint32_t i = 0; i < 14; ++i) REQUIRE(error_of(tensors.out(i), story, 176 + i) < 1e-3);
}

TEST_CASE("a chunk behind pages that were found chooses its blocks as one that begins there", "[engine][prefix]") {
  const EngineRig rig = engine_rig();
  Story story(kShape, 600, 203);
  if (rig.kv_dtype != DType::f32) story.round_queries();
  EngineOptions options = options_for(rig, 1, 0);
  options.largest.prefill_rows = 400;
  options.prefill = {.mode = PrefillMode::flexprefill, .flex = {.gamma = 0.7f, .min_budget = 128}};
  Engine engine(options, rig.device);
  const Ids ids = ids_of(600);
  // Cut where the second one will begin, by what it finds: 304 + 288 tokens, then 8.
  Teller first = begin_named(engine, story, kFull, ids);
  (void)run(engine, rig, {&first}, {304}, true);
  (void)run(engine, rig, {&first}, {288}, true);
  const auto want = run(engine, rig, {&first}, {8}, true);
  Teller second = begin_named(engine, story, kFull, ids);
  REQUIRE(second.at == 592);
  REQUIRE(difference(run(engine, rig, {&second}, {8}, true)[0], want[0]) <= same(rig, 0));
}

TEST_CASE("pages are found by ids, salt and length alone, when their forwards are finished", "[engine][prefix]") {
  const EngineRig rig = engine_rig();
  const Story story(kShape, 200, 204);
  Engine engine(options_for(rig, 1, 0), rig.device);
  const PolicySpec full = parse_policy(kFull);
  const auto matched = [&](const Ids& ids, std::uint64_t salt = 0) { return engine.match_prefix(full, ids, salt); };
  const Ids ids = ids_of(100);
  REQUIRE(matched(ids) == 0);
  Teller teller = begin_named(engine, story, kFull, ids, 9);
  // Planned, and not finished.
  ForwardTensors tensors(*rig.device, kShape, engine.options().largest.rows());
  const PlanItem item{.sequence = teller.id, .tokens = 70, .prefill = true};
  for (std::uint32_t i = 0; i < 70; ++i) tensors.set(i, story, i);
  const Batch batch = engine.plan({&item, 1}, engine.options().largest, rig.stream);
  tensors.attend(engine, rig.stream);
  rig.synchronize();
  REQUIRE(matched(ids, 9) == 0);
  engine.finish(batch);
  REQUIRE(matched(ids, 9) == 64);
  REQUIRE(matched(ids) == 0);
  REQUIRE(matched(ids, 8) == 0);
  for (const std::uint32_t tokens : {0u, 1u, 16u, 17u, 32u, 33u, 64u, 65u, 66u})
    REQUIRE(matched(ids_of(tokens), 9) == (tokens == 0 ? 0 : (tokens - 1) / 16 * 16));
  for (const std::uint32_t same : {0u, 15u, 16u, 40u, 63u}) REQUIRE(matched(ids_of(100, 1, same), 9) == same / 16 * 16);
  REQUIRE(engine.match_prefix(parse_policy("lfps"), ids_of(70), 9) == 32);
  // What comes in otherwise, and is named later, part by part.
  Teller other{.story = &story, .id = engine.begin(full)};
  import_story(engine, rig, other, 90, 50);
  REQUIRE(matched(ids) == 0);
  engine.name_tokens(other.id, 0, ids_of(30));
  REQUIRE(matched(ids) == 16);
  engine.name_tokens(other.id, 20, std::span(ids).subspan(20, 70));
  REQUIRE(matched(ids) == 80);
  engine.name_tokens(other.id, 10, std::span(ids).subspan(10, 5));
  REQUIRE(matched(ids) == 80);
  engine.name_tokens(other.id, 5, {});
  REQUIRE(code_of([&] { engine.name_tokens(other.id, 91, ids); }) == Errc::invalid_argument);
  REQUIRE(code_of([&] { engine.name_tokens(other.id, 0, ids_of(80, 1, 79)); }) == Errc::invalid_argument);
  REQUIRE(code_of([&] { engine.name_tokens(other.id, 90, ids_of(5'000)); }) == Errc::out_of_capacity);
  REQUIRE(code_of([&] { engine.name_tokens(SequenceId{99}, 0, ids); }) == Errc::not_found);
  REQUIRE(code_of([&] { (void)engine.begin(full, ids_of(5'000)); }) == Errc::out_of_capacity);
  // Names of what comes may change until it does.
  engine.name_tokens(other.id, 90, ids_of(10, 3));
  engine.name_tokens(other.id, 90, std::span(ids).subspan(90, 10));
  prefill(engine, rig, other, 97);
  REQUIRE(matched(ids) == 96);
}

TEST_CASE("an import whose layers do not come leaves no names", "[engine][prefix]") {
  const EngineRig rig = engine_rig();
  const Story story(kShape, 80, 219);
  Engine engine(options_for(rig, 1, 0), rig.device);
  const Ids ids = ids_of(80);
  Teller teller = begin_named(engine, story, kFull, ids);
  const auto rows = rig.device->allocate_pinned(std::uint64_t{64} * kShape.kv_heads * kShape.head_dim * sizeof(float));
  const TensorView half =
      dense_view(reinterpret_cast<const float*>(rows->data()), DType::f32, 64, kShape.kv_heads, kShape.head_dim);
  engine.import_prefix(teller.id, LayerId{0}, half, half, rig.stream);
  REQUIRE(engine.match_prefix(parse_policy(kFull), ids) == 0);
  import_story(engine, rig, teller, 70);  // Begins again.
  REQUIRE(engine.match_prefix(parse_policy(kFull), ids) == 0);
  engine.name_tokens(teller.id, 0, ids);
  REQUIRE(engine.match_prefix(parse_policy(kFull), ids) == 64);
}

TEST_CASE("tokens that were decoded by what leaves some out are found if that is wanted", "[engine][prefix]") {
  const EngineRig rig = engine_rig();
  const Story story(kShape, 200, 205);
  for (const bool wanted : {false, true}) {
    CAPTURE(wanted);
    EngineOptions options = options_for(rig, 1, 0);
    options.prefix_decoded = wanted;
    Engine engine(options, rig.device);
    const PolicySpec full = parse_policy(kFull);
    const Ids ids = ids_of(200);
    Teller sparse = begin_named(engine, story, "none | near=0,sinks=4,recent=20", ids);
    prefill(engine, rig, sparse, 40);
    for (int i = 0; i < 10; ++i) (void)decode(engine, rig, sparse);
    REQUIRE(engine.match_prefix(full, ids) == (wanted ? 48 : 32));
    // What comes behind attends them, of a fork, too.
    Teller heir{.story = &story, .id = engine.fork(sparse.id, 50, full), .at = 50};
    engine.name_tokens(heir.id, 50, std::span(ids).subspan(50));
    prefill(engine, rig, heir, 70);
    REQUIRE(engine.match_prefix(full, ids) == (wanted ? 64 : 32));
    prefill(engine, rig, sparse, 100);
    REQUIRE(engine.match_prefix(full, ids) == (wanted ? 96 : 32));
    // A fork is told from its parent's tokens, and without them like any other.
    Teller child{.story = &story, .id = engine.fork(sparse.id, 40, full), .at = 40};
    engine.name_tokens(child.id, 40, std::span(ids).subspan(40));
    while (child.at < 64) (void)decode(engine, rig, child);
    REQUIRE(engine.match_prefix(full, ids) == (wanted ? 96 : 64));
    engine.truncate(sparse.id, 40);
    sparse.at = 40;
    engine.name_tokens(sparse.id, 40, std::span(ids).subspan(40));
    prefill(engine, rig, sparse, 130);
    REQUIRE(engine.match_prefix(full, ids) == 128);
  }
}
