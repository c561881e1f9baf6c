// Looks at prompts beside everything else: when they begin, what goes on meanwhile, and how they are taken back.
#include <string>
#include <thread>

#include "sluice/run_clock.hpp"
#include "tests/runtime/gate.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/engine_policies.hpp"
#include "tests/support/engine_prefix.hpp"

using namespace sluice;
using namespace sluice::test;
using namespace sluice::test::policies;
using namespace std::chrono_literals;

namespace {

constexpr std::uint32_t kPrompt = 130;
constexpr std::uint32_t kThreads = 3;
constexpr const char* kLooks = "clusters | top_p=0.9 | near=0,sinks=2,recent=6";
constexpr const char* kDoesNot = "exact | int4 | top_k=10 | near=0";

EngineOptions options_of(const EngineRig& rig, const std::shared_ptr<Gate>& gate) {
  EngineOptions options = policies::options_for(rig, 2, 0);
  options.threads = kThreads;
  options.answer_timeout = 60s;
  options.before_answer = [gate] { gate->pass(); };
  // For no more than these: the engine's memory has to be cleared within its deadline, short in some cases.
  return named(options, {kLooks, kDoesNot});
}

Teller begin_of(Engine& engine, const EngineRig& rig, const Story& story, const std::string& policy, bool named) {
  Teller teller = named ? prefixes::begin_named(engine, story, policy.c_str(), prefixes::ids_of(kPrompt))
                        : Teller{.story = &story, .id = engine.begin(parse_policy(policy))};
  policies::prefill(engine, rig, teller, kPrompt);
  return teller;
}

/// What such a sequence says in an engine of its own whose plan looks at the prompt.
std::vector<std::vector<float>> said_alone(const EngineRig& rig, const Story& story, const std::string& policy,
                                           int tokens) {
  Engine engine(policies::options_for(rig, 2, 0), rig.device);
  Teller teller = begin_of(engine, rig, story, policy, false);
  std::vector<std::vector<float>> all;
  for (int i = 0; i < tokens; ++i) all.push_back(policies::decode(engine, rig, teller));
  REQUIRE(engine.stats().stalls <= 1);
  return all;
}

}  // namespace

TEST_CASE("a look begins with the end of a prompt that has names, and changes nothing", "[engine][look]") {
  const std::string policy =
      GENERATE(as<std::string>{}, kLooks, "lfps", "magicpig | dense=0",
               "labels:channels=8,budget=24 | top_k=max(1, 100%) | near=0", "adakv:budget=60,window=16");
  CAPTURE(policy);
  const EngineRig rig = engine_rig();
  const Story story(kShape, kPrompt + 20, 5);
  const auto want = said_alone(rig, story, policy, 5);
  bool waited = true;
  for (int round = 0; round < 50 && waited; ++round) {
    Engine engine(policies::options_for(rig, 2, 0), rig.device);
    Teller teller = begin_of(engine, rig, story, policy, true);
    std::this_thread::sleep_for(std::chrono::milliseconds(round * round));
    for (const auto& each : want) REQUIRE(policies::decode(engine, rig, teller) == each);
    waited = engine.stats().stalls != 0;
  }
  REQUIRE_FALSE(waited);
}

TEST_CASE("other sequences go on while threads look at a prompt", "[engine][look]") {
  const EngineRig rig = engine_rig();
  const Story story(kShape, kPrompt + 20, 6);
  const auto want = said_alone(rig, story, kLooks, 1);
  const auto want_other = said_alone(rig, story, kDoesNot, 8);
  const auto gate = std::make_shared<Gate>();
  Engine engine(options_of(rig, gate), rig.device);
  Teller other = begin_of(engine, rig, story, kDoesNot, false);
  gate->wanted = kThreads;  // All but the one that only answers.
  Teller looks = begin_of(engine, rig, story, kLooks, true);
  gate->await(kThreads);
  for (const auto& each : want_other) REQUIRE(policies::decode(engine, rig, other) == each);
  REQUIRE(engine.stats().stalls == 0);
  // When the plan has come to wait for the look, of which it does the pieces that nobody has begun.
  std::jthread opens([&] {
    const Deadline deadline = deadline_after(20s);
    while (!gate->helped && RunClock::now() < deadline) std::this_thread::sleep_for(1ms);
    gate->open = true;
  });
  REQUIRE(policies::decode(engine, rig, looks) == want[0]);
  REQUIRE(engine.stats().stalls == 1);
}

TEST_CASE("a prompt that is looked at goes on, is cut and ends", "[engine][look]") {
  const EngineRig rig = engine_rig();
  const Story story(kShape, kPrompt + 40, 7);
  const bool comes_back = GENERATE(true, false);
  const std::string way = GENERATE(as<std::string>{}, "goes on", "is cut", "ends", "is forked", "lives on");
  CAPTURE(way, comes_back);
  const long users = rig.device.use_count();
  const auto gate = std::make_shared<Gate>();
  EngineOptions options = options_of(rig, gate);
  if (!comes_back) options.timeout = 300ms;
  auto engine = std::make_unique<Engine>(options, rig.device);
  gate->wanted = kThreads;
  Teller teller = begin_of(*engine, rig, story, kLooks, true);
  gate->await(kThreads);
  std::jthread opens([&] {
    if (!comes_back) return;
    std::this_thread::sleep_for(50ms);
    gate->open = true;
  });
  std::vector<float> want;
  Teller twin;
  const auto twin_of = [&](std::uint32_t tokens) {
    Engine alone(policies::options_for(rig, 2, 0), rig.device);
    twin = {.story = &story, .id = alone.begin(parse_policy(kLooks))};
    policies::prefill(alone, rig, twin, tokens);
    want = policies::decode(alone, rig, twin);
  };
  if (way == "goes on") {
    policies::prefill(*engine, rig, teller, kPrompt + 20);
    twin_of(kPrompt + 20);
  } else if (way == "is cut") {
    engine->truncate(teller.id, 64);
    teller.at = 64;
    twin_of(64);
  } else if (way == "ends") {
    engine->end(teller.id);
    teller = begin_of(*engine, rig, story, kLooks, false);  // In its blocks.
    twin_of(kPrompt);
  } else if (way == "is forked") {
    teller = {.story = &story, .id = engine->fork(teller.id, kPrompt), .at = kPrompt};
    twin_of(kPrompt);
  } else {
    twin_of(kPrompt);
  }
  if (way == "is cut") {
    // The queries of its newest tokens are no more, which this policy does without.
    REQUIRE(difference(policies::decode(*engine, rig, teller), want) < policies::tolerance(rig));
  } else if (comes_back || way != "lives on") {
    REQUIRE(policies::decode(*engine, rig, teller) == want);
  } else {
    REQUIRE(code_of([&] { (void)policies::decode(*engine, rig, teller); }) == Errc::timeout);
    REQUIRE(policies::decode(*engine, rig, teller) == want);  // By the threads that are left: the caller's.
  }
  engine.reset();
  if (!comes_back) REQUIRE(gate->held == static_cast<int>(kThreads));
  gate->open = true;
  while (rig.device.use_count() != users) std::this_thread::sleep_for(1ms);
}

TEST_CASE("a thread that does not come back from an audit costs the forward a deadline", "[engine][look][lost]") {
  const EngineRig rig = engine_rig();
  const Story story(kShape, kPrompt + 20, 8);
  const auto gate = std::make_shared<Gate>();
  EngineOptions options = options_of(rig, gate);
  options.largest.audit = true;
  options.timeout = 300ms;
  Engine engine(options, rig.device);
  const SequenceId id = engine.begin(parse_policy(kDoesNot));
  Teller teller{.story = &story, .id = id};
  Bucket bucket = engine.options().largest;
  bucket.audit = false;
  const auto run = [&](std::uint32_t tokens, bool prefill) {
    ForwardTensors tensors(*rig.device, kShape, bucket.rows());
    for (std::uint32_t i = 0; i < tokens; ++i) tensors.set(i, story, teller.at + i);
    const PlanItem item{.sequence = id, .tokens = tokens, .prefill = prefill};
    const Batch batch = engine.plan({&item, 1}, bucket, rig.stream);
    tensors.attend(engine, bucket, rig.stream);
    rig.synchronize();
    teller.at += tokens;
    return batch;
  };
  engine.finish(run(100, true));
  bucket = {.decode_rows = 2, .audit = true};
  const Batch batch = run(1, false);
  gate->wanted = 1;
  const auto finish = [&] { engine.finish(batch); };
  for (int i = 0; i < 2; ++i) REQUIRE(code_of(finish) == Errc::timeout);
  REQUIRE(gate->held == 1);
  gate->open = true;
  // The thread has yet to do the piece that it holds.
  for (int tries = 0; tries < 100 && engine.audit(id).tokens == 0; ++tries) {
    try {
      finish();
    } catch (const Error& error) {
      REQUIRE(error.code() == Errc::timeout);
    }
  }
  REQUIRE(engine.audit(id).tokens == 1);
}
