// Engines whose threads do not come back, and engines that share the cores of a process.
#include <atomic>
#include <optional>
#include <random>
#include <string>
#include <thread>

#include "cpu/machine/core_shares.hpp"
#include "sluice/run_clock.hpp"
#include "tests/runtime/gate.hpp"
#include "tests/runtime/own_device.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/engine_plain.hpp"

using namespace sluice;
using namespace sluice::test;
using namespace sluice::test::plain;
using namespace std::chrono_literals;

namespace {

constexpr const char* kPolicy = "exact | int4 | top_k=10 | near=0,sinks=2,recent=6";

EngineOptions impatient(const EngineRig& rig, const std::shared_ptr<Gate>& gate) {
  EngineOptions options = options_for(rig, 1, 60, 0);
  options.answer_timeout = 400ms;
  options.timeout = 1s;
  options.before_answer = [gate] { gate->pass(); };
  return options;
}

}  // namespace

TEST_CASE("a thread that does not come back from an answer costs the engine, not the process", "[engine][lost]") {
  const bool comes_back = GENERATE(true, false);
  CAPTURE(comes_back);
  const EngineRig rig = engine_rig();
  const long users = rig.device.use_count();
  const auto gate = std::make_shared<Gate>();
  const Story story(kShape, 120, 5);
  auto engine = std::make_unique<Engine>(impatient(rig, gate), rig.device);
  Teller teller{.story = &story, .id = engine->begin(parse_policy(kPolicy))};
  import_story(*engine, rig, teller, 100);
  ForwardTensors tensors(*rig.device, kShape, 1);
  (void)run_forward(*engine, rig, tensors, {&teller});
  gate->wanted = 1;
  tensors.set(0, story, teller.at);
  const Batch batch = engine->plan(one_each({&teller.id, 1}), engine->options().largest, rig.stream);
  tensors.attend(*engine, rig.stream);
  rig.synchronize();
  REQUIRE(std::isnan(tensors.out(0).back()));
  for (int i = 0; i < 2; ++i) REQUIRE(code_of([&] { engine->finish(batch); }) == Errc::timeout);
  REQUIRE(engine->tokens(teller.id) == teller.at);
  REQUIRE(gate->held == 1);
  if (comes_back) {
    gate->open = true;
    const auto [code, text] = refusal_of([&] { engine->finish(batch); });
    CAPTURE(text);
    REQUIRE(code == Errc::device);
    REQUIRE(text.find("sequence " + std::to_string(teller.id.value) + ";") != std::string::npos);
    while (teller.at < story.tokens()) {
      const auto out = run_forward(*engine, rig, tensors, {&teller});
      REQUIRE(error_of(out[0], story, teller.at - 1, 2, 6, 10) < kTolerance);
    }
    engine.reset();
    REQUIRE(rig.device.use_count() == users);
    return;
  }
  engine.reset();
  REQUIRE(gate->held == 1);
  REQUIRE(rig.device.use_count() > users);
  REQUIRE(cpu::CoreShares::of_process().shares().empty());
  gate->open = true;
  while (rig.device.use_count() != users) std::this_thread::sleep_for(1ms);
}

TEST_CASE("a thread that does not come back from a look at a prompt costs a plan", "[engine][lost]") {
  const EngineRig rig = engine_rig();
  const long users = rig.device.use_count();
  const auto gate = std::make_shared<Gate>();
  const Story story(kShape, 120, 5);
  EngineOptions options = impatient(rig, gate);
  options.threads = 3;
  options.largest.unbounded = true;
  options.policies.push_back(parse_policy(kOnCpu));
  options.cpu_sequences = 1;
  auto engine = std::make_unique<Engine>(options, rig.device);
  Teller stuck{.story = &story, .id = engine->begin(parse_policy("exact | top_k=10 | near=0,sinks=2,recent=6"))};
  Teller other{.story = &story, .id = engine->begin(parse_policy(kPolicy))};
  for (Teller* const teller : {&stuck, &other}) import_story(*engine, rig, *teller, 100);
  gate->wanted = 1;
  const auto plan = [&] { (void)engine->plan(one_each({&stuck.id, 1}), engine->options().largest, rig.stream); };
  const auto [code, text] = refusal_of(plan);
  CAPTURE(text);
  REQUIRE(code == Errc::timeout);
  REQUIRE(text.find("sequence " + std::to_string(stuck.id.value)) != std::string::npos);
  ForwardTensors tensors(*rig.device, kShape, 1);
  while (stuck.at < 110) (void)run_forward(*engine, rig, tensors, {&stuck});  // The others look at it.
  while (other.at < story.tokens()) {
    const auto out = run_forward(*engine, rig, tensors, {&other});
    REQUIRE(error_of(out[0], story, other.at - 1, 2, 6, 10) < kTolerance);
  }
  engine->end(stuck.id);
  REQUIRE(gate->held == 1);
  engine.reset();
  REQUIRE(gate->held == 1);
  REQUIRE(rig.device.use_count() > users);
  gate->open = true;
  while (rig.device.use_count() != users) std::this_thread::sleep_for(1ms);
}

TEST_CASE("a fork that shares the page in which a sequence goes on leaves it nothing to learn", "[engine][lost]") {
  const EngineRig rig = engine_rig();
  const auto gate = std::make_shared<Gate>();
  const std::shared_ptr<Event> learnable = rig.device->create_event();
  EngineOptions options = options_for(rig, 2, 60, 0);
  options.threads = 1;
  options.largest.unbounded = true;
  options.policies.push_back(parse_policy(kOnCpu));
  options.cpu_sequences = 3;
  options.answer_timeout = options.timeout = 60s;
  options.before_answer = [gate, learnable] {
    if (gate->wanted == 0 || std::this_thread::get_id() == gate->caller) return;
    if (learnable->state() != Event::State::done) return;
    gate->held = 1;
    while (!gate->open) std::this_thread::sleep_for(1ms);
  };
  const Story story(kShape, 220, 5);
  auto engine = std::make_unique<Engine>(options, rig.device);
  Teller parent{.story = &story, .id = engine->begin(parse_policy("tactic:least=64,size=4,recluster=64"))};
  Teller other{.story = &story, .id = engine->begin(parse_policy("exact | top_k=10 | near=0,sinks=2,recent=6"))};
  import_story(*engine, rig, parent, 150);
  import_story(*engine, rig, other, 100);
  ForwardTensors tensors(*rig.device, kShape, 2), more(*rig.device, kShape, 2);
  while (parent.at < 213) (void)run_forward(*engine, rig, tensors, {&parent});
  (void)run_forward(*engine, rig, tensors, {&other});
  // The next token is one of 64 that are to be clustered, and the only thread that could do so is held up.
  const auto enqueue = [&](const Teller& teller, ForwardTensors& with) {
    with.set(0, story, teller.at);
    const Batch batch = engine->plan(one_each({&teller.id, 1}), engine->options().largest, rig.stream);
    with.attend(*engine, rig.stream);
    return batch;
  };
  const Batch last = enqueue(parent, tensors);
  rig.queue->record(*learnable);
  gate->wanted = 1;
  const Batch next = enqueue(other, more);
  while (gate->held == 0) std::this_thread::sleep_for(1ms);
  engine->finish(last);
  const SequenceId child = engine->fork(parent.id, 214, parse_policy(kPolicy));
  const std::uint64_t learnt = engine->memory(parent.id).policy;
  gate->open = true;
  engine->finish(next);
  engine->end(engine->fork(parent.id, 214));  // This waits for all that there is to learn.
  REQUIRE(engine->memory(parent.id).policy == learnt);
  parent.at = 214;
  (void)run_forward(*engine, rig, tensors, {&parent});
  engine->end(child);
}

TEST_CASE("far rows of a list are attended while a policy still chooses for another", "[engine][far_workers]") {
  const EngineRig rig = engine_rig();
  const Story story(kShape, 120, 5);
  // A layer asks to choose for the KV heads of the first row; those of the second are as the device has listed them.
  constexpr std::uint32_t kLists = 2 * kShape.kv_heads;
  constexpr std::uint32_t kPieces = kShape.kv_heads + kLists - 1;  // Without the far rows of the list that is held up.
  std::atomic<std::uint32_t> pieces{0};
  std::atomic<bool> armed{false};
  std::atomic<bool> overlapped{false};
  EngineOptions options = options_for(rig, 2, 60, 0);
  options.answer_timeout = 60s;
  options.largest.unbounded = true;
  options.policies.push_back(parse_policy(kOnCpu));
  options.cpu_sequences = 1;
  options.before_answer = [&] {
    if (!armed || pieces.fetch_add(1) != 0) return;
    const Deadline deadline = deadline_after(20s);
    while (pieces < kPieces && RunClock::now() < deadline) std::this_thread::sleep_for(1ms);
    overlapped = pieces >= kPieces;
  };
  const auto tell = [&](bool stalls) {
    Engine engine(options, rig.device);
    Teller asks{.story = &story, .id = engine.begin(parse_policy("exact | top_k=10 | near=0,sinks=2,recent=6"))};
    Teller listed{.story = &story, .id = engine.begin(parse_policy(kPolicy))};
    for (Teller* const teller : {&asks, &listed}) import_story(engine, rig, *teller, 100);
    ForwardTensors tensors(*rig.device, kShape, 2);
    (void)run_forward(engine, rig, tensors, {&asks, &listed});
    std::vector<std::vector<float>> all;
    while (asks.at < 110) {
      pieces = 0;
      overlapped = false;
      armed = stalls;
      for (const auto& out : run_forward(engine, rig, tensors, {&asks, &listed})) all.push_back(out);
      armed = false;
      if (stalls) REQUIRE(overlapped);
      REQUIRE(error_of(all.back(), story, listed.at - 1, 2, 6, 10) < kTolerance);
    }
    return all;
  };
  const auto want = tell(false);
  REQUIRE(tell(true) == want);
}

TEST_CASE("the caller is bound to the core that is left to it, on request, and not longer", "[engine][core_shares]") {
  const cpu::Topology machine;
  const EngineRig rig{.device = own_device(), .queue = nullptr};
  EngineOptions options = options_for(rig, 1, 20, 0);
  options.threads = 0;
  const auto on_its_own = [](const auto& work) { std::thread(work).join(); };  // What this test's thread may use stays.
  if (machine.core_order(0).size() < 2) {
    Engine engine(options, rig.device);
    REQUIRE(code_of([&] { engine.pin_caller(); }) == Errc::unsupported);
    return;
  }
  Engine engine(options, rig.device);
  const std::vector<cpu::CoreShare> shares = cpu::CoreShares::of_process().shares();
  REQUIRE(shares.size() == 1);
  const std::vector<std::uint32_t> alone{shares.front().pus.front()};
  std::vector<std::uint32_t> before, once, twice, after, other;
  on_its_own([&] {
    engine.unpin_caller();  // Of a thread that is not bound: nothing.
    before = machine.binding_of_this_thread();
    engine.pin_caller();
    once = machine.binding_of_this_thread();
    engine.pin_caller();
    twice = machine.binding_of_this_thread();
    engine.unpin_caller();
    after = machine.binding_of_this_thread();
  });
  on_its_own([&] { other = machine.binding_of_this_thread(); });
  REQUIRE(before.size() > 1);
  REQUIRE(once == alone);
  REQUIRE(twice == alone);
  REQUIRE(after == before);
  REQUIRE(other == before);
  // With one core there is none for the caller.
  EngineOptions narrow = options;
  narrow.cores = {machine.core_order(0).front()};
  Engine alone_there(narrow, own_device());
  REQUIRE(code_of([&] { alone_there.pin_caller(); }) == Errc::unsupported);
}

TEST_CASE("engines that come and go beside each other say what each says alone", "[engine][core_shares]") {
  const Story story(kShape, 106, 7);
  const auto tell = [&story](std::uint32_t near, bool pin) {
    const EngineRig rig{.device = own_device(), .queue = nullptr};
    const auto queue = rig.device->create_stream("caller");
    EngineOptions options = options_for(rig, 1, 20, near);
    options.threads = 0;
    options.pin_threads = pin;
    Engine engine(options, rig.device);
    const SequenceId id = engine.begin(parse_policy(kPolicy));
    Teller teller{.story = &story, .id = id};
    EngineRig mine{.device = rig.device, .queue = nullptr, .stream = queue.get()};
    import_story(engine, mine, teller, 100);
    ForwardTensors tensors(*rig.device, kShape, 1);
    std::vector<float> all;
    while (teller.at < story.tokens()) {
      tensors.set(0, story, teller.at++);
      const Batch batch = engine.plan(one_each({&id, 1}), engine.options().largest, queue.get());
      tensors.attend(engine, queue.get());
      engine.finish(batch);
      queue->synchronize(deadline_after(60s));
      const std::vector<float> out = tensors.out(0);
      all.insert(all.end(), out.begin(), out.end());
    }
    return all;
  };
  const std::vector<float> want = tell(0, true);
  const std::vector<float> want_near = tell(4, true);
  std::atomic<int> wrong{0};
  std::vector<std::thread> threads;
  for (std::uint32_t i = 0; i < 3; ++i) {
    threads.emplace_back([&, i] {
      std::mt19937 rng(i);
      for (int round = 0; round < 4; ++round) {
        const bool near = rng() % 2 == 0;
        wrong += tell(near ? 4 : 0, rng() % 2 == 0) == (near ? want_near : want) ? 0 : 1;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  REQUIRE(wrong == 0);
  REQUIRE(cpu::CoreShares::of_process().shares().empty());
}
