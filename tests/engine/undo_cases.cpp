// Sequences that fork, and take tokens back, when the policies of the CPU have learnt from what they decoded: on every
// device they go on as if they never had.
#include <algorithm>
#include <array>
#include <thread>
#include <utility>

#include "scheduler/layer_policy.hpp"
#include "sluice/error.hpp"
#include "sluice/page_rules.hpp"
#include "sluice/step/forward.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/engine_policies.hpp"
#include "tests/support/random.hpp"
#include "tests/support/sanitized.hpp"

using namespace sluice;
using namespace sluice::test;
using namespace sluice::test::policies;
using namespace std::chrono_literals;

namespace {

constexpr std::uint32_t kUndo = 32;  ///< tokens that history takes back
constexpr std::uint32_t kPrompt = 150;
constexpr const char* kHistory = "history:observe_every=3,share_group=on | top_k=24 | near=0,sinks=4,recent=16";
/// Those first that keep most of what they have learnt, and differ most in how.
constexpr auto kPolicies = few<4>(
    std::array{"lfps", "tactic:least=64,size=4,recluster=64 | int4", "magicpig:recent_prompt=8 | dense=1", kHistory,
               "tactic:least=64,size=4,recluster=64", "pages | progressive=0.8,microbatch=2 | near=0,sinks=4,recent=16",
               "labels:channels=8,budget=24 | top_k=max(1, 100%) | near=0", "adakv:budget=60,window=16",
               "exact | verified=0.2,heavy=16 | near=0,sinks=4,recent=20", "exact | hadamard | top_k=24 | near=0",
               "infinigen:alpha=1 | dense=1"});

EngineOptions options_of(const EngineRig& rig) { return paged_options(rig, 2, 9, DigestKind::cuboid_mean); }

/// What a sequence says when nothing happens to it but a prompt.
std::vector<std::vector<float>> undisturbed(const EngineRig& rig, const Story& story, const char* policy,
                                            std::uint32_t prompt = kPrompt) {
  Engine engine(options_of(rig), rig.device);
  Teller teller{.story = &story, .id = engine.begin(parse_policy(policy))};
  prefill(engine, rig, teller, prompt);
  std::vector<std::vector<float>> out(prompt);
  while (teller.at < story.tokens()) out.push_back(decode(engine, rig, teller));
  return out;
}

/// Decodes `count` tokens that come out as `want` says.
void go_on(Engine& engine, const EngineRig& rig, Teller& teller, const std::vector<std::vector<float>>& want,
           std::uint32_t count) {
  for (std::uint32_t i = 0; i < count && teller.at < teller.story->tokens(); ++i) {
    CAPTURE(teller.at);
    const std::vector<float> out = decode(engine, rig, teller);
    REQUIRE(difference(out, want[teller.at - 1]) < tolerance(rig));
  }
}

void take_back(Engine& engine, Teller& teller, std::uint32_t tokens) {
  engine.truncate(teller.id, tokens);
  teller.at = tokens;
  REQUIRE(engine.tokens(teller.id) == tokens);
}

/// Decodes tokens of another story.
void stray(Engine& engine, const EngineRig& rig, Teller& teller, const Story& other, std::uint32_t count) {
  const Story* const own = std::exchange(teller.story, &other);
  for (std::uint32_t i = 0; i < count; ++i) (void)decode(engine, rig, teller);
  teller.story = own;
}

}  // namespace

TEST_CASE("forks of sequences whose policies have learnt go on as they do", "[engine][undo]") {
  const char* const policy = GENERATE(from_range(kPolicies));
  CAPTURE(policy);
  const EngineRig rig = engine_rig();
  const Story story(kShape, kPrompt + 60, 301);
  const Story other(kShape, kPrompt + 120, 302);
  const auto want = undisturbed(rig, story, policy);
  Engine engine(options_of(rig), rig.device);
  Teller parent{.story = &story, .id = engine.begin(parse_policy(policy))};
  prefill(engine, rig, parent, kPrompt);
  go_on(engine, rig, parent, want, 45);
  for (const std::uint32_t back : {0u, 1u, 2u, 15u, 31u, kUndo}) {
    CAPTURE(back);
    Teller child{.story = &story, .id = engine.fork(parent.id, parent.at - back), .at = parent.at - back};
    Teller stranger{.story = &story, .id = engine.fork(parent.id, parent.at - back), .at = parent.at - back};
    REQUIRE(engine.memory(child.id).policy == engine.memory(stranger.id).policy);
    stray(engine, rig, stranger, other, 3);  // What one learns no other one knows.
    go_on(engine, rig, child, want, back + 2);
    engine.end(stranger.id);
    // A fork of a fork.
    Teller grandchild{.story = &story, .id = engine.fork(child.id, child.at - 1), .at = child.at - 1};
    engine.end(child.id);
    go_on(engine, rig, grandchild, want, 4);
    engine.end(grandchild.id);
  }
  go_on(engine, rig, parent, want, 60);
  engine.end(parent.id);
  REQUIRE(engine.memory().far_pages_used == 0);
}

TEST_CASE("tokens are taken back whatever the order in which their forwards were finished", "[engine][undo]") {
  const char* const policy = GENERATE(from_range(kPolicies));
  const auto [in_order] = GENERATE(grid(few<1>(std::array{false, true})));
  CAPTURE(policy, in_order);
  const EngineRig rig = engine_rig();
  const Story story(kShape, kPrompt + 30, 305);
  const Story other(kShape, kPrompt + 30, 306);
  const auto want = undisturbed(rig, story, policy);
  Engine engine(options_of(rig), rig.device);
  Teller teller{.story = &story, .id = engine.begin(parse_policy(policy))};
  prefill(engine, rig, teller, kPrompt);
  Bucket bucket = engine.options().largest;
  bucket.prefill_rows = bucket.prefills = 0;
  ForwardTensors first(*rig.device, kShape, bucket.rows()), second(*rig.device, kShape, bucket.rows());
  while (teller.at + 2 < story.tokens()) {
    const PlanItem item{.sequence = teller.id};
    const auto enqueue = [&](ForwardTensors& tensors, const Story& of, std::uint32_t token) {
      tensors.set(0, of, token);
      tensors.spoil();
      const Batch batch = engine.plan({&item, 1}, bucket, rig.stream);
      tensors.attend(engine, bucket, rig.stream);
      return batch;
    };
    const Batch stays = enqueue(first, story, teller.at);
    const Batch goes = enqueue(second, other, teller.at + 1);
    engine.finish(in_order ? stays : goes);
    engine.finish(in_order ? goes : stays);
    rig.synchronize();
    CAPTURE(teller.at);
    REQUIRE(difference(first.out(0), want[teller.at]) < tolerance(rig));
    take_back(engine, teller, teller.at + 1);
  }
  go_on(engine, rig, teller, want, 2);
}

TEST_CASE("sequences go on as if tokens that were taken back had never been decoded", "[engine][undo]") {
  const char* const policy = GENERATE(from_range(kPolicies));
  CAPTURE(policy);
  const EngineRig rig = engine_rig();
  const Story story(kShape, kPrompt + 60, 303);
  const Story other(kShape, kPrompt + 120, 304);
  const auto want = undisturbed(rig, story, policy);
  Engine engine(options_of(rig), rig.device);
  Teller teller{.story = &story, .id = engine.begin(parse_policy(policy))};
  prefill(engine, rig, teller, kPrompt);
  // To the prompt's end, to each of the next tokens, with as many drafts as can be taken back.
  for (const std::uint32_t drafts : {1u, 4u, kUndo, 3u, 31u, kUndo, 2u}) {
    CAPTURE(drafts);
    const std::uint32_t tokens = teller.at;
    stray(engine, rig, teller, other, drafts);
    if (drafts > 3) take_back(engine, teller, teller.at - 2);  // In two steps.
    take_back(engine, teller, tokens);
    take_back(engine, teller, tokens);
    go_on(engine, rig, teller, want, 3);
  }
  // Of those that were right, too.
  take_back(engine, teller, teller.at - 2);
  go_on(engine, rig, teller, want, 60);
}

TEST_CASE("histories of forks, drafts and cancelled forwards change nothing", "[engine][undo]") {
  const char* const policy = GENERATE(from_range(kPolicies));
  const std::uint32_t seed = GENERATE(from_range(few<1>(std::array{1u, 2u})));
  CAPTURE(policy, seed);
  const EngineRig rig = engine_rig();
  const Story story(kShape, kPrompt + 80, 305);
  const Story other(kShape, kPrompt + 200, 306);
  const auto want = undisturbed(rig, story, policy);
  Engine engine(options_of(rig), rig.device);
  Random random(seed);
  Teller teller{.story = &story, .id = engine.begin(parse_policy(policy))};
  prefill(engine, rig, teller, kPrompt);
  while (teller.at < story.tokens()) {
    const std::uint32_t tokens = teller.at;
    switch (random.below(8)) {
      case 0:
        stray(engine, rig, teller, other, 1 + random.below(12));
        take_back(engine, teller, tokens);
        break;
      case 1: {
        const SequenceId parent = std::exchange(teller.id, engine.fork(teller.id, tokens));
        engine.end(parent);
        break;
      }
      case 2: {
        stray(engine, rig, teller, other, 1 + random.below(6));
        const SequenceId parent = std::exchange(teller.id, engine.fork(teller.id, tokens));
        teller.at = tokens;
        engine.end(parent);
        break;
      }
      case 3: {  // Threads may have learnt from it, or not.
        ForwardTensors tensors(*rig.device, kShape, engine.options().largest.rows());
        tensors.set(0, other, tokens);
        const PlanItem item{.sequence = teller.id};
        const Batch batch = engine.plan({&item, 1}, engine.options().largest, rig.stream);
        tensors.attend(engine, rig.stream);
        rig.synchronize();
        if (random.below(2) == 0) std::this_thread::sleep_for(2ms);
        engine.cancel(batch);
        break;
      }
      default: go_on(engine, rig, teller, want, 1 + random.below(5));
    }
  }
}

TEST_CASE("beyond what can be taken back a policy begins again, with all that its sequence has", "[engine][undo]") {
  const EngineRig rig = engine_rig();
  const Story story(kShape, kPrompt + 60, 307);
  const bool forks = GENERATE(true, false);
  CAPTURE(forks);
  Engine engine(options_of(rig), rig.device);
  const auto cut = [&](Teller& teller, std::uint32_t tokens) {
    if (!forks) return take_back(engine, teller, tokens);
    const SequenceId parent = std::exchange(teller.id, engine.fork(teller.id, tokens));
    teller.at = tokens;
    engine.end(parent);
  };
  Teller teller{.story = &story, .id = engine.begin(parse_policy("lfps | bypass=off"))};
  prefill(engine, rig, teller, kPrompt);
  while (teller.at < kPrompt + 50) (void)decode(engine, rig, teller);
  cut(teller, kPrompt + 50 - kUndo - 1);
  REQUIRE(engine.memory(teller.id).policy == 0);
  // There are no queries of these tokens: everything is attended.
  const std::vector<float> out = decode(engine, rig, teller);
  REQUIRE(error_of(out, story, teller.at - 1) < tolerance(rig));
  // The prompt has: its policy begins as it did.
  const auto want = undisturbed(rig, story, "lfps | bypass=off");
  while (teller.at < kPrompt + 50) (void)decode(engine, rig, teller);
  cut(teller, kPrompt);
  go_on(engine, rig, teller, want, 60);
}

TEST_CASE("a prompt that is taken back behind decoded tokens is forgotten", "[engine][undo]") {
  const EngineRig rig = engine_rig();
  const Story story(kShape, kPrompt + 50, 308);
  const Story other(kShape, kPrompt + 120, 309);
  const auto want = undisturbed(rig, story, "lfps");
  Engine engine(options_of(rig), rig.device);
  Teller teller{.story = &story, .id = engine.begin(parse_policy("lfps"))};
  prefill(engine, rig, teller, kPrompt);
  go_on(engine, rig, teller, want, 20);
  const std::uint32_t tokens = teller.at;
  Teller turn{.story = &other, .id = teller.id, .at = tokens};
  prefill(engine, rig, turn, tokens + 20);
  // One that forks before it, and one that is cut there.
  Teller child{.story = &story, .id = engine.fork(teller.id, tokens - 3), .at = tokens - 3};
  go_on(engine, rig, child, want, 10);
  take_back(engine, teller, tokens);
  go_on(engine, rig, teller, want, 60);
}

TEST_CASE("forks count in full against what policies may keep", "[engine][undo]") {
  const EngineRig rig = engine_rig();
  const Story story(kShape, kPrompt + 20, 310);
  EngineOptions options = options_of(rig);
  const PolicySpec policy = parse_policy("lfps");
  const std::uint64_t most = scheduler::policy_state_bytes(policy, kShape, kPrompt + 20 + 1 + kMostForwards);
  options.policy_bytes = 2 * most + most / 2;
  Engine engine(options, rig.device);
  Teller teller{.story = &story, .id = engine.begin(policy)};
  prefill(engine, rig, teller, kPrompt);
  for (int i = 0; i < 10; ++i) (void)decode(engine, rig, teller);
  const Teller child{.story = &story, .id = engine.fork(teller.id, teller.at), .at = teller.at};
  REQUIRE(engine.memory(child.id).policy >= engine.memory(teller.id).policy / 2);
  REQUIRE(engine.memory(child.id).policy <= most);
  REQUIRE_FALSE(engine.can_admit(teller.at, policy));
  REQUIRE(code_of([&] { (void)engine.fork(teller.id, teller.at); }) == Errc::out_of_capacity);
  engine.end(child.id);
  REQUIRE(engine.can_admit(teller.at, policy));
  engine.end(engine.fork(teller.id, teller.at));
}

TEST_CASE("a forward that ran and is cancelled is as if its token had been decoded and taken back", "[engine][undo]") {
  // All that is seen is observed: what is kept to be taken back is that of the newest 23 tokens or so.
  const PolicySpec policy = parse_policy("history:share_group=on | top_k=1000 | near=0,sinks=4,recent=16");
  const EngineRig rig = engine_rig();
  const Story story(kShape, kPrompt + 60, 311), other(kShape, kPrompt + 70, 312), longest(kShape, 1100, 313);
  EngineOptions options = options_of(rig);
  options.threads = 1;
  Engine engine(options, rig.device);
  // The one thread learns from this one first, which takes a while: as a rule it has no time for the other.
  Teller first{.story = &longest, .id = engine.begin(policy)};
  Teller prompt{.story = &story, .id = engine.begin(policy)};
  prefill(engine, rig, first, 700);
  prefill(engine, rig, prompt, kPrompt);
  Bucket bucket = engine.options().largest;
  bucket.prefill_rows = bucket.prefills = 0;
  ForwardTensors tensors(*rig.device, kShape, bucket.rows());
  const auto gone = [&](const Teller& of) { return engine.memory(of.id).policy == 0; };
  bool all = true, none = true;
  // From before that number to beyond it, in one step under the thread sanitizer.
  for (std::uint32_t back = 20; back < 26; back += kThreadSanitized ? 5 : 1) {
    Teller calm{.story = &story, .id = engine.fork(prompt.id, kPrompt), .at = kPrompt};
    Teller teller{.story = &story, .id = engine.fork(prompt.id, kPrompt), .at = kPrompt};
    while (calm.at + 1 < story.tokens()) {
      const std::vector<float> want = decode(engine, rig, calm);
      CAPTURE(back, calm.at);
      const auto got = run(engine, rig, {&first, &teller}, {1, 1}, false);
      REQUIRE(difference(got[1], want) < tolerance(rig));
    }
    tensors.set(0, longest, first.at);
    tensors.set(1, other, teller.at);
    const std::array items{PlanItem{.sequence = first.id}, PlanItem{.sequence = teller.id}};
    const Batch batch = engine.plan(items, bucket, rig.stream);
    tensors.attend(engine, bucket, rig.stream);
    rig.synchronize();
    engine.cancel(batch);
    stray(engine, rig, calm, other, 1);
    take_back(engine, calm, calm.at - 1);
    CAPTURE(back);
    REQUIRE(gone(teller) == gone(calm));
    take_back(engine, calm, calm.at - back);
    take_back(engine, teller, teller.at - back);
    REQUIRE(gone(teller) == gone(calm));
    all &= gone(calm);
    none &= !gone(calm);
    engine.end(calm.id);
    engine.end(teller.id);
  }
  REQUIRE_FALSE(all);
  REQUIRE_FALSE(none);
}
