// Prefixes when sequences fork, shrink and fail, and when there is no room for them, on every device.
#include "sluice/error.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/engine_prefix.hpp"

using namespace sluice;
using namespace sluice::test;
using namespace sluice::test::policies;
using namespace sluice::test::prefixes;

namespace {

EngineOptions room_for(const EngineRig& rig, std::uint32_t blocks, std::uint32_t near = 0) {
  EngineOptions options = options_for(rig, 2, near);
  options.host_bytes = blocks * block_bytes(options);
  return options;
}

/// A decoded token attends all of its story.
void require_dense(Engine& engine, const EngineRig& rig, Teller& teller) {
  const auto out = decode(engine, rig, teller);
  REQUIRE(error_of(out, *teller.story, teller.at - 1) < 1e-3);
}

/// A named sequence of this prompt, which is ended.
void leave(Engine& engine, const EngineRig& rig, const Story& story, const Ids& ids) {
  Teller teller = begin_named(engine, story, kFull, ids);
  prefill(engine, rig, teller, static_cast<std::uint32_t>(ids.size()));
  engine.end(teller.id);
}

const PolicySpec kDense = parse_policy(kFull);

}  // namespace

TEST_CASE("what was let go of first gives way first, the end of a sequence before its beginning", "[engine][prefix]") {
  const EngineRig rig = engine_rig();
  const Story story(kShape, 200, 211);
  Engine engine(room_for(rig, 12), rig.device);
  const std::uint64_t block = block_bytes(engine.options());
  const Ids a = ids_of(65, 1);
  const Ids b = ids_of(65, 2);
  const auto known = [&](const Ids& ids) { return engine.match_prefix(kDense, ids); };
  leave(engine, rig, story, a);
  leave(engine, rig, story, b);
  REQUIRE(engine.memory().far_pages_cached == 8 * block);
  REQUIRE(engine.memory().far_pages_used == 0);
  REQUIRE(engine.can_admit(12 * 16));
  // Of the first, that comes to be used again, only the beginning: its end is older than all of the second.
  engine.end(begin_named(engine, story, kFull, ids_of(40, 1)).id);
  REQUIRE(known(a) == 64);
  Teller third{.story = &story, .id = engine.begin(kDense)};
  const auto grow_to = [&](std::uint32_t pages) { prefill(engine, rig, third, 16 * pages); };
  grow_to(5);
  REQUIRE(known(a) == 48);
  REQUIRE(known(b) == 64);
  grow_to(6);
  REQUIRE(known(a) == 32);
  REQUIRE(known(b) == 64);
  grow_to(8);
  REQUIRE(known(a) == 32);
  REQUIRE(known(b) == 32);
  grow_to(11);
  REQUIRE(known(a) == 16);
  REQUIRE(known(b) == 0);
  REQUIRE(engine.stats().evicted_blocks == 7);
  REQUIRE(engine.memory().far_pages_used + engine.memory().far_pages_cached == 12 * block);
  REQUIRE(engine.can_admit(16));
  REQUIRE_FALSE(engine.can_admit(17));
  // What a sequence holds stays.
  Teller holder = begin_named(engine, story, kFull, a);
  REQUIRE(holder.at == 16);
  REQUIRE_FALSE(engine.can_admit(1));
  REQUIRE(code_of([&] { prefill(engine, rig, third, 16 * 12); }) == Errc::out_of_capacity);
  REQUIRE(known(a) == 16);
  engine.end(third.id);
  require_dense(engine, rig, holder);
}

TEST_CASE("pages of ended sequences take no more than they may", "[engine][prefix]") {
  const EngineRig rig = engine_rig();
  const Story story(kShape, 200, 212);
  const std::uint32_t most = GENERATE(0u, 3u);
  EngineOptions options = room_for(rig, 12);
  options.prefix_bytes = most * block_bytes(options);
  Engine engine(options, rig.device);
  const Ids ids = ids_of(65, 1);
  Teller teller = begin_named(engine, story, kFull, ids);
  prefill(engine, rig, teller, 65);
  REQUIRE(engine.match_prefix(kDense, ids) == 64);
  Teller other = begin_named(engine, story, kFull, ids);
  engine.truncate(other.id, 20);
  engine.end(teller.id);
  REQUIRE(engine.match_prefix(kDense, ids) == (most == 0 ? 32 : 64));
  engine.end(other.id);
  REQUIRE(engine.match_prefix(kDense, ids) == 16 * most);
  REQUIRE(engine.memory().far_pages_cached == options.prefix_bytes);
  leave(engine, rig, story, ids_of(100, 2));
  REQUIRE(engine.memory().far_pages_cached == options.prefix_bytes);
  // Also when tokens are taken back, and when what remains of a page is copied.
  Teller third = begin_named(engine, story, kFull, ids_of(65, 3));
  prefill(engine, rig, third, 65);
  engine.truncate(third.id, 20);
  third.at = 20;
  REQUIRE(engine.memory().far_pages_cached == options.prefix_bytes);
  require_dense(engine, rig, third);
  REQUIRE(engine.memory().far_pages_cached == options.prefix_bytes);
}

TEST_CASE("nobody writes into a page that is known, and what is told anew is known by its own name",
          "[engine][prefix]") {
  const EngineRig rig = engine_rig();
  const Story story(kShape, 120, 213);
  Story other(kShape, 120, 214);
  other.begin_as(story, 40);
  Engine engine(room_for(rig, 30, GENERATE(0u, 5u)), rig.device);
  const Ids ids = ids_of(90);
  const Ids others = ids_of(90, 1, 40);
  Teller teller = begin_named(engine, story, kFull, ids);
  prefill(engine, rig, teller, 70);
  // In the middle of a page: one by a fork, one by taking tokens back, which forgets their names.
  Teller child{.story = &other, .id = engine.fork(teller.id, 40), .at = 40};
  for (Teller* each : {&child, &teller}) {
    if (each == &teller) {
      engine.truncate(teller.id, 40);
      teller.at = 40;
      teller.story = &other;
    }
    require_dense(engine, rig, *each);
    REQUIRE(code_of([&] { engine.name_tokens(each->id, 41, others); }) == Errc::invalid_argument);
    prefill(engine, rig, *each, 80);
    REQUIRE(engine.match_prefix(kDense, others) == (each == &child ? 32 : 80));
    engine.name_tokens(each->id, 40, std::span(others).subspan(40));
    REQUIRE(engine.match_prefix(kDense, others) == 80);
    REQUIRE(engine.match_prefix(kDense, ids) == 64);
  }
  for (const bool first : {true, false}) {
    Teller again = begin_named(engine, first ? story : other, kFull, first ? ids : others);
    REQUIRE(again.at == (first ? 64 : 80));
    for (int i = 0; i < 3; ++i) require_dense(engine, rig, again);
    engine.end(again.id);
  }
  require_dense(engine, rig, child);
  require_dense(engine, rig, teller);
}

TEST_CASE("where there is no block for a copy, what was known of tokens that were taken back is not",
          "[engine][prefix]") {
  const EngineRig rig = engine_rig();
  const Story story(kShape, 120, 215);
  Story other(kShape, 120, 216);
  other.begin_as(story, 40);
  Engine engine(room_for(rig, 4), rig.device);
  const Ids ids = ids_of(65);
  Teller teller = begin_named(engine, story, kFull, ids_of(64));
  prefill(engine, rig, teller, 64);
  const SequenceId rest = engine.fork(teller.id, 64);
  engine.truncate(teller.id, 40);
  // The fork has them all: a page more is needed, and there is none.
  teller.at = 40;
  teller.story = &other;
  REQUIRE(code_of([&] { (void)decode(engine, rig, teller); }) == Errc::out_of_capacity);
  REQUIRE(engine.match_prefix(kDense, ids) == 64);
  engine.end(rest);
  // The last page is given up for a copy of the one before it; then that has what comes.
  REQUIRE(engine.can_admit(16));
  require_dense(engine, rig, teller);
  REQUIRE(engine.match_prefix(kDense, ids) == 48);
  prefill(engine, rig, teller, 64);
  REQUIRE(engine.match_prefix(kDense, ids) == 32);
  const Ids others = ids_of(65, 1, 40);
  engine.name_tokens(teller.id, 40, std::span(others).subspan(40, 24));
  REQUIRE(engine.match_prefix(kDense, others) == 64);
  engine.truncate(teller.id, 44);
  teller.at = 44;
  Teller second{.story = &story, .id = engine.begin(kDense)};
  prefill(engine, rig, second, 16);
  REQUIRE(engine.match_prefix(kDense, others) == 48);
  // Nothing is left to give up but the page itself.
  require_dense(engine, rig, teller);
  REQUIRE(engine.match_prefix(kDense, others) == 32);
  prefill(engine, rig, teller, 48);
  engine.end(teller.id);
  REQUIRE(engine.memory().far_pages_cached == 2 * block_bytes(engine.options()));
  Teller last = begin_named(engine, story, kFull, ids_of(33));
  REQUIRE(last.at == 32);
  require_dense(engine, rig, last);
}

TEST_CASE("forwards that fail or are cancelled leave no names", "[engine][prefix]") {
  const EngineRig rig = engine_rig();
  const Story story(kShape, 120, 217);
  Story other(kShape, 120, 218);
  other.begin_as(story, 32);
  EngineOptions options = room_for(rig, 30);
  options.in_flight = 3;
  Engine engine(options, rig.device);
  const Ids ids = ids_of(100);
  Teller teller = begin_named(engine, story, kFull, ids);
  prefill(engine, rig, teller, 32);
  std::vector<ForwardTensors> tensors;
  for (int i = 0; i < 3; ++i) tensors.emplace_back(*rig.device, kShape, options.largest.rows());
  const auto start = [&](std::size_t which, const Story& told, std::uint32_t at, std::uint32_t count, bool enqueue) {
    for (std::uint32_t i = 0; i < count; ++i) tensors[which].set(i, told, at + i);
    const PlanItem item{.sequence = teller.id, .tokens = count, .prefill = true};
    const Batch batch = engine.plan({&item, 1}, engine.options().largest, rig.stream);
    if (enqueue) tensors[which].attend(engine, rig.stream);
    return batch;
  };
  // Two in flight, the first of which is not enqueued whole.
  const Batch lost = start(0, story, 32, 20, false);
  const Batch behind = start(1, story, 52, 20, true);
  REQUIRE(code_of([&] { engine.finish(behind); }) == Errc::device);
  REQUIRE(code_of([&] { engine.finish(lost); }) == Errc::device);
  const Batch cancelled = start(0, story, 32, 40, true);
  engine.cancel(cancelled);
  REQUIRE(engine.tokens(teller.id) == 32);
  // Something else comes instead, under no name.
  teller.story = &other;
  prefill(engine, rig, teller, 70);
  REQUIRE(engine.match_prefix(kDense, ids) == 32);
  REQUIRE(code_of([&] { engine.name_tokens(teller.id, 33, ids); }) == Errc::invalid_argument);
  const Ids others = ids_of(100, 1, 32);
  engine.name_tokens(teller.id, 32, std::span(others).subspan(32));
  REQUIRE(engine.match_prefix(kDense, others) == 64);
  REQUIRE(engine.match_prefix(kDense, ids) == 32);
  // Tokens of forwards that are finished in another order are known when all before them are.
  const Batch first = start(0, other, 70, 5, true);
  const Batch second = start(1, other, 75, 7, true);
  engine.finish(second);
  REQUIRE(engine.match_prefix(kDense, others) == 64);
  engine.finish(first);
  REQUIRE(engine.match_prefix(kDense, others) == 80);
  teller.at = 82;
  require_dense(engine, rig, teller);
}

TEST_CASE("a sequence that is preempted gives up what is near of it alone, and attends the same", "[engine][prefix]") {
  const EngineRig rig = engine_rig();
  const Story story(kShape, 160, 220);
  const char* const policy = "exact | int4 | top_k=20 | near=0,sinks=4,recent=40";
  std::vector<std::vector<float>> want;
  for (const bool preempted : {false, true}) {
    Engine engine(room_for(rig, 40, 20), rig.device);
    const std::uint64_t row = near_block_bytes(engine.options()) / 16;
    const auto near_rows = [&] { return engine.memory().near_pages_used / row; };
    Teller teller = begin_named(engine, story, policy, ids_of(100));
    prefill(engine, rig, teller, 100);
    Teller other = begin_named(engine, story, policy, ids_of(50));
    REQUIRE(other.at == 48);
    prefill(engine, rig, other, 50);
    REQUIRE(near_rows() == 102);
    if (preempted) {
      // Rows 48 to 99 of the one; the other's and what they share stay. Then rows of the token that comes.
      engine.preempt(teller.id);
      (void)decode(engine, rig, other);
      REQUIRE(near_rows() == 51);
      // While a forward with it is under way, too.
      ForwardTensors tensors(*rig.device, kShape, engine.options().largest.rows());
      tensors.set(0, story, other.at++);
      const PlanItem item{.sequence = other.id};
      const Batch batch = engine.plan({&item, 1}, engine.options().largest, rig.stream);
      engine.preempt(other.id);
      tensors.attend(engine, rig.stream);
      engine.finish(batch);
    } else {
      for (int i = 0; i < 2; ++i) (void)decode(engine, rig, other);
    }
    for (int i = 0; i < 20; ++i) {
      if (preempted && i % 7 == 3) engine.preempt(teller.id);
      const auto out = decode(engine, rig, teller);
      if (!preempted) want.push_back(out);
      REQUIRE(difference(out, want[i]) < tolerance(rig));
    }
    engine.end(other.id);
    engine.end(teller.id);
    REQUIRE(code_of([&] { engine.preempt(teller.id); }) == Errc::not_found);
    // What is only known is not near.
    Teller last{.story = &story, .id = engine.begin(parse_policy(policy))};
    (void)decode(engine, rig, last);
    REQUIRE(near_rows() == 1);
  }
}
