// Pages behind windows are given up: what a sequence holds of layers with windows does not grow with its length, and
// whatever happens to it, its rows see what they would have seen.
#include <array>
#include <cmath>

#include "sluice/admission.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/engine_park.hpp"

using namespace sluice;
using namespace sluice::test;
using namespace sluice::test::policies;
using parks::parked;
using prefixes::begin_named;
using prefixes::ids_of;

namespace {

/// One layer in three sees everything, and all have windows.
const std::vector<std::uint32_t> kMixed{40, 0, 23}, kAll{40, 30, 23};
constexpr std::uint32_t kSlack = 16;

EngineOptions windowed(const EngineRig& rig, const std::vector<std::uint32_t>& windows, std::uint32_t near = 0) {
  EngineOptions options = options_for(rig, 2, near);
  options.largest.prefill_rows = 32;
  options.largest.max_tokens = 1024;
  options.import_rows = 32;
  options.windows = windows;
  options.window_slack = kSlack;
  return options;
}

Story story_of(const std::vector<std::uint32_t>& windows, std::uint32_t tokens, std::uint64_t seed,
               const EngineRig& rig, std::uint32_t page_tokens = 16) {
  Story story(kShape, tokens, seed, page_tokens);
  story.see(windows);
  if (rig.kv_dtype != DType::f32) story.round_queries();
  return story;
}

void goes_on(Engine& engine, const EngineRig& rig, Teller teller, std::uint32_t tokens) {
  for (const std::uint32_t end = teller.at + tokens; teller.at < end;) {
    CAPTURE(teller.at);
    const std::vector<float> out = decode(engine, rig, teller);
    REQUIRE(error_of(out, *teller.story, teller.at - 1) < 1e-3);
  }
}

/// A prompt in chunks of 32.
void read(Engine& engine, const EngineRig& rig, Teller& teller, std::uint32_t tokens) {
  while (teller.at < tokens) (void)run(engine, rig, {&teller}, {std::min(32u, tokens - teller.at)}, true);
}

/// A sequence that attends everything it sees, of a prompt of 300 tokens.
Teller told(Engine& engine, const EngineRig& rig, const Story& story) {
  Teller teller{.story = &story, .id = engine.begin(parse_policy("full"))};
  read(engine, rig, teller, 300);
  return teller;
}

EngineOptions with_pages(EngineOptions options, std::uint32_t page_tokens) {
  options.page_tokens = page_tokens;
  options.prefill_window = 64;
  return options;
}

/// Blocks that are free have rows of another story from now on.
void fill(Engine& engine, const EngineRig& rig, const std::vector<std::uint32_t>& windows) {
  const Story other = story_of(windows, 1000, 699, rig);
  Teller teller{.story = &other, .id = engine.begin(parse_policy("full"))};
  read(engine, rig, teller, 900);
  engine.end(teller.id);
}

std::uint64_t blocks_of(const Engine& engine, SequenceId id, const EngineRig& rig) {
  const PageLayout layout{.page_tokens = 16, .head_dim = kShape.head_dim, .dtype = rig.kv_dtype};
  const std::uint64_t layers = engine.options().windows == kAll ? 3 : 1;
  return engine.far_bytes(id) / (layout.page_bytes() * layers * kShape.kv_heads);
}

}  // namespace

TEST_CASE("what layers with windows hold does not grow", "[engine][windows]") {
  const auto [mixed, near] = GENERATE(table<bool, std::uint32_t>({{true, 0u}, {true, 9u}, {false, 0u}, {false, 9u}}));
  CAPTURE(mixed, near);
  const EngineRig rig = engine_rig();
  const auto& windows = mixed ? kMixed : kAll;
  const Story story = story_of(windows, 700, 601, rig);
  Engine engine(windowed(rig, windows, near), rig.device);
  Teller teller{.story = &story, .id = engine.begin(parse_policy("full"))};
  const std::uint64_t stacks = mixed ? 2 : 1;
  const auto require_little = [&] {
    // The window, what may be taken back, and the page in which each begins.
    const std::uint64_t most = (40 + kSlack) / 16 + 2;
    const std::uint64_t whole = mixed ? (teller.at + 15) / 16 : 0;
    CAPTURE(teller.at);
    REQUIRE(blocks_of(engine, teller.id, rig) <= whole + stacks * most);
    REQUIRE(engine.memory().far_pages_used == engine.far_bytes(teller.id));
  };
  while (teller.at < 400) {
    read(engine, rig, teller, teller.at + 32);
    require_little();
  }
  for (; teller.at < 600; teller.at += 8) {
    goes_on(engine, rig, teller, 8);
    require_little();
  }
  engine.end(teller.id);
  REQUIRE(engine.memory().far_pages_used == 0);
}

TEST_CASE("sequences with windows fork and are shortened as far as they may", "[engine][windows]") {
  const auto& windows = GENERATE(kMixed, kAll);
  const EngineRig rig = engine_rig();
  const Story story = story_of(windows, 400, 602, rig);
  Engine engine(windowed(rig, windows, 7), rig.device);
  Teller teller = told(engine, rig, story);
  for (const std::uint32_t fewer : {0u, 1u, kSlack}) {
    Teller child{.story = &story, .id = engine.fork(teller.id, 300 - fewer), .at = 300 - fewer};
    goes_on(engine, rig, child, 40);
    engine.end(child.id);
  }
  for (const std::uint32_t wrong : {1u, 60u, 240u}) {
    REQUIRE(code_of([&] { (void)engine.fork(teller.id, wrong); }) == Errc::unsupported);
    REQUIRE(code_of([&] { engine.truncate(teller.id, wrong); }) == Errc::unsupported);
  }
  REQUIRE(engine.tokens(engine.fork(teller.id, 0)) == 0);
  engine.truncate(teller.id, 300 - kSlack);
  teller.at = 300 - kSlack;
  goes_on(engine, rig, teller, 30);
  engine.truncate(teller.id, 0);  // All of it goes, and it begins again.
  goes_on(engine, rig, {.story = &story, .id = teller.id}, 30);
}

TEST_CASE("prompts find as much as layers with windows still have", "[engine][windows][prefix]") {
  const auto& windows = GENERATE(kMixed, kAll);
  const EngineRig rig = engine_rig();
  const Story story = story_of(windows, 400, 603, rig);
  EngineOptions options = windowed(rig, windows, 7);
  options.host_bytes = 28 * block_bytes(options);
  Engine engine(options, rig.device);
  const PolicySpec full = parse_policy("full");
  Teller first = begin_named(engine, story, "full", ids_of(300));
  read(engine, rig, first, 300);
  // While it lives: what it has passed is kept by the cache alone.
  Teller second = begin_named(engine, story, "full", ids_of(300));
  REQUIRE(second.at == 288);
  goes_on(engine, rig, second, 20);
  engine.end(second.id);
  engine.end(first.id);
  REQUIRE(engine.match_prefix(full, ids_of(300)) == 288);
  REQUIRE(engine.match_prefix(full, ids_of(150)) == 144);
  REQUIRE(engine.memory().far_pages_used == 0);
  Teller third = begin_named(engine, story, "full", ids_of(150));
  goes_on(engine, rig, third, 20);
  engine.end(third.id);
  // Others need the room. What is found then is whole, or it is not found.
  const Story other = story_of(windows, 1000, 604, rig);
  Teller large{.story = &other, .id = engine.begin(full)};
  std::uint32_t known = 144;
  while (large.at + 32 <= 960) {
    read(engine, rig, large, large.at + 32);
    const std::uint32_t left = engine.match_prefix(full, ids_of(150));
    REQUIRE((left <= known && left % 16 == 0));
    known = left;
  }
  REQUIRE((known < 144 || windows == kAll));
  engine.end(large.id);
  Teller again = begin_named(engine, story, "full", ids_of(150));
  REQUIRE(again.at == known);
  read(engine, rig, again, 144);
  goes_on(engine, rig, again, 20);
}

TEST_CASE("parked sequences have what layers with windows have, and come back with other pages", "[engine][windows]") {
  const auto& windows = GENERATE(kMixed, kAll);
  const EngineRig rig = engine_rig();
  const Story story = story_of(windows, 400, 605, rig);
  Engine engine(windowed(rig, windows, 7), rig.device);
  Teller teller = told(engine, rig, story);
  const std::vector<std::byte> area = parked(engine, teller.id);
  EngineOptions whole = windowed(rig, {}, 0);
  Engine other(whole, rig.device);
  const Teller all = told(other, rig, story);
  REQUIRE(3 * area.size() < (windows == kAll ? 1 : 2) * other.park_bytes(all.id));
  REQUIRE(code_of([&] { (void)other.resume(area); }) == Errc::invalid_argument);
  for (const std::uint32_t page_tokens : {8u, 16u, 64u}) {
    CAPTURE(page_tokens);
    Engine into(with_pages(windowed(rig, windows, 3), page_tokens), rig.device);
    const Story same = story_of(windows, 400, 605, rig, page_tokens);
    goes_on(into, rig, {.story = &same, .id = into.resume(area), .at = 300}, 60);
  }
}

TEST_CASE("with larger pages a sequence has no more of its windows than what was parked", "[engine][windows]") {
  const auto& windows = GENERATE(kMixed, kAll);
  const std::uint32_t page_tokens = GENERATE(8u, 64u);
  CAPTURE(page_tokens);
  const EngineRig rig = engine_rig();
  const Story story = story_of(windows, 400, 605, rig);
  Engine engine(windowed(rig, windows), rig.device);
  const Teller teller = told(engine, rig, story);
  const std::vector<std::byte> area = parked(engine, teller.id);
  Engine into(with_pages(windowed(rig, windows, 3), page_tokens), rig.device);
  fill(into, rig, windows);
  const Story same = story_of(windows, 400, 605, rig, page_tokens);
  const Teller all{.story = &same, .id = into.resume(area), .at = 300};
  REQUIRE((parked(into, all.id) == area));
  for (std::uint32_t tokens = 300; tokens > 220; tokens -= 3) {
    CAPTURE(tokens);
    Teller child{.story = &same, .id = {}, .at = tokens};
    const auto fork = [&](Engine& of, SequenceId id) { child.id = of.fork(id, tokens); };
    if (tokens + 1 - 40 < 240) {  // Which are parked from there on.
      REQUIRE(code_of([&] { fork(engine, teller.id); }) == Errc::unsupported);
      REQUIRE(code_of([&] { fork(into, all.id); }) == Errc::unsupported);
      REQUIRE(code_of([&] { into.truncate(all.id, tokens); }) == Errc::unsupported);
      continue;
    }
    fork(into, all.id);
    const SequenceId grandchild = into.fork(child.id, tokens);
    goes_on(into, rig, child, 3);
    into.end(child.id);
    REQUIRE(code_of([&] { (void)into.fork(grandchild, 270); }) == Errc::unsupported);
    into.end(grandchild);
  }
  into.truncate(all.id, 0);
  const Teller again{.story = &same, .id = all.id};
  goes_on(into, rig, again, 60);
  into.truncate(all.id, 50);
  goes_on(into, rig, {.story = &same, .id = all.id, .at = 50}, 10);
}

TEST_CASE("no other sequence finds pages of windows that came back without their first rows",
          "[engine][windows][prefix]") {
  const auto& windows = GENERATE(kMixed, kAll);
  const EngineRig rig = engine_rig();
  const Story story = story_of(windows, 400, 606, rig);
  Engine engine(windowed(rig, windows), rig.device);
  Teller teller = begin_named(engine, story, "full", ids_of(300));
  read(engine, rig, teller, 300);
  const std::vector<std::byte> area = parked(engine, teller.id);
  Engine into(with_pages(windowed(rig, windows), 64), rig.device);
  fill(into, rig, windows);
  // The first pages are known there, also where all layers have windows.
  Teller first = begin_named(into, story, "full", ids_of(220));
  read(into, rig, first, 220);
  REQUIRE(into.match_prefix(parse_policy("full"), ids_of(300)) == 192);
  Teller resumed{.story = &story, .id = into.resume(area), .at = 300};
  into.name_tokens(resumed.id, 300, std::span<const std::int32_t>(ids_of(400)).subspan(300));
  REQUIRE(into.match_prefix(parse_policy("full"), ids_of(300)) == 192);
  Teller second = begin_named(into, story, "full", ids_of(300));
  goes_on(into, rig, second, 70);
  goes_on(into, rig, resumed, 80);
}

TEST_CASE("more sequences with windows have room, and admission knows", "[engine][windows]") {
  const EngineRig rig = engine_rig();
  EngineOptions options = windowed(rig, kMixed);
  options.largest.max_tokens = 320;
  options.in_flight = 1;
  // 150 blocks: 20 for a sequence's tokens, and at most 9 for windows twice.
  options.host_bytes = 50 * block_bytes(options);
  const Engine engine(options, rig.device);
  REQUIRE(engine.can_admit(320));
  const AdmissionOptions shares = admission_options(engine.options());
  REQUIRE((shares.pages == 150 && shares.page_blocks == 1 && shares.window_blocks == 2));
  REQUIRE(shares.window_pages == (40 + kSlack + 32 + 15) / 16 + 1);
  REQUIRE(shares.window_resting_pages == 3);  // 39 tokens.
  AdmissionOptions many = shares;
  many.decode_rows = many.sequences = 8;
  Admission admission(many);
  for (std::uint64_t id = 1; id <= 5; ++id)
    admission.submit({.id = RequestId{id}, .prompt_tokens = 304, .max_new_tokens = 16});
  REQUIRE(admission.admit().admit.size() == 4);  // 19 + 2 * 7 blocks each, of 150; with all tokens it would be two.
}
