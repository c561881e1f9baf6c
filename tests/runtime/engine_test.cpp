// The cases of every engine, on a host device with memory of its own whose stream is a queue; and what only such a
// device can show.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <new>
#include <span>

#include "cpu/device/host_device.hpp"
#include "tests/runtime/own_device.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/engine_rig.hpp"
#include "tools/stages/host_stages.hpp"

namespace sluice::test {

namespace {

struct HostThreads {
  cpu::Topology topology;
  cpu::Workers workers{topology, {.threads = 2, .pin = false}};
  tools::HostStages stages{{.workers = workers}};
};

}  // namespace

EngineRig engine_rig() {
  static HostThreads host;
  EngineRig rig{
      .device = own_device(handover_or(Handover::device)), .queue = nullptr, .kv_dtype = kv_dtype_or(DType::f32)};
  rig.stages = {std::shared_ptr<void>(), &host.stages};
  rig.queue = rig.device->create_stream("caller");
  rig.stream = rig.queue.get();
  return rig;
}

}  // namespace sluice::test

using namespace sluice;
using namespace sluice::test;

namespace {
constexpr AttentionShape kShape{.layers = 2, .q_heads = 4, .kv_heads = 2, .head_dim = 32};

EngineOptions small_options(std::uint32_t near_blocks) {
  EngineOptions options{.shape = kShape,
                        .kv_dtype = DType::f32,
                        .policies = {parse_policy("exact | int4 | top_k=9 | near=0,sinks=2,recent=5")},
                        .largest = {.decode_rows = 2},
                        .threads = 3,
                        .pin_threads = false};
  const std::uint64_t block = PageLayout{.head_dim = 32, .dtype = DType::f32}.page_bytes() * 4;
  options.host_bytes = 30 * block;
  options.near_bytes = near_blocks * block;
  options.import_rows = 64;
  return options;
}

std::vector<float> tell(Engine& engine, const EngineRig& rig, const Story& story) {
  Teller teller{.story = &story, .id = engine.begin(parse_policy("exact | int4 | top_k=9 | near=0,sinks=2,recent=5"))};
  import_story(engine, rig, teller, 130);
  ForwardTensors tensors(*rig.device, kShape, 2);
  std::vector<float> all;
  while (teller.at < story.tokens()) {
    const auto out = run_forward(engine, rig, tensors, {&teller});
    all.insert(all.end(), out[0].begin(), out[0].end());
  }
  return all;
}

/// Of all layers, against attention to every token in float64.
double plain_difference(const std::vector<float>& out, const Story& story, std::uint32_t token) {
  double worst = 0.0;
  for (std::uint32_t layer = 0; layer < kShape.layers; ++layer) {
    const std::vector<double> want = story.attended(layer, token, story.tokens(), 1, 0);
    worst = std::max(worst, difference(std::span(out).subspan(layer * want.size(), want.size()), want));
  }
  return worst;
}
}  // namespace

TEST_CASE("an engine gives the same bits at once, queued, and however late its device is", "[engine]") {
  const Story story(kShape, 150, 4);
  EngineRig at_once{.device = std::make_shared<cpu::HostDevice>(std::make_shared<cpu::Workers>(
                        cpu::Topology(), cpu::WorkersOptions{.threads = 1, .pin = false})),
                    .queue = nullptr};
  at_once.queue = at_once.device->create_stream("unused");
  Engine first(small_options(4), at_once.device);
  const std::vector<float> want = tell(first, at_once, story);
  for (std::uint64_t seed = 0; seed < 20; ++seed) {
    CAPTURE(seed);
    EngineRig rig = engine_rig();
    static_cast<cpu::HostDevice&>(*rig.device)
        .inject({.seed = seed, .max_delay = std::chrono::microseconds(200), .reorder_copies = true});
    Engine engine(small_options(4), rig.device);
    REQUIRE(tell(engine, rig, story) == want);
  }
}

TEST_CASE("a forward during which the device runs short of memory fails, and can be run again", "[engine]") {
  std::atomic<int> left{-1};
  const auto fail_one = [&](std::uint32_t) {
    if (left >= 0 && left.fetch_sub(1) == 0) throw std::bad_alloc();
  };
  auto workers = std::make_shared<cpu::Workers>(
      cpu::Topology(), cpu::WorkersOptions{.threads = 2, .pin = false, .before_body = fail_one});
  EngineRig rig{.device = std::make_shared<cpu::HostDevice>(workers), .queue = nullptr};
  rig.queue = rig.device->create_stream("caller");
  rig.stream = rig.queue.get();
  EngineOptions options = small_options(0);
  options.largest = {.decode_rows = 1, .prefill_rows = 64, .prefills = 1};
  Engine engine(options, rig.device);
  const Story story(kShape, 192, 4);
  const SequenceId id = engine.begin(parse_policy("exact | int4 | top_k=9 | near=0,sinks=2,recent=5"));
  const PlanItem item{.sequence = id, .tokens = 64, .prefill = true};
  const auto drain = [&] {
    const auto event = rig.device->create_event();
    rig.queue->record(*event);  // Takes the failure.
    rig.synchronize();
    return event->state();
  };
  ForwardTensors tensors(*rig.device, kShape, engine.options().largest.rows());
  for (std::uint32_t at = 0; at < story.tokens(); at += item.tokens) {
    for (const int which : {0, 1, -1}) {
      CAPTURE(at, which);
      for (std::uint32_t i = 0; i < item.tokens; ++i) tensors.set(i, story, at + i);
      tensors.spoil();
      left = which;
      const Batch batch = engine.plan({&item, 1}, engine.options().largest, rig.stream);
      tensors.attend(engine, rig.stream);
      if (which < 0) engine.finish(batch);
      if (which >= 0) REQUIRE(code_of([&] { engine.finish(batch); }) == Errc::device);
      REQUIRE(drain() == (which < 0 ? Event::State::done : Event::State::failed));
      REQUIRE(std::isnan(tensors.out(0).back()) == (which >= 0));
      REQUIRE(engine.tokens(id) == (which < 0 ? at + item.tokens : at));
    }
    REQUIRE(plain_difference(tensors.out(63), story, at + 63) < 1e-3);
  }
}
