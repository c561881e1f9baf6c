// Forwards in graphs that wait for the CPU by their stream, and engines whose calling thread waits.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <memory>
#include <thread>

#include "sluice/error.hpp"
#include "tests/gpu/forward_graph.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/engine_plain.hpp"

using namespace sluice;
using namespace sluice::test;
using namespace sluice::test::plain;
using namespace std::chrono_literals;

namespace {

constexpr const char* kPolicy = "exact | int4 | top_k=10 | near=0,sinks=2,recent=6";

EngineOptions options_by(const EngineRig& rig, Handover handover, const PolicySpec& spec, PlacementMode placement) {
  EngineOptions options = options_for(rig, 1, 40, 6);
  options.handover = handover;
  options.placement = placement;
  options.policies = {spec};
  return options;
}

/// Twenty tokens; in a graph, with a replay now and then that was not planned.
std::vector<float> tell(const EngineRig& rig, Handover handover, bool graphs, const std::string& policy,
                        PlacementMode placement) {
  const PolicySpec spec = parse_policy(policy);
  Engine engine(options_by(rig, handover, spec, placement), rig.device);
  ForwardTensors tensors(*rig.device, kShape, 1);
  std::unique_ptr<ForwardGraph> graph;
  if (graphs) graph = std::make_unique<ForwardGraph>(engine, tensors, static_cast<cudaStream_t>(rig.stream));
  const Story story(kShape, 130, 5);
  Teller teller{.story = &story, .id = engine.begin(spec)};
  import_story(engine, rig, teller, 110, kNone, 70);
  std::vector<float> all;
  while (teller.at < story.tokens()) {
    tensors.set(0, story, teller.at++);
    const Batch batch = engine.plan(one_each({&teller.id, 1}), engine.options().largest, rig.stream);
    graph ? graph->replay() : tensors.attend(engine, rig.stream);
    engine.finish(batch);
    rig.synchronize();
    const auto out = tensors.out(0);
    all.insert(all.end(), out.begin(), out.end());
    if (!graph || teller.at % 5 != 2) continue;
    graph->replay();  // Without a plan.
    rig.synchronize();
    REQUIRE(std::isnan(tensors.out(0).front()));
  }
  REQUIRE(std::ranges::none_of(all, [](float x) { return std::isnan(x); }));
  return all;
}

}  // namespace

TEST_CASE("the GPU says who waits for the CPU, and why", "[handover][gpu]") {
  const EngineRig rig = engine_rig();
  const DeviceInfo& info = rig.device->info();
  CAPTURE(to_string(info.handover), info.handover_reason, info.stream_waits, info.captures_waits);
  REQUIRE(info.handover != Handover::automatic);
  REQUIRE(info.handover_reason.empty() == (info.handover == Handover::device));
  REQUIRE((info.stream_waits || !info.captures_waits));
  REQUIRE(info.captures_forwards(Handover::device));
  REQUIRE_FALSE(info.captures_forwards(Handover::host));
  // What the probing graph has left behind, if anything, is no error.
  REQUIRE(cudaGetLastError() == cudaSuccess);
}

TEST_CASE("a captured forward whose stream waits for the CPU is the forward of a kernel that does, bit by bit",
          "[engine][gpu][handover]") {
  const EngineRig rig = engine_rig();
  const auto [policy, placement] = GENERATE(
      table<std::string, PlacementMode>({{kPolicy, PlacementMode::hybrid},
                                         {"exact | top_k=10 | near=0,sinks=2,recent=6", PlacementMode::hybrid},
                                         {"exact | top_k=10 | near=0,sinks=2,recent=6", PlacementMode::stream}}));
  CAPTURE(policy, to_string(placement));
  const auto want = tell(rig, Handover::device, true, policy, placement);
  REQUIRE(tell(rig, Handover::host, false, policy, placement) == want);
  if (!rig.device->info().stream_waits) return;
  REQUIRE(tell(rig, Handover::stream, false, policy, placement) == want);
  if (!rig.device->info().captures_waits) return;
  REQUIRE(tell(rig, Handover::stream, true, policy, placement) == want);
}

TEST_CASE("a captured forward whose stream waits for a late answer goes on without it", "[engine][gpu][handover]") {
  const EngineRig rig = engine_rig();
  if (!rig.device->info().captures_waits) return;
  EngineOptions options = options_by(rig, Handover::stream, parse_policy(kPolicy), PlacementMode::hybrid);
  options.near_bytes = 0;
  constexpr auto kStall = 1500ms;
  std::atomic<bool> stalls{false};
  options.answer_timeout = 200ms;
  options.before_answer = [&] {
    if (stalls.exchange(false)) std::this_thread::sleep_for(kStall);
  };
  Engine engine(options, rig.device);
  REQUIRE(engine.captures());
  ForwardTensors tensors(*rig.device, kShape, 1);
  const ForwardGraph graph(engine, tensors, static_cast<cudaStream_t>(rig.stream));
  const Story story(kShape, 120, 8);
  Teller teller{.story = &story, .id = engine.begin(parse_policy(kPolicy))};
  import_story(engine, rig, teller, 100);
  for (std::uint32_t step = 0; step < 9; ++step) {
    tensors.set(0, story, teller.at);
    const bool late = step % 3 == 1;
    stalls = late;
    const auto begin = Clock::now();
    const Batch batch = engine.plan(one_each({&teller.id, 1}), engine.options().largest, rig.stream);
    graph.replay();
    if (late) {
      rig.synchronize();
      REQUIRE(Clock::now() - begin >= options.answer_timeout);
      REQUIRE(Clock::now() - begin < kStall);
      REQUIRE(std::isnan(tensors.out(0).back()));
      REQUIRE(code_of([&] { engine.finish(batch); }) == Errc::device);
      continue;
    }
    engine.finish(batch);
    rig.synchronize();
    REQUIRE(error_of(tensors.out(0), story, teller.at++, 2, 6, 10) < kTolerance);
  }
}

TEST_CASE("an engine whose calling thread waits is not captured, and goes on", "[engine][gpu][handover]") {
  const EngineRig rig = engine_rig();
  Engine engine(options_by(rig, Handover::host, parse_policy(kPolicy), PlacementMode::hybrid), rig.device);
  REQUIRE_FALSE(engine.captures());
  ForwardTensors tensors(*rig.device, kShape, 1);
  const auto stream = static_cast<cudaStream_t>(rig.stream);
  Errc code{};
  const ForwardGraph graph(stream, cudaStreamCaptureModeRelaxed,
                           [&] { code = code_of([&] { tensors.attend(engine, stream); }); });
  REQUIRE(code == Errc::unsupported);
  REQUIRE(graph.nodes() == 0);
  const Story story(kShape, 112, 8);
  Teller teller{.story = &story, .id = engine.begin(parse_policy(kPolicy))};
  import_story(engine, rig, teller, 100);
  while (teller.at < story.tokens()) {
    const auto out = run_forward(engine, rig, tensors, {&teller});
    REQUIRE(error_of(out[0], story, teller.at - 1, 2, 6, 10) < kTolerance);
  }
}
