// The cases of every engine, on a host device with memory of its own whose stream is a queue; and what only such a
// device can show.
#include "cpu/host_device.hpp"
#include "tests/runtime/toy.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/engine_rig.hpp"

namespace sluice::test {

EngineRig engine_rig() {
  EngineRig rig{.device = separate_device(), .queue = nullptr};
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
  EngineOptions options{
      .shape = kShape, .kv_dtype = DType::f32, .largest = {.decode_rows = 2}, .threads = 3, .pin_threads = false};
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
        .misbehave({.seed = seed, .max_delay = std::chrono::microseconds(200), .reorder_copies = true});
    Engine engine(small_options(4), rig.device);
    REQUIRE(tell(engine, rig, story) == want);
  }
}
