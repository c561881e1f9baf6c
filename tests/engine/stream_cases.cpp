// Far rows that the device attends over the link, on every device: the same as where the CPU attends them in place.
#include <atomic>
#include <thread>

#include "sluice/error.hpp"
#include "sluice/page_rules.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/engine_plain.hpp"
#include "tests/support/engine_policies.hpp"
#include "tests/support/pause.hpp"
#include "tests/support/sanitized.hpp"

using namespace sluice;
using namespace sluice::test;
using namespace std::chrono_literals;

namespace {

EngineOptions streaming(EngineOptions options) {
  options.placement = PlacementMode::stream;
  return options;
}

}  // namespace

TEST_CASE("an engine that streams attends what it chose, and asks nobody", "[engine]") {
  struct Choice {
    std::uint32_t sinks, recent, picks;
  };
  const auto [choice, near] =
      GENERATE(grid(std::array{Choice{0, 1, 1}, Choice{4, 16, 24}, Choice{20, 40, 100}, Choice{4, 8, 400}},
                    std::array{0u, 6u, 100u}));
  CAPTURE(choice.sinks, choice.recent, choice.picks, near);
  const EngineRig rig = engine_rig();
  Engine engine(streaming(plain::options_for(rig, 1, 40, near)), rig.device);
  const Story story(plain::kShape, 320, 21);
  const std::string policy = "exact | int4 | top_k=" + std::to_string(choice.picks) +
                             " | near=0,sinks=" + std::to_string(choice.sinks) +
                             ",recent=" + std::to_string(choice.recent);
  Teller teller{.story = &story, .id = engine.begin(parse_policy(policy))};
  import_story(engine, rig, teller, 300);
  ForwardTensors tensors(*rig.device, plain::kShape, 1);
  while (teller.at < story.tokens()) {
    const auto out = run_forward(engine, rig, tensors, {&teller});
    REQUIRE(plain::error_of(out[0], story, teller.at - 1, choice.sinks, choice.recent, choice.picks) <
            plain::kTolerance);
  }
  const EngineStats stats = engine.stats();
  REQUIRE(stats.asked == 0);
  REQUIRE(stats.far_tokens == 0);
  REQUIRE((stats.fetched_tokens == 0) == (near == 100));
  REQUIRE((stats.near_tokens == 0) == (near == 0));
}

TEST_CASE("lists of thousands of rows come over the link whole", "[engine]") {
  const EngineRig rig = engine_rig();
  const auto [prompt, group] = GENERATE(grid(std::array{4000u, 5003u}, std::array{2u, 12u}));
  const AttentionShape shape{.layers = 2, .q_heads = group, .kv_heads = 1, .head_dim = 64};
  EngineOptions options{.shape = shape,
                        .kv_dtype = rig.kv_dtype,
                        .placement = PlacementMode::stream,
                        .policies = {parse_policy("full | near=0")},
                        .threads = 1,
                        .pin_threads = false};
  options.host_bytes = 320 * block_bytes(options);
  options.near_bytes = 10 * near_block_bytes(options);
  options.import_rows = 2000;
  Engine engine(options, rig.device);
  const Story story(shape, prompt + 3, 41);
  Teller teller{.story = &story, .id = engine.begin(parse_policy("full | near=0"))};
  import_story(engine, rig, teller, prompt);
  ForwardTensors tensors(*rig.device, shape, 1);
  const std::size_t row = std::size_t{shape.q_heads} * shape.head_dim;
  while (teller.at < story.tokens()) {
    const auto out = run_forward(engine, rig, tensors, {&teller});
    for (std::uint32_t layer = 0; layer < shape.layers; ++layer) {
      REQUIRE(plain::worst(out[0], story.attended(layer, teller.at - 1, 0, 1, 10'000), layer * row) <
              plain::kTolerance);
    }
  }
  REQUIRE(engine.stats().fetched_tokens > 3 * std::uint64_t{shape.layers} * (prompt - 200));
}

TEST_CASE("what the CPU chooses the device fetches, and it is what the CPU attends in place", "[engine]") {
  using namespace policies;
  constexpr std::array kPolicies{
      "lfps", "magicpig", "tactic:least=64,size=4,recluster=64", "quest", "exact | int4 | top_p=0.9 | near=0",
      "exact | top_k=30 | near=0,sinks=4,recent=0 | bypass=0.8", "full | near=0", "topk", "lfps | bypass=off",
      "history:share_group=on,observe_every=3 | top_k=24 | near=0,sinks=4,recent=16 | dense=1"};
  const auto [text, near] = GENERATE_COPY(grid(few<6>(kPolicies), std::array{0u, 7u}));
  CAPTURE(text, near);
  const EngineRig rig = engine_rig();
  Story story(kShape, 300, 77);
  story.lean_on_sinks();
  if (rig.kv_dtype != DType::f32) story.round_queries();
  const PolicySpec policy = parse_policy(text);
  EngineOptions options = paged_options(rig, 2, near, DigestKind::box);
  options.largest.audit = true;
  Engine in_place(options, rig.device);
  Engine engine(streaming(options), rig.device);
  Teller want{.story = &story, .id = in_place.begin(policy)};
  Teller teller{.story = &story, .id = engine.begin(policy)};
  prefill(in_place, rig, want, 270);
  prefill(engine, rig, teller, 270);
  while (teller.at < story.tokens()) {
    CAPTURE(teller.at);
    REQUIRE(difference(decode(engine, rig, teller), decode(in_place, rig, want)) < tolerance(rig));
  }
  const EngineStats here = engine.stats();
  const EngineStats there = in_place.stats();
  // Only where the device attends what was chosen does that come near.
  REQUIRE(here.near_tokens >= there.near_tokens);
  REQUIRE((near != 0 || here.near_tokens == there.near_tokens));
  REQUIRE(here.near_tokens + here.far_tokens + here.fetched_tokens == there.near_tokens + there.far_tokens);
  REQUIRE(there.fetched_tokens == 0);
  // Tokens that come with their scores are attended where these are.
  REQUIRE((here.far_tokens == 0) == (policy.name != "magicpig"));
  REQUIRE(here.fetched_tokens != 0);
  require_same_audit(engine.audit(teller.id), in_place.audit(want.id));
}

TEST_CASE("a batch of all kinds of policies attends over the link what each does alone", "[engine]") {
  using namespace policies;
  const EngineRig rig = engine_rig();
  const auto options = [&](std::uint32_t rows, std::uint32_t near) {
    return streaming(policies::options_for(rig, rows, near));
  };
  require_same_in_batch(rig, options, GENERATE(from_range(few<1>(std::array{10u, 0u}))), 14,
                        {{"lfps", 200},
                         {"exact | int4 | top_k=30 | near=0,sinks=4,recent=12", 90},
                         {"magicpig", 170},
                         {"topk", 33},
                         {"none | near=0,sinks=4,recent=30", 64}});
}

TEST_CASE("more rows than a launch has room for attend what each does alone", "[engine]") {
  const EngineRig rig = engine_rig();
  const AttentionShape shape{.layers = 1, .q_heads = 8, .kv_heads = 8, .head_dim = 64};
  constexpr std::uint32_t kRows = 140;
  const PlacementMode placement = GENERATE(PlacementMode::hybrid, PlacementMode::stream);
  CAPTURE(to_string(placement));
  const PolicySpec policy = parse_policy("exact | int4 | top_k=9 | near=0,sinks=3,recent=5");
  EngineOptions options{.shape = shape,
                        .kv_dtype = rig.kv_dtype,
                        .placement = placement,
                        .policies = {policy},
                        .largest = {.decode_rows = kRows},
                        .sequences = kRows,
                        .threads = 2,
                        .pin_threads = false};
  options.host_bytes = (kRows + 10) * block_bytes(options);
  options.near_bytes = 12 * near_block_bytes(options);
  Engine engine(options, rig.device);
  const Story story(shape, 45, 61);
  std::vector<Teller> tellers{{.story = &story, .id = engine.begin(policy)}};
  import_story(engine, rig, tellers[0], 40);
  std::vector<Teller*> rows;
  for (std::uint32_t row = 1; row < kRows; ++row)  // At other lengths, so that rows differ.
    tellers.push_back({.story = &story, .id = engine.fork(tellers[0].id, 36 + row % 5), .at = 36 + row % 5});
  for (Teller& teller : tellers) rows.push_back(&teller);
  ForwardTensors tensors(*rig.device, shape, kRows);
  for (int step = 0; step < 3; ++step) {
    const auto out = run_forward(engine, rig, tensors, rows);
    for (std::uint32_t row = 0; row < kRows; ++row) {
      CAPTURE(step, row);
      REQUIRE(plain::worst(out[row], story.attended(0, tellers[row].at - 1, 3, 5, 9), 0) < plain::kTolerance);
    }
  }
}

TEST_CASE("a key that is not a number shows, wherever in a list it comes", "[engine]") {
  using namespace plain;
  const EngineRig rig = engine_rig();
  const auto [placement, near] =
      GENERATE(grid(std::array{PlacementMode::hybrid, PlacementMode::stream}, std::array{0u, 40u}));
  CAPTURE(to_string(placement), near);
  EngineOptions options = options_for(rig, 1, 40, near);
  options.placement = placement;
  Engine engine(options, rig.device);
  Story story(kShape, 120, 12);
  for (std::uint32_t layer = 0; layer < kShape.layers; ++layer) story.poison(layer, 85);
  // The newest token is the last of the list, which gets longer and longer.
  Teller teller{.story = &story, .id = engine.begin(parse_policy("exact | int4 | top_k=all | near=0,sinks=0,recent=1"))};
  import_story(engine, rig, teller, 85);
  ForwardTensors tensors(*rig.device, kShape, 1);
  const auto first = run_forward(engine, rig, tensors, {&teller});
  for (const float x : first[0]) REQUIRE(std::isnan(x));
  for (std::uint32_t length = 69; length < 86; ++length) {
    Teller fork{.story = &story, .id = engine.fork(teller.id, length), .at = length};
    Story other(kShape, 120, 12);
    for (std::uint32_t layer = 0; layer < kShape.layers; ++layer) other.poison(layer, length);
    fork.story = &other;
    CAPTURE(length);
    const auto out = run_forward(engine, rig, tensors, {&fork});
    for (const float x : out[0]) REQUIRE(std::isnan(x));
    engine.end(fork.id);
  }
}

TEST_CASE("a choice that does not come in time costs the forward, which can be run again", "[engine]") {
  using namespace policies;
  const EngineRig rig = engine_rig();
  const PolicySpec policy = parse_policy("topk");
  const Story story(kShape, 210, 5);
  EngineOptions options = streaming(options_for(rig, 1, 0));
  Engine calm(options, rig.device);
  std::atomic<bool> stalls{false};
  options.answer_timeout = 400ms;
  options.before_answer = [&] {
    if (stalls.exchange(false)) pause_for(1500ms);
  };
  Engine engine(options, rig.device);
  Teller want{.story = &story, .id = calm.begin(policy)};
  Teller teller{.story = &story, .id = engine.begin(policy)};
  prefill(calm, rig, want, 200);
  prefill(engine, rig, teller, 200);
  while (teller.at < story.tokens()) {
    if (teller.at % 4 == 2) {  // Not the first, before which a policy looks at the prompt.
      stalls = true;
      ForwardTensors tensors(*rig.device, kShape, engine.options().largest.rows());
      tensors.set(0, story, teller.at);
      tensors.spoil();
      const PlanItem item{.sequence = teller.id};
      const Batch batch = engine.plan({&item, 1}, engine.options().largest, rig.stream);
      tensors.attend(engine, rig.stream);
      REQUIRE(code_of([&] { engine.finish(batch); }) == Errc::device);
      rig.synchronize();
      for (const float x : tensors.out(0)) REQUIRE(std::isnan(x));  // The first layer's answer was late.
      REQUIRE(engine.tokens(teller.id) == teller.at);
    }
    REQUIRE(difference(decode(engine, rig, teller), decode(calm, rig, want)) < tolerance(rig));
  }
}

TEST_CASE("where tokens are attended is one of two ways", "[engine]") {
  const EngineRig rig = engine_rig();
  EngineOptions options = plain::options_for(rig, 1, 20, 0);
  options.placement = PlacementMode{17};
  REQUIRE(code_of([&] { Engine engine(options, rig.device); }) == Errc::invalid_argument);
  REQUIRE(parse_placement("stream") == PlacementMode::stream);
  REQUIRE(code_of([&] { (void)parse_placement("near"); }) == Errc::invalid_argument);
}
