// Short sequences attend everything: EngineOptions::dense_tokens, on every device.
#include "scheduler/plan/dense_advice.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/engine_policies.hpp"

using namespace sluice;
using namespace sluice::test;
using namespace sluice::test::policies;

namespace {

constexpr std::uint32_t kDense = 208;
constexpr const char* kFew = "exact | int4 | top_k=4 | near=0,sinks=4,recent=16";

EngineOptions dense_options(const EngineRig& rig, std::uint32_t near, std::uint32_t dense = kDense) {
  EngineOptions options = options_for(rig, 4, near);
  options.largest.unbounded = false;
  options.dense_tokens = dense;
  return named(options, {kManyTokens});
}

Teller begun(Engine& engine, const EngineRig& rig, const Story& story, std::uint32_t tokens,
             const char* policy = kFew) {
  Teller teller{.story = &story, .id = engine.begin(parse_policy(policy))};
  prefill(engine, rig, teller, tokens);
  return teller;
}

/// Rows with scales are listed, and attended far by the CPU.
bool may_be_whole(const EngineRig& rig) { return rig.kv_dtype != DType::fp8_e4m3; }

/// Decodes a token; by how much it is off what attending everything gives.
double off(Engine& engine, const EngineRig& rig, Teller& teller) {
  const std::vector<float> out = decode(engine, rig, teller);
  return error_of(out, *teller.story, teller.at - 1);
}

/// Decodes a token of each in a forward of this bucket.
std::vector<std::vector<float>> decode_in(Engine& engine, const EngineRig& rig, const Bucket& asked,
                                          const std::vector<Teller*>& tellers) {
  ForwardTensors tensors(*rig.device, kShape, asked.rows());
  std::vector<SequenceId> ids;
  for (std::uint32_t row = 0; row < tellers.size(); ++row) {
    tensors.set(row, *tellers[row]->story, tellers[row]->at++);
    ids.push_back(tellers[row]->id);
  }
  (void)run_batch(engine, rig, tensors, one_each(ids), asked);
  std::vector<std::vector<float>> out;
  for (std::uint32_t row = 0; row < tellers.size(); ++row) out.push_back(tensors.out(row));
  return out;
}

}  // namespace

TEST_CASE("a short sequence attends everything, a longer one what its policy chooses", "[engine][dense]") {
  const std::uint32_t near = GENERATE(0u, 5u, 40u);
  CAPTURE(near);
  const EngineRig rig = engine_rig();
  const Story story(kShape, kDense + 12, 801);
  Engine engine(dense_options(rig, near), rig.device);
  Teller teller = begun(engine, rig, story, kDense - 12);
  while (teller.at < kDense) {
    CAPTURE(teller.at);
    REQUIRE(off(engine, rig, teller) < 1e-3);
    REQUIRE(engine.stats().estimated == 0);
  }
  while (teller.at < story.tokens()) {
    CAPTURE(teller.at);
    REQUIRE(off(engine, rig, teller) > 1e-2);
  }
  REQUIRE(engine.stats().estimated != 0);
}

TEST_CASE("buckets of short sequences do without the stages that choose", "[engine][dense]") {
  const std::uint32_t near = GENERATE(0u, 60u);
  CAPTURE(near);
  const EngineRig rig = engine_rig();
  const Story first(kShape, kDense, 802), second(kShape, kDense, 803);
  Engine engine(dense_options(rig, near), rig.device);
  Bucket large = engine.options().largest;
  large.prefill_rows = large.prefills = 0;
  Bucket small = large;
  small.max_tokens = kDense;
  // One has pages of a policy that no bucket of this engine could serve if something were chosen.
  Teller a = begun(engine, rig, first, kDense - 20);
  Teller b = begun(engine, rig, second, 33, "exact | int4 | top_k=2 | near=0,sinks=1,recent=500");
  while (a.at < kDense) {
    CAPTURE(a.at, b.at);
    const auto out = decode_in(engine, rig, a.at % 3 == 0 ? large : small, {&a, &b});
    REQUIRE(error_of(out[0], first, a.at - 1) < 1e-3);
    REQUIRE(error_of(out[1], second, b.at - 1) < 1e-3);
  }
  const Batch batch = engine.plan(one_each(std::vector{b.id}), small, rig.stream);
  REQUIRE((!batch.bucket.top_k && batch.bucket.max_tokens == kDense));
  engine.cancel(batch);
  REQUIRE(code_of([&] { (void)engine.plan(one_each(std::vector{a.id}), small, rig.stream); }) == Errc::out_of_capacity);
}

TEST_CASE("what short sequences attend far comes near where there is room for all of it", "[engine][dense]") {
  const EngineRig rig = engine_rig();
  const Story story(kShape, kDense, 804), other(kShape, 300, 805);
  Engine engine(dense_options(rig, 14), rig.device);  // 224 tokens.
  Teller before = begun(engine, rig, other, 250);
  for (int i = 0; i < 40; ++i) (void)decode(engine, rig, before);  // Its window is near, and used.
  Teller teller = begun(engine, rig, story, kDense - 60);
  engine.end(before.id);
  std::uint64_t asked = 0;
  while (teller.at < kDense) {
    asked = engine.stats().asked;
    REQUIRE(off(engine, rig, teller) < 1e-3);
  }
  REQUIRE(engine.stats().asked == asked);  // Nothing was far in the end,
  REQUIRE(engine.memory().near_pages_used ==
          kDense * near_block_bytes(engine.options()) / engine.options().page_tokens);
}

TEST_CASE("what is attended whole comes over the link at first, in slices, and then near", "[engine][dense]") {
  constexpr std::uint32_t kLong = 1'200;
  const EngineRig rig = engine_rig();
  const Story story(kShape, kLong, 808);
  EngineOptions options = dense_options(rig, 76, kLong);
  options.host_bytes = 90 * block_bytes(options);
  options.largest.decode_rows = 1;
  Engine engine(options, rig.device);
  Teller teller = begun(engine, rig, story, kLong - 60);
  Bucket bucket = engine.options().largest;
  bucket.prefill_rows = bucket.prefills = 0;
  bucket.max_tokens = kLong;
  const auto decode_some = [&](std::uint32_t tokens) {
    for (const std::uint32_t end = teller.at + tokens; teller.at < end;) {
      CAPTURE(teller.at);
      const std::vector<float> out = decode_in(engine, rig, bucket, {&teller})[0];
      REQUIRE(error_of(out, story, teller.at - 1) < 1e-3);
    }
  };
  decode_some(4);
  REQUIRE(engine.stats().fetched_tokens == 0);
  engine.preempt(teller.id);
  decode_some(20);
  const std::uint64_t fetched = engine.stats().fetched_tokens, asked = engine.stats().asked;
  REQUIRE((fetched != 0) == may_be_whole(rig));
  REQUIRE((asked == 0) == may_be_whole(rig));
  REQUIRE(engine.stats().promoted != 0);
  decode_some(20);
  REQUIRE(engine.stats().fetched_tokens == fetched);  // All of it is near again.
  REQUIRE(engine.stats().asked == asked);
}

TEST_CASE("rows that are kept near are kept whatever is planned between them", "[engine][dense]") {
  const EngineRig rig = engine_rig();
  const Story story(kShape, kDense, 809), other(kShape, 400, 810);
  EngineOptions options = dense_options(rig, 30);  // 480 tokens.
  options.largest.decode_rows = 2;
  Engine engine(options, rig.device);
  Teller teller = begun(engine, rig, story, 100);
  Teller longer = begun(engine, rig, other, 300);
  Bucket bucket = engine.options().largest;
  bucket.prefill_rows = bucket.prefills = 0;
  const Bucket large = bucket;
  bucket.max_tokens = kDense;
  (void)decode_in(engine, rig, bucket, {&teller});
  engine.preempt(teller.id);
  // Every other plan, whatever their numbers.
  if (GENERATE(false, true)) (void)decode_in(engine, rig, large, {&longer});
  for (int i = 0; i < 40; ++i) {
    (void)decode_in(engine, rig, bucket, {&teller});
    (void)decode_in(engine, rig, large, {&longer});
  }
  const std::uint64_t fetched = engine.stats().fetched_tokens;
  (void)decode_in(engine, rig, bucket, {&teller});
  REQUIRE(engine.stats().fetched_tokens == fetched);
}

TEST_CASE("whole rows attend in several launches, of more query heads than a thread block has, beside prompts",
          "[engine][dense]") {
  constexpr AttentionShape kWide{.layers = 1, .q_heads = 40, .kv_heads = 2, .head_dim = 64};
  constexpr std::uint32_t kRows = 130;
  const EngineRig rig = engine_rig();
  const Story story(kWide, 60, 811);
  const auto attended = [&](std::uint32_t dense) {
    EngineOptions options{.shape = kWide,
                          .softcap = 7.f,
                          .kv_dtype = rig.kv_dtype,
                          .dense_tokens = dense,
                          .policies = {parse_policy("none | near=0")},
                          .largest = {.decode_rows = kRows,
                                      .prefill_rows = 9,
                                      .prefills = 1,
                                      .max_tokens = 48,
                                      .top_k = false,
                                      .unbounded = dense == 0},
                          .threads = 2,
                          .pin_threads = false};
    options.host_bytes = 3 * kRows * block_bytes(options);
    options.near_bytes = 3 * kRows * near_block_bytes(options);
    options.sequences = kRows + 1;
    options.prefill_window = 64;
    Engine engine(options, rig.device);
    Teller first{.story = &story, .id = engine.begin(parse_policy("full"))};
    import_story(engine, rig, first, 33);
    Teller prompt{.story = &story, .id = engine.begin(parse_policy("full"))};
    import_story(engine, rig, prompt, 20);
    std::vector<PlanItem> items{{.sequence = first.id}};
    for (std::uint32_t i = 1; i < kRows; ++i) items.push_back({.sequence = engine.fork(first.id, 33 - i % 30)});
    items.push_back({.sequence = prompt.id, .tokens = 9, .prefill = true});
    ForwardTensors tensors(*rig.device, kWide, kRows + 9);
    for (std::uint32_t i = 0; i < kRows; ++i) tensors.set(i, story, 33 - i % 30);
    for (std::uint32_t i = 0; i < 9; ++i) tensors.set(kRows + i, story, 20 + i);
    const Batch batch = run_batch(engine, rig, tensors, items, engine.options().largest);
    REQUIRE(batch.bucket.whole == (dense != 0 && may_be_whole(rig)));
    std::vector<std::vector<float>> out;
    for (std::uint32_t i = 0; i < kRows + 9; ++i) out.push_back(tensors.out(i));
    return out;
  };
  const auto want = attended(0);
  const auto got = attended(48);
  for (std::size_t i = 0; i < want.size(); ++i) {
    CAPTURE(i);
    REQUIRE(difference(got[i], want[i]) < tolerance(rig));
  }
}

TEST_CASE("where there is no room for all of a sequence nothing moves for it", "[engine][dense]") {
  const EngineRig rig = engine_rig();
  const Story story(kShape, kDense, 806);
  Engine engine(dense_options(rig, 6), rig.device);
  Teller teller = begun(engine, rig, story, kDense - 30);
  while (teller.at < kDense) REQUIRE(off(engine, rig, teller) < 1e-3);
  REQUIRE(engine.stats().promoted == 0);
}

TEST_CASE("policies that choose on the CPU choose however short sequences are", "[engine][dense]") {
  const EngineRig rig = engine_rig();
  const Story story(kShape, 130, 807);
  EngineOptions options = options_for(rig, 1, 20);
  options.dense_tokens = kDense;
  Engine engine(options, rig.device);
  Teller teller = begun(engine, rig, story, 120, "exact | top_k=2 | near=0,sinks=1,recent=4");
  REQUIRE(off(engine, rig, teller) > 1e-2);
}

TEST_CASE("an engine says up to how many tokens it attends everything", "[engine][dense]") {
  const EngineRig rig = engine_rig();
  const auto resolved = [&](std::uint32_t near, std::uint32_t rows) {
    EngineOptions options = dense_options(rig, near, kDenseAuto);
    options.largest.decode_rows = rows;
    return Engine(options, rig.device).options().dense_tokens;
  };
  if (rig.device->info().own_processor) {
    REQUIRE(resolved(0, 1) == 0);
    REQUIRE(resolved(40, 1) == 640);  // What there is room for,
    REQUIRE(resolved(40, 3) == 208);  // of each of three.
  } else {
    const std::uint32_t advised = scheduler::dense_tokens_of_cpu(parse_policy("sluice"), kShape, rig.kv_dtype);
    REQUIRE(advised != 0);
    for (const std::uint32_t near : {0u, 40u}) REQUIRE(resolved(near, 3) == advised);
  }
  REQUIRE(Engine(dense_options(rig, 0, 77), rig.device).options().dense_tokens == 77);
  REQUIRE(code_of([&] { Engine(dense_options(rig, 0, 1u << 31), rig.device); }) == Errc::invalid_argument);
}
