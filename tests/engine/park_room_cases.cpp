// Sequences that come back where there is no room for them, from files, and beside what is left undone, on every
// device.
#include <filesystem>

#include "sluice/error.hpp"
#include "tests/support/engine_park.hpp"
#include "tests/support/temporary_directory.hpp"

using namespace sluice;
using namespace sluice::test;
using namespace sluice::test::policies;
using namespace sluice::test::prefixes;
using namespace sluice::test::parks;

TEST_CASE("what does not fit is not resumed, and changes nothing", "[engine][park]") {
  const EngineRig rig = engine_rig();
  const Story story(kShape, 200, 308);
  const PolicySpec policy = parse_policy(kExact);
  Engine engine(room_for(rig, policy), rig.device);
  Teller teller = begin_named(engine, story, kExact, ids_of(130));
  prefill(engine, rig, teller, 129);
  const Area area = parked(engine, teller.id, "model 1");
  const auto refused_by = [&](const EngineOptions& options, Errc code, std::string_view model = "model 1") {
    Engine other(options, rig.device);
    const EngineMemoryUse before = other.memory();
    REQUIRE(code_of([&] { (void)other.resume(area, model); }) == code);
    REQUIRE(same_memory(other.memory(), before));
    REQUIRE(other.can_admit(16));
  };
  const EngineOptions options = room_for(rig, policy);
  refused_by(options, Errc::invalid_argument, "model 2");
  refused_by(options, Errc::invalid_argument, "");
  for (std::uint32_t AttentionShape::*field :
       {&AttentionShape::layers, &AttentionShape::q_heads, &AttentionShape::kv_heads, &AttentionShape::head_dim}) {
    EngineOptions changed = options;
    changed.shape.*field *= 2;
    refused_by(changed, Errc::invalid_argument);
  }
  EngineOptions changed = options;
  changed.kv_dtype = rig.kv_dtype == DType::f16 ? DType::bf16 : DType::f16;
  refused_by(changed, Errc::invalid_argument);
  changed = options;
  changed.largest.max_tokens = 128;
  refused_by(changed, Errc::out_of_capacity);
  changed = options;
  changed.host_bytes = 8 * block_bytes(options);
  refused_by(changed, Errc::out_of_capacity);
  changed = options;
  changed.largest.top_k = false;
  changed.policies = {parse_policy("all")};
  refused_by(changed, Errc::unsupported);
  changed = options;
  changed.sequences = changed.cpu_sequences = changed.cluster_sequences = 1;
  Engine full(changed, rig.device);
  const SequenceId only = full.begin(policy);
  REQUIRE(code_of([&] { (void)full.resume(area, "model 1"); }) == Errc::out_of_capacity);
  full.end(only);
  REQUIRE(full.tokens(full.resume(area, "model 1")) == 129);
  // An area that is too short, and one that is longer than what was written.
  Area more(area.size() + 1);
  REQUIRE(code_of([&] { (void)engine.park(teller.id, std::span(more).first(area.size() - 1), "model 1"); }) ==
          Errc::out_of_capacity);
  REQUIRE(engine.park(teller.id, more, "model 1") == area.size());
  REQUIRE(code_of([&] { (void)engine.resume(more, "model 1"); }) == Errc::corrupt);
  REQUIRE(code_of([&] { (void)engine.park_bytes(teller.id, std::string(5000, 'x')); }) == Errc::invalid_argument);
  REQUIRE(code_of([&] { (void)engine.park_bytes(SequenceId{99}); }) == Errc::not_found);
}

TEST_CASE("pages that are cached give way to a sequence that is resumed, but not to one that is damaged",
          "[engine][park]") {
  const EngineRig rig = engine_rig();
  const Story story(kShape, 200, 309);
  const PolicySpec policy = parse_policy(kExact);
  EngineOptions options = room_for(rig, policy);
  options.host_bytes = 12 * block_bytes(options);
  Engine engine(options, rig.device);
  Teller teller = told(engine, rig, story, policy, 100);
  Area area = parked(engine, teller.id);
  engine.end(teller.id);
  Teller cached = begin_named(engine, story, kExact, ids_of(160));
  prefill(engine, rig, cached, 160);
  engine.end(cached.id);
  const EngineMemoryUse before = engine.memory();
  REQUIRE(before.far_pages_cached == 10 * block_bytes(options));
  area.back() ^= std::byte{1};
  REQUIRE(code_of([&] { (void)engine.resume(area); }) == Errc::corrupt);
  REQUIRE(same_memory(engine.memory(), before));
  area.back() ^= std::byte{1};
  Teller back = resumed(engine, area, teller);
  REQUIRE(engine.memory().far_pages_cached == 5 * block_bytes(options));
  (void)decode(engine, rig, back);
}

TEST_CASE("a page whose copy a plan has left behind is as it should be when its source has another owner",
          "[engine][park]") {
  const EngineRig rig = engine_rig();
  const Story story(kShape, 200, 310);
  const PolicySpec policy = parse_policy(kExact);
  Engine engine(room_for(rig, policy), rig.device);
  Teller parent = told(engine, rig, story, policy, 40);
  Teller other = told(engine, rig, Story(kShape, 200, 311), policy, 40);
  const Area area = parked(engine, other.id);
  engine.end(other.id);
  Teller child{.story = &story, .id = engine.fork(parent.id, 40), .at = 40};
  // No stream of the engine's device: the plan has copied the page of keys, and the device knows nothing of it.
  const PlanItem item{.sequence = child.id};
  struct OtherStream final : Stream {
    void copy(std::span<const Copy>) override {}
    void fill(std::span<std::byte>, std::byte) override {}
    void record(Event&) override {}
    void wait(const Event&) override {}
    void signal(Flag&, std::uint64_t) override {}
    void wait(const Flag&, std::uint64_t) override {}
    void synchronize(Deadline) override {}
  } stream;
  if (rig.device->info().captures) return;  // What a GPU is given is taken to be a stream of its own.
  REQUIRE_THROWS_AS(engine.plan({&item, 1}, engine.options().largest, static_cast<Stream*>(&stream)), Error);
  engine.end(parent.id);
  std::vector<Teller> back;
  for (int i = 0; i < 3; ++i) back.push_back(resumed(engine, area, {.story = &story, .id = {}, .at = 40}));
  Teller want = told(engine, rig, story, policy, 40);
  for (int step = 0; step < 3; ++step)
    REQUIRE(difference(decode(engine, rig, child), decode(engine, rig, want)) == 0.0);
}

TEST_CASE("a sequence is parked in a file and resumed from it", "[engine][park]") {
  const EngineRig rig = engine_rig();
  const TemporaryDirectory directory;
  const Story story(kShape, 260, 312);
  const PolicySpec policy = parse_policy(GENERATE(as<std::string>{}, kExact, "lfps"));
  Engine engine(room_for(rig, policy), rig.device);
  const std::string file = directory.path() + "/parked";
  // The second takes the place of the first.
  for (const std::uint32_t tokens : {250u, 0u, 17u}) {
    Teller teller = told(engine, rig, story, policy, tokens);
    engine.park(teller.id, file, "model");
    REQUIRE(std::filesystem::file_size(file) == engine.park_bytes(teller.id, "model"));
    REQUIRE(std::distance(std::filesystem::directory_iterator(directory.path()), {}) == 1);
    Engine other(room_for(rig, policy), rig.device);
    Teller back{.story = &story, .id = other.resume(file, "model"), .at = tokens};
    for (int step = 0; step < 5; ++step)
      REQUIRE(difference(decode(other, rig, back), decode(engine, rig, teller)) == 0.0);
    REQUIRE(code_of([&] { (void)other.resume(file); }) == Errc::invalid_argument);
  }
}
