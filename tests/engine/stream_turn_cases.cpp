// Lists that the CPU chooses and the device fetches, on every device: those that are chosen for do not wait for others.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <limits>
#include <memory>
#include <thread>

#include "sluice/step/forward.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/engine_rig.hpp"
#include "tests/support/forwarding.hpp"
#include "tests/support/pause.hpp"
#include "tests/support/sanitized.hpp"

using namespace sluice;
using namespace sluice::test;
using namespace std::chrono_literals;

namespace {

constexpr AttentionShape kShape{.layers = 1, .q_heads = 16, .kv_heads = 8, .head_dim = 64};
constexpr std::uint32_t kPrompt = 400;

/// Shows where an engine's device writes what it has fetched.
class ShownDevice final : public ForwardingDevice {
 public:
  explicit ShownDevice(std::shared_ptr<Device> inner)
      : ForwardingDevice(std::move(inner)), verbs_(*inner_->forward_verbs()) {}
  [[nodiscard]] ForwardVerbs* forward_verbs() noexcept override { return &verbs_; }
  /// Once there was a forward.
  [[nodiscard]] float* fetched_lse() const noexcept { return verbs_.fetched_lse; }

 private:
  struct Verbs final : ForwardingVerbs {
    using ForwardingVerbs::ForwardingVerbs;
    void fetch(const ForwardMemory& memory, const ForwardLayer& layer) override {
      fetched_lse = memory.fetched_lse;
      inner_.fetch(memory, layer);
    }
    float* fetched_lse = nullptr;
  };
  Verbs verbs_;
};

/// Lets so many pieces of answers begin, and holds up the next until it is told to let go.
struct Gate {
  std::atomic<int> left{1'000'000};
  std::atomic<bool> held{false}, open{false};
  void pass() {
    if (left.fetch_sub(1) > 0) return;
    held = true;
    while (!open) std::this_thread::sleep_for(1ms);
  }
};

EngineOptions options_for(const EngineRig& rig) {
  EngineOptions options{.shape = kShape,
                        .kv_dtype = rig.kv_dtype,
                        .placement = PlacementMode::stream,
                        .policies = {parse_policy("lfps"), parse_policy("lsh | sampled | near=0,sinks=2,recent=4")},
                        .largest = {.unbounded = true},
                        .cpu_sequences = 1,
                        .threads = 1,
                        .pin_threads = false};
  options.host_bytes = 60 * block_bytes(options);
  options.import_rows = kPrompt;
  options.answer_timeout = 60s;
  options.handover = Handover::device;  // Else an answer is awaited as a whole.
  return options;
}

/// What the device has where it writes lse of a list's first head.
class Sight {
 public:
  Sight(Device& device, float* at) : at_(at), stream_(device.create_stream("sight")) {
    host_ = device.allocate_pinned(sizeof(float));
  }
  void put(float value) { copy(at_, &(word() = value)); }
  [[nodiscard]] float get() {
    copy(&word(), at_);
    return word();
  }

 private:
  [[nodiscard]] float& word() const noexcept { return *reinterpret_cast<float*>(host_->data()); }
  void copy(float* to, const float* from) {
    const Copy one{.to = reinterpret_cast<std::byte*>(to),
                   .from = reinterpret_cast<const std::byte*>(from),
                   .bytes = sizeof(float)};
    stream_->copy({&one, 1});
    stream_->synchronize(deadline_after(10s));
  }
  float* at_;
  std::unique_ptr<Buffer> host_;
  std::unique_ptr<Stream> stream_;
};

}  // namespace

TEST_CASE("the device fetches a list that is chosen for while the CPU chooses for others", "[engine][turns]") {
  const EngineRig rig = engine_rig();
  const auto device = std::make_shared<ShownDevice>(rig.device);
  const auto gate = std::make_shared<Gate>();
  const Story story(kShape, kPrompt + 4, 91);
  const PolicySpec policy = parse_policy("lfps");
  EngineOptions options = options_for(rig);
  Engine plain(options, rig.device);
  options.before_answer = [gate] { gate->pass(); };
  Engine engine(options, device);
  Teller want{.story = &story, .id = plain.begin(policy)};
  Teller teller{.story = &story, .id = engine.begin(policy)};
  import_story(plain, rig, want, kPrompt, kNone, kPrompt - 40);
  import_story(engine, rig, teller, kPrompt, kNone, kPrompt - 40);
  ForwardTensors tensors(*rig.device, kShape, 1), others(*rig.device, kShape, 1);
  (void)run_forward(plain, rig, others, {&want});
  (void)run_forward(engine, rig, tensors, {&teller});  // Its policy has looked at the prompt.
  constexpr float kUntouched = 12'345.f;
  Sight sight(*rig.device, device->fetched_lse());
  sight.put(kUntouched);
  // Four of eight lists are chosen for, and attended near and far as far as that goes.
  gate->left = 4;
  const PlanItem item{.sequence = teller.id};
  tensors.set(0, story, teller.at++);
  const Batch batch = engine.plan({&item, 1}, engine.options().largest, rig.stream);
  tensors.attend(engine, rig.stream);
  const Deadline end = deadline_after(20s);
  while (!gate->held && RunClock::now() < end) std::this_thread::sleep_for(1ms);
  bool fetched = !gate->held;
  // What a host device does meanwhile is not ordered with a look at it.
  if (rig.on_gpu || !kSanitized) {
    const Deadline patience = deadline_after(10s);
    while (!fetched && RunClock::now() < patience) {
      fetched = sight.get() != kUntouched;
      std::this_thread::sleep_for(1ms);
    }
  } else {
    fetched = true;
  }
  const bool held = gate->held;
  gate->open = true;
  engine.finish(batch);
  rig.synchronize();
  REQUIRE(held);
  REQUIRE(fetched);
  REQUIRE(difference(tensors.out(0), run_forward(plain, rig, others, {&want})[0]) < rig.tolerance);
  REQUIRE(engine.stats().fetched_tokens > 0);
  REQUIRE(engine.stats().waited_ns > 0);
}

TEST_CASE("a layer that waits for choices and for an answer waits no longer for being asked twice", "[engine][turns]") {
  const EngineRig rig = engine_rig();
  const auto pieces = std::make_shared<std::atomic<int>>(1'000);
  const Story story(kShape, kPrompt + 4, 92);
  EngineOptions options = options_for(rig);
  options.answer_timeout = 1s;
  // The first list is chosen late, and attended late, by the CPU, as its rows come with scores. Either is in time.
  options.before_answer = [pieces] {
    const int piece = (*pieces)++;
    if (piece == 0 || piece == static_cast<int>(kShape.kv_heads)) pause_for(900ms);
  };
  Engine engine(options, rig.device);
  Teller teller{.story = &story, .id = engine.begin(parse_policy("lsh | sampled | near=0,sinks=2,recent=4"))};
  import_story(engine, rig, teller, kPrompt, kNone, kPrompt - 40);
  ForwardTensors tensors(*rig.device, kShape, 1);
  (void)run_forward(engine, rig, tensors, {&teller});
  REQUIRE(*pieces > 1'000 + static_cast<int>(kShape.kv_heads));  // It asks, and is attended on the CPU.
  *pieces = 0;
  const PlanItem item{.sequence = teller.id};
  tensors.set(0, story, teller.at);
  const Batch batch = engine.plan({&item, 1}, engine.options().largest, rig.stream);
  tensors.attend(engine, rig.stream);
  REQUIRE(code_of([&] { engine.finish(batch); }) == Errc::device);
  rig.synchronize();
  *pieces = 1'000;
  (void)run_forward(engine, rig, tensors, {&teller});
}
