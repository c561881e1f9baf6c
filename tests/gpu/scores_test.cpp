// Forwards with scores of the caller: captured in CUDA graphs beside the same enqueued, beside rows that choose by
// copies of keys, and scores in memory of the GPU.
#include <cuda_runtime_api.h>

#include <array>
#include <memory>
#include <string>
#include <vector>

#include "tests/gpu/forward_graph.hpp"
#include "tests/support/engine_scores.hpp"

using namespace sluice;
using namespace sluice::test;
using namespace sluice::test::scores;

namespace {

constexpr std::array kPolicies{"scores | top_k=40 | near=0,sinks=4,recent=24",
                               "exact | int4 | top_k=40 | near=0,sinks=4,recent=24",
                               "scores | top_k=7 | near=0,sinks=0,recent=1"};
constexpr const char* kShare = "scores | top_p=0.7 | near=0,sinks=4,recent=24";

/// Decodes `steps` tokens of each story, in a graph or not; outputs in order.
std::vector<float> decoded(const EngineRig& rig, const AttentionShape& shape, const std::vector<Story>& stories,
                           const std::vector<std::string>& policies, std::uint32_t near, std::uint32_t steps,
                           bool graphs) {
  const auto rows = static_cast<std::uint32_t>(stories.size());
  EngineOptions options = graph_options(shape, rows, near);
  for (const std::string& policy : policies) options.policies.push_back(parse_policy(policy));
  Engine engine(options, rig.device);
  ForwardTensors tensors(*rig.device, shape, rows);
  Brought brought(*rig.device, shape.layers, rows, shape.kv_heads, engine.options().largest.max_tokens);
  tensors.bring(brought.views());
  std::unique_ptr<ForwardGraph> graph;
  if (graphs) graph = std::make_unique<ForwardGraph>(engine, tensors, static_cast<cudaStream_t>(rig.stream));
  std::vector<Teller> tellers;
  std::vector<SequenceId> ids;
  for (std::uint32_t row = 0; row < rows; ++row) {
    tellers.push_back({.story = &stories[row], .id = engine.begin(parse_policy(policies[row % policies.size()]))});
    import_story(engine, rig, tellers.back(), stories[row].tokens() - steps);
    ids.push_back(tellers.back().id);
  }
  std::vector<float> all;
  for (std::uint32_t step = 0; step < steps; ++step) {
    for (std::uint32_t row = 0; row < rows; ++row) {
      tensors.set(row, stories[row], tellers[row].at);
      brought.set(row, step % 3 == 2 ? Kind::ties : Kind::any, tellers[row].at++);
    }
    const Batch batch = engine.plan(one_each(ids), engine.options().largest, rig.stream);
    run_planned(engine, rig, tensors, graph.get(), batch, rows, all);
  }
  return all;
}

}  // namespace

TEST_CASE("a captured forward with scores is the forward, bit by bit, and each row what it is alone",
          "[engine][gpu][scores]") {
  constexpr std::uint32_t kSteps = 12;
  const std::uint32_t rows = GENERATE(1u, 6u);
  const std::uint32_t near = GENERATE(0u, 9u);
  const std::uint32_t head_dim = GENERATE(64u, 128u, 192u);
  const bool share = GENERATE(false, true);
  CAPTURE(rows, near, head_dim, share);
  const AttentionShape shape{.layers = 3, .q_heads = 8, .kv_heads = 2, .head_dim = head_dim};
  const EngineRig rig = engine_rig();
  std::vector<std::string> policies(kPolicies.begin(), kPolicies.end());
  if (share) policies.emplace_back(kShare);
  std::vector<Story> stories;
  for (std::uint32_t i = 0; i < rows; ++i) stories.emplace_back(shape, 300 + 130 * i % 900, 170 + i);
  const auto want = decoded(rig, shape, stories, policies, near, kSteps, false);
  REQUIRE(decoded(rig, shape, stories, policies, near, kSteps, true) == want);
  if (rows == 1) return;
  const std::size_t values = want.size() / (rows * kSteps);
  for (std::uint32_t row = 0; row < rows; ++row) {
    CAPTURE(row);
    const auto alone = decoded(rig, shape, {stories[row]}, {policies[row % policies.size()]}, 0, kSteps, false);
    REQUIRE(alone.size() == values * kSteps);
    float off = 0.f;
    for (std::size_t i = 0; i < alone.size(); ++i)
      off = std::max(off, std::abs(alone[i] - want[(i / values * rows + row) * values + i % values]));
    REQUIRE(off < rig.tolerance);
  }
}

TEST_CASE("scores are read from memory of the GPU, with rows and heads any distance apart", "[engine][gpu][scores]") {
  const EngineRig rig = engine_rig();
  const AttentionShape shape = shape_of(4);
  const Story story = story_of(rig, shape, 330, 1301);
  Engine engine(scores::options_for(rig, shape, 1, 4), rig.device);
  const Policy policy{.picks = 20};
  Teller teller = begun(engine, rig, story, policy.text(), 320);
  const std::uint32_t tokens = engine.options().largest.max_tokens;
  const std::uint64_t apart = std::uint64_t{tokens} + 3;  // Rows of floats that no vector load fits.
  const auto memory = rig.device->allocate(shape.layers * shape.kv_heads * apart * sizeof(float));
  ForwardTensors tensors(*rig.device, shape, 1);
  const std::size_t row = std::size_t{shape.q_heads} * shape.head_dim;
  while (teller.at < story.tokens()) {
    std::vector<float> numbers(shape.layers * shape.kv_heads * apart, 1e30f);
    std::vector<TensorView> views;
    for (std::uint32_t layer = 0; layer < shape.layers; ++layer) {
      for (std::uint32_t kv = 0; kv < shape.kv_heads; ++kv) {
        for (std::uint32_t token = 0; token <= teller.at; ++token)
          numbers[(layer * shape.kv_heads + kv) * apart + token] = score_of(Kind::any, layer, kv, teller.at, token);
      }
      views.push_back({.data = memory->data() + layer * shape.kv_heads * apart * sizeof(float),
                       .dtype = DType::f32,
                       .tokens = 1,
                       .heads = shape.kv_heads,
                       .head_dim = tokens,
                       .token_stride = shape.kv_heads * apart,
                       .head_stride = apart});
    }
    REQUIRE(cudaMemcpy(memory->data(), numbers.data(), numbers.size() * sizeof(float), cudaMemcpyHostToDevice) ==
            cudaSuccess);
    tensors.bring(views);
    tensors.set(0, story, teller.at);
    (void)run_batch(engine, rig, tensors, one_each(std::array{teller.id}), engine.options().largest);
    const std::vector<float> out = tensors.out(0);
    CAPTURE(teller.at);
    for (std::uint32_t layer = 0; layer < shape.layers; ++layer) {
      const auto want = attended(story, shape, layer, {.first = teller.at}, policy, Kind::any, false);
      REQUIRE(difference(std::span(out).subspan(layer * row, row), want) < scores::tolerance(rig));
    }
    ++teller.at;
  }
}
