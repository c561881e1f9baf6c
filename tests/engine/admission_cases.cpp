// What an engine admits with which policy, and what sequences take of its memory, on every device.
#include <random>

#include "scheduler/layer_policy.hpp"
#include "sluice/error.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/engine_policies.hpp"

using namespace sluice;
using namespace sluice::test;
using namespace sluice::test::policies;

namespace {

const char* const kOnDevice = "exact | int4 | top_p=0.9 | near=0";

/// An engine of 100 blocks of 16 tokens that serves policies of both kinds.
EngineOptions admission_options(const EngineRig& rig) {
  EngineOptions options = options_for(rig, 2, 0);
  options.policies.push_back(parse_policy(kOnDevice));
  return options;
}

/// What policies of these sequences have learnt, one after the other.
std::uint64_t learnt(const Engine& engine, const std::vector<Teller>& tellers) {
  std::uint64_t bytes = 0;
  for (const Teller& teller : tellers) bytes += engine.memory(teller.id).policy;
  return bytes;
}

}  // namespace

TEST_CASE("what an engine admits depends on the policy", "[engine]") {
  const EngineRig rig = engine_rig();
  EngineOptions options = admission_options(rig);
  options.cpu_sequences = 1;
  Engine engine(options, rig.device);
  const PolicySpec lfps = parse_policy("lfps"), device = parse_policy(kOnDevice);
  REQUIRE(engine.can_admit(1600, lfps));
  REQUIRE(engine.can_admit(1600, device));
  REQUIRE_FALSE(engine.can_admit(1601, device));
  // No digests, no pages; and what no engine serves, or what breaks its ranges.
  REQUIRE_FALSE(engine.can_admit(16, parse_policy("quest | near=0")));
  PolicySpec broken = device;
  broken.budget.mass = 2.f;
  REQUIRE_FALSE(engine.can_admit(16, broken));

  const SequenceId only = engine.begin(lfps);
  REQUIRE_FALSE(engine.can_admit(16, lfps));
  REQUIRE(engine.can_admit(16, device));
  std::vector<SequenceId> others;
  for (std::uint32_t i = 1; i < options.sequences; ++i) others.push_back(engine.begin(device));
  REQUIRE_FALSE(engine.can_admit(16, device));
  engine.end(others.back());
  REQUIRE(engine.can_admit(16, device));
  engine.end(only);
  REQUIRE(engine.can_admit(16, lfps));
}

TEST_CASE("sequences say what they take, shared or not", "[engine]") {
  const EngineRig rig = engine_rig();
  const Story story(kShape, 210, 71);
  Engine engine(admission_options(rig), rig.device);
  const std::uint64_t block = block_bytes(engine.options());
  Teller teller{.story = &story, .id = engine.begin(parse_policy("lfps"))};
  SequenceMemoryUse use = engine.memory(teller.id);
  const std::uint64_t tail = std::uint64_t{32} * kShape.layers * kRow * sizeof(float);
  REQUIRE((use.far_pages == 0 && use.policy == 0 && use.names == 0 && use.tail == tail));
  prefill(engine, rig, teller, 100);
  REQUIRE(engine.memory(teller.id).policy == 0);  // Nobody has asked it yet.
  (void)decode(engine, rig, teller);
  use = engine.memory(teller.id);
  REQUIRE(use.far_pages == 7 * block);
  REQUIRE(use.far_pages_shared == 0);
  REQUIRE(use.policy != 0);

  const SequenceId child = engine.fork(teller.id, 40, parse_policy(kOnDevice));
  REQUIRE(engine.memory(child).far_pages == 3 * block);
  REQUIRE(engine.memory(child).far_pages_shared == 3 * block);
  REQUIRE((engine.memory(child).policy == 0 && engine.memory(child).tail == 0));
  REQUIRE(engine.memory(teller.id).far_pages_shared == 3 * block);
  std::vector<std::int32_t> ids(101, 7);
  engine.name_tokens(teller.id, 0, ids);
  REQUIRE(engine.memory(teller.id).names >= 101 * sizeof(std::int32_t));
  REQUIRE(engine.memory(teller.id).far_pages_shared >= 6 * block);  // Names keep its full pages, too.
  engine.end(child);
  engine.end(teller.id);
  REQUIRE(code_of([&] { (void)engine.memory(child); }) == Errc::not_found);
}

TEST_CASE("what would exceed the bound of policy state is refused, and nothing has changed", "[engine]") {
  const EngineRig rig = engine_rig();
  const Story story(kShape, 400, 72);
  EngineOptions options = admission_options(rig);
  const PolicySpec lfps = parse_policy("lfps");
  options.policy_bytes = scheduler::policy_state_bytes(lfps, kShape, 170);
  std::uint32_t too_many = 170;  // Tables grow by some tokens at a time.
  while (scheduler::policy_state_bytes(lfps, kShape, too_many) <= options.policy_bytes) ++too_many;
  CAPTURE(too_many);
  REQUIRE(too_many <= 200);
  Engine engine(options, rig.device);
  REQUIRE(engine.can_admit(150, lfps));
  REQUIRE_FALSE(engine.can_admit(too_many - 1, lfps));  // Policies look a token ahead.
  REQUIRE(engine.can_admit(1600, parse_policy(kOnDevice)));
  REQUIRE_FALSE(engine.can_admit(150, parse_policy("magicpig")));

  Teller teller{.story = &story, .id = engine.begin(lfps)};
  prefill(engine, rig, teller, 150);
  Errc code{};
  std::string reason;
  try {
    for (int step = 0; step < 60; ++step) (void)decode(engine, rig, teller);
  } catch (const Error& error) {
    code = error.code();
    reason = error.what();
  }
  REQUIRE(code == Errc::out_of_capacity);
  REQUIRE(reason.find("policy_bytes") != std::string::npos);
  const std::uint32_t reached = engine.tokens(teller.id);
  REQUIRE((reached > 150 && reached < too_many));
  REQUIRE(engine.memory(teller.id).policy <= options.policy_bytes);
  REQUIRE(engine.memory(teller.id).far_pages == div_up(reached, 16) * block_bytes(options));
  // Others of the kind have no room, not even for their first token; those that keep nothing do.
  REQUIRE(code_of([&] { (void)engine.begin(lfps); }) == Errc::out_of_capacity);
  REQUIRE(code_of([&] { (void)engine.fork(teller.id, 16, lfps); }) == Errc::out_of_capacity);
  Teller other{.story = &story, .id = engine.begin(parse_policy(kOnDevice))};
  prefill(engine, rig, other, 300);
  (void)decode(engine, rig, other);
  engine.end(teller.id);
  REQUIRE(engine.can_admit(150, lfps));
}

TEST_CASE("policies keep within their bound over a life of begins and ends", "[engine]") {
  const EngineRig rig = engine_rig();
  const Story story(kShape, 260, 73);
  EngineOptions options = admission_options(rig);
  const char* const kinds[] = {"lfps", "history:observe_every=2 | top_k=20 | near=0", "tactic:least=32", kOnDevice};
  options.policy_bytes = 3 * scheduler::policy_state_bytes(parse_policy("lfps"), kShape, 150);
  Engine engine(options, rig.device);
  std::vector<Teller> tellers;
  std::mt19937 rng(5);
  std::uint32_t refused = 0, decoded = 0;
  for (int round = 0; round < 120; ++round) {
    if (tellers.size() < 5 && rng() % 3 == 0) {
      const PolicySpec policy = parse_policy(kinds[rng() % std::size(kinds)]);
      const bool admitted = engine.can_admit(0, policy);
      try {
        tellers.push_back({.story = &story, .id = engine.begin(policy)});
        REQUIRE(admitted);
      } catch (const Error& error) {
        REQUIRE((!admitted && error.code() == Errc::out_of_capacity));
        ++refused;
      }
    }
    if (tellers.empty()) continue;
    const std::size_t at = rng() % tellers.size();
    Teller& teller = tellers[at];
    try {
      if (teller.at == 0) {
        prefill(engine, rig, teller, 40 + static_cast<std::uint32_t>(rng() % 100));
      } else if (teller.at < story.tokens()) {
        (void)decode(engine, rig, teller);
        ++decoded;
      }
    } catch (const Error& error) {
      REQUIRE(error.code() == Errc::out_of_capacity);
      ++refused;
      engine.end(teller.id);
      tellers.erase(tellers.begin() + static_cast<std::ptrdiff_t>(at));
    }
    const std::uint64_t held = learnt(engine, tellers);
    REQUIRE(held <= options.policy_bytes);
    REQUIRE(engine.memory().policies >= held);
    if (tellers.size() > 3 && rng() % 4 == 0) {
      engine.end(tellers.front().id);
      tellers.erase(tellers.begin());
    }
  }
  REQUIRE(refused > 0);
  REQUIRE(decoded > 20);
}
