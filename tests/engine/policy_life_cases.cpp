// Policies that choose on the CPU, on every device: what they know when forwards fail, overlap and are taken back.
#include <atomic>
#include <chrono>
#include <thread>

#include "sluice/error.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/engine_policies.hpp"

using namespace sluice;
using namespace sluice::test;
using namespace sluice::test::policies;
using namespace std::chrono_literals;

namespace {

/// What a sequence says when nothing happens to it but this prompt, in these chunks.
std::vector<std::vector<float>> undisturbed(const EngineRig& rig, const Story& story, const char* policy,
                                            std::vector<std::uint32_t> chunks) {
  Engine engine(options_for(rig, 1, 0), rig.device);
  Teller teller{.story = &story, .id = engine.begin(parse_policy(policy))};
  for (const std::uint32_t count : chunks) (void)run(engine, rig, {&teller}, {count}, true);
  std::vector<std::vector<float>> out;
  while (teller.at < story.tokens()) out.push_back(decode(engine, rig, teller));
  return out;
}

/// Plans and enqueues, and does not finish.
Batch start(Engine& engine, const EngineRig& rig, ForwardTensors& tensors, Teller& teller, std::uint32_t count,
            bool prefill) {
  for (std::uint32_t i = 0; i < count; ++i) tensors.set(i, *teller.story, teller.at + i);
  const PlanItem item{.sequence = teller.id, .tokens = count, .prefill = prefill};
  const Batch batch = engine.plan({&item, 1}, engine.options().largest, rig.stream);
  tensors.attend(engine, rig.stream);
  return batch;
}

void rest_as(Engine& engine, const EngineRig& rig, Teller& teller, const std::vector<std::vector<float>>& want) {
  for (const std::vector<float>& out : want) {
    CAPTURE(teller.at);
    REQUIRE(difference(decode(engine, rig, teller), out) < tolerance(rig));
  }
}

}  // namespace

TEST_CASE("policies choose and learn the same however late threads are, and again after a failure", "[engine]") {
  const EngineRig rig = engine_rig();
  const Story story(kShape, 190, 12);
  const char* const policy = "history:observe_every=2 | top_k=20 | near=0,sinks=4,recent=6 | bypass=0.6";
  std::vector<std::vector<float>> want;
  for (std::uint32_t seed = 0; seed < 4; ++seed) {
    CAPTURE(seed);
    EngineOptions options = options_for(rig, 1, seed % 2 == 0 ? 0 : 20);
    options.threads = 1 + seed;
    options.answer_timeout = 300ms;
    std::atomic<std::uint32_t> parts{0};
    std::atomic<std::uint32_t> stall{kNone};
    options.before_answer = [&] {
      const std::uint32_t part = parts.fetch_add(1);
      if (seed != 0 && part % 7 == seed) std::this_thread::sleep_for(200us);
      while (part == stall) std::this_thread::sleep_for(1ms);
    };
    Engine engine(options, rig.device);
    Teller teller{.story = &story, .id = engine.begin(parse_policy(policy))};
    prefill(engine, rig, teller, 150);
    ForwardTensors tensors(*rig.device, kShape, engine.options().largest.rows());
    for (std::uint32_t step = 0; step < 40; ++step) {
      if (seed != 0 && step % 9 == seed) {
        stall = parts + seed;
        const Batch late = start(engine, rig, tensors, teller, 1, false);
        rig.synchronize();  // The device has given up.
        stall = kNone;
        REQUIRE(code_of([&] { engine.finish(late); }) == Errc::device);
      }
      const std::vector<float> out = decode(engine, rig, teller);
      if (seed == 0) want.push_back(out);
      REQUIRE(difference(out, want[step]) < tolerance(rig));
    }
  }
}

TEST_CASE("forwards of policies of the CPU follow one another before they are finished", "[engine]") {
  const EngineRig rig = engine_rig();
  const Story story(kShape, 160, 31);
  const PolicySpec policy = parse_policy("lfps");
  Reference reference(rig, story, kShape, policy);
  reference.prefill(120);
  EngineOptions options = options_for(rig, 1, 0);
  options.in_flight = 4;
  Engine engine(options, rig.device);
  Teller teller{.story = &story, .id = engine.begin(policy)};
  prefill(engine, rig, teller, 120);
  std::vector<std::unique_ptr<ForwardTensors>> tensors;
  std::vector<Batch> batches;
  const PlanItem item{.sequence = teller.id};
  for (std::uint32_t step = 0; step < 40; ++step) {
    tensors.push_back(std::make_unique<ForwardTensors>(*rig.device, kShape, options.largest.rows()));
    tensors.back()->set(0, story, 120 + step);
    if (step >= 4) engine.finish(batches[step - 4]);
    batches.push_back(engine.plan({&item, 1}, engine.options().largest, rig.stream));
    tensors.back()->attend(engine, rig.stream);
  }
  for (std::uint32_t step = 36; step < 40; ++step) engine.finish(batches[step]);
  rig.synchronize();
  for (std::uint32_t step = 0; step < 40; ++step)
    REQUIRE(difference(tensors[step]->out(0), reference.decode()) < tolerance(rig));
}

TEST_CASE("a fork of a prompt goes on as its parent would", "[engine]") {
  const EngineRig rig = engine_rig();
  const Story story(kShape, 150, 41);
  Engine engine(options_for(rig, 1, 0), rig.device);
  Teller parent{.story = &story, .id = engine.begin(parse_policy("lfps"))};
  prefill(engine, rig, parent, 130);
  Teller child{.story = &story, .id = engine.fork(parent.id, 130), .at = 130};
  for (std::uint32_t step = 0; step < 10; ++step)
    REQUIRE(difference(decode(engine, rig, child), decode(engine, rig, parent)) == 0.0);
  engine.truncate(parent.id, 140);  // As many as there are.
  engine.end(parent.id);
  (void)decode(engine, rig, child);
  // Of a policy without memory tokens are taken back.
  Teller exact{.story = &story, .id = engine.begin(parse_policy("exact | top_k=20 | near=0"))};
  prefill(engine, rig, exact, 130);
  const auto first = decode(engine, rig, exact);
  engine.truncate(exact.id, 130);
  exact.at = 130;
  REQUIRE(difference(decode(engine, rig, exact), first) == 0.0);
}

TEST_CASE("a fork under another policy is as if it had been there from the beginning", "[engine]") {
  const char* const text =
      GENERATE("lfps", "magicpig | dense=0", "exact | int4 | top_k=20 | near=0", "full:near=0", "exact | top_k=20 | near=0");
  CAPTURE(text);
  const EngineRig rig = engine_rig();
  const Story story(kShape, 150, 43);
  Engine engine(options_for(rig, 1, 0), rig.device);
  Teller parent{.story = &story, .id = engine.begin(parse_policy("history | top_k=9 | near=0"))};
  prefill(engine, rig, parent, 130);
  Teller child{.story = &story, .id = engine.fork(parent.id, 130, parse_policy(text)), .at = 130};
  for (int step = 0; step < 5; ++step) (void)decode(engine, rig, parent);
  // What the parent has learnt from is no matter; its prompt's newest queries are.
  Teller late{.story = &story, .id = engine.fork(parent.id, 130, parse_policy(text)), .at = 130};
  engine.end(parent.id);
  Teller own{.story = &story, .id = engine.begin(parse_policy(text))};
  prefill(engine, rig, own, 130);
  for (int step = 0; step < 12; ++step) {
    const std::vector<float> want = decode(engine, rig, own);
    REQUIRE(difference(decode(engine, rig, child), want) < tolerance(rig));
    REQUIRE(difference(decode(engine, rig, late), want) < tolerance(rig));
  }
  REQUIRE(code_of([&] { (void)engine.fork(own.id, 20, parse_policy("quest")); }) == Errc::unsupported);
}

TEST_CASE("imported queries are worth as much as a prompt's own", "[engine]") {
  struct Case {
    std::uint32_t rows;     ///< of an import, at most
    std::uint32_t queries;  ///< of the prompt's newest tokens, which come along
  };
  const auto& [rows, queries] = GENERATE(values<Case>({{130, 130}, {50, 130}, {130, 32}, {50, 40}, {7, 33}}));
  CAPTURE(rows, queries);
  const EngineRig rig = engine_rig();
  const Story story(kShape, 150, 44);
  Engine engine(options_for(rig, 1, 9), rig.device);
  Teller own{.story = &story, .id = engine.begin(parse_policy("lfps"))};
  prefill(engine, rig, own, 130);
  Teller teller{.story = &story, .id = engine.begin(parse_policy("lfps"))};
  import_story(engine, rig, teller, 130, rows, 130 - queries);
  for (int step = 0; step < 12; ++step)
    REQUIRE(difference(decode(engine, rig, teller), decode(engine, rig, own)) < tolerance(rig));
}

TEST_CASE("what policies of the CPU cannot have is named", "[engine]") {
  const EngineRig rig = engine_rig();
  EngineOptions options = options_for(rig, 2, 0);
  options.cpu_sequences = 1;
  Engine engine(options, rig.device);
  const Story story(kShape, 40, 5);
  REQUIRE(code_of([&] { (void)engine.begin(parse_policy("quest")); }) == Errc::unsupported);
  REQUIRE(code_of([&] { (void)engine.begin(parse_policy("history | top_k=9 | near=3%")); }) == Errc::unsupported);
  REQUIRE(code_of([&] { (void)engine.begin(parse_policy("lfps:init=200")); }) == Errc::unsupported);
  Teller teller{.story = &story, .id = engine.begin(parse_policy("lfps"))};
  REQUIRE(code_of([&] { (void)engine.begin(parse_policy("lfps")); }) == Errc::out_of_capacity);
  prefill(engine, rig, teller, 30);
  const PlanItem drafts{.sequence = teller.id, .tokens = 2};
  REQUIRE(code_of([&] { (void)engine.plan({&drafts, 1}, engine.options().largest, rig.stream); }) == Errc::unsupported);
  (void)decode(engine, rig, teller);
  engine.end(teller.id);
  (void)engine.begin(parse_policy("lfps"));
}

TEST_CASE("a prompt that is taken back takes along what its policy knew", "[engine]") {
  const EngineRig rig = engine_rig();
  const Story first(kShape, 101, 61);
  const Story second(kShape, 70, 62);
  for (const char* const policy : {"lfps", "magicpig:recent_prompt=8"}) {
    CAPTURE(policy);
    const auto want = undisturbed(rig, second, policy, {60});
    Engine engine(options_for(rig, 1, 0), rig.device);
    Teller teller{.story = &first, .id = engine.begin(parse_policy(policy))};
    std::vector<ForwardTensors> tensors;
    for (int i = 0; i < 2; ++i) tensors.emplace_back(*rig.device, kShape, engine.options().largest.rows());
    const Batch prompt = start(engine, rig, tensors[0], teller, 100, true);
    teller.at = 100;
    (void)start(engine, rig, tensors[1], teller, 1, false);
    rig.synchronize();
    engine.cancel(prompt);  // And what is behind it, which has run, and may have been learnt from.
    REQUIRE(engine.tokens(teller.id) == 0);
    teller = {.story = &second, .id = teller.id};
    (void)run(engine, rig, {&teller}, {60}, true);
    rest_as(engine, rig, teller, want);
  }
}

TEST_CASE("a decoded token that is taken back when it has run is not learnt from", "[engine]") {
  const EngineRig rig = engine_rig();
  const Story story(kShape, 160, 63);
  const auto want = undisturbed(rig, story, "lfps", {100, 20});
  Engine engine(options_for(rig, 1, 0), rig.device);
  Teller teller{.story = &story, .id = engine.begin(parse_policy("lfps"))};
  prefill(engine, rig, teller, 120);
  ForwardTensors tensors(*rig.device, kShape, engine.options().largest.rows());
  const auto take_back = [&] {
    const Batch batch = start(engine, rig, tensors, teller, 1, false);
    rig.synchronize();
    std::this_thread::sleep_for(20ms);  // So that threads learn.
    engine.cancel(batch);
  };
  take_back();
  rest_as(engine, rig, teller, {want.begin(), want.begin() + 10});
  take_back();
  rest_as(engine, rig, teller, {want.begin() + 10, want.end()});
}

TEST_CASE("a shorter fork, and one that is cut, begin with the queries of their own prompts", "[engine]") {
  const EngineRig rig = engine_rig();
  const Story story(kShape, 170, 64);
  const auto want = undisturbed(rig, story, "lfps", {100, 50});
  Engine engine(options_for(rig, 1, 0), rig.device);
  Teller parent{.story = &story, .id = engine.begin(parse_policy("lfps"))};
  prefill(engine, rig, parent, 170);
  Teller child{.story = &story, .id = engine.fork(parent.id, 100), .at = 100};
  (void)run(engine, rig, {&child}, {50}, true);
  rest_as(engine, rig, child, want);
  engine.truncate(parent.id, 100);
  parent.at = 100;
  (void)run(engine, rig, {&parent}, {50}, true);
  rest_as(engine, rig, parent, want);
}

TEST_CASE("a prompt that is finished behind its first decoded token is not read again", "[engine]") {
  const EngineRig rig = engine_rig();
  const Story story(kShape, 120, 65);
  const auto want = undisturbed(rig, story, "lfps", {100});
  Engine engine(options_for(rig, 1, 0), rig.device);
  Teller teller{.story = &story, .id = engine.begin(parse_policy("lfps"))};
  std::vector<ForwardTensors> tensors;
  for (int i = 0; i < 2; ++i) tensors.emplace_back(*rig.device, kShape, engine.options().largest.rows());
  const Batch prompt = start(engine, rig, tensors[0], teller, 100, true);
  teller.at = 100;
  const Batch token = start(engine, rig, tensors[1], teller, 1, false);
  ++teller.at;
  engine.finish(token);
  engine.finish(prompt);
  rig.synchronize();
  REQUIRE(difference(tensors[1].out(0), want[0]) < tolerance(rig));
  rest_as(engine, rig, teller, {want.begin() + 1, want.end()});
}

TEST_CASE("sequences end while threads learn from them", "[engine]") {
  const EngineRig rig = engine_rig();
  const Story story(kShape, 210, 66);
  Engine engine(options_for(rig, 1, 0), rig.device);
  for (int i = 0; i < 40; ++i) {
    Teller teller{.story = &story, .id = engine.begin(parse_policy("lfps"))};
    prefill(engine, rig, teller, 200);
    for (int step = 0; step < 1 + i % 3; ++step) (void)decode(engine, rig, teller);
    engine.end(teller.id);
  }
  REQUIRE(engine.memory().far_pages_used == 0);
}

TEST_CASE("what policies have learnt is accounted, and gone with their sequences", "[engine]") {
  const EngineRig rig = engine_rig();
  const Story story(kShape, 220, 67);
  Engine engine(options_for(rig, 1, 0), rig.device);
  const auto reserved = [](const EngineMemoryUse& use) { return use.host() - use.policies; };
  const std::uint64_t before = reserved(engine.memory());
  std::uint64_t last = 0;
  for (const std::uint32_t tokens : {50u, 210u}) {
    Teller teller{.story = &story, .id = engine.begin(parse_policy("lfps"))};
    prefill(engine, rig, teller, tokens);
    (void)decode(engine, rig, teller);
    engine.end(engine.fork(teller.id, teller.at));  // This waits for all that there is to learn.
    const std::uint64_t learnt = engine.memory(teller.id).policy;
    const EngineMemoryUse use = engine.memory();
    const std::uint64_t held = use.policies;
    // Two tables of each query head, of a score of 2 bytes per token, at least.
    REQUIRE(learnt > std::uint64_t{kShape.layers} * kShape.q_heads * 2 * (tokens - 4) * 2);
    REQUIRE(held > last);
    REQUIRE(reserved(use) == before);
    last = held;
    engine.end(teller.id);
    REQUIRE(engine.memory().policies == held - learnt);  // Lists that the next one takes over.
  }
}
