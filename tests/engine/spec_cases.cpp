// What a model says of its attention - scale, soft-cap, windows of layers - on every device, against float64.
#include <array>
#include <cmath>
#include <vector>

#include "sluice/error.hpp"
#include "sluice/page_rules.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/engine_park.hpp"
#include "tests/support/reference.hpp"
#include "tests/support/sanitized.hpp"

using namespace sluice;
using namespace sluice::test;
using namespace sluice::test::policies;

namespace {

/// Of a model, as an engine is told.
struct Spec {
  float scale = 0.f;
  float softcap = 0.f;
  std::vector<std::uint32_t> windows{};

  /// As the references are told.
  [[nodiscard]] AttentionShape shape() const {
    AttentionShape shape = kShape;
    shape.scale = scale;
    shape.softcap = softcap;
    return shape;
  }
};

/// Windows that are shorter than sequences, or not, or a page, or not quite; scales and caps that bite.
const Spec kSpecs[] = {{.scale = 0.05f},
                       {.softcap = 1.5f},
                       {.windows = {40, 0, 7}},
                       {.windows = {16, 100'000, 301}},
                       {.scale = 0.25f, .softcap = 4.f, .windows = {0, 130, 1}}};
constexpr std::array kSpecNumbers{0, 1, 2, 3, 4};
static_assert(kSpecNumbers.size() == std::size(kSpecs));

EngineOptions spec_options(const EngineRig& rig, const Spec& spec, std::uint32_t rows, std::uint32_t near) {
  EngineOptions options = paged_options(rig, rows, near, DigestKind::box);
  options.scale = spec.scale;
  options.softcap = spec.softcap;
  options.windows = spec.windows;
  return options;
}

Story story_of(const EngineRig& rig, const Spec& spec, std::uint32_t tokens, std::uint64_t seed) {
  Story story(spec.shape(), tokens, seed);
  story.see(spec.windows);
  if (rig.kv_dtype != DType::f32) story.round_queries();
  return story;
}

/// Of all layers of a token. `mass` not 0: of a policy that goes by it instead of picks.
double error_of(const std::vector<float>& got, const Story& story, std::uint32_t token, std::uint32_t sinks,
                std::uint32_t recent, std::uint32_t picks, double mass = 0.0) {
  double error = 0.0;
  for (std::uint32_t layer = 0; layer < kShape.layers; ++layer) {
    const std::vector<double> want = mass != 0.0 ? story.attended_by_mass(layer, token, sinks, recent, mass)
                                                 : story.attended(layer, token, sinks, recent, picks);
    error = std::max(error, off_in_layer(got, want, layer));
  }
  return error;
}

constexpr std::uint32_t kAll = 100'000;

}  // namespace

TEST_CASE("rows that decode attend by the model's scale, soft-cap and windows, near or far", "[engine][spec]") {
  struct Way {
    const char* text;
    std::uint32_t sinks, recent, picks;
    double mass;
  };
  constexpr auto kWays = std::to_array<Way>({{"full", kAll, 1, 0, 0.0},
                                             {"exact | int4 | top_k=24 | near=0,sinks=4,recent=16", 4, 16, 24, 0.0},
                                             {"exact | int4 | top_p=0.8 | near=0,sinks=4,recent=16", 4, 16, 0, 0.8},
                                             {"none | near=0,sinks=3,recent=20", 3, 20, 0, 0.0}});
  const auto [number, way, near] = GENERATE_COPY(grid(kSpecNumbers, kWays, std::array{0u, 7u, 60u}));
  CAPTURE(number, way.text, near);
  const EngineRig rig = engine_rig();
  const Spec& spec = kSpecs[number];
  const Story story = story_of(rig, spec, 312, 91);
  Engine engine(spec_options(rig, spec, 1, near), rig.device);
  Teller teller{.story = &story, .id = engine.begin(parse_policy(way.text))};
  import_story(engine, rig, teller, 5);
  const auto both = [&](std::uint32_t tokens) {
    while (teller.at < tokens) {
      const std::vector<float> out = decode(engine, rig, teller);
      CAPTURE(teller.at);
      REQUIRE(error_of(out, story, teller.at - 1, way.sinks, way.recent, way.picks, way.mass) < 1e-3);
    }
  };
  both(20);
  import_story(engine, rig, teller, 300);
  both(story.tokens());
}

TEST_CASE("layers with windows are attended over the link as by the CPU", "[engine][spec]") {
  const auto [text, near] =
      GENERATE(grid(std::array{"full", "exact | int4 | top_k=24 | near=0,sinks=4,recent=16", "lfps", "topk"},
                    std::array{0u, 7u}));
  CAPTURE(text, near);
  const EngineRig rig = engine_rig();
  const Spec& spec = kSpecs[4];
  const Story story = story_of(rig, spec, 290, 90);
  std::vector<std::vector<float>> outs[2];
  for (const PlacementMode placement : {PlacementMode::hybrid, PlacementMode::stream}) {
    EngineOptions options = spec_options(rig, spec, 1, near);
    options.placement = placement;
    Engine engine(options, rig.device);
    Teller teller{.story = &story, .id = engine.begin(parse_policy(text))};
    prefill(engine, rig, teller, 270);
    while (teller.at < story.tokens())
      outs[placement == PlacementMode::stream ? 1 : 0].push_back(decode(engine, rig, teller));
  }
  for (std::size_t i = 0; i < outs[0].size(); ++i) REQUIRE(difference(outs[0][i], outs[1][i]) < tolerance(rig));
}

TEST_CASE("chunks of prompts attend by the model's scale, soft-cap and windows", "[engine][spec]") {
  const auto [number, near, window] = GENERATE(grid(kSpecNumbers, std::array{0u, 20u}, std::array{16u, 64u, 4096u}));
  CAPTURE(number, near, window);
  const EngineRig rig = engine_rig();
  const Spec& spec = kSpecs[number];
  const Story story = story_of(rig, spec, 333, 92);
  EngineOptions options = spec_options(rig, spec, 1, near);
  options.prefill_window = window;
  Engine engine(options, rig.device);
  const SequenceId id = engine.begin(parse_policy("full"));
  ForwardTensors tensors(*rig.device, kShape, options.largest.rows());
  // Chunks that are longer than some windows, and shorter.
  std::uint32_t at = 0;
  for (const std::uint32_t count : {100u, 1u, 37u, 95u, 100u}) {
    const PlanItem item{.sequence = id, .tokens = count, .prefill = true};
    for (std::uint32_t i = 0; i < count; ++i) tensors.set(i, story, at + i);
    (void)run_batch(engine, rig, tensors, {&item, 1}, options.largest);
    for (std::uint32_t i = 0; i < count; i += count < 5 ? 1 : 7) {
      CAPTURE(at, i);
      REQUIRE(error_of(tensors.out(i), story, at + i, kAll, 1, 0) < 1e-3);
      std::vector<double> sums;
      for (std::uint32_t layer = 0; layer < kShape.layers; ++layer)
        (void)story.attended(layer, at + i, kAll, 1, 0, &sums);
      const std::vector<float> lse = tensors.lse(i);
      for (std::size_t h = 0; h < lse.size(); ++h) REQUIRE(std::abs(lse[h] - sums[h]) < 1e-3);
    }
    at += count;
  }
}

TEST_CASE("drafts in layers with windows each see their own newest tokens", "[engine][spec]") {
  const std::uint32_t near = GENERATE(0u, 60u);
  const EngineRig rig = engine_rig();
  const Spec& spec = kSpecs[4];
  const Story story = story_of(rig, spec, 205, 93);
  EngineOptions options = spec_options(rig, spec, 5, near);
  Engine engine(options, rig.device);
  Teller teller{.story = &story,
                .id = engine.begin(parse_policy("exact | int4 | top_k=24 | near=0,sinks=4,recent=16"))};
  import_story(engine, rig, teller, 200);
  ForwardTensors tensors(*rig.device, kShape, options.largest.rows());
  for (std::uint32_t i = 0; i < 5; ++i) tensors.set(i, story, 200 + i);
  const PlanItem item{.sequence = teller.id, .tokens = 5};
  (void)run_batch(engine, rig, tensors, {&item, 1}, options.largest);
  for (std::uint32_t i = 0; i < 5; ++i) REQUIRE(error_of(tensors.out(i), story, 200 + i, 4, 16, 24) < 1e-3);
}

TEST_CASE("windows have room in an engine whose policies choose little", "[engine][spec]") {
  const EngineRig rig = engine_rig();
  const Spec spec{.windows = {200, 0, 90}};
  const Story story = story_of(rig, spec, 310, 94);
  const PolicySpec policy = parse_policy("exact | int4 | top_k=2 | near=0,sinks=4,recent=8");
  EngineOptions options{
      .shape = kShape, .kv_dtype = rig.kv_dtype, .policies = {policy}, .threads = 2, .pin_threads = false};
  options.host_bytes = 40 * block_bytes(options);
  options.windows = spec.windows;
  const EngineMemoryUse needed = memory_needed(options, rig.device.get());
  Engine engine(options, rig.device);
  REQUIRE(engine.memory().pinned == needed.pinned);
  REQUIRE(engine.memory().buffers == needed.buffers);
  Teller teller{.story = &story, .id = engine.begin(policy)};
  import_story(engine, rig, teller, 300);
  ForwardTensors tensors(*rig.device, kShape, 1);
  while (teller.at < story.tokens()) {
    const auto out = run_forward(engine, rig, tensors, {&teller});
    REQUIRE(error_of(out[0], story, teller.at - 1, 4, 8, 2) < 1e-3);
  }
}

TEST_CASE("policies of the CPU choose by the model's scores, and not in layers with windows", "[engine][spec]") {
  constexpr std::array kPolicies{"lfps",
                                 "psa | dense=0",
                                 "psa | int4",
                                 "magicpig",
                                 "tactic:least=64,size=4,recluster=64",
                                 "topk",
                                 "exact | top_k=30 | near=0,sinks=4 | bypass=0.3",
                                 "snapkv:budget=60,window=16",
                                 "exact | verified=0.2,heavy=16 | near=0,sinks=4,recent=9"};
  const auto [text, number, near] = GENERATE_COPY(grid(few<3>(kPolicies), kSpecNumbers, std::array{0u, 7u}));
  CAPTURE(text, number, near);
  const EngineRig rig = engine_rig();
  const Spec& spec = kSpecs[number];
  const Story story = story_of(rig, spec, 330, 95);
  const PolicySpec policy = parse_policy(text);
  EngineOptions options = spec_options(rig, spec, 2, near);
  options.largest.pages = false;
  options.policies = {policy};
  Reference reference(rig, story, spec.shape(), policy);
  reference.see(spec.windows);
  Engine engine(options, rig.device);
  Teller teller{.story = &story, .id = engine.begin(policy)};
  reference.prefill(300);
  prefill(engine, rig, teller, 300);
  while (teller.at < story.tokens()) {
    const std::vector<float> want = reference.decode();
    CAPTURE(teller.at);
    REQUIRE(difference(decode(engine, rig, teller), want) < tolerance(rig));
  }
}

TEST_CASE("an audit holds rows against what layers let them see", "[engine][spec]") {
  const EngineRig rig = engine_rig();
  const Spec& spec = kSpecs[4];
  const Story story = story_of(rig, spec, 260, 96);
  EngineOptions options = spec_options(rig, spec, 1, 7);
  options.largest.audit = true;
  Engine engine(options, rig.device);
  Teller teller{.story = &story, .id = engine.begin(parse_policy("full"))};
  import_story(engine, rig, teller, 250);
  const std::vector<std::uint32_t> watched{3, 245};
  engine.watch(teller.id, watched);
  std::uint64_t visible = 0;
  while (teller.at < story.tokens()) {
    (void)decode(engine, rig, teller);
    visible += (teller.at + 130 + 1) * std::uint64_t{kShape.kv_heads};
  }
  const AuditReport report = engine.audit(teller.id);
  REQUIRE(report.dense_tokens == visible);
  REQUIRE(report.attended_tokens == visible);
  for (const HeadAudit& head : report.heads) {
    REQUIRE(head.coverage_min > 0.99);
    REQUIRE(head.coverage < 1.01);
    REQUIRE(head.overlap == 1.0);
    REQUIRE(head.bound_broken == 0);
    if (head.watched_steps != 0) REQUIRE(head.watched_kept > 0.99);
  }
}

TEST_CASE("forks, shorter sequences and parked ones go on as their layers let them see", "[engine][spec]") {
  const EngineRig rig = engine_rig();
  const Spec& spec = kSpecs[4];
  const Story story = story_of(rig, spec, 280, 97);
  Engine engine(spec_options(rig, spec, 1, 7), rig.device);
  const char* const text = "exact | int4 | top_k=24 | near=0,sinks=4,recent=16";
  Teller teller{.story = &story, .id = engine.begin(parse_policy(text))};
  prefill(engine, rig, teller, 270);
  const auto goes_on = [&](SequenceId id, std::uint32_t at) {
    Teller other{.story = &story, .id = id, .at = at};
    while (other.at < at + 4) {
      const std::vector<float> out = decode(engine, rig, other);
      REQUIRE(error_of(out, story, other.at - 1, 4, 16, 24) < 1e-3);
    }
  };
  goes_on(engine.fork(teller.id, 207), 207);
  const parks::Area area = parks::parked(engine, teller.id);
  REQUIRE(code_of([&] { engine.truncate(teller.id, 140); }) == Errc::unsupported);
  engine.truncate(teller.id, 206);
  goes_on(teller.id, 206);
  goes_on(engine.resume(area), 270);
}

TEST_CASE("a plan reads no more of a layer than its window", "[engine][spec]") {
  const EngineRig rig = engine_rig();
  EngineOptions options = spec_options(rig, {.windows = {40, 0, 7}}, 1, 0);
  options.largest.trace = true;
  Engine engine(options, rig.device);
  const Story story(kShape, 201, 98);
  Teller teller{.story = &story, .id = engine.begin(parse_policy("full"))};
  import_story(engine, rig, teller, 200);
  ForwardTensors tensors(*rig.device, kShape, options.largest.rows());
  tensors.set(0, story, 200);
  const PlanItem item{.sequence = teller.id};
  const Bucket bucket{.decode_rows = 1, .unbounded = true, .trace = true};
  const Batch batch = run_batch(engine, rig, tensors, {&item, 1}, bucket);
  std::uint64_t read = 0;
  for (const WorkItem& work : engine.trace(batch).work)
    if (work.stage == Stage::attend_far) read += work.read;
  const PageLayout layout{.page_tokens = 1, .head_dim = kShape.head_dim, .dtype = rig.kv_dtype};
  REQUIRE(read == layout.page_bytes() * (40 + 201 + 7) * kShape.kv_heads);
}

TEST_CASE("what no model says of its attention is refused", "[engine][spec]") {
  const EngineRig rig = engine_rig();
  const auto refused = [&](const auto& change) {
    EngineOptions options = options_for(rig, 1, 0);
    change(options);
    const Errc code = code_of([&] { Engine engine(options, rig.device); });
    REQUIRE(code_of([&] { (void)memory_needed(options, rig.device.get()); }) == code);
    return code;
  };
  for (const float wrong : {-1.f, NAN, INFINITY, 1e-42f}) {
    CAPTURE(wrong);
    REQUIRE(refused([&](EngineOptions& options) { options.scale = wrong; }) == Errc::invalid_argument);
    REQUIRE(refused([&](EngineOptions& options) { options.softcap = wrong; }) == Errc::invalid_argument);
  }
  REQUIRE(refused([](EngineOptions& options) { options.softcap = 1001.f; }) == Errc::invalid_argument);
  REQUIRE(refused([](EngineOptions& options) { options.windows = {4, 4}; }) == Errc::invalid_argument);
  REQUIRE(refused([](EngineOptions& options) { options.shape.scale = 0.1f; }) == Errc::invalid_argument);
  REQUIRE(refused([](EngineOptions& options) { options.shape.softcap = 30.f; }) == Errc::invalid_argument);
  REQUIRE(refused([](EngineOptions& options) {
            options.softcap = 30.f;
            options.prefill.mode = PrefillMode::automatic;
          }) == Errc::unsupported);
}
