// Far rows that come near while several sequences decode, on every device.
#include <algorithm>
#include <utility>

#include "sluice/step/forward.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/engine_named.hpp"
#include "tests/support/engine_rig.hpp"
#include "tests/support/forwarding.hpp"
#include "tests/support/sanitized.hpp"

using namespace sluice;
using namespace sluice::test;

namespace {

constexpr AttentionShape kShape{.layers = 5, .q_heads = 16, .kv_heads = 8, .head_dim = 64};
constexpr std::uint32_t kRows = 4;
constexpr std::uint32_t kPrompt = 300;
constexpr const char* kPolicy = "exact | int4 | top_k=6 | near=0,sinks=4,recent=16";

EngineOptions options_for(const EngineRig& rig, std::uint32_t rows, std::uint32_t near) {
  EngineOptions options{
      .shape = kShape, .kv_dtype = rig.kv_dtype, .largest = {.decode_rows = rows}, .threads = 2, .pin_threads = false};
  options.host_bytes = 120 * block_bytes(options);
  options.near_bytes = near * near_block_bytes(options);
  options.import_rows = kPrompt;
  return named(options, {kManyTokens});
}

std::vector<Story> stories_of(std::uint32_t tokens) {
  std::vector<Story> stories;
  for (std::uint32_t i = 0; i < kRows; ++i) {
    stories.emplace_back(kShape, tokens, 310 + i);
    stories.back().repeat_query();
  }
  return stories;
}

std::vector<Teller> begin_all(Engine& engine, const EngineRig& rig, const std::vector<Story>& stories) {
  std::vector<Teller> tellers;
  for (const Story& story : stories) {
    tellers.push_back({.story = &story, .id = engine.begin(parse_policy(kPolicy))});
    import_story(engine, rig, tellers.back(), kPrompt);
  }
  return tellers;
}

std::vector<Teller*> all_of(std::vector<Teller>& tellers) {
  std::vector<Teller*> all;
  for (Teller& teller : tellers) all.push_back(&teller);
  return all;
}

double same(const EngineRig& rig) { return rig.kv_dtype == DType::f32 ? 2e-5 : 2e-3; }

/// The next tokens, up to this one, as a prompt's.
void read_on(Engine& engine, const EngineRig& rig, Teller& teller, std::uint32_t tokens) {
  const Bucket bucket = engine.options().largest;
  ForwardTensors tensors(*rig.device, kShape, bucket.rows());
  for (std::uint32_t i = 0; teller.at + i < tokens; ++i) tensors.set(i, *teller.story, teller.at + i);
  const PlanItem item{.sequence = teller.id, .tokens = tokens - teller.at, .prefill = true};
  (void)run_batch(engine, rig, tensors, {&item, 1}, bucket);
  teller.at = tokens;
}

/// Some layers of a forward, which is then taken back.
void begin_in_vain(Engine& engine, const EngineRig& rig, ForwardTensors& tensors, std::vector<Teller>& tellers,
                   std::uint32_t layers) {
  std::vector<SequenceId> ids;
  for (std::uint32_t row = 0; row < kRows; ++row) {
    tensors.set(row, *tellers[row].story, tellers[row].at);
    ids.push_back(tellers[row].id);
  }
  const Bucket bucket = engine.options().largest;
  const Batch batch = engine.plan(one_each(ids), bucket, rig.stream);
  for (std::uint32_t layer = 0; layer < layers; ++layer) tensors.attend_layer(engine, bucket, layer, rig.stream);
  engine.cancel(batch);
}

/// The same sequences without near rows and with some, whose device refuses plans if it is told to.
struct Pair {
  EngineRig rig = engine_rig();
  std::vector<Story> stories = stories_of(kPrompt + 40);
  std::shared_ptr<RefusingDevice> refusing = std::make_shared<RefusingDevice>(rig.device);
  Engine bare{options_for(rig, kRows, 0), rig.device};
  Engine cached{options_for(rig, kRows, 12), refusing};
  std::vector<Teller> want_tellers = begin_all(bare, rig, stories);
  std::vector<Teller> tellers = begin_all(cached, rig, stories);
  ForwardTensors tensors{*rig.device, kShape, kRows};
};

}  // namespace

TEST_CASE("of several sequences rows come near, and nothing else changes, batched or alone", "[engine][near]") {
  const EngineRig rig = engine_rig();
  const auto stories = stories_of(kPrompt + 24);
  Engine bare(options_for(rig, kRows, 0), rig.device);
  Engine cached(options_for(rig, kRows, 60), rig.device);
  Engine single(options_for(rig, 1, 30), rig.device);
  auto bare_tellers = begin_all(bare, rig, stories);
  auto tellers = begin_all(cached, rig, stories);
  Teller alone{.story = &stories[1], .id = single.begin(parse_policy(kPolicy))};
  import_story(single, rig, alone, kPrompt);
  ForwardTensors tensors(*rig.device, kShape, kRows);
  ForwardTensors one(*rig.device, kShape, 1);
  std::vector<std::uint64_t> far;
  while (tellers[0].at < stories[0].tokens()) {
    CAPTURE(tellers[0].at);
    const auto want = run_forward(bare, rig, tensors, all_of(bare_tellers));
    const auto got = run_forward(cached, rig, tensors, all_of(tellers));
    for (std::uint32_t row = 0; row < kRows; ++row) REQUIRE(difference(got[row], want[row]) < same(rig));
    REQUIRE(difference(run_forward(single, rig, one, {&alone})[0], got[1]) < same(rig));
    far.push_back(cached.stats().far_tokens);
  }
  REQUIRE(bare.stats().promoted == 0);
  REQUIRE(cached.stats().promoted != 0);
  // The same tokens in every step: each layer's first turn, of seven forwards one, lists them; two later they are near.
  REQUIRE(far[kNearTurn - 1] > far[0]);
  REQUIRE(far.back() == far[2 * kNearTurn]);
}

TEST_CASE("rows that a forward was to bring near are attended all the same when it is taken back", "[engine][near]") {
  const EngineRig rig = engine_rig();
  const auto stories = stories_of(kPrompt + 40);
  Engine bare(options_for(rig, kRows, 0), rig.device);
  Engine cached(options_for(rig, kRows, 12), rig.device);  // So few that rows give way all the time.
  auto want_tellers = begin_all(bare, rig, stories);
  auto tellers = begin_all(cached, rig, stories);
  ForwardTensors tensors(*rig.device, kShape, kRows);
  for (std::uint32_t step = 0; tellers[0].at < stories[0].tokens(); ++step) {
    CAPTURE(step);
    begin_in_vain(cached, rig, tensors, tellers, step % (kShape.layers + 1));
    // Another sequence gets the pages of one that ends, whose rows may be near or on their way.
    if (step % 3 == 2) {
      const std::uint32_t row = step / 3 % kRows;
      for (auto [engine, all] : {std::pair(&bare, &want_tellers), {&cached, &tellers}}) {
        Teller& teller = (*all)[row];
        const std::uint32_t at = teller.at;
        engine->end(teller.id);
        teller = {.story = &stories[row], .id = engine->begin(parse_policy(kPolicy))};
        import_story(*engine, rig, teller, at);
      }
    }
    const auto want = run_forward(bare, rig, tensors, all_of(want_tellers));
    const auto got = run_forward(cached, rig, tensors, all_of(tellers));
    for (std::uint32_t row = 0; row < kRows; ++row) {
      CAPTURE(row);
      REQUIRE(difference(got[row], want[row]) < same(rig));
    }
  }
  REQUIRE(cached.stats().promoted != 0);
}

TEST_CASE("rows that are on their way come near although plans between are refused", "[engine][near]") {
  Pair pair;
  auto& [rig, stories, refusing, bare, cached, want_tellers, tellers, tensors] = pair;
  std::uint64_t promoted = 0;
  for (std::uint32_t step = 0; tellers[0].at < stories[0].tokens(); ++step) {
    CAPTURE(step);
    // One to five in a row, as many plans as it takes for a layer's next turn to come before the rows of its last.
    for (std::uint32_t refused = 0; refused < step % 6; ++refused) {
      refusing->verbs.refuses = true;
      REQUIRE(code_of([&] { begin_in_vain(cached, rig, tensors, tellers, 0); }) == Errc::device);
    }
    const auto want = run_forward(bare, rig, tensors, all_of(want_tellers));
    const auto got = run_forward(cached, rig, tensors, all_of(tellers));
    for (std::uint32_t row = 0; row < kRows; ++row) REQUIRE(difference(got[row], want[row]) < same(rig));
    REQUIRE(cached.stats().promoted >= promoted);
    promoted = cached.stats().promoted;
  }
  REQUIRE(promoted != 0);
  REQUIRE(cached.memory().near_pages_used <= cached.memory().near_pages);
}

TEST_CASE("rows that found near rows which nobody fills give these back, and come near another time",
          "[engine][near]") {
  Pair pair;
  auto& [rig, stories, refusing, bare, cached, want_tellers, tellers, tensors] = pair;
  std::uint64_t failed = 0;
  for (std::uint32_t step = 0; tellers[0].at < stories[0].tokens(); ++step) {
    CAPTURE(step);
    // Up to three in a row, between a layer's turns and with them.
    for (std::uint32_t more = 0; more < step % 4; ++more, ++failed) {
      refusing->verbs.fails = true;
      REQUIRE(code_of([&] { begin_in_vain(cached, rig, tensors, tellers, 0); }) == Errc::device);
    }
    const auto want = run_forward(bare, rig, tensors, all_of(want_tellers));
    const auto got = run_forward(cached, rig, tensors, all_of(tellers));
    for (std::uint32_t row = 0; row < kRows; ++row) REQUIRE(difference(got[row], want[row]) < same(rig));
    REQUIRE(cached.memory().near_pages_used <= cached.memory().near_pages);
  }
  REQUIRE(failed > 40);
  REQUIRE(cached.stats().promoted != 0);
  for (const Teller& teller : tellers) cached.end(teller.id);
  // Whatever was placed and not filled is free again: another sequence finds all of near memory.
  Teller alone{.story = &stories[0],
               .id = cached.begin(parse_policy("exact | int4 | top_k=all | near=0,sinks=4,recent=16"))};
  import_story(cached, rig, alone, 12 * 16 - 1);
  const std::uint64_t far = cached.stats().far_tokens;
  (void)run_forward(cached, rig, tensors, {&alone});
  REQUIRE(cached.stats().far_tokens == far);
}

TEST_CASE("what is written anew while it is on its way near is attended as it is now", "[engine][near]") {
  const EngineRig rig = engine_rig();
  const auto stories = stories_of(kPrompt + 60);
  const Story other(kShape, kPrompt + 60, 77);
  const std::uint32_t decoded = GENERATE(1u, 2u, 3u, 4u);  // So that each layer's turn is just before the cut.
  CAPTURE(decoded);
  const auto with = [&](std::uint32_t near) {
    EngineOptions options = options_for(rig, kRows, near);
    options.largest.prefills = 1;
    options.largest.prefill_rows = 8;
    return options;
  };
  Engine bare(with(0), rig.device);
  // Near rows that recent tokens may have and prompts may not: those that others have had for less than 32 forwards.
  Engine cached(with(6), rig.device);
  auto want_tellers = begin_all(bare, rig, stories);
  auto tellers = begin_all(cached, rig, stories);
  ForwardTensors tensors(*rig.device, kShape, bare.options().largest.rows());
  const auto compare = [&] {
    const auto want = run_forward(bare, rig, tensors, all_of(want_tellers));
    const auto got = run_forward(cached, rig, tensors, all_of(tellers));
    for (std::uint32_t row = 0; row < kRows; ++row) REQUIRE(difference(got[row], want[row]) < same(rig));
  };
  for (std::uint32_t round = 0; round < (kThreadSanitized ? 2u : 6u); ++round) {
    CAPTURE(round);
    for (std::uint32_t i = 0; i < decoded; ++i) compare();
    for (auto [engine, all] : {std::pair(&bare, &want_tellers), {&cached, &tellers}}) {
      Teller& teller = (*all)[round % kRows];
      const std::uint32_t at = teller.at;
      engine->truncate(teller.id, teller.at = at - 6);
      teller.story = round % 2 == 0 ? &other : &stories[round % kRows];
      read_on(*engine, rig, teller, at);
    }
    for (std::uint32_t i = 0; i < 3; ++i) compare();
  }
  REQUIRE(cached.stats().promoted != 0);
}
