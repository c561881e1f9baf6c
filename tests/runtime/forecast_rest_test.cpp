// Histories that rest, of sequences that are forked, shortened or ended, beside others that propose ahead of time.
#include <array>
#include <atomic>
#include <random>
#include <thread>
#include <vector>

#include "runtime/far/far_choice.hpp"
#include "sluice/error.hpp"
#include "tests/runtime/comes.hpp"
#include "tests/runtime/gate.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/engine_policies.hpp"
#include "tests/support/sanitized.hpp"

using namespace sluice;
using namespace sluice::runtime;
using namespace sluice::test;
using namespace sluice::test::policies;
using namespace std::chrono_literals;

namespace {

/// The same choices of histories, and an engine for it has none of them ready before a layer begins.
constexpr const char* kUntold = "history:observe_every=3 | int4 | top_k=20 | near=0,sinks=4,recent=20";
constexpr const char* kPolicy = "history | int4 | top_k=20 | near=0,sinks=4,recent=20";

struct RestMemory {
  RestMemory() {
    memory.shape = {.layers = 2, .q_heads = 1, .kv_heads = 1, .head_dim = 32};
    memory.layout = {.page_tokens = 16, .head_dim = 32, .dtype = DType::f32};
    memory.largest.decode_rows = 1;
    memory.largest.max_tokens = 128;
    memory.proposal_slots = 1;
    memory.proposals = proposals.data();
    memory.proposed = reinterpret_cast<std::uint32_t*>(words.data());
  }

  std::array<ForwardProposal, 2> proposals{};
  std::array<std::uint64_t, 4> words{};
  ForwardMemory memory;
};

/// Two policies: that of `learner` has a row in forward 1, that of `proposer` in forward 2, for which it has not
/// proposed yet.
struct RestDesk : RestMemory {
  RestDesk() {
    choice.expect(1, 0, {{.sequence = SequenceId{1}, .policy = learner, .index = 0, .window = {}}});
    choice.expect(2, 1, {{.sequence = SequenceId{2}, .policy = proposer, .index = 0, .window = {.proposed = 1}}});
  }
  [[nodiscard]] std::shared_ptr<SequencePolicy> policy() {
    return std::make_shared<SequencePolicy>(parse_policy(kPolicy), memory, blocks);
  }
  /// Whether forward 2 has what its histories propose, in all layers, once a thread has had time for it.
  [[nodiscard]] bool proposes() {
    const bool could = choice.propose(1, 2, [] { return false; });
    return could && proposals[0].forward == 2 && proposals[1].forward == 2;
  }

  std::vector<std::uint32_t> blocks{0};
  FarChoice choice{memory, cpu::fastest_kernels(), 1s};
  std::shared_ptr<SequencePolicy> learner = policy();
  std::shared_ptr<SequencePolicy> proposer = policy();
};

}  // namespace

TEST_CASE("while a sequence's history waits for its threads, rests and goes, others learn and propose", "[far_rest]") {
  RestDesk desk;
  Gate gate;
  gate.wanted = 1;
  std::thread learns([&] {
    (void)desk.choice.learn(1, [&] {
      gate.pass();  // In a head of the policy that is to rest.
      return false;
    });
  });
  REQUIRE(comes([&] { return gate.held == 1; }));
  REQUIRE(code_of([&] { (void)SequencePolicy::rest(desk.learner, 10ms); }) == Errc::timeout);
  std::atomic<bool> rests{false};
  std::atomic<bool> goes_on{false};
  std::thread caller([&] {
    const Rest rest = SequencePolicy::rest(desk.learner, 60s);
    desk.learner->close();
    desk.learner.reset();  // What rests lives as long.
    rests = true;
    while (!goes_on) std::this_thread::sleep_for(1ms);
  });
  REQUIRE(comes([&] { return desk.learner->lessons().rests(); }));
  REQUIRE_FALSE(rests);
  REQUIRE(desk.proposes());
  gate.open = true;
  learns.join();
  REQUIRE(comes([&] { return rests.load(); }));
  std::uint32_t heads = 0;
  REQUIRE_FALSE(desk.choice.learn(2, [&] { return ++heads == 0; }));
  REQUIRE(heads == 2);  // Of the other policy, while one could not.
  goes_on = true;
  caller.join();
  REQUIRE(desk.choice.learn(2, [] { return false; }));
}

TEST_CASE("while all rest for a forward that failed, none learns or proposes", "[far_rest]") {
  RestDesk desk;
  {
    const Rest rest = desk.choice.rest(60s);
    REQUIRE_FALSE(desk.choice.learn(2, [] { return false; }));
    REQUIRE_FALSE(desk.proposes());
  }
  REQUIRE(desk.choice.learn(2, [] { return false; }));
  REQUIRE(desk.proposes());
}

TEST_CASE("sequences are forked, shortened and ended while histories of others propose",
          "[engine][forecast][far_rest]") {
  const auto seed = GENERATE(1u, 2u, 3u);
  CAPTURE(seed);
  EngineRig rig = engine_rig();
  const Story story(kShape, 240, 71);
  Story branch(kShape, 700, 72);
  branch.begin_as(Story(kShape, 700, 73), 640);
  constexpr std::uint32_t kRounds = kSanitized ? 8 : 24;
  EngineOptions options = options_for(rig, 2, 8);
  options.in_flight = 3;
  options.threads = 3;
  options.host_bytes = 200 * block_bytes(options);
  const auto tell = [&](bool disturbed) {
    options.policies = {parse_policy(disturbed ? kPolicy : kUntold)};
    options.before_answer = {};
    std::atomic<std::uint32_t> parts{seed};
    if (disturbed)
      options.before_answer = [&] {
        std::minstd_rand random(++parts);
        std::this_thread::sleep_for(std::chrono::microseconds(random() % 300));
      };
    Engine engine(options, rig.device);
    Teller told{.story = &story, .id = engine.begin(parse_policy(kPolicy))};
    Teller parent{.story = &branch, .id = engine.begin(parse_policy(kPolicy))};
    prefill(engine, rig, told, 160);
    prefill(engine, rig, parent, 640);
    std::vector<ForwardTensors> tensors;
    for (int i = 0; i < 3; ++i) tensors.emplace_back(*rig.device, kShape, 2);
    Bucket bucket = engine.options().largest;
    bucket.prefill_rows = bucket.prefills = 0;
    std::vector<std::vector<float>> out;
    for (std::uint32_t round = 0; round < kRounds; ++round) {
      // Both learn from this one.
      for (auto& each : run(engine, rig, {&told, &parent}, {1, 1}, false)) out.push_back(std::move(each));
      std::array<Batch, 2> batches;
      for (std::uint32_t i = 0; i < 2; ++i) {
        tensors[i].set(0, story, told.at + i);
        const PlanItem item{.sequence = told.id};
        batches[i] = engine.plan({&item, 1}, bucket, rig.stream);
        tensors[i].attend(engine, bucket, rig.stream);
      }
      for (std::uint32_t i = 0; disturbed && i < 4; ++i) {
        const SequenceId fork = engine.fork(parent.id, parent.at - i % 2);
        engine.truncate(fork, parent.at - 3);
        engine.end(fork);
      }
      if (round % 3 == 2) engine.truncate(parent.id, --parent.at);
      for (std::uint32_t i = 0; i < 2; ++i) {
        engine.finish(batches[i]);
        rig.synchronize();
        out.push_back(tensors[i].out(0));
      }
      told.at += 2;
    }
    return out;
  };
  const auto want = tell(false);
  const auto got = tell(true);
  REQUIRE(got.size() == want.size());
  for (std::size_t i = 0; i < want.size(); ++i) {
    CAPTURE(i);
    REQUIRE(difference(got[i], want[i]) < tolerance(rig));
  }
}
