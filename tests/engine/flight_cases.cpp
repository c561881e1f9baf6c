// Forwards in flight that fail, are taken back, end in another order, or are not enqueued as they were planned.
#include <atomic>
#include <cmath>
#include <span>
#include <thread>

#include "sluice/error.hpp"
#include "sluice/step/forward.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/engine_lives.hpp"
#include "tests/support/pause.hpp"

using namespace sluice;
using namespace sluice::test;
using namespace sluice::test::lives;
using namespace std::chrono_literals;

TEST_CASE("a forward that fails takes those behind it along, and no other", "[engine]") {
  const EngineRig rig = engine_rig();
  EngineOptions options = life_options(rig, 1, 40);
  options.near_bytes = 0;
  std::atomic<bool> stalls{false};
  options.answer_timeout = 300ms;
  options.before_answer = [&] {
    if (stalls.exchange(false)) pause_for(1200ms);
  };
  Engine engine(options, rig.device);
  const Story story(kShape, 120, 5);
  Teller a{.story = &story, .id = engine.begin(parse_policy(kPolicy))};
  Teller b{.story = &story, .id = engine.begin(parse_policy(kPolicy))};
  import_story(engine, rig, a, 100);
  import_story(engine, rig, b, 90);
  std::vector<ForwardTensors> tensors;
  for (int i = 0; i < 4; ++i) tensors.emplace_back(*rig.device, kShape, 1);
  const Bucket bucket = engine.options().largest;
  const auto start = [&](std::size_t at, const Teller& teller, std::uint32_t token, bool enqueue = true) {
    tensors[at].set(0, story, token);
    const PlanItem item{.sequence = teller.id};
    const Batch batch = engine.plan({&item, 1}, bucket, rig.stream);
    if (enqueue) tensors[at].attend(engine, bucket, rig.stream);
    return batch;
  };
  const auto off = [&](std::size_t at, std::uint32_t token) {
    rig.synchronize();
    const auto out = tensors[at].out(0);
    const auto want = story.attended(1, token, 2, 6, 10);
    return difference(std::span(out).subspan(want.size()), want);
  };

  // Of three in flight the second fails. The third continues it, though it is another sequence's.
  const Batch first = start(0, a, 100);
  engine.finish(first);
  stalls = true;
  const Batch second = start(1, a, 101);
  const Batch third = start(2, b, 90);
  REQUIRE(off(0, 100) < 1e-3);
  REQUIRE(code_of([&] { engine.finish(third); }) == Errc::device);
  REQUIRE(code_of([&] { engine.finish(second); }) == Errc::device);
  REQUIRE(engine.tokens(a.id) == 101);
  REQUIRE(engine.tokens(b.id) == 90);
  // Both can be run again, together in flight.
  const Batch again = start(1, a, 101);
  const Batch next = start(2, b, 90);
  const Batch last = start(0, a, 102);
  engine.finish(again);
  engine.finish(next);
  REQUIRE(off(1, 101) < 1e-3);
  REQUIRE(off(2, 90) < 1e-3);
  engine.finish(last);
  REQUIRE(off(0, 102) < 1e-3);

  // One that was not enqueued before the next was planned is lost, and what continues it with it.
  const Batch skipped = start(0, a, 103, false);
  const Batch orphan = start(1, b, 91);
  REQUIRE(code_of([&] { engine.finish(skipped); }) == Errc::device);
  REQUIRE(code_of([&] { engine.finish(orphan); }) == Errc::device);
  // What is taken back takes those behind it along, not those before.
  const Batch kept = start(0, a, 103);
  const Batch taken = start(1, b, 91);
  const Batch along = start(2, a, 104);
  REQUIRE(code_of([&] { (void)start(3, b, 92); }) == Errc::invalid_argument);
  REQUIRE(code_of([&] { engine.end(a.id); }) == Errc::invalid_argument);
  engine.cancel(taken);
  REQUIRE(code_of([&] { engine.finish(along); }) == Errc::invalid_argument);
  const Batch continues = start(1, b, 91);
  engine.finish(kept);
  REQUIRE(off(0, 103) < 1e-3);
  engine.finish(continues);
  REQUIRE(off(1, 91) < 1e-3);
  REQUIRE(engine.tokens(a.id) == 104);
  REQUIRE(engine.tokens(b.id) == 92);
}

TEST_CASE("a forward that was not enqueued whole never counts as done, however many came before", "[engine]") {
  const EngineRig rig = engine_rig();
  Engine engine(life_options(rig, 1, 40), rig.device);
  const Story story(kShape, 120, 5);
  Teller teller{.story = &story, .id = engine.begin(parse_policy(kPolicy))};
  import_story(engine, rig, teller, 90);
  ForwardTensors tensors(*rig.device, kShape, 1);
  const PlanItem item{.sequence = teller.id};
  const Bucket bucket = engine.options().largest;
  const auto attend_layer = [&](std::uint32_t layer) {
    const TensorView none = dense_view<const std::byte>(nullptr, DType::f32, 1, kShape.q_heads, kShape.head_dim);
    REQUIRE(code_of([&] { engine.attend(bucket, LayerId{layer}, none, none, none, {}, rig.stream); }) ==
            Errc::invalid_argument);
    tensors.attend_layer(engine, bucket, layer, rig.stream);
  };
  for (int round = 0; round < 12; ++round) {
    // Half of one, and the next on top of it.
    tensors.set(0, story, 0);
    const Batch half = engine.plan({&item, 1}, bucket, rig.stream);
    attend_layer(0);
    const Batch next = engine.plan({&item, 1}, bucket, rig.stream);
    tensors.attend(engine, rig.stream);
    REQUIRE(code_of([&] { engine.finish(half); }) == Errc::device);
    REQUIRE(code_of([&] { engine.finish(next); }) == Errc::device);
    rig.synchronize();
    // Its first layer twice.
    const Batch twice = engine.plan({&item, 1}, bucket, rig.stream);
    attend_layer(0);
    tensors.attend(engine, rig.stream);
    REQUIRE(code_of([&] { engine.finish(twice); }) == Errc::device);
    rig.synchronize();  // What was enqueued in vain still says so in the outputs.
    REQUIRE(engine.tokens(teller.id) == teller.at);
    const auto out = run_forward(engine, rig, tensors, {&teller});
    const auto want = story.attended(0, teller.at - 1, 2, 6, 10);
    for (std::size_t i = 0; i < want.size(); ++i) REQUIRE(std::abs(out[0][i] - want[i]) < 1e-3);
  }
}

TEST_CASE("a forward behind one that fails is not done either, however little of it was enqueued", "[engine]") {
  const EngineRig rig = engine_rig();
  Engine engine(life_options(rig, 2, 40), rig.device);
  const Story story(kShape, 120, 5);
  Teller teller{.story = &story, .id = engine.begin(parse_policy(kPolicy))};
  import_story(engine, rig, teller, 90);
  ForwardTensors tensors(*rig.device, kShape, 2);
  const PlanItem item{.sequence = teller.id};
  const Bucket bucket = engine.options().largest;
  for (std::uint32_t round = 0; round < 12; ++round) {
    CAPTURE(round);
    tensors.set(0, story, 0);
    const Batch wrong = engine.plan({&item, 1}, bucket, rig.stream);
    tensors.attend(engine, {.decode_rows = 1}, rig.stream);
    const Batch part = engine.plan({&item, 1}, bucket, rig.stream);
    tensors.attend_layer(engine, bucket, 0, rig.stream);
    // Half of it and another one, or once more from its beginning.
    const bool half = round % 2 == 0;
    if (half) {
      const Batch last = engine.plan({&item, 1}, bucket, rig.stream);
      tensors.attend(engine, bucket, rig.stream);
      REQUIRE(code_of([&] { engine.finish(last); }) == Errc::device);
    } else {
      tensors.attend(engine, bucket, rig.stream);
    }
    REQUIRE(code_of([&] { engine.finish(part); }) == Errc::device);
    REQUIRE(code_of([&] { engine.finish(wrong); }) == Errc::device);
    rig.synchronize();
    REQUIRE(engine.tokens(teller.id) == teller.at);
    const auto out = run_forward(engine, rig, tensors, {&teller});
    const auto want = story.attended(0, teller.at - 1, 2, 6, 10);
    for (std::size_t i = 0; i < want.size(); ++i) REQUIRE(std::abs(out[0][i] - want[i]) < 1e-3);
  }
}

TEST_CASE("forwards are finished in any order, and not taken back once one behind them is", "[engine]") {
  const EngineRig rig = engine_rig();
  EngineOptions options = life_options(rig, 1, 40);
  options.in_flight = kMostForwards;
  Engine engine(options, rig.device);
  const Story story(kShape, 150, 5);
  Teller teller{.story = &story, .id = engine.begin(parse_policy(kPolicy))};
  import_story(engine, rig, teller, 90);
  std::vector<ForwardTensors> tensors;
  for (std::uint32_t i = 0; i < kMostForwards; ++i) tensors.emplace_back(*rig.device, kShape, 1);
  const PlanItem item{.sequence = teller.id};
  const Bucket bucket = engine.options().largest;
  std::uint32_t at = 90;
  const auto start = [&](std::uint32_t i) {
    tensors[i].set(0, story, at++);
    const Batch batch = engine.plan({&item, 1}, bucket, rig.stream);
    tensors[i].attend(engine, rig.stream);
    return batch;
  };
  const Batch oldest = start(0);
  for (int round = 0; round < 20; ++round) {
    const Batch newest = start(1);
    engine.finish(newest);
    REQUIRE(code_of([&] { engine.cancel(oldest); }) == Errc::invalid_argument);
  }
  engine.finish(oldest);
  REQUIRE(engine.tokens(teller.id) == 111);
  std::vector<Batch> all;
  for (std::uint32_t i = 0; i < kMostForwards; ++i) all.push_back(start(i));
  REQUIRE(code_of([&] { (void)engine.plan({&item, 1}, bucket, rig.stream); }) == Errc::invalid_argument);
  for (const std::uint32_t i : {3u, 0u, 7u, 1u, 2u, 6u, 5u, 4u}) engine.finish(all[i]);
  rig.synchronize();
  for (std::uint32_t i = 0; i < kMostForwards; ++i) {
    const auto want = story.attended(0, 111 + i, 2, 6, 10);
    const auto out = tensors[i].out(0);
    for (std::size_t c = 0; c < want.size(); ++c) REQUIRE(std::abs(out[c] - want[c]) < 1e-3);
  }
  REQUIRE(engine.tokens(teller.id) == 119);
}

TEST_CASE("what runs in another bucket than the plan's gives NaN and changes nothing", "[engine]") {
  const EngineRig rig = engine_rig();
  Engine engine(life_options(rig, 2, 40), rig.device);
  const Story story(kShape, 120, 5);
  Teller teller{.story = &story, .id = engine.begin(parse_policy(kPolicy))};
  import_story(engine, rig, teller, 100);
  ForwardTensors tensors(*rig.device, kShape, 2);
  for (const Bucket& wrong : {Bucket{.decode_rows = 1}, Bucket{.decode_rows = 2, .max_tokens = 128}}) {
    tensors.set(0, story, 100);
    tensors.spoil();
    const PlanItem item{.sequence = teller.id};
    const Batch batch = engine.plan({&item, 1}, {.decode_rows = 2}, rig.stream);
    tensors.attend(engine, wrong, rig.stream);
    REQUIRE(code_of([&] { engine.finish(batch); }) == Errc::device);
    rig.synchronize();
    REQUIRE(std::isnan(tensors.out(0).front()));
    REQUIRE(engine.tokens(teller.id) == 100);
  }
  const auto out = run_forward(engine, rig, tensors, {&teller});
  const auto want = story.attended(0, 100, 2, 6, 10);
  for (std::size_t i = 0; i < want.size(); ++i) REQUIRE(std::abs(out[0][i] - want[i]) < 1e-3);
  for (const Bucket& none : {Bucket{.decode_rows = 0}, Bucket{.decode_rows = 3},
                             Bucket{.decode_rows = 1, .prefill_rows = 1}, Bucket{.decode_rows = 1, .max_tokens = 20}}) {
    REQUIRE(code_of([&] { (void)engine.plan({}, none, rig.stream); }) == Errc::invalid_argument);
  }
}
