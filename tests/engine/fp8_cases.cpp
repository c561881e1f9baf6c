// Far rows of 8 bits with a scale each, on every device: as if keys and values had been rounded before they came.
#include <algorithm>
#include <array>
#include <cmath>
#include <span>

#include "tests/support/catch.hpp"
#include "tests/support/engine_park.hpp"
#include "tests/support/engine_policies.hpp"
#include "tests/support/sanitized.hpp"

using namespace sluice;
using namespace sluice::test;
using namespace sluice::test::policies;

namespace {

EngineOptions options_of(const EngineRig& rig, DType dtype, std::uint32_t near, PlacementMode placement) {
  EngineRig other{.device = nullptr, .queue = nullptr, .kv_dtype = dtype};
  EngineOptions options = options_for(other, 2, near);
  options.placement = placement;
  if (rig.on_gpu) options.answer_timeout = std::chrono::seconds(5);
  return options;
}

/// Outputs of a prompt's newest token, of decoded ones, of some behind a truncation, and of a fork beside.
std::vector<std::vector<float>> told(Engine& engine, const EngineRig& rig, const Story& story,
                                     const PolicySpec& policy) {
  constexpr std::uint32_t kPrompt = 210;
  std::vector<std::vector<float>> out;
  Teller teller{.story = &story, .id = engine.begin(policy)};
  prefill(engine, rig, teller, kPrompt);
  for (int step = 0; step < 9; ++step) out.push_back(decode(engine, rig, teller));
  Teller fork{.story = &story, .id = engine.fork(teller.id, kPrompt + 3), .at = kPrompt + 3};
  engine.truncate(teller.id, kPrompt + 5);
  teller.at = kPrompt + 5;
  for (int step = 0; step < 8; ++step) {
    for (auto& each : run(engine, rig, {&teller, &fork}, {1, 1}, false)) out.push_back(std::move(each));
  }
  const parks::Area area = parks::parked(engine, fork.id);
  engine.end(fork.id);
  fork.id = engine.resume(area);
  for (int step = 0; step < 4; ++step) out.push_back(decode(engine, rig, fork));
  return out;
}

}  // namespace

TEST_CASE("an engine of fp8 attends what one does whose keys and values were rounded before they came",
          "[engine][fp8]") {
  constexpr std::array kPolicies{"full | near=0",
                                 "exact | int4 | top_k=24 | near=0,sinks=4,recent=9",
                                 "topk",
                                 "lfps",
                                 "tactic:least=16,size=4",
                                 "psa",
                                 "psa | int4",
                                 "twilight",
                                 "quest",
                                 "arkvale",
                                 "magicpig"};
  const auto [near, placement, text] =
      GENERATE_COPY(grid(std::array{0u, 9u}, std::array{PlacementMode::hybrid, PlacementMode::stream}, kPolicies));
  CAPTURE(near, to_string(placement), text);
  const EngineRig rig = engine_rig();
  Story story(kShape, 240, 501);
  story.leave_grid(502);
  story.round_queries();
  const PolicySpec policy = parse_policy(text);
  const auto tell = [&](DType dtype, const Story& of) {
    EngineOptions options = options_of(rig, dtype, near, placement);
    options.largest = {.decode_rows = 2, .prefill_rows = kChunk, .prefills = 2, .unbounded = true};
    options.policies.push_back(policy);
    options.cpu_sequences = 4;
    Engine engine(options, rig.device);
    return told(engine, rig, of, policy);
  };
  const auto got = tell(DType::fp8_e4m3, story);
  story.round_rows(DType::fp8_e4m3);
  const auto want = tell(rig.on_gpu ? DType::bf16 : DType::f32, story);
  REQUIRE(got.size() == want.size());
  for (std::size_t i = 0; i < got.size(); ++i) {
    CAPTURE(i);
    REQUIRE(difference(got[i], want[i]) < (rig.on_gpu ? 2e-3 : 1e-4));
  }
}

TEST_CASE("a row that has no number in fp8 spoils what attends it, and nothing else", "[engine][fp8]") {
  const EngineRig rig = engine_rig();
  const std::uint32_t near = GENERATE(0u, 9u);
  Story story(kShape, 120, 503);
  story.poison(1, 40);
  Engine engine(options_of(rig, DType::fp8_e4m3, near, PlacementMode::hybrid), rig.device);
  Teller windowed{.story = &story, .id = engine.begin(parse_policy("none | near=0,sinks=4,recent=30"))};
  import_story(engine, rig, windowed, 100);
  Teller all{.story = &story, .id = engine.fork(windowed.id, 100, parse_policy("full | near=0")), .at = 100};
  const std::vector<std::vector<float>> out = run(engine, rig, {&windowed, &all}, {1, 1}, false);
  for (std::uint32_t layer = 0; layer < kShape.layers; ++layer) {
    CAPTURE(near, layer);
    const auto finite = [&](const std::vector<float>& row) {
      const std::span<const float> values = std::span(row).subspan(layer * kRow, kRow);
      return static_cast<std::size_t>(std::ranges::count_if(values, [](float value) { return std::isfinite(value); }));
    };
    REQUIRE(finite(out[0]) == kRow);
    REQUIRE(finite(out[1]) == (layer == 1 ? 0 : kRow));
  }
}

TEST_CASE("fp8 halves host memory, near memory stays as it is, and tensors have none of it", "[engine][fp8]") {
  const EngineRig rig = engine_rig();
  EngineOptions half = options_of(rig, DType::fp8_e4m3, 9, PlacementMode::hybrid);
  EngineOptions whole = options_of(rig, DType::bf16, 9, PlacementMode::hybrid);
  REQUIRE(half.host_bytes * 128 == whole.host_bytes * 68);  // 64 codes and a scale of 4 bytes, of 128 bytes.
  const EngineMemoryUse less = memory_needed(half, rig.device.get());
  const EngineMemoryUse more = memory_needed(whole, rig.device.get());
  REQUIRE(less.far_pages * 128 == more.far_pages * 68);
  REQUIRE(less.near_pages == more.near_pages);
  REQUIRE(less.codes == more.codes);
  REQUIRE(less.buffers == more.buffers);
  Engine engine(half, rig.device);
  const SequenceId id = engine.begin(parse_policy("full | near=0"));
  const auto rows = rig.device->allocate_pinned(std::uint64_t{kShape.kv_heads} * kShape.head_dim * sizeof(float));
  const TensorView kv = dense_view<const std::byte>(rows->data(), DType::fp8_e4m3, 1, kShape.kv_heads, kShape.head_dim);
  const auto [code, text] = refusal_of([&] { engine.import_prefix(id, LayerId{0}, kv, kv, rig.stream); });
  CAPTURE(text);
  REQUIRE(code == Errc::invalid_argument);
  REQUIRE(text.find("kv_dtype") != std::string::npos);
}
