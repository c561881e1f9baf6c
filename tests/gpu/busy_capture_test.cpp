// Forwards captured in CUDA graphs while others are under way, answered, learnt from, and bring rows near.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <memory>
#include <optional>
#include <string>
#include <thread>

#include "sluice/error.hpp"
#include "tests/gpu/forward_graph.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/engine_rig.hpp"

using namespace sluice;
using namespace sluice::test;

namespace {

/// Two sequences, of which one learns and of the other rows come near again and again, in an engine whose threads are
/// as slow as they are told to be.
class BusyDecoding {
 public:
  static constexpr std::uint32_t kWarm = 12, kAhead = 4, kBehind = 40;
  static constexpr std::uint32_t kTokens = 600;  ///< of the prompts

  explicit BusyDecoding(const EngineRig& rig) : rig_(rig), other_(rig.device->create_stream("captures")) {
    const std::string policies[] = {"lfps", "exact | int4 | top_k=40 | near=0,sinks=4,recent=24"};
    EngineOptions options{.shape = kShape, .kv_dtype = rig.kv_dtype, .policies = {}, .largest = {.decode_rows = 2}};
    options.host_bytes = 100 * block_bytes(options);
    options.near_bytes = 9 * near_block_bytes(options);
    options.in_flight = kAhead;
    options.threads = 3;
    options.answer_timeout = std::chrono::seconds(10);
    for (const std::string& policy : policies) options.policies.push_back(parse_policy(policy));
    options.before_answer = [pause = pause_us_] { std::this_thread::sleep_for(std::chrono::microseconds(*pause)); };
    engine_ = std::make_unique<Engine>(options, rig.device);
    for (std::uint32_t i = 0; i < 2; ++i) {
      stories_.emplace_back(kShape, kTokens + kWarm + kAhead + kBehind, 300 + i);
      tellers_.push_back({.story = nullptr, .id = engine_->begin(parse_policy(policies[i]))});
    }
    for (std::uint32_t i = 0; i < 2; ++i) {
      tellers_[i].story = &stories_[i];
      import_story(*engine_, rig_, tellers_[i], kTokens, kNone, kTokens - 40);
    }
    for (std::uint32_t i = 0; i < kAhead; ++i)
      tensors_.push_back(std::make_unique<ForwardTensors>(*rig.device, kShape, 2));
  }

  /// Outputs of all tokens. A forward is captured in this mode while earlier ones run, and replayed behind them; or all
  /// are enqueued.
  std::vector<float> decode(std::optional<cudaStreamCaptureMode> mode) {
    for (std::uint32_t i = 0; i < kWarm; ++i) finish(enqueue(*tensors_[0], nullptr), *tensors_[0]);
    REQUIRE(engine_->stats().asked == kWarm * kShape.layers);
    REQUIRE(engine_->memory(tellers_[0].id).policy > 0);
    ForwardTensors tensors(*rig_.device, kShape, 2);  // Pinned memory may have to wait until the device is idle.
    *pause_us_ = 3000;
    std::vector<Batch> batches;
    for (const auto& each : tensors_) batches.push_back(enqueue(*each, nullptr));
    std::unique_ptr<ForwardGraph> graph;
    if (mode) {
      REQUIRE(engine_->stats().asked <= (kWarm + 1) * kShape.layers);
      const auto stream = static_cast<cudaStream_t>(other_->native_handle());
      graph = std::make_unique<ForwardGraph>(stream, *mode, [&] {
        for (std::uint32_t layer = 0; layer < kShape.layers; ++layer) {
          if (layer == kShape.layers / 2) await_work();
          tensors.attend_layer(*engine_, engine_->options().largest, layer, stream);
        }
        REQUIRE(engine_->stats().asked < (kWarm + kAhead) * kShape.layers);  // They still run.
      });
    }
    for (std::uint32_t i = 0; i < kAhead; ++i) finish(batches[i], *tensors_[i]);
    *pause_us_ = 0;
    const std::uint64_t promoted = engine_->stats().promoted;
    for (std::uint32_t i = 0; i < kBehind; ++i) finish(enqueue(tensors, graph.get()), tensors);
    REQUIRE(engine_->stats().promoted > promoted);
    REQUIRE(engine_->stats().unplanned == 0);
    return outputs_;
  }

 private:
  static constexpr AttentionShape kShape{.layers = 4, .q_heads = 8, .kv_heads = 2, .head_dim = 64};

  Batch enqueue(ForwardTensors& tensors, const ForwardGraph* graph) {
    for (std::uint32_t row = 0; row < 2; ++row) tensors.set(row, stories_[row], tellers_[row].at++);
    const SequenceId ids[] = {tellers_[0].id, tellers_[1].id};
    const Batch batch = engine_->plan(one_each(ids), engine_->options().largest, rig_.stream);
    if (graph != nullptr) {
      graph->replay(static_cast<cudaStream_t>(rig_.stream));
    } else {
      tensors.attend(*engine_, rig_.stream);
    }
    return batch;
  }
  void finish(const Batch& batch, const ForwardTensors& tensors) {
    engine_->finish(batch);
    rig_.synchronize();
    for (std::uint32_t row = 0; row < 2; ++row) {
      const auto out = tensors.out(row);
      outputs_.insert(outputs_.end(), out.begin(), out.end());
    }
  }
  /// Until rows have come near, and more than a whole forward has been answered. The policy has learnt from the one
  /// before it: it does not choose before it has.
  void await_work() const {
    const EngineStats before = engine_->stats();
    const Deadline end = deadline_after(std::chrono::seconds(60));
    for (EngineStats now = before;
         now.asked < before.asked + 2 * kShape.layers || now.promoted == before.promoted || now.scored == before.scored;
         now = engine_->stats()) {
      if (RunClock::now() > end) throw Error(Errc::timeout, "no forward runs beside a capture");
      std::this_thread::sleep_for(std::chrono::microseconds(500));
    }
  }

  const EngineRig& rig_;
  std::unique_ptr<Stream> other_;
  std::shared_ptr<std::atomic<std::uint32_t>> pause_us_ = std::make_shared<std::atomic<std::uint32_t>>(0);
  std::unique_ptr<Engine> engine_;
  std::vector<Story> stories_;
  std::vector<Teller> tellers_;
  std::vector<std::unique_ptr<ForwardTensors>> tensors_;
  std::vector<float> outputs_;
};

}  // namespace

TEST_CASE("a forward is captured while others run, bring rows near and are learnt from", "[engine][gpu]") {
  const EngineRig rig = engine_rig();
  const std::vector<float> want = BusyDecoding(rig).decode({});
  REQUIRE(std::ranges::none_of(want, [](float x) { return std::isnan(x); }));
  for (const cudaStreamCaptureMode mode :
       {cudaStreamCaptureModeGlobal, cudaStreamCaptureModeThreadLocal, cudaStreamCaptureModeRelaxed}) {
    CAPTURE(static_cast<int>(mode));
    REQUIRE(BusyDecoding(rig).decode(mode) == want);
  }
}

TEST_CASE("a plan on a captured stream is refused, and leaves the capture as it is", "[engine][gpu]") {
  const EngineRig rig = engine_rig();
  const AttentionShape shape{.layers = 2, .q_heads = 4, .kv_heads = 2, .head_dim = 64};
  const Story story(shape, 70, 311);
  const PolicySpec policy = parse_policy("exact | int4 | top_k=9 | near=0,sinks=4,recent=16");
  EngineOptions options{.shape = shape, .kv_dtype = rig.kv_dtype, .policies = {policy}};
  options.host_bytes = 8 * block_bytes(options);
  options.near_bytes = 2 * near_block_bytes(options);
  Engine engine(options, rig.device);
  Teller teller{.story = &story, .id = engine.begin(policy)};
  import_story(engine, rig, teller, 60);
  ForwardTensors tensors(*rig.device, shape, 1);
  (void)run_forward(engine, rig, tensors, {&teller});
  const auto plan = [&](void* stream) {
    const Refusal refusal = refusal_of([&] {
      (void)engine.plan(one_each({&teller.id, 1}), engine.options().largest, stream);
    });
    REQUIRE(refusal.code == Errc::unsupported);
    REQUIRE(refusal.text.find("captured") != std::string::npos);
  };
  const ForwardGraph graph(static_cast<cudaStream_t>(rig.stream), cudaStreamCaptureModeRelaxed, [&] {
    plan(rig.stream);
    tensors.attend(engine, engine.options().largest, rig.stream);
  });
  for (int step = 0; step < 3; ++step) {
    tensors.set(0, story, teller.at);
    const Batch batch = engine.plan(one_each({&teller.id, 1}), engine.options().largest, rig.stream);
    graph.replay();
    engine.finish(batch);
    REQUIRE(engine.tokens(teller.id) == ++teller.at);
  }
}
