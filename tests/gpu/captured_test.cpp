// Forwards captured in CUDA graphs beside the same enqueued, and rows beside what each is alone.
#include <algorithm>
#include <cmath>
#include <memory>
#include <string>

#include "gpu/head_dims.hpp"
#include "gpu/kernels/compiled.hpp"
#include "sluice/error.hpp"
#include "tests/gpu/forward_graph.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/engine_rig.hpp"

using namespace sluice;
using namespace sluice::test;

namespace {

using Graph = ForwardGraph;
constexpr const char* kPolicy = kGraphPolicy;

/// Whether kernels for this head_dim attend what they find near.
bool in_clusters(std::uint32_t head_dim) {
  return gpu::compiled_for() >= gpu::Compiled::clusters && gpu::TunedHeadDims::has(head_dim);
}

/// Decodes `steps` tokens of each story, in a graph or not; outputs in order.
std::vector<float> decode(const EngineRig& rig, const AttentionShape& shape, const std::vector<Story>& stories,
                          std::uint32_t near_blocks, std::uint32_t steps, bool graphs,
                          PlacementMode placement = PlacementMode::hybrid, const std::string& policy = kPolicy,
                          float fetch_share = 0.f) {
  const auto rows = static_cast<std::uint32_t>(stories.size());
  const PolicySpec spec = parse_policy(policy);
  EngineOptions options = graph_options(shape, rows, near_blocks);
  options.placement = placement;
  options.fetch_share = fetch_share;
  options.policies = {spec};
  Engine engine(options, rig.device);
  const bool chooses_here = engine.sizes().cpu_sequences != 0;
  const bool clusters = engine.sizes().cluster_sequences != 0;
  ForwardTensors tensors(*rig.device, shape, rows);
  // Before anything was planned: what is captured depends on the bucket alone.
  std::unique_ptr<Graph> graph;
  if (graphs) graph = std::make_unique<Graph>(engine, tensors, static_cast<cudaStream_t>(rig.stream));
  // Where the CPU attends some, rows come near beside the layer's merge.
  const bool promotes_apart = near_blocks != 0 && (placement == PlacementMode::stream || fetch_share == 1.f);
  // Where the CPU attends all that is far, the thread blocks that find near rows attend them.
  const bool attends_apart = placement == PlacementMode::stream || fetch_share != 0.f || !in_clusters(shape.head_dim);
  // The key and value of one row come in beside the scores of the others.
  const bool appends_apart = rows != 1 || !gpu::TunedHeadDims::has(shape.head_dim);
  const std::size_t kernels = 3 + (appends_apart ? 1 : 0) + (promotes_apart ? 1 : 0) + (attends_apart ? 1 : 0);
  if (graph && !chooses_here && !clusters && !engine.options().largest.pages)
    REQUIRE(graph->nodes() == 2 + kernels * shape.layers);
  std::vector<Teller> tellers;
  std::vector<SequenceId> ids;
  for (const Story& story : stories) {
    tellers.push_back({.story = &story, .id = engine.begin(spec)});
    import_story(engine, rig, tellers.back(), story.tokens() - steps, kNone, story.tokens() - steps - 40);
    ids.push_back(tellers.back().id);
  }
  std::vector<float> all;
  for (std::uint32_t step = 0; step < steps; ++step) {
    for (std::uint32_t row = 0; row < rows; ++row) tensors.set(row, stories[row], tellers[row].at++);
    const Batch batch = engine.plan(one_each(ids), engine.options().largest, rig.stream);
    run_planned(engine, rig, tensors, graph.get(), batch, rows, all);
    if (!graph || step % 5 != 2) continue;
    graph->replay();  // Without a plan.
    rig.synchronize();
    REQUIRE(std::isnan(tensors.out(0).front()));
    REQUIRE(engine.tokens(ids[0]) == tellers[0].at);
  }
  REQUIRE((engine.stats().asked > 0) == ((placement == PlacementMode::hybrid && fetch_share != 1.f) || chooses_here));
  REQUIRE((engine.stats().fetched_tokens > 0) ==
          (placement == PlacementMode::stream || (fetch_share != 0.f && !chooses_here)));
  return all;
}

}  // namespace

TEST_CASE("a forward captured in a CUDA graph is the forward, bit by bit", "[engine][gpu]") {
  const std::uint32_t rows = GENERATE(1u, 8u);
  const std::uint32_t near_blocks = GENERATE(0u, 9u);
  const std::uint32_t head_dim = GENERATE(64u, 96u, 128u, 192u, 256u);
  const AttentionShape shape{.layers = 4, .q_heads = 8, .kv_heads = 2, .head_dim = head_dim};
  const std::string policy =
      GENERATE(values<std::string>({kPolicy, "exact | int3 | sample=40 | near=0,sinks=4,recent=12"}));
  CAPTURE(rows, near_blocks, head_dim, policy);
  const EngineRig rig = engine_rig();
  std::vector<Story> stories;
  for (std::uint32_t i = 0; i < rows; ++i) stories.emplace_back(shape, 300 + 130 * i % 900, 70 + i);
  const auto told = [&](bool graphs) {
    return decode(rig, shape, stories, near_blocks, 20, graphs, PlacementMode::hybrid, policy);
  };
  const auto want = told(false);
  REQUIRE(told(true) == want);
}

TEST_CASE("rows of more thread blocks than run at once have their answers in every layer", "[engine][gpu]") {
  constexpr std::uint32_t kRows = 136, kSteps = 3;  // With 8 KV heads each more than 8 blocks a multiprocessor.
  const AttentionShape shape{.layers = 3, .q_heads = 8, .kv_heads = 8, .head_dim = 64};
  const EngineRig rig = engine_rig();
  std::vector<Story> stories;
  for (std::uint32_t i = 0; i < kRows; ++i) stories.emplace_back(shape, 90 + i % 7, 900 + i);
  const auto all = decode(rig, shape, stories, 0, kSteps, false);
  const std::size_t values = all.size() / (kRows * kSteps);
  for (const std::uint32_t row : {0u, 66u, kRows - 1}) {
    CAPTURE(row);
    const auto alone = decode(rig, shape, {stories[row]}, 0, kSteps, false);
    REQUIRE(alone.size() == values * kSteps);
    float off = 0.f;
    for (std::size_t i = 0; i < alone.size(); ++i)
      off = std::max(off, std::abs(alone[i] - all[(i / values * kRows + row) * values + i % values]));
    REQUIRE(off < rig.tolerance);
  }
}

TEST_CASE("what a head chooses is foreseen by the step before, however much is attended anyway and alike",
          "[engine][gpu]") {
  const EngineRig rig = engine_rig();
  const auto recent = GENERATE(1u, 24u, 900u);
  const auto alike = GENERATE(0.f, 8.f);  // Of all keys along one channel; queries are random there.
  CAPTURE(recent, alike);
  const AttentionShape shape{.layers = 2, .q_heads = 8, .kv_heads = 2, .head_dim = 64};
  const PolicySpec spec = parse_policy("exact | int4 | top_k=40 | near=0,sinks=4,recent=" + std::to_string(recent));
  constexpr std::uint32_t kWarmUp = 96;
  constexpr std::uint32_t kSteps = 64;
  Story story(shape, 1100 + kWarmUp + kSteps, 77);
  story.lean_along(5, alike);
  EngineOptions options = graph_options(shape, 1, 8);
  options.policies = {spec};
  Engine engine(options, rig.device);
  ForwardTensors tensors(*rig.device, shape, 1);
  Teller teller{.story = &story, .id = engine.begin(spec)};
  import_story(engine, rig, teller, 1100);
  for (std::uint32_t step = 0; step < kWarmUp; ++step) (void)run_forward(engine, rig, tensors, {&teller});
  const std::uint64_t before = engine.stats().missed;
  for (std::uint32_t step = 0; step < kSteps; ++step) (void)run_forward(engine, rig, tensors, {&teller});
  // Queries are random: now and then one has another distribution of scores than the one before.
  REQUIRE(engine.stats().missed - before <= kSteps * shape.layers * shape.q_heads / 10);
}

TEST_CASE("a captured forward that streams is the forward, whoever chooses", "[engine][gpu]") {
  const std::uint32_t rows = GENERATE(1u, 4u);
  const std::uint32_t near_blocks = GENERATE(0u, 9u);
  const std::string policy =
      GENERATE(values<std::string>({kPolicy, "lfps", "exact | top_k=30 | near=0,sinks=4,recent=12 | bypass=0.8"}));
  const AttentionShape shape{.layers = 3, .q_heads = 24, .kv_heads = 2, .head_dim = 64};  // Groups of 12.
  CAPTURE(rows, near_blocks, policy);
  const EngineRig rig = engine_rig();
  std::vector<Story> stories;
  for (std::uint32_t i = 0; i < rows; ++i) stories.emplace_back(shape, 300 + 130 * i, 70 + i);
  const auto want = decode(rig, shape, stories, near_blocks, 20, false, PlacementMode::stream, policy);
  REQUIRE(decode(rig, shape, stories, near_blocks, 20, true, PlacementMode::stream, policy) == want);
  const auto in_place = decode(rig, shape, stories, near_blocks, 20, false, PlacementMode::hybrid, policy);
  REQUIRE(difference(want, in_place) < 2e-3);
}

TEST_CASE("a captured forward whose histories propose ahead is the forward", "[engine][gpu][forecast]") {
  const std::uint32_t rows = GENERATE(1u, 4u);
  const std::uint32_t near_blocks = GENERATE(0u, 9u);
  const std::string policy = GENERATE(values<std::string>(
      {"history | int4 | top_k=40 | near=0,sinks=4,recent=32",
       "history:observe_every=5,share_group=on | int4 | top_k=40 | near=0,sinks=4,recent=32 | dense=1"}));
  const AttentionShape shape{.layers = 3, .q_heads = 8, .kv_heads = 2, .head_dim = 128};
  CAPTURE(rows, near_blocks, policy);
  const EngineRig rig = engine_rig();
  std::vector<Story> stories;
  for (std::uint32_t i = 0; i < rows; ++i) stories.emplace_back(shape, 300 + 330 * i, 70 + i);
  const auto want = decode(rig, shape, stories, near_blocks, 20, false, PlacementMode::hybrid, policy);
  REQUIRE(decode(rig, shape, stories, near_blocks, 20, true, PlacementMode::hybrid, policy) == want);
}

TEST_CASE("a captured forward whose lists are shared is the forward, and what the CPU attends alone", "[engine][gpu]") {
  const std::uint32_t rows = GENERATE(1u, 4u);
  const std::uint32_t near_blocks = GENERATE(0u, 9u);
  const float share = GENERATE(0.3f, 0.99f, 1.f);
  const std::string policy = GENERATE(values<std::string>({kPolicy, "lfps"}));
  const std::uint32_t heads = GENERATE(8u, 24u);  // Groups of 4 and of 12.
  const AttentionShape shape{.layers = 3, .q_heads = heads, .kv_heads = 2, .head_dim = 64};
  CAPTURE(rows, near_blocks, share, policy, heads);
  const EngineRig rig = engine_rig();
  std::vector<Story> stories;
  for (std::uint32_t i = 0; i < rows; ++i) stories.emplace_back(shape, 300 + 130 * i, 70 + i);
  const auto told = [&](bool graphs, float of) {
    return decode(rig, shape, stories, near_blocks, 20, graphs, PlacementMode::hybrid, policy, of);
  };
  const auto want = told(false, share);
  REQUIRE(told(true, share) == want);
  REQUIRE(difference(want, told(false, 0.f)) < 2e-3);
}

TEST_CASE("a captured forward that chooses among clusters is the forward, behind a clustering, too",
          "[engine][gpu][clusters]") {
  const std::uint32_t rows = GENERATE(1u, 4u);
  const std::uint32_t near_blocks = GENERATE(0u, 9u);
  const std::uint32_t head_dim = GENERATE(64u, 128u);
  const AttentionShape shape{.layers = 3, .q_heads = 8, .kv_heads = 2, .head_dim = head_dim};
  CAPTURE(rows, near_blocks, head_dim);
  const EngineRig rig = engine_rig();
  std::vector<Story> stories;
  for (std::uint32_t i = 0; i < rows; ++i) stories.emplace_back(shape, 400 + 130 * i, 170 + i);
  const auto told = [&](bool graphs) {
    return decode(rig, shape, stories, near_blocks, 80, graphs, PlacementMode::hybrid,
                  "tactic:least=64,size=8,recluster=64 | int4 | fitted=0.7");
  };
  const auto want = told(false);
  REQUIRE(std::ranges::none_of(want, [](float x) { return std::isnan(x); }));
  REQUIRE(told(true) == want);
}

TEST_CASE("a captured forward that takes pages until there is a share is the forward", "[engine][gpu][progress]") {
  const std::uint32_t rows = GENERATE(1u, 4u);
  const std::uint32_t near_blocks = GENERATE(0u, 9u);
  const PlacementMode placement = GENERATE(PlacementMode::hybrid, PlacementMode::stream);
  const std::uint32_t head_dim = GENERATE(64u, 128u, 96u);
  const AttentionShape shape{.layers = 3, .q_heads = 8, .kv_heads = 2, .head_dim = head_dim};
  CAPTURE(rows, near_blocks, to_string(placement), head_dim);
  const EngineRig rig = engine_rig();
  std::vector<Story> stories;
  for (std::uint32_t i = 0; i < rows; ++i) stories.emplace_back(shape, 400 + 130 * i, 170 + i);
  const auto told = [&](bool graphs) {
    return decode(rig, shape, stories, near_blocks, 40, graphs, placement,
                  "pages | int4 | progressive=0.6,microbatch=2 | near=0,sinks=4,recent=24");
  };
  const auto want = told(false);
  REQUIRE(std::ranges::none_of(want, [](float x) { return std::isnan(x); }));
  REQUIRE(told(true) == want);
}

TEST_CASE("a captured forward grows with its sequence, past pages and past what is near", "[engine][gpu]") {
  const AttentionShape shape{.layers = 2, .q_heads = 32, .kv_heads = 8, .head_dim = 128};
  const EngineRig rig = engine_rig();
  std::vector<Story> stories;
  stories.emplace_back(shape, 700, 90);
  const auto want = decode(rig, shape, stories, 6, 300, false);
  REQUIRE(decode(rig, shape, stories, 6, 300, true) == want);
}
