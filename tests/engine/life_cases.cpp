// Sequences that fork and shrink, what an engine admits, and what it reserves.
#include <cmath>

#include "sluice/error.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/engine_lives.hpp"

using namespace sluice;
using namespace sluice::test;
using namespace sluice::test::lives;

TEST_CASE("forks share their blocks, and write into none that is shared", "[engine]") {
  const EngineRig rig = engine_rig();
  Engine engine(life_options(rig, 2, 9), rig.device);
  const std::uint64_t block = block_bytes(engine.options());
  const Story story(kShape, 100, 3);
  const Story other(kShape, 100, 4);
  Teller parent{.story = &story, .id = engine.begin(parse_policy(kPolicy))};
  import_story(engine, rig, parent, 70);
  REQUIRE(engine.memory().far_pages_used == 5 * block);
  Teller child{.story = &story, .id = engine.fork(parent.id, 70), .at = 70};
  REQUIRE(engine.memory().far_pages_used == 5 * block);
  REQUIRE(engine.far_bytes(child.id) == 5 * block);
  ForwardTensors tensors(*rig.device, kShape, 2);
  // Together, so that the open block is wanted twice; the child goes its own way.
  const auto both = run_forward(engine, rig, tensors, {&parent, &child});
  for (std::size_t i = 0; i < both[0].size(); ++i) REQUIRE(std::abs(both[0][i] - both[1][i]) < rig.tolerance);
  REQUIRE(engine.memory().far_pages_used == 6 * block);
  child.story = &other;
  for (int step = 0; step < 20; ++step) (void)run_forward(engine, rig, tensors, {&parent, &child});
  // A second child of what the first never touched, and the parent with it, still tell the story.
  Teller second{.story = &story, .id = engine.fork(parent.id, 50), .at = 50};
  const auto after = run_forward(engine, rig, tensors, {&parent, &second});
  for (std::uint32_t layer = 0; layer < kShape.layers; ++layer) {
    const std::size_t row = std::size_t{kShape.q_heads} * kShape.head_dim;
    const auto want_parent = story.attended(layer, parent.at - 1, 2, 6, 10);
    const auto want_second = story.attended(layer, second.at - 1, 2, 6, 10);
    for (std::size_t i = 0; i < row; ++i) {
      REQUIRE(std::abs(after[0][layer * row + i] - want_parent[i]) < 1e-3);
      REQUIRE(std::abs(after[1][layer * row + i] - want_second[i]) < 1e-3);
    }
  }
  engine.end(parent.id);
  engine.end(child.id);
  REQUIRE(engine.memory().far_pages_used == 4 * block);
  engine.end(second.id);
  REQUIRE(engine.memory().far_pages_used == 0);
}

TEST_CASE("an engine admits what its pool has room for, and says what it holds", "[engine]") {
  const EngineRig rig = engine_rig();
  Engine engine(life_options(rig, 1, 6), rig.device);
  const Story story(kShape, 100, 3);
  REQUIRE(engine.can_admit(96));
  REQUIRE_FALSE(engine.can_admit(97));
  Teller teller{.story = &story, .id = engine.begin(parse_policy(kPolicy))};
  import_story(engine, rig, teller, 33);
  REQUIRE(engine.can_admit(48));
  REQUIRE_FALSE(engine.can_admit(49));
  engine.truncate(teller.id, 16);
  REQUIRE(engine.can_admit(80));
  REQUIRE(code_of([&] { engine.truncate(teller.id, 17); }) == Errc::invalid_argument);
  REQUIRE(code_of([&] { (void)engine.fork(teller.id, 17); }) == Errc::invalid_argument);
  for (int i = 0; i < 3; ++i) (void)engine.fork(teller.id, 16);
  REQUIRE_FALSE(engine.can_admit(1));
  REQUIRE(code_of([&] { (void)engine.fork(teller.id, 16); }) == Errc::out_of_capacity);
  const EngineMemoryUse use = engine.memory();
  REQUIRE(use.far_pages == 6 * block_bytes(engine.options()));
  REQUIRE(use.near_pages == 3 * near_block_bytes(engine.options()));
  REQUIRE(use.device() > use.near_pages);
  REQUIRE(use.host() > use.far_pages);
}

TEST_CASE("what an engine will reserve can be told before it is built", "[engine]") {
  const EngineRig rig = engine_rig();
  std::vector<EngineOptions> wanted(5, life_options(rig, 3, 40));
  wanted[1].near_bytes = 0;
  wanted[1].in_flight = 1;
  wanted[2].policies.push_back(parse_policy("quest"));
  wanted[3].placement = PlacementMode::stream;
  wanted[3].largest.audit = wanted[3].largest.trace = true;
  wanted[3].policies.push_back(parse_policy("lfps"));
  wanted[4].largest.prefill_rows = 256;
  wanted[4].largest.prefills = 2;
  wanted[4].prefill.mode = PrefillMode::flexprefill;
  for (const EngineOptions& options : wanted) {
    CAPTURE(&options - wanted.data());
    const EngineMemoryUse needed = memory_needed(options, rig.device.get());
    const Engine engine(options, rig.device);
    const EngineMemoryUse use = engine.memory();
    REQUIRE(needed.far_pages == use.far_pages);
    REQUIRE(needed.pinned == use.pinned);
    REQUIRE(needed.near_pages == use.near_pages);
    REQUIRE(needed.codes == use.codes);
    REQUIRE(needed.digests == use.digests);
    REQUIRE(needed.buffers == use.buffers);
    REQUIRE(needed.far_pages_used + needed.policies + needed.prefixes == 0);
  }
  EngineOptions wrong = wanted[0];
  wrong.page_tokens = 12;
  REQUIRE(code_of([&] { (void)memory_needed(wrong, rig.device.get()); }) == Errc::invalid_argument);
}
