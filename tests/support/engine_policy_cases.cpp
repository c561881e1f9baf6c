// Policies that choose on the CPU, on every device: what they attend is what they attend in a Runtime.
#include "sluice/error.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/engine_policies.hpp"

using namespace sluice;
using namespace sluice::test;
using namespace sluice::test::policies;

TEST_CASE("policies that choose on the CPU attend what they attend in a runtime, near or far", "[engine]") {
  const char* const text =
      GENERATE("lfps", "lfps | bypass=off", "topk", "magicpig", "tactic:least=64,size=4,recluster=64",
               "history:share_group=on,observe_every=3 | top_k=24 | near=0,sinks=4,recent=16 | dense=1",
               "history+exact | top_p=0.8 | near=0,sinks=2,recent=7", "exact | top_k=30 | near=0 | bypass=0.3",
               "clusters:least=64,size=8,candidates=48+lsh | top_k=40 | near=0 | dense=0,every=2");
  const std::uint32_t near = GENERATE(0u, 7u);
  CAPTURE(text, near);
  const EngineRig rig = engine_rig();
  Story story(kShape, 390, 77);
  if (rig.kv_dtype != DType::f32) story.round_queries();
  const PolicySpec policy = parse_policy(text);
  Reference reference(rig, story, policy);
  Engine engine(options_for(rig, 2, near), rig.device);
  Teller teller{.story = &story, .id = engine.begin(policy)};
  const auto both_decode = [&](std::uint32_t tokens) {
    while (teller.at < tokens) {
      const std::vector<float> want = reference.decode();
      CAPTURE(teller.at);
      REQUIRE(difference(decode(engine, rig, teller), want) < tolerance(rig));
    }
  };
  const auto both_prefill = [&](std::uint32_t tokens) {
    reference.prefill(tokens);
    prefill(engine, rig, teller, tokens);
  };
  // As many tokens as clusters are made of.
  const std::uint32_t decoded = policy.clusters.recluster_every < 100 ? policy.clusters.recluster_every + 10 : 20;
  both_prefill(270);
  both_decode(270 + decoded);
  both_prefill(290 + decoded);  // The next turn of a conversation.
  both_decode(306 + decoded);
}

TEST_CASE("heads that look at the sinks alone are bypassed as in a runtime", "[engine]") {
  const char* const text = GENERATE("lfps", "exact | top_k=30 | near=0,sinks=4,recent=0 | bypass=0.8",
                                    "history | top_k=all | near=0,sinks=4,recent=9 | bypass=0.9");
  const std::uint32_t near = GENERATE(0u, 7u);
  CAPTURE(text, near);
  const EngineRig rig = engine_rig();
  Story story(kShape, 320, 78);
  story.lean_on_sinks();
  if (rig.kv_dtype != DType::f32) story.round_queries();
  const PolicySpec policy = parse_policy(text);
  Reference reference(rig, story, policy);
  Engine engine(options_for(rig, 1, near), rig.device);
  Teller teller{.story = &story, .id = engine.begin(policy)};
  reference.prefill(290);
  prefill(engine, rig, teller, 290);
  while (teller.at < story.tokens()) {
    CAPTURE(teller.at);
    REQUIRE(difference(decode(engine, rig, teller), reference.decode()) < tolerance(rig));
  }
  REQUIRE(reference.stats().bypassed_heads >= 15 * kShape.layers);
  REQUIRE(reference.stats().bypassed_heads < 30 * kShape.layers * kShape.q_heads);
}

TEST_CASE("policies of the CPU begin behind imported tokens as in a runtime", "[engine]") {
  const char* const text = GENERATE("lfps", "magicpig", "tactic:least=64,size=4");
  CAPTURE(text);
  const EngineRig rig = engine_rig();
  const Story story(kShape, 260, 79);
  const PolicySpec policy = parse_policy(text);
  Reference reference(rig, story, policy);
  Engine engine(options_for(rig, 1, 0), rig.device);
  Teller teller{.story = &story, .id = engine.begin(policy)};
  reference.import(230);
  import_story(engine, rig, teller, 230);
  while (teller.at < story.tokens())
    REQUIRE(difference(decode(engine, rig, teller), reference.decode()) < tolerance(rig));
}

TEST_CASE("a batch of policies of the CPU and of the device attends what each does alone", "[engine]") {
  const EngineRig rig = engine_rig();
  const char* const policies[] = {"lfps", "exact | int4 | top_k=30 | near=0,sinks=4,recent=12", "magicpig", "topk",
                                  "none | near=0,sinks=4,recent=30"};
  constexpr std::uint32_t kSteps = 14;
  const std::uint32_t prompts[] = {200, 90, 170, 33, 64};
  std::vector<Story> stories;
  for (std::uint32_t i = 0; i < 5; ++i) stories.emplace_back(kShape, prompts[i] + kSteps, 150 + i);
  std::vector<std::vector<std::vector<float>>> alone(5);
  for (std::uint32_t i = 0; i < 5; ++i) {
    Engine engine(options_for(rig, 5, 0), rig.device);
    Teller teller{.story = &stories[i], .id = engine.begin(parse_policy(policies[i]))};
    prefill(engine, rig, teller, prompts[i]);
    for (std::uint32_t s = 0; s < kSteps; ++s) alone[i].push_back(decode(engine, rig, teller));
  }
  for (const std::uint32_t near : {0u, 10u}) {
    Engine engine(options_for(rig, 5, near), rig.device);
    std::vector<Teller> tellers;
    for (std::uint32_t i = 0; i < 5; ++i) {
      tellers.push_back({.story = &stories[i], .id = engine.begin(parse_policy(policies[i]))});
      prefill(engine, rig, tellers[i], prompts[i]);
    }
    for (std::uint32_t s = 0; s < 3 * kSteps; ++s) {
      std::vector<Teller*> batch;
      for (std::uint32_t i = 0; i < 5; ++i) {
        Teller& teller = tellers[(i + s) % 5];
        if ((i * 7 + s * 3) % 5 < 3 && teller.at < teller.story->tokens()) batch.push_back(&teller);
      }
      if (batch.empty()) continue;
      const auto out = run(engine, rig, batch, std::vector<std::uint32_t>(batch.size(), 1), false);
      for (std::size_t row = 0; row < batch.size(); ++row) {
        const auto i = static_cast<std::size_t>(batch[row] - tellers.data());
        CAPTURE(near, s, policies[i]);
        REQUIRE(difference(out[row], alone[i][batch[row]->at - prompts[i] - 1]) < tolerance(rig));
      }
    }
  }
}
