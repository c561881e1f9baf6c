// Ends of layers that find the CPU's answer there, in units of their question, and such as have to wait for it.
#include <cuda_runtime_api.h>

#include <atomic>
#include <memory>
#include <mutex>
#include <thread>

#include "cpu/device/fault_injector.hpp"
#include "runtime/far/far_units.hpp"
#include "tests/gpu/forward_graph.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/engine_drafts.hpp"
#include "tests/support/forwarding.hpp"

using namespace sluice;
using namespace sluice::test;
using namespace std::chrono_literals;

namespace {

constexpr const char* kPolicy = "exact | int4 | top_k=10 | near=0,sinks=2,recent=6";
constexpr std::uint32_t kTeams = 2;
constexpr std::uint32_t kSteps = 12;

std::uint64_t look(const std::uint64_t& word) {
  return std::atomic_ref(const_cast<std::uint64_t&>(word)).load(std::memory_order_acquire);
}

/// A GPU on which every other layer ends only when the CPU has answered.
class HeldDevice final : public ForwardingDevice {
 public:
  explicit HeldDevice(std::shared_ptr<Device> inner)
      : ForwardingDevice(std::move(inner)), verbs_(*inner_->forward_verbs()) {}
  [[nodiscard]] ForwardVerbs* forward_verbs() noexcept override { return &verbs_; }
  [[nodiscard]] std::uint64_t held_lists() const noexcept { return verbs_.held_lists; }
  [[nodiscard]] std::uint64_t lists() const noexcept { return verbs_.lists; }
  /// Lists so far whose far part and answer were there at once. While nothing runs.
  [[nodiscard]] std::uint64_t at_once() const {
    std::uint64_t lists = 0;
    REQUIRE(cudaMemcpy(&lists, &verbs_.state->at_once, sizeof(lists), cudaMemcpyDefault) == cudaSuccess);
    return lists;
  }

 private:
  struct Verbs final : ForwardingVerbs {
    using ForwardingVerbs::ForwardingVerbs;
    void merge(const ForwardMemory& memory, const ForwardLayer& layer) override {
      state = memory.state;
      lists += memory.bucket.decode_rows * memory.shape.kv_heads;
      if (++layers % 2 == 0) {
        held_lists += memory.bucket.decode_rows * memory.shape.kv_heads;
        REQUIRE(cudaStreamSynchronize(static_cast<cudaStream_t>(layer.stream)) == cudaSuccess);
        const Deadline deadline = deadline_after(30s);
        while (look(memory.mailbox->answer.answered) < look(memory.mailbox->question.asked)) {
          REQUIRE(RunClock::now() < deadline);
          std::this_thread::yield();
        }
      }
      inner_.merge(memory, layer);
    }
    const ForwardState* state = nullptr;
    std::uint64_t layers = 0, lists = 0, held_lists = 0;
  };
  Verbs verbs_;
};

/// Sleeps before each part of an answer, for a time that is chosen at random.
class Delays {
 public:
  explicit Delays(std::chrono::microseconds most) : injector_({.seed = 5, .max_delay = most}) {}
  void pass() {
    std::chrono::microseconds delay{};
    {
      const std::lock_guard lock(mutex_);
      delay = sequence_.next(cpu::FaultSite::other).delay;
    }
    std::this_thread::sleep_for(delay);
  }

 private:
  std::mutex mutex_;
  cpu::FaultInjector injector_;
  cpu::FaultSequence sequence_{injector_, 1};
};

EngineOptions options_by(const EngineRig& rig, Handover handover, std::uint32_t drafts, std::uint32_t near,
                         Delays* delays) {
  EngineOptions options = drafts::draft_options(rig, drafts::shape_of(4), drafts, kTeams, near);
  options.handover = handover;
  make_room_for(parse_policy(kPolicy), 200, options);
  if (delays != nullptr) options.before_answer = [delays] { delays->pass(); };
  return options;
}

/// Outputs and lse of all rows of some forwards of two sequences.
std::vector<float> tell(const EngineRig& rig, const std::shared_ptr<Device>& device, const EngineOptions& options) {
  const std::uint32_t drafts = options.largest.drafts;
  Engine engine(options, device);
  const Story stories[] = {{options.shape, 90 + kSteps * drafts, 5}, {options.shape, 80 + kSteps * drafts, 6}};
  Teller tellers[kTeams];
  for (std::uint32_t i = 0; i < kTeams; ++i) {
    tellers[i] = {.story = &stories[i], .id = engine.begin(parse_policy(kPolicy))};
    import_story(engine, rig, tellers[i], stories[i].tokens() - kSteps * drafts, kNone, 60);
  }
  std::vector<float> all;
  for (std::uint32_t step = 0; step < kSteps; ++step) {
    const std::uint32_t count = step % 3 == 1 ? (drafts + 1) / 2 : drafts;
    for (const auto& rows : drafts::run(engine, rig, options.largest, {{&tellers[0], count}, {&tellers[1], drafts}})) {
      for (const drafts::Row& row : rows) {
        all.insert(all.end(), row.out.begin(), row.out.end());
        all.insert(all.end(), row.lse.begin(), row.lse.end());
      }
    }
  }
  return all;
}

}  // namespace

TEST_CASE("whether an answer is there at once or has to be waited for, outputs are the same, bit by bit",
          "[engine][gpu][handover]") {
  const EngineRig rig = engine_rig();
  const std::uint32_t drafts = GENERATE(1u, 4u);
  const std::uint32_t near = GENERATE(0u, 6u);
  CAPTURE(drafts, near);
  const auto want = tell(rig, rig.device, options_by(rig, Handover::host, drafts, near, nullptr));
  if (rig.device->info().stream_waits)
    REQUIRE(tell(rig, rig.device, options_by(rig, Handover::stream, drafts, near, nullptr)) == want);
  Delays delays(600us);
  const auto device = std::make_shared<HeldDevice>(rig.device);
  REQUIRE(tell(rig, device, options_by(rig, Handover::device, drafts, near, &delays)) == want);
  const std::uint64_t at_once = device->at_once();
  CAPTURE(at_once, device->held_lists(), device->lists());
  if (!runtime::stores_units()) {
    REQUIRE(at_once == 0);
  } else if (near == 0) {  // Every list has far rows.
    REQUIRE(at_once >= device->held_lists());
    REQUIRE(at_once < device->lists());
  } else {
    REQUIRE(at_once > 0);
  }
}

TEST_CASE("a captured forward whose answers come at any time is the forward, bit by bit", "[engine][gpu][handover]") {
  const EngineRig rig = engine_rig();
  const auto tell_by = [&](Handover handover, Delays* delays) {
    const EngineOptions options = options_by(rig, handover, 1, 6, delays);
    Engine engine(options, rig.device);
    ForwardTensors tensors(*rig.device, options.shape, options.largest.rows());
    std::unique_ptr<ForwardGraph> graph;
    if (handover == Handover::device)
      graph = std::make_unique<ForwardGraph>(engine, tensors, static_cast<cudaStream_t>(rig.stream));
    const Story story(options.shape, 140, 5);
    Teller teller{.story = &story, .id = engine.begin(parse_policy(kPolicy))};
    import_story(engine, rig, teller, 100, kNone, 60);
    std::vector<float> all;
    while (teller.at < story.tokens()) {
      tensors.set(0, story, teller.at++);
      const PlanItem item{.sequence = teller.id, .tokens = 1};
      const Batch batch = engine.plan({&item, 1}, options.largest, rig.stream);
      graph ? graph->replay() : tensors.attend(engine, rig.stream);
      engine.finish(batch);
      rig.synchronize();
      const auto out = tensors.out(0);
      all.insert(all.end(), out.begin(), out.end());
    }
    return all;
  };
  const auto want = tell_by(Handover::host, nullptr);
  for (const auto most : {0us, 20us, 60us, 300us}) {
    CAPTURE(most.count());
    Delays delays(most);
    REQUIRE(tell_by(Handover::device, &delays) == want);
  }
}
