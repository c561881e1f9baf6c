// What histories propose ahead of time, on every device: it chooses of that what the CPU would have chosen.
#include <array>
#include <atomic>
#include <chrono>
#include <thread>

#include "tests/support/catch.hpp"
#include "tests/support/engine_policies.hpp"
#include "tests/support/pause.hpp"
#include "tests/support/sanitized.hpp"

using namespace sluice;
using namespace sluice::test;
using namespace sluice::test::policies;
using namespace std::chrono_literals;

namespace {

/// An engine that is for it has what histories propose ready before a layer begins.
constexpr const char* kAhead = "history:observe_every=4 | int4 | top_k=20 | near=0,sinks=4,recent=20";
constexpr const char* kPlain = "history | int4 | top_k=20 | near=0,sinks=4,recent=20";
constexpr const char* kShare = "history | int4 | top_p=0.8 | near=0,sinks=4,recent=20";

/// `ahead`: with what histories propose written down before it is needed; else the CPU chooses.
EngineOptions forecasting(const EngineRig& rig, std::uint32_t rows, std::uint32_t near, bool ahead) {
  EngineOptions options = options_for(rig, rows, near);
  options.largest.audit = true;
  if (ahead) options.policies.push_back(parse_policy(kAhead));
  return options;
}

/// Of numbers that the device's products keep, so that it puts estimates in the order that the CPU does.
Story story_of(const EngineRig& rig, std::uint32_t tokens, std::uint64_t seed) {
  Story story(kShape, tokens, seed);
  if (rig.kv_dtype != DType::f32) story.round_queries();
  return story;
}

/// What a sequence's tokens from `prompt` on give, and which tokens were attended.
struct Said {
  std::vector<std::vector<float>> out;
  AuditReport audit;
  EngineStats stats;
};
Said say(const EngineRig& rig, const Story& story, const PolicySpec& policy, std::uint32_t prompt,
         const EngineOptions& options) {
  Engine engine(options, rig.device);
  Teller teller{.story = &story, .id = engine.begin(policy)};
  if (prompt != 0) prefill(engine, rig, teller, prompt);
  engine.watch(teller.id, std::vector<std::uint32_t>{1, 9, 42, 79, 116});
  Said said;
  while (teller.at < story.tokens()) said.out.push_back(decode(engine, rig, teller));
  said.audit = engine.audit(teller.id);
  said.stats = engine.stats();
  return said;
}

void require_same(const EngineRig& rig, const Said& got, const Said& want) {
  REQUIRE(got.out.size() == want.out.size());
  for (std::size_t i = 0; i < want.out.size(); ++i) {
    CAPTURE(i);
    REQUIRE(difference(got.out[i], want.out[i]) < tolerance(rig));
  }
  require_same_audit(got.audit, want.audit);
  REQUIRE(got.audit.watched.count() == want.audit.watched.count());
}

}  // namespace

TEST_CASE("of what history proposes ahead the device chooses what the CPU would have", "[engine][forecast]") {
  constexpr std::array kPolicies{
      kPlain,
      "history:observe_every=4 | int4 | top_k=20 | near=0,sinks=4,recent=20",
      "history | int4 | top_p=0.7 | near=0,sinks=4,recent=20",
      "history:share_group=on,observe_near=off | int4 | top_k=12 | near=0,sinks=0,recent=16",
      "history:limit=0.3,alpha=0.4 | int4 | top_k=30 | near=0,sinks=2,recent=33 | dense=1",
      "history:tables=slash,expand=off | int4 | top_k=9 | near=0,sinks=4,recent=20 | far=120",
      "history:observe_every=4,share_group=on | int4 | top_p=0.9 | near=0,sinks=4,recent=16",
      "history:alpha=3 | int4 | top_p=0.95 | near=0,sinks=0,recent=33 | dense=1 | far=120",
      "history:alpha=3 | int4 | top_k=60 | near=0,sinks=4,recent=20"};
  const auto [text, near] = GENERATE_COPY(grid(few<3>(kPolicies), std::array{0u, 9u}));
  CAPTURE(text, near);
  const EngineRig rig = engine_rig();
  const Story story = story_of(rig, 230, 61);
  const PolicySpec policy = parse_policy(text);
  const Said want = say(rig, story, policy, 180, forecasting(rig, 1, near, false));
  const Said got = say(rig, story, policy, 180, forecasting(rig, 1, near, true));
  require_same(rig, got, want);
  REQUIRE(want.stats.estimated == 0);
  REQUIRE((got.stats.estimated > 0) == (rig.device->info().handover == Handover::device));
}

TEST_CASE("a share of the mass is the CPU's choice where the bucket has no room for the device's",
          "[engine][forecast]") {
  const EngineRig rig = engine_rig();
  const Story story = story_of(rig, 200, 67);
  EngineOptions options = forecasting(rig, 1, 9, false);
  options.largest.unbounded = false;
  options.policies = {parse_policy(kAhead)};
  const Said got = say(rig, story, parse_policy(kShare), 180, options);
  options.policies = {parse_policy(kPlain)};
  require_same(rig, got, say(rig, story, parse_policy(kShare), 180, options));
  REQUIRE(got.stats.estimated == 0);
}

TEST_CASE("forecasts tell what comes over the link, too", "[engine][forecast]") {
  const auto text = GENERATE(kPlain, kShare);
  CAPTURE(text);
  const EngineRig rig = engine_rig();
  const Story story = story_of(rig, 200, 68);
  EngineOptions options = forecasting(rig, 1, 9, true);
  options.placement = PlacementMode::stream;
  const Said got = say(rig, story, parse_policy(text), 180, options);
  require_same(rig, got, say(rig, story, parse_policy(text), 180, forecasting(rig, 1, 9, false)));
  REQUIRE(got.stats.fetched_tokens > 0);
}

TEST_CASE("histories that know nothing yet are no forecast, from the first token on", "[engine][forecast]") {
  const auto [prompt, text] = GENERATE(grid(std::array{79u, 0u, 1u, 16u}, std::array{kPlain, kShare}));
  CAPTURE(prompt, text);
  const EngineRig rig = engine_rig();
  const Story story = story_of(rig, 100, 62);
  const PolicySpec policy = parse_policy(text);
  require_same(rig, say(rig, story, policy, prompt, forecasting(rig, 1, 6, true)),
               say(rig, story, policy, prompt, forecasting(rig, 1, 0, false)));
}

TEST_CASE("forecasts of sequences that were forked or shortened are those of the tokens that are left",
          "[engine][forecast]") {
  const EngineRig rig = engine_rig();
  const Story story = story_of(rig, 200, 63);
  Story branch = story_of(rig, 200, 64);
  branch.begin_as(story, 172);
  const auto tell = [&](bool ahead) {
    Engine engine(forecasting(rig, 2, 8, ahead), rig.device);
    Teller teller{.story = &story, .id = engine.begin(parse_policy(kPlain))};
    prefill(engine, rig, teller, 160);
    std::vector<std::vector<float>> out;
    while (teller.at < 176) out.push_back(decode(engine, rig, teller));
    Teller fork{.story = &branch, .id = engine.fork(teller.id, 172), .at = 172};
    engine.truncate(teller.id, 168);
    teller.at = 168;
    while (fork.at < story.tokens()) {
      std::vector<Teller*> batch{&fork};
      if (teller.at < story.tokens() && fork.at % 3 != 0) batch.push_back(&teller);
      for (auto& each : run(engine, rig, batch, std::vector<std::uint32_t>(batch.size(), 1), false))
        out.push_back(std::move(each));
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

TEST_CASE("in batches with others, of any policy, forecasts are those that they are alone", "[engine][forecast]") {
  const EngineRig rig = engine_rig();
  const auto near = GENERATE(0u, 30u);
  const auto options = [&](std::uint32_t rows, std::uint32_t blocks) {
    return forecasting(rig, rows, blocks, blocks != 0);
  };
  require_same_in_batch(
      rig, options, near, 12,
      {{.policy = kPlain, .prompt = 150},
       {.policy = "lfps", .prompt = 131},
       {.policy = "exact | int4 | top_k=9 | near=0,sinks=2,recent=6", .prompt = 64},
       {.policy = "history:observe_every=3 | int4 | top_k=9 | near=0,sinks=2,recent=16", .prompt = 97},
       {.policy = kShare, .prompt = 140}});
}

TEST_CASE("forwards that are planned ahead, taken back or late find their forecasts", "[engine][forecast]") {
  const EngineRig rig = engine_rig();
  const Story story = story_of(rig, 190, 65);
  EngineOptions options = options_for(rig, 1, 8);
  options.in_flight = 3;
  options.threads = 3;
  const PolicySpec policy = parse_policy(kPlain);
  const Said want = say(rig, story, policy, 160, options);
  options.policies.push_back(parse_policy(kAhead));
  std::atomic<std::uint32_t> parts{0};
  options.before_answer = [&] {
    if (parts.fetch_add(1) % 16 == 5) std::this_thread::sleep_for(2ms);
  };
  Engine engine(options, rig.device);
  Teller teller{.story = &story, .id = engine.begin(policy)};
  prefill(engine, rig, teller, 160);
  Bucket bucket = engine.options().largest;
  bucket.prefill_rows = bucket.prefills = 0;
  std::vector<ForwardTensors> tensors;
  for (int i = 0; i < 3; ++i) tensors.emplace_back(*rig.device, kShape, bucket.rows());
  const PlanItem item{.sequence = teller.id};
  const auto start = [&](std::uint32_t i) {
    tensors[i % 3].set(0, story, 160 + i);
    const Batch batch = engine.plan({&item, 1}, bucket, rig.stream);
    tensors[i % 3].attend(engine, bucket, rig.stream);
    return batch;
  };
  std::vector<Batch> batches;
  for (std::uint32_t i = 0; i < 30; ++i) {
    CAPTURE(i);
    if (i % 5 == 4) engine.cancel(start(i));  // And with it nothing of what it proposed is left.
    batches.push_back(start(i));
    if (i % 3 != 2) continue;
    for (std::uint32_t f = i - 2; f <= i; ++f) {
      engine.finish(batches[f]);
      rig.synchronize();
      REQUIRE(difference(tensors[f % 3].out(0), want.out[f]) < tolerance(rig));
    }
  }
  REQUIRE((engine.stats().awaited > 0) == (rig.device->info().handover == Handover::device));
  REQUIRE(engine.stats().awaited <= (30 + 6) * kShape.layers);
}

TEST_CASE("a forecast that does not come in time costs the forward, and nothing of what was learnt",
          "[engine][forecast]") {
  const EngineRig rig = engine_rig();
  const Story story = story_of(rig, 180, 66);
  EngineOptions options = options_for(rig, 1, 8);
  options.threads = 1;
  options.answer_timeout = 300ms;  // Longer than a busy machine keeps a thread off its core.
  const PolicySpec policy = parse_policy(kPlain);
  const Said want = say(rig, story, policy, 160, options);
  options.policies.push_back(parse_policy(kAhead));
  std::atomic<bool> stalls{false};
  options.before_answer = [&] {
    if (stalls.exchange(false)) pause_for(900ms);
  };
  Engine engine(options, rig.device);
  Teller teller{.story = &story, .id = engine.begin(policy)};
  prefill(engine, rig, teller, 160);
  for (std::uint32_t i = 0; i < want.out.size(); ++i) {
    CAPTURE(i);
    if (i % 6 == 2) {
      stalls = true;
      REQUIRE(code_of([&] { (void)decode(engine, rig, teller); }) == Errc::device);
      stalls = false;
      pause_for(800ms);
    }
    REQUIRE(difference(decode(engine, rig, teller), want.out[i]) < tolerance(rig));
  }
}
