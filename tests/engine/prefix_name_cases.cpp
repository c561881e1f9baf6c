// Names of tokens that are still to come: which of them stay when a sequence is truncated, forked, parked and resumed,
// on every device.
#include "sluice/error.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/engine_park.hpp"

using namespace sluice;
using namespace sluice::test;
using namespace sluice::test::policies;
using namespace sluice::test::prefixes;
using parks::parked;

namespace {

constexpr std::uint32_t kPrompt = 65, kPages = 64;  ///< tokens that are named, and those of whole pages

const PolicySpec kDense = parse_policy(kFull);

/// As many of its tokens have names: it is refused to leave out the next one, and not to go on with it.
void require_named(Engine& engine, SequenceId id, std::uint32_t tokens) {
  const std::int32_t other = -1;
  CAPTURE(tokens);
  REQUIRE(code_of([&] { engine.name_tokens(id, tokens + 1, {&other, 1}); }) == Errc::invalid_argument);
  REQUIRE_NOTHROW(engine.name_tokens(id, tokens, {}));
}

/// The rest of the prompt comes, is not named again, and is found by its names.
void require_found(Engine& engine, const EngineRig& rig, Teller& teller, const Ids& ids) {
  prefill(engine, rig, teller, static_cast<std::uint32_t>(ids.size()));
  REQUIRE(engine.match_prefix(kDense, ids) == kPages);
  const std::vector<float> out = decode(engine, rig, teller);
  REQUIRE(error_of(out, *teller.story, teller.at - 1) < 1e-3);
}

}  // namespace

TEST_CASE("where no token is taken back, no name is forgotten", "[engine][prefix]") {
  const EngineRig rig = engine_rig();
  const Story story(kShape, 120, 231);
  Engine engine(options_for(rig, 2, GENERATE(0u, 5u)), rig.device);
  const std::uint32_t there = GENERATE(0u, 20u, 32u, kPrompt);
  CAPTURE(there);
  const Ids ids = ids_of(kPrompt);
  Teller teller = begin_named(engine, story, kFull, ids);
  if (there != 0) prefill(engine, rig, teller, there);
  for (int i = 0; i < 2; ++i) engine.truncate(teller.id, there);
  REQUIRE(engine.tokens(teller.id) == there);
  require_named(engine, teller.id, kPrompt);
  require_found(engine, rig, teller, ids);
  // Names of tokens that are to be decoded, too.
  const Ids answer = ids_of(90, 1, kPrompt);
  engine.name_tokens(teller.id, kPrompt, std::span(answer).subspan(kPrompt));
  (void)decode(engine, rig, teller);
  engine.truncate(teller.id, teller.at);
  require_named(engine, teller.id, 90);
}

TEST_CASE("a truncation to fewer tokens leaves the names of those alone", "[engine][prefix]") {
  const EngineRig rig = engine_rig();
  const Story story(kShape, 120, 232);
  Engine engine(options_for(rig, 2, 0), rig.device);
  const std::uint32_t left = GENERATE(0u, 20u, 32u, 39u);
  CAPTURE(left);
  Story other(kShape, 120, 233);
  other.begin_as(story, left);
  const Ids ids = ids_of(kPrompt);
  const Ids others = ids_of(kPrompt, 1, left);
  Teller teller = begin_named(engine, story, kFull, ids);
  prefill(engine, rig, teller, 40);
  engine.truncate(teller.id, left);
  require_named(engine, teller.id, left);
  if (left != 0) {
    const std::int32_t wrong = -1;
    REQUIRE(code_of([&] { engine.name_tokens(teller.id, left - 1, {&wrong, 1}); }) == Errc::invalid_argument);
  }
  // What comes instead is not found by names of what is gone.
  teller.at = left;
  teller.story = &other;
  prefill(engine, rig, teller, kPrompt);
  REQUIRE(engine.match_prefix(kDense, ids) <= 32);  // The pages that the first 40 tokens had.
  REQUIRE(engine.match_prefix(kDense, others) == left / 16 * 16);
  engine.name_tokens(teller.id, left, std::span(others).subspan(left));
  require_found(engine, rig, teller, others);
}

TEST_CASE("a truncation that is refused forgets no name", "[engine][prefix]") {
  const EngineRig rig = engine_rig();
  Story story(kShape, 200, 234);
  EngineOptions options = options_for(rig, 2, 0);
  options.windows = {40, 0, 23};
  options.window_slack = 16;
  options.import_rows = kChunk;
  story.see(options.windows);
  Engine engine(options, rig.device);
  const Ids ids = ids_of(150);
  Teller teller = begin_named(engine, story, kFull, ids);
  prefill(engine, rig, teller, 100);
  REQUIRE(code_of([&] { engine.truncate(teller.id, 101); }) == Errc::invalid_argument);
  REQUIRE(code_of([&] { engine.truncate(teller.id, 30); }) == Errc::unsupported);  // Behind its windows.
  require_named(engine, teller.id, 150);
  ForwardTensors tensors(*rig.device, kShape, options.largest.rows());
  for (std::uint32_t i = 0; i < 10; ++i) tensors.set(i, story, 100 + i);
  const PlanItem item{.sequence = teller.id, .tokens = 10, .prefill = true};
  const Batch batch = engine.plan({&item, 1}, options.largest, rig.stream);
  for (const std::uint32_t tokens : {100u, 99u})
    REQUIRE(code_of([&] { engine.truncate(teller.id, tokens); }) == Errc::invalid_argument);
  tensors.attend(engine, rig.stream);
  engine.finish(batch);
  REQUIRE(engine.tokens(teller.id) == 110);
  require_named(engine, teller.id, 150);
  teller.at = 110;
  prefill(engine, rig, teller, 150);
  REQUIRE(engine.match_prefix(kDense, ids) == 144);
}

TEST_CASE("a fork has the names of its own tokens, and its parent keeps those to come", "[engine][prefix]") {
  const EngineRig rig = engine_rig();
  const Story story(kShape, 120, 235);
  Engine engine(options_for(rig, 2, 0), rig.device);
  const std::uint32_t forked = GENERATE(0u, 20u, 40u);
  CAPTURE(forked);
  Story other(kShape, 120, 236);
  other.begin_as(story, forked);
  const Ids ids = ids_of(kPrompt);
  Teller teller = begin_named(engine, story, kFull, ids);
  prefill(engine, rig, teller, 40);
  Teller child{.story = &other, .id = engine.fork(teller.id, forked), .at = forked};
  engine.truncate(child.id, forked);
  require_named(engine, child.id, forked);
  require_named(engine, teller.id, kPrompt);
  // The child goes on otherwise, under no name.
  prefill(engine, rig, child, kPrompt);
  REQUIRE(engine.match_prefix(kDense, ids) == 32);
  require_found(engine, rig, teller, ids);
}

TEST_CASE("a parked sequence keeps the names of tokens to come", "[engine][prefix][park]") {
  const EngineRig rig = engine_rig();
  const Story story(kShape, 120, 237);
  Engine engine(options_for(rig, 2, 0), rig.device);
  const Ids ids = ids_of(kPrompt);
  Teller teller = begin_named(engine, story, kFull, ids, 7);
  prefill(engine, rig, teller, 40);
  engine.truncate(teller.id, 40);
  const parks::Area area = parked(engine, teller.id);
  require_named(engine, teller.id, kPrompt);
  engine.end(teller.id);
  Engine second(options_for(rig, 2, 0), rig.device);
  Teller again = parks::resumed(second, area, teller);
  second.truncate(again.id, 40);
  require_named(second, again.id, kPrompt);
  prefill(second, rig, again, kPrompt);
  REQUIRE(second.match_prefix(kDense, ids, 7) == kPages);
  // Truncated, it keeps the names of what is left.
  Teller cut = parks::resumed(second, area, teller);
  second.truncate(cut.id, 20);
  require_named(second, cut.id, 20);
}
