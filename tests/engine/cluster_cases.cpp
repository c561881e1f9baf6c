// Policies that choose among clusters of keys on the device: what they attend is what the same policy attends by itself
// on the CPU, where no arithmetic of the device is in between.
#include <algorithm>
#include <array>
#include <cmath>
#include <string>

#include "sluice/error.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/engine_policies.hpp"
#include "tests/support/sanitized.hpp"

using namespace sluice;
using namespace sluice::test;
using namespace sluice::test::policies;

namespace {

constexpr const char* kTactic = "tactic:least=64,size=4,recluster=64 | int4";

/// How often outputs differ. A GPU's k-means may give a key that lies between two centroids to the other one, and where
/// a token more or less is as near to the share wanted, rounding decides.
class Agreement {
 public:
  explicit Agreement(const EngineRig& rig) : rig_(rig) {}
  void add(std::span<const float> got, std::span<const float> want) {
    const double off = difference(got, want);
    REQUIRE(off < (rig_.on_gpu ? 0.5 : tolerance(rig_)));
    ++all_;
    unlike_ += off < tolerance(rig_) ? 0 : 1;
  }
  void require_mostly() const {
    CAPTURE(unlike_, all_);
    REQUIRE(unlike_ * 5 <= all_);
  }

 private:
  const EngineRig& rig_;
  std::uint32_t all_ = 0;
  std::uint32_t unlike_ = 0;
};

/// The next `steps` outputs.
std::vector<std::vector<float>> decoded(Engine& engine, const EngineRig& rig, Teller& teller, std::uint32_t steps) {
  std::vector<std::vector<float>> outs;
  for (std::uint32_t i = 0; i < steps; ++i) outs.push_back(decode(engine, rig, teller));
  return outs;
}

}  // namespace

TEST_CASE("clusters that the device chooses are those that the policy chooses by itself, near or far",
          "[engine][clusters]") {
  constexpr std::array kPolicies{
      kTactic, "tactic:least=100,size=9,recluster=80 | int4 | fitted=0.6 | near=0,sinks=3,recent=11",
      "tactic:least=64,size=4,recluster=64 | int4 | dense=1", "tactic:least=5000,size=4,recluster=64 | int4"};
  const auto [text, near] = GENERATE_COPY(grid(few<2>(kPolicies), std::array{0u, 7u}));
  CAPTURE(text, near);
  const EngineRig rig = engine_rig();
  Story story(kShape, 470, 777);
  if (rig.kv_dtype != DType::f32) story.round_queries();
  const PolicySpec policy = parse_policy(text);
  Reference reference(rig, story, kShape, policy);
  Engine engine(options_for(rig, 2, near), rig.device);
  Teller teller{.story = &story, .id = engine.begin(policy)};
  Agreement agreement(rig);
  const auto both_decode = [&](std::uint32_t tokens) {
    while (teller.at < tokens) {
      const std::vector<float> want = reference.decode();
      CAPTURE(teller.at);
      agreement.add(decode(engine, rig, teller), want);
    }
  };
  const auto both_prefill = [&](std::uint32_t tokens) {
    reference.prefill(tokens);
    prefill(engine, rig, teller, tokens);
  };
  both_prefill(230);
  both_decode(230 + 150);  // Past where new tokens are clustered.
  both_prefill(400);       // The next turn of a conversation.
  both_decode(story.tokens());
  agreement.require_mostly();
}

TEST_CASE("all of the mass of the device's clusters is dense attention", "[engine][clusters]") {
  const auto [placement, near, windows] = GENERATE(
      grid(std::array{PlacementMode::hybrid, PlacementMode::stream}, std::array{0u, 9u}, std::array{false, true}));
  CAPTURE(to_string(placement), near, windows);
  const EngineRig rig = engine_rig();
  Story story(kShape, 360, 51);
  EngineOptions options = options_for(rig, 1, near);
  options.placement = placement;
  if (windows) {
    options.windows = {40, 0, 23};
    story.see(options.windows);
  }
  if (rig.kv_dtype != DType::f32) story.round_queries();
  Engine engine(options, rig.device);
  Teller teller{.story = &story,
                .id = engine.begin(parse_policy("tactic:least=100,size=5,recluster=64 | int4 | fitted=1"))};
  prefill(engine, rig, teller, 280);
  while (teller.at < story.tokens()) {
    CAPTURE(teller.at);
    const std::vector<float> out = decode(engine, rig, teller);
    REQUIRE(error_of(out, story, teller.at - 1) < 2 * tolerance(rig));
  }
}

TEST_CASE("what the device has clustered is taken back, and forked, exactly", "[engine][clusters]") {
  const std::uint32_t near = GENERATE(0u, 7u);
  CAPTURE(near);
  const EngineRig rig = engine_rig();
  const Story story(kShape, 420, 91), other(kShape, 420, 92);
  Engine engine(options_for(rig, 1, near), rig.device);
  Teller calm{.story = &story, .id = engine.begin(parse_policy(kTactic))};
  prefill(engine, rig, calm, 210);
  const auto want = decoded(engine, rig, calm, 200);
  Teller teller{.story = &story, .id = engine.begin(parse_policy(kTactic))};
  prefill(engine, rig, teller, 210);
  const auto go = [&](std::uint32_t steps) {
    for (std::uint32_t i = 0; i < steps; ++i) {
      const std::uint32_t at = teller.at;
      CAPTURE(at);
      REQUIRE(difference(decode(engine, rig, teller), want[at - 210]) < tolerance(rig));
    }
  };
  go(70);  // Behind the first block of new tokens.
  // What others would have made of the next ones never was: neither in front of a block's end nor behind it.
  for (const std::uint32_t back : {1u, 20u, 69u}) {
    const std::uint32_t at = teller.at;
    Teller stray{.story = &other, .id = teller.id, .at = at};
    (void)decoded(engine, rig, stray, 5);
    engine.truncate(teller.id, teller.at = at - back);
    go(back);
  }
  const SequenceId parent = teller.id;
  teller.id = engine.fork(parent, teller.at -= 30);
  go(100);
  teller.id = engine.fork(parent, 210);  // Where the prompt ended.
  teller.at = 210;
  go(10);
  REQUIRE(code_of([&] { (void)engine.fork(SequenceId{987}, 3); }) == Errc::not_found);
}

TEST_CASE("a batch of policies with and without clusters attends what each does alone", "[engine][clusters]") {
  const EngineRig rig = engine_rig();
  const auto options = [&](std::uint32_t rows, std::uint32_t near) { return options_for(rig, rows, near); };
  require_same_in_batch(rig, options, GENERATE(from_range(few<1>(std::array{10u, 0u}))), 14,
                        {{kTactic, 200},
                         {"exact | int4 | top_k=30 | near=0,sinks=4,recent=12", 90},
                         {"tactic:least=64,size=12 | int4 | fitted=0.5 | near=0,sinks=2,recent=9", 170},
                         {"topk", 33},
                         {"exact | int4 | top_p=0.8 | near=0,sinks=4,recent=30", 64}});
}

TEST_CASE("what has no room for clusters says so and changes nothing", "[engine][clusters]") {
  const EngineRig rig = engine_rig();
  const Story story(kShape, 300, 93);
  EngineOptions options = named(options_for(rig, 1, 0), {kManyTokens});
  {
    Engine engine(options, rig.device);
    const auto [code, text] = refusal_of([&] { (void)engine.begin(parse_policy(kTactic)); });
    CAPTURE(text);
    REQUIRE(code == Errc::unsupported);
    REQUIRE(text.find("among clusters") != std::string::npos);
    REQUIRE(text.find("EngineOptions::policies") != std::string::npos);
  }
  options.cluster_sequences = 2;
  options.policies = {parse_policy("tactic:least=64,size=64,recluster=64 | int4")};
  Engine engine(options, rig.device);
  Teller teller{.story = &story, .id = engine.begin(parse_policy(kTactic))};
  const SequenceId second = engine.begin(parse_policy(kTactic));
  REQUIRE(code_of([&] { (void)engine.begin(parse_policy(kTactic)); }) == Errc::out_of_capacity);
  REQUIRE_FALSE(engine.can_admit(10, parse_policy(kTactic)));
  engine.end(second);
  REQUIRE(engine.can_admit(10, parse_policy(kTactic)));
  const std::uint32_t prompt = 4 * (engine.sizes().max_clusters + 1);  // In clusters of 4: one too many.
  prefill(engine, rig, teller, prompt);
  REQUIRE(code_of([&] { (void)decode(engine, rig, teller); }) == Errc::out_of_capacity);
  REQUIRE(engine.tokens(teller.id) == prompt);
  engine.truncate(teller.id, teller.at = prompt - 1);
  REQUIRE(decode(engine, rig, teller).size() == kShape.layers * kRow);
}
