// Forwards and imports that fail, are taken back or were never planned, on every device; and calls that are refused.
#include <cmath>

#include "sluice/error.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/engine_plain.hpp"
#include "tests/support/forwarding.hpp"

using namespace sluice;
using namespace sluice::test;
using namespace sluice::test::plain;

TEST_CASE("a forward without a plan of its own gives NaN and changes nothing", "[engine]") {
  const EngineRig rig = engine_rig();
  Engine engine(options_for(rig, 2, 40, 4), rig.device);
  const Story story(kShape, 120, 3);
  Teller teller{.story = &story, .id = engine.begin(parse_policy("exact | int4 | top_k=10 | near=0,sinks=2,recent=6"))};
  import_story(engine, rig, teller, 100);
  ForwardTensors tensors(*rig.device, kShape, 2);
  std::uint64_t unplanned = 0;
  while (teller.at < story.tokens()) {
    const auto out = run_forward(engine, rig, tensors, {&teller});
    REQUIRE(error_of(out[0], story, teller.at - 1, 2, 6, 10) < kTolerance);
    if (teller.at % 3 != 0) continue;
    tensors.set(0, story, 0);  // Would do harm if it came in.
    tensors.attend(engine, rig.stream);
    rig.synchronize();
    for (const float x : tensors.out(0)) REQUIRE(std::isnan(x));
    for (const float x : tensors.out(1)) REQUIRE(std::isnan(x));
    REQUIRE(engine.stats().unplanned == ++unplanned);
    REQUIRE(engine.tokens(teller.id) == teller.at);
  }
  REQUIRE(unplanned > 3);
}

TEST_CASE("a forward that is cancelled has no plan any more, whether it was enqueued or not, whoever waits",
          "[engine][handover]") {
  const EngineRig rig = engine_rig();
  const Handover mode = GENERATE(Handover::device, Handover::stream, Handover::host);
  const std::uint32_t near = GENERATE(0u, 4u);
  CAPTURE(to_string(mode), near);
  EngineOptions options = options_for(rig, 1, 40, near);
  options.handover = mode;
  Engine engine(options, rig.device);
  const Story story(kShape, 120, 8);
  Teller teller{.story = &story, .id = engine.begin(parse_policy("exact | int4 | top_k=10 | near=0,sinks=2,recent=6"))};
  import_story(engine, rig, teller, 100);
  ForwardTensors tensors(*rig.device, kShape, 1);
  std::uint64_t unplanned = 0;
  for (std::uint32_t step = 0; step < 12; ++step) {
    tensors.set(0, story, teller.at);
    const Batch batch = engine.plan(one_each({&teller.id, 1}), engine.options().largest, rig.stream);
    if (step % 3 == 1) tensors.attend(engine, rig.stream);
    engine.cancel(batch);
    REQUIRE(engine.tokens(teller.id) == teller.at);
    if (step % 3 == 2) {
      tensors.set(0, story, 0);  // Would do harm if it came in.
      tensors.attend(engine, rig.stream);
      rig.synchronize();
      REQUIRE(std::isnan(tensors.out(0).front()));
      REQUIRE(engine.stats().unplanned == ++unplanned);
    }
    const auto out = run_forward(engine, rig, tensors, {&teller});
    REQUIRE(error_of(out[0], story, teller.at - 1, 2, 6, 10) < kTolerance);
  }
}

TEST_CASE("what a graph is not to repeat is refused on a captured stream, by name, and changes nothing", "[engine]") {
  const EngineRig rig = engine_rig();
  const auto device = std::make_shared<RefusingDevice>(rig.device);
  Engine engine(options_for(rig, 1, 40, 4), device);
  const Story story(kShape, 104, 8);
  Teller teller{.story = &story, .id = engine.begin(parse_policy("exact | int4 | top_k=10 | near=0,sinks=2,recent=6"))};
  const auto refused = [&](const auto& call) {
    device->verbs.captures = true;
    const Refusal refusal = refusal_of(call);
    device->verbs.captures = false;
    REQUIRE(refusal.code == Errc::unsupported);
    REQUIRE(refusal.text.find("captured") != std::string::npos);
    REQUIRE(refusal.text.find("before each replay") != std::string::npos);
  };
  refused([&] { import_story(engine, rig, teller, 100); });
  teller.at = 0;
  import_story(engine, rig, teller, 100);
  ForwardTensors tensors(*rig.device, kShape, 1);
  while (teller.at < story.tokens()) {
    refused([&] { (void)engine.plan(one_each({&teller.id, 1}), engine.options().largest, rig.stream); });
    REQUIRE(engine.tokens(teller.id) == teller.at);
    const auto out = run_forward(engine, rig, tensors, {&teller});
    REQUIRE(error_of(out[0], story, teller.at - 1, 2, 6, 10) < kTolerance);
  }
}

TEST_CASE("what a plan was written to is used no more if nobody knows whether it was read", "[engine]") {
  const EngineRig rig = engine_rig();
  const auto device = std::make_shared<RefusingDevice>(rig.device);
  EngineOptions options = options_for(rig, 1, 40, 4);
  options.in_flight = 2;
  Engine engine(options, device);
  const Story story(kShape, 104, 9);
  Teller teller{.story = &story, .id = engine.begin(parse_policy("exact | int4 | top_k=10 | near=0,sinks=2,recent=6"))};
  import_story(engine, rig, teller, 100);
  const auto plan = [&] { return engine.plan(one_each({&teller.id, 1}), engine.options().largest, rig.stream); };
  const auto fails = [&] {
    device->verbs.fails = device->verbs.mute = true;
    REQUIRE(refusal_of([&] { (void)plan(); }).text.find("fails behind this plan") != std::string::npos);
    device->verbs.mute = false;
  };
  fails();
  // One of two is left.
  const Batch batch = plan();
  REQUIRE(code_of([&] { (void)plan(); }) == Errc::invalid_argument);
  engine.cancel(batch);
  ForwardTensors tensors(*rig.device, kShape, 1);
  const auto out = run_forward(engine, rig, tensors, {&teller});
  REQUIRE(error_of(out[0], story, teller.at - 1, 2, 6, 10) < kTolerance);
  fails();
  const Refusal refusal = refusal_of([&] { (void)plan(); });
  REQUIRE(refusal.code == Errc::device);
  REQUIRE(refusal.text.find("build another engine") != std::string::npos);
  REQUIRE(engine.tokens(teller.id) == teller.at);
  rig.synchronize();
}

TEST_CASE("an import that does not get to its last layer is begun again or ends with its sequence", "[engine]") {
  const EngineRig rig = engine_rig();
  Engine engine(options_for(rig, 1, 40, 3), rig.device);
  const Story story(kShape, 70, 8);
  const Story other(kShape, 70, 9);
  const auto policy = parse_policy("exact | int4 | top_k=10 | near=0,sinks=2,recent=6");
  Teller teller{.story = &story, .id = engine.begin(policy)};
  Teller given_up{.story = &other, .id = engine.begin(policy)};
  ForwardTensors tensors(*rig.device, kShape, 1);
  const auto rows = rig.device->allocate_pinned(50 * kShape.kv_heads * kShape.head_dim * sizeof(float));
  const auto view = [&](std::uint32_t tokens) {
    return dense_view<const std::byte>(rows->data(), DType::f32, tokens, kShape.kv_heads, kShape.head_dim);
  };
  for (const SequenceId id : {teller.id, given_up.id}) {
    engine.import_prefix(id, LayerId{0}, view(50), view(50), rig.stream);
    REQUIRE(code_of([&] { engine.import_prefix(id, LayerId{2}, view(50), view(50), rig.stream); }) ==
            Errc::invalid_argument);
    REQUIRE(code_of([&] { engine.import_prefix(id, LayerId{1}, view(49), view(49), rig.stream); }) ==
            Errc::invalid_argument);
    REQUIRE(code_of([&] {
              (void)engine.plan(one_each({&id, 1}), engine.options().largest, rig.stream);
            }) == Errc::invalid_argument);
    REQUIRE(code_of([&] { tensors.attend(engine, rig.stream); }) == Errc::invalid_argument);
    REQUIRE(engine.tokens(id) == 0);
    if (id == given_up.id) engine.end(id);
    if (id == teller.id) import_story(engine, rig, teller, 60);
  }
  while (teller.at < story.tokens()) {
    const auto out = run_forward(engine, rig, tensors, {&teller});
    REQUIRE(error_of(out[0], story, teller.at - 1, 2, 6, 10) < kTolerance);
  }
}

TEST_CASE("an engine names what it cannot do", "[engine]") {
  const EngineRig rig = engine_rig();
  EngineOptions options = options_for(rig, 2, 10, 0);
  options.in_flight = 1;
  Engine engine(options, rig.device);
  for (const char* policy : {"full", "exact | int4 | top_k=8 | near=3%", "exact | top_k=8 | near=10%",
                             "exact | int4 | top_p=0.9", "exact | int4 | top_k=8 | near=0,sinks=600,recent=8"}) {
    CAPTURE(policy);
    REQUIRE(code_of([&] { (void)engine.begin(parse_policy(policy)); }) == Errc::unsupported);
  }
  const auto policy = parse_policy("exact | int4 | top_k=8 | near=0,sinks=4,recent=8");
  const SequenceId a = engine.begin(policy);
  const SequenceId b = engine.begin(policy);
  const SequenceId twice[] = {a, a};
  const SequenceId three[] = {a, b, a};
  const SequenceId stranger[] = {SequenceId{99}};
  REQUIRE(code_of([&] { (void)engine.plan(one_each(twice), engine.options().largest, rig.stream); }) ==
          Errc::invalid_argument);
  REQUIRE(code_of([&] { (void)engine.plan(one_each(three), engine.options().largest, rig.stream); }) ==
          Errc::invalid_argument);
  REQUIRE(code_of([&] { (void)engine.plan(one_each(stranger), engine.options().largest, rig.stream); }) ==
          Errc::not_found);
  REQUIRE(code_of([&] { engine.finish({.forward = 1, .bucket = {}}); }) == Errc::invalid_argument);

  const SequenceId one[] = {a};
  const Batch batch = engine.plan(one_each(one), engine.options().largest, rig.stream);
  REQUIRE(code_of([&] { (void)engine.plan(one_each(one), engine.options().largest, rig.stream); }) ==
          Errc::invalid_argument);
  REQUIRE(code_of([&] { engine.end(a); }) == Errc::invalid_argument);
  engine.end(b);
  engine.cancel(batch);
  REQUIRE(engine.tokens(a) == 0);
  engine.end(a);

  EngineOptions wrong = options;
  wrong.page_tokens = 12;
  REQUIRE(code_of([&] { Engine(wrong, rig.device); }) == Errc::invalid_argument);
  wrong = options;
  wrong.host_bytes = 1;
  REQUIRE(code_of([&] { Engine(wrong, rig.device); }) == Errc::invalid_argument);
  for (int i = 0; i < 8; ++i) (void)engine.begin(policy);
  REQUIRE(code_of([&] { (void)engine.begin(policy); }) == Errc::out_of_capacity);
}
