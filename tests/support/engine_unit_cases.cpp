// What the CPU attends as a device may read it without having been told that it is there, on every device.
#include <atomic>
#include <functional>

#include "runtime/far/far_units.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/engine_plain.hpp"
#include "tests/support/forwarding.hpp"

using namespace sluice;
using namespace sluice::test;
using namespace sluice::test::plain;

namespace {

constexpr const char* kPolicy = "exact | int4 | top_k=10 | near=0,sinks=2,recent=6";
/// The CPU chooses.
constexpr const char* kChosenHere = "exact | top_k=10 | near=0,sinks=2,recent=6";

/// Shows what a device works on, behind each layer.
class ShownDevice final : public ForwardingDevice {
 public:
  explicit ShownDevice(std::shared_ptr<Device> inner)
      : ForwardingDevice(std::move(inner)), verbs_(*inner_->forward_verbs()) {}
  [[nodiscard]] ForwardVerbs* forward_verbs() noexcept override { return &verbs_; }
  void show(std::function<void(const ForwardMemory&, std::uint32_t layer)> to) { verbs_.to = std::move(to); }

 private:
  struct Verbs final : ForwardingVerbs {
    using ForwardingVerbs::ForwardingVerbs;
    void merge(const ForwardMemory& memory, const ForwardLayer& layer) override {
      inner_.merge(memory, layer);
      if (to) to(memory, layer.layer);
    }
    std::function<void(const ForwardMemory&, std::uint32_t)> to;
  };
  Verbs verbs_;
};

template <class T>
T word(T& from) {
  return std::atomic_ref(from).load(std::memory_order_acquire);
}

/// Lists with far rows, and of these those that are published, of the question that was asked last: completely.
struct Counts {
  std::uint32_t far = 0;
  std::uint32_t published = 0;
};
void count(const ForwardMemory& m, Counts& counts) {
  const auto asked = static_cast<std::uint32_t>(word(m.mailbox->question.asked));
  const std::uint32_t outs = m.shape.group() * m.shape.head_dim;
  for (std::uint32_t list = 0; list < m.bucket.decode_rows * m.shape.kv_heads; ++list) {
    if (word(m.far_counts[list]) == 0) continue;
    ++counts.far;
    bool good = m.far_units != nullptr;
    for (std::uint32_t i = 0; good && i < outs + m.shape.group(); ++i) {
      const FarUnit& unit = m.far_units[std::uint64_t{list} * m.list_units() + i / FarUnit::kFloats];
      const float want = i < outs ? m.far_out[std::uint64_t{list} * outs + i]
                                  : m.far_lse[std::uint64_t{list} * m.shape.group() + i - outs];
      good = unit.tag == asked && unit.floats[i % FarUnit::kFloats] == want;
    }
    counts.published += good ? 1 : 0;
  }
}

}  // namespace

TEST_CASE("what the CPU attends of lists that the device chose is published with every question",
          "[engine][handover]") {
  const EngineRig rig = engine_rig();
  const auto [policy, handover, share] = GENERATE(table<std::string, Handover, float>(
      {{kPolicy, Handover::device, 0.f},
       {kPolicy, Handover::device, 0.4f},
       {kPolicy, Handover::stream, 0.f},  // No kernel waits.
       {"exact | int4 | top_p=0.8 | near=0,sinks=2,recent=6", Handover::device, 0.f},
       {kChosenHere, Handover::device, 0.f}}));
  CAPTURE(policy, to_string(handover), share);
  if (handover == Handover::stream && !rig.device->info().stream_waits) return;
  const PolicySpec spec = parse_policy(policy);
  EngineOptions options = options_for(rig, 2, 60, 0);
  options.handover = handover;
  options.fetch_share = share;
  make_room_for(spec, 120, options);
  if (options.cpu_sequences != 0) options.cpu_sequences = 2;
  const auto device = std::make_shared<ShownDevice>(rig.device);
  Engine engine(options, device);
  const Story stories[] = {{kShape, 120, 5}, {kShape, 110, 6}};
  Teller tellers[] = {{.story = &stories[0], .id = engine.begin(spec)},
                      {.story = &stories[1], .id = engine.begin(spec)}};
  for (Teller& teller : tellers) import_story(engine, rig, teller, 90, kNone, 60);
  ForwardTensors tensors(*rig.device, kShape, 2);
  constexpr std::uint32_t kSteps = 6;
  Counts counts;
  device->show([&](const ForwardMemory& memory, std::uint32_t) {
    rig.synchronize();
    count(memory, counts);
  });
  for (std::uint32_t step = 0; step < kSteps; ++step) run_forward(engine, rig, tensors, {&tellers[0], &tellers[1]});
  device->show({});
  REQUIRE(counts.far == kSteps * kShape.layers * 2 * kShape.kv_heads);
  const bool publishes = handover == Handover::device && policy != kChosenHere && runtime::stores_units();
  REQUIRE(counts.published == (publishes ? counts.far : 0));
}
