// Prompts of sequences that are parked and resumed, on every device: how they go on, and who finds their pages.
#include <array>

#include "tests/support/engine_park.hpp"
#include "tests/support/sanitized.hpp"

using namespace sluice;
using namespace sluice::test;
using namespace sluice::test::policies;
using namespace sluice::test::prefixes;
using namespace sluice::test::parks;

TEST_CASE("prompts that choose blocks by what earlier chunks kept go on doing so", "[engine][park]") {
  const EngineRig rig = engine_rig();
  const Story story(kShape, 1400, 307);
  const PolicySpec policy = parse_policy(kFull);
  EngineOptions options = room_for(rig, policy);
  options.largest.prefill_rows = 200;
  options.prefill = {.mode = PrefillMode::automatic, .flex = {.gamma = 0.9f, .min_budget = 128}};
  const auto chunks = [&](Engine& engine, Teller& teller, std::uint32_t end) {
    std::vector<std::vector<float>> out;
    while (teller.at < end) out.push_back(run(engine, rig, {&teller}, {200}, true)[0]);
    return out;
  };
  Engine first(options, rig.device);
  Teller stays{.story = &story, .id = first.begin(policy)};
  (void)chunks(first, stays, 800);
  Engine second(options, rig.device);
  const Area area = parked(first, stays.id);
  Teller back = resumed(second, area, stays);
  REQUIRE(parked(second, back.id) == area);
  const EngineStats before = first.stats();
  const auto want = chunks(first, stays, 1400);
  const auto out = chunks(second, back, 1400);
  for (std::size_t i = 0; i < want.size(); ++i) REQUIRE(difference(out[i], want[i]) == 0.0);
  REQUIRE(second.stats().sparse_chunks == first.stats().sparse_chunks - before.sparse_chunks);
}

TEST_CASE("prompts of an engine find pages of a sequence that is resumed if its prompts attended alike",
          "[engine][park]") {
  const EngineRig rig = engine_rig();
  const Story story(kShape, 200, 314);
  const PolicySpec policy = parse_policy(kExact);
  const Ids ids = ids_of(200);
  const auto options = [&](PrefillMode mode, float gamma) {
    EngineOptions all = room_for(rig, policy);
    all.prefill = {.mode = mode, .flex = {.gamma = gamma, .min_budget = 128}};
    return all;
  };
  const auto by = [&](PrefillMode mode, std::uint32_t tokens) {
    EngineOptions all = room_for(rig, policy);
    all.prefill = {.mode = mode, .streaming = {.window = tokens}, .minference = {.a_shape = {.sinks = tokens}}};
    return all;
  };
  const std::array kinds{options(PrefillMode::full, 0.9f),        options(PrefillMode::full, 0.8f),
                         options(PrefillMode::flexprefill, 0.9f), options(PrefillMode::flexprefill, 0.8f),
                         options(PrefillMode::automatic, 0.9f),   by(PrefillMode::streaming, 100),
                         by(PrefillMode::streaming, 200),         by(PrefillMode::minference, 100),
                         by(PrefillMode::minference, 200)};
  for (std::size_t from = 0; from < kinds.size(); ++from) {
    Engine first(kinds[from], rig.device);
    Teller teller = begin_named(first, story, kExact, ids_of(101));
    prefill(first, rig, teller, 100);
    const Area area = parked(first, teller.id);
    for (std::size_t to = 0; to < kinds.size(); ++to) {
      if (kSanitized && to != from && to != (from + 1) % kinds.size()) continue;
      CAPTURE(from, to);
      Engine second(kinds[to], rig.device);
      Teller back = resumed(second, area, teller);
      const bool alike = from == to || (from < 2 && to < 2);  // What prompts do not read may differ.
      REQUIRE(second.match_prefix(policy, ids) == (alike ? 96 : 0));
      if (!alike) {
        Engine third(kinds[from], rig.device);
        (void)third.resume(parked(second, back.id));
        REQUIRE(third.match_prefix(policy, ids) == 0);
      }
      prefill(second, rig, back, 150);
      REQUIRE(second.match_prefix(policy, ids) == (alike ? 96 : 0));
    }
  }
}
