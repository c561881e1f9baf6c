// Policies that choose on the CPU, on every device: what they attend is what they attend by themselves.
#include "sluice/error.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/engine_policies.hpp"
#include "tests/support/sanitized.hpp"

using namespace sluice;
using namespace sluice::test;
using namespace sluice::test::policies;

TEST_CASE("policies that choose on the CPU attend what they attend by themselves, near or far", "[engine]") {
  constexpr std::array kPolicies{
      "lfps",
      "magicpig",
      "tactic:least=64,size=4,recluster=64",
      "history:share_group=on,observe_every=3 | top_k=24 | near=0,sinks=4,recent=16 | dense=1",
      "clusters:least=64,size=8,candidates=48+lsh | top_k=40 | near=0 | dense=0,every=2",
      "exact | top_k=30 | near=0 | bypass=0.3",
      "history+exact | top_p=0.8 | near=0,sinks=2,recent=7",
      "lfps | bypass=off",
      "topk",
      "labels:channels=8,budget=40 | top_k=max(1, 100%) | near=0,sinks=4,recent=0",
      "labels:channels=8,budget=60 | int4 | top_p=0.9 | near=0,sinks=4,recent=0 | dense=1",
      "snapkv:budget=90,window=16",
      "adakv:budget=90,pyramid=4",
      "exact | verified=0.2,heavy=16 | near=0,sinks=4,recent=20",
      "exact | hadamard | top_k=40 | near=0 | dense=1",
      "infinigen:alpha=1 | dense=1",
      "exact | skewed=50% | within=1.5,most=60 | near=0,sinks=4,recent=9"};
  const auto [text, near] = GENERATE_COPY(grid(few<6>(kPolicies), std::array{0u, 7u}));
  CAPTURE(text, near);
  const EngineRig rig = engine_rig();
  Story story(kShape, 390, 77);
  if (rig.kv_dtype != DType::f32) story.round_queries();
  const PolicySpec policy = parse_policy(text);
  Beside both(rig, story, policy, options_for(rig, 2, near));
  // As many tokens as clusters are made of.
  const std::uint32_t decoded = policy.clusters.recluster_every < 100 ? policy.clusters.recluster_every + 10 : 20;
  both.prefill(270);
  both.decode(270 + decoded);
  both.prefill(290 + decoded);  // The next turn of a conversation.
  both.decode(306 + decoded);
}

TEST_CASE("heads that look at the sinks alone are bypassed as by themselves", "[engine]") {
  const auto [text, near] =
      GENERATE(grid(std::array{"lfps", "exact | top_k=30 | near=0,sinks=4,recent=0 | bypass=0.8",
                               "history | top_k=all | near=0,sinks=4,recent=9 | bypass=0.9"},
                    std::array{0u, 7u}));
  CAPTURE(text, near);
  const EngineRig rig = engine_rig();
  Story story(kShape, 320, 78);
  story.lean_on_sinks();
  if (rig.kv_dtype != DType::f32) story.round_queries();
  const PolicySpec policy = parse_policy(text);
  Beside both(rig, story, policy, options_for(rig, 1, near));
  both.prefill(290);
  both.decode(story.tokens());
  REQUIRE(both.reference.audit().bypassed_heads >= 15 * kShape.layers);
  REQUIRE(both.reference.audit().bypassed_heads < 30 * kShape.layers * kShape.q_heads);
}

TEST_CASE("policies of the CPU begin behind imported tokens as by themselves", "[engine]") {
  const char* const text = GENERATE("lfps", "magicpig", "tactic:least=64,size=4");
  CAPTURE(text);
  const EngineRig rig = engine_rig();
  const Story story(kShape, 260, 79);
  const PolicySpec policy = parse_policy(text);
  Reference reference(rig, story, kShape, policy);
  Engine engine(options_for(rig, 1, 0), rig.device);
  Teller teller{.story = &story, .id = engine.begin(policy)};
  reference.import(230);
  import_story(engine, rig, teller, 230);
  while (teller.at < story.tokens())
    REQUIRE(difference(decode(engine, rig, teller), reference.decode()) < tolerance(rig));
}

TEST_CASE("a batch of policies of the CPU and of the device attends what each does alone", "[engine]") {
  const EngineRig rig = engine_rig();
  const auto options = [&](std::uint32_t rows, std::uint32_t near) { return options_for(rig, rows, near); };
  require_same_in_batch(rig, options, GENERATE(from_range(few<1>(std::array{10u, 0u}))), 14,
                        {{"lfps", 200},
                         {"exact | int4 | top_k=30 | near=0,sinks=4,recent=12", 90},
                         {"magicpig", 170},
                         {"topk", 33},
                         {"infinigen:alpha=1 | dense=1", 120},
                         {"none | near=0,sinks=4,recent=30", 64}});
}

TEST_CASE("all of the clusters' mass is dense attention, and nearly so is a sample that every key gets into",
          "[engine]") {
  const auto [clusters, placement] =
      GENERATE(grid(std::array{true, false}, std::array{PlacementMode::hybrid, PlacementMode::stream}));
  CAPTURE(clusters, to_string(placement));
  const EngineRig rig = engine_rig();
  const Story story(kShape, 380, 51);
  PolicySpec policy = parse_policy(clusters ? "tactic:least=100,recluster=64" : "magicpig");
  policy.budget.mass = 1.f;
  policy.dense_every = 0;
  // One bit in 512 tables: a key stays out only if it points away from the query.
  policy.lsh.bits = 1;
  policy.lsh.tables = 512;
  EngineOptions options = options_for(rig, 1, 0);
  options.placement = placement;
  Engine engine(options, rig.device);
  Teller teller{.story = &story, .id = engine.begin(policy)};
  prefill(engine, rig, teller, 300);
  while (teller.at < story.tokens()) {  // Past where new tokens are clustered.
    const std::vector<float> out = decode(engine, rig, teller);
    REQUIRE(error_of(out, story, teller.at - 1) < (clusters ? tolerance(rig) : 2e-2));
  }
}

TEST_CASE("rehearsed queries that are missing are asked for, and those that nobody wants ignored", "[engine]") {
  const EngineRig rig = engine_rig();
  const Story story(kShape, 130, 52);
  const PolicySpec policy = parse_policy("infinigen:alpha=2 | dense=1");
  EngineOptions options = options_for(rig, 1, 0);
  options.largest.rehearsed = false;
  {
    Engine engine(options, rig.device);
    const Refusal refusal = refusal_of([&] { (void)engine.begin(policy); });
    REQUIRE(refusal.code == Errc::unsupported);
    REQUIRE(refusal.text.find("EngineOptions::policies") != std::string::npos);
  }
  options.policies.push_back(policy);
  Engine engine(options, rig.device);
  REQUIRE(engine.options().largest.rehearsed);
  Teller teller{.story = &story, .id = engine.begin(policy)};
  prefill(engine, rig, teller, 128);
  ForwardTensors tensors(*rig.device, kShape, 1);
  tensors.set(0, story, 128);
  Bucket bucket{.decode_rows = 1, .unbounded = true};
  const std::vector<PlanItem> items = one_each(std::array{teller.id});
  const Refusal unplanned = refusal_of([&] { (void)engine.plan(items, bucket, rig.stream); });
  REQUIRE(unplanned.code == Errc::invalid_argument);
  REQUIRE(unplanned.text.find("rehearsed queries") != std::string::npos);
  bucket.rehearsed = true;
  const Batch batch = engine.plan(items, bucket, rig.stream);
  tensors.attend_layer(engine, bucket, 0, rig.stream);
  const std::vector<float> zeros(kRow);
  const auto view = [&](std::uint32_t heads) {
    return dense_view(zeros.data(), DType::f32, 1, heads, kShape.head_dim);
  };
  std::vector<float> out(kRow);
  const Refusal missing = refusal_of([&] {
    engine.attend(bucket, LayerId{1}, view(kShape.q_heads), view(kShape.kv_heads), view(kShape.kv_heads),
                  dense_view(out.data(), DType::f32, 1, kShape.q_heads, kShape.head_dim), rig.stream);
  });
  REQUIRE(missing.code == Errc::invalid_argument);
  REQUIRE(missing.text.find("layer 1 comes without") != std::string::npos);
  for (std::uint32_t layer = 1; layer < kShape.layers; ++layer)  // Nothing of it was enqueued.
    tensors.attend_layer(engine, bucket, layer, rig.stream);
  engine.finish(batch);
  REQUIRE(engine.tokens(teller.id) == 129);
}

TEST_CASE("rehearsed with all there is allowed, attention is dense", "[engine]") {
  const EngineRig rig = engine_rig();
  const Story story(kShape, 240, 53);
  Engine engine(options_for(rig, 1, GENERATE(0u, 7u)), rig.device);
  Teller teller{.story = &story, .id = engine.begin(parse_policy("infinigen:alpha=1000,most=100% | dense=1"))};
  prefill(engine, rig, teller, 215);
  while (teller.at < story.tokens()) {
    const std::vector<float> out = decode(engine, rig, teller);
    REQUIRE(error_of(out, story, teller.at - 1) < tolerance(rig));
  }
}

TEST_CASE("so many rows that lists outnumber multiprocessors attend what each does alone", "[engine]") {
  // Two lists each; GPUs of today, which no sanitizer is for, have up to 188 multiprocessors.
  constexpr std::uint32_t kMany = kSanitized ? 24 : 96;
  constexpr std::array kPolicies{"exact | int4 | top_k=40 | near=0,sinks=4,recent=12",
                                 "exact | int4 | top_p=0.7 | near=0,sinks=4,recent=12", "none | near=0,recent=50"};
  const auto [text, near] = GENERATE_COPY(grid(kPolicies, std::array{0u, 20u}));
  CAPTURE(text, near);
  const EngineRig rig = engine_rig();
  const Story story(kShape, 2100, 160);
  const auto decoded = [&](std::uint32_t at_once) {
    EngineOptions options = options_for(rig, at_once, near);
    options.host_bytes = 500 * block_bytes(options);
    options.sequences = kMany + 1;
    Engine engine(options, rig.device);
    Teller parent{.story = &story, .id = engine.begin(parse_policy(text))};
    import_story(engine, rig, parent, 2000);
    // Each goes on at another token, so that each attends something else.
    std::vector<Teller> tellers;
    for (std::uint32_t i = 0; i < kMany; ++i)
      tellers.push_back({.story = &story, .id = engine.fork(parent.id, 2000 - 13 * i), .at = 2000 - 13 * i});
    std::vector<std::vector<float>> out;
    for (std::uint32_t first = 0; first < kMany; first += at_once) {
      std::vector<Teller*> batch;
      for (std::uint32_t i = first; i < first + at_once; ++i) batch.push_back(&tellers[i]);
      for (auto& row : run(engine, rig, batch, std::vector<std::uint32_t>(at_once, 1), false))
        out.push_back(std::move(row));
    }
    return out;
  };
  const auto alone = decoded(1), together = decoded(kMany);
  for (std::uint32_t i = 0; i < kMany; ++i) {
    CAPTURE(i);
    REQUIRE(difference(together[i], alone[i]) < tolerance(rig));
  }
}
