// The prompt phase when something goes wrong, and when calls come in an order that nobody planned for.
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "sluice/error.hpp"
#include "tests/runtime/prompt_toy.hpp"
#include "tests/support/catch.hpp"

using namespace sluice;
using namespace sluice::test;

namespace {

constexpr AttentionShape kOneLayer{.layers = 1, .q_heads = 4, .kv_heads = 2, .head_dim = 64};

std::vector<float> steps(Runtime& runtime, SequenceId id, const Toy& toy, std::uint32_t begin, std::uint32_t end) {
  std::vector<float> out;
  for (std::uint32_t token = begin; token < end; ++token) {
    const std::vector<float> now = step(runtime, id, toy, token);
    out.insert(out.end(), now.begin(), now.end());
  }
  return out;
}

/// A policy that clusters short prompts, too.
PolicySpec eager(const std::string& policy) {
  PolicySpec spec = parse_policy(policy);
  spec.clusters.min_tokens = 64;
  return spec;
}

Errc code_of(auto&& call) {
  try {
    call();
  } catch (const Error& error) {
    return error.code();
  }
  FAIL("the call did not throw");
  return Errc::device;
}

}  // namespace

TEST_CASE("a runtime may go while policies begin", "[runtime][concurrent]") {
  constexpr std::uint32_t kTokens = 600;
  const Toy toy(kShape, kTokens, 21);
  const std::string policy = GENERATE(as<std::string>{}, "tactic", "magicpig", "sluice");
  const auto device = separate_device();
  RuntimeOptions options = options_with(kTokens, 2000);
  options.prefill_chunk = kTokens;
  Runtime runtime(options, device);
  const SequenceId id = runtime.begin(eager(policy));
  auto out = outputs(toy);
  prefill_chunk(runtime, id, toy, 0, kTokens, out, true, true);
  runtime.synchronize();
  REQUIRE(runtime.tokens(id) == kTokens);
}

TEST_CASE("a prompt goes on while its first end is still queued", "[runtime][concurrent]") {
  constexpr std::uint32_t kTokens = 420;
  const AttentionShape shape = GENERATE(kOneLayer, kShape);
  const std::string policy = GENERATE(as<std::string>{}, "sluice", "tactic", "lfps");
  const Toy toy(shape, kTokens, 22);
  RuntimeOptions options = toy_options(shape, kTokens);
  options.prefill_chunk = kTokens;
  options.promote_pages = 0;
  const auto run = [&](bool first_last, bool second_last) {
    Runtime runtime(options, separate_device());
    const SequenceId id = runtime.begin(eager(policy));
    auto out = outputs(toy);
    prefill_chunk(runtime, id, toy, 0, 200, out, true, first_last);
    prefill_chunk(runtime, id, toy, 200, 210, out, true, second_last);
    return steps(runtime, id, toy, 410, kTokens);
  };
  const std::vector<float> want = run(false, false);
  REQUIRE(run(true, false) == want);
  REQUIRE(run(true, true) == want);
}

TEST_CASE("pages that filled while decoding are indexed when a prompt goes on behind them", "[runtime][concurrent]") {
  constexpr std::uint32_t kTokens = 300;
  const Toy toy(kShape, kTokens, 23);
  const Toy stranger(kShape, kTokens, 123);
  const std::string policy =
      GENERATE(as<std::string>{}, "pages:quest,budget=128 | near=0%", "twilight", "pages:quest,budget=64 | int4 | top_k=32 | near=0%");
  const auto run = [&](bool separate) {
    RuntimeOptions options = options_with(kTokens, 2000);
    options.promote_pages = 0;
    Runtime runtime(options, separate ? separate_device() : nullptr);
    auto out = outputs(toy);
    // Leaves its indices behind in frames that the next sequence gets.
    const SequenceId before = runtime.begin(parse_policy(policy));
    prefill_chunk(runtime, before, stranger, 0, 290, out, true, true);
    static_cast<void>(steps(runtime, before, stranger, 290, kTokens));
    runtime.end(before);
    const SequenceId id = runtime.begin(parse_policy(policy));
    prefill_chunk(runtime, id, toy, 0, 100, out, true, true);
    std::vector<float> all = steps(runtime, id, toy, 100, 128);  // The last step fills a page.
    prefill_chunk(runtime, id, toy, 128, 150, out, true, true);
    const std::vector<float> more = steps(runtime, id, toy, 278, kTokens);
    all.insert(all.end(), more.begin(), more.end());
    return all;
  };
  REQUIRE(worst_difference(run(true), run(false)) < 1e-5);
}

TEST_CASE("every sequence whose ordered prompt failed refuses to go on, and no other", "[runtime][concurrent]") {
  const Toy toy(kOneLayer, 100, 24);
  const auto device = separate_device();
  RuntimeOptions options = toy_options(kOneLayer, 400);
  Runtime runtime(options, device);
  std::vector<SequenceId> ids;
  for (int i = 0; i < 3; ++i) ids.push_back(runtime.begin(modest()));
  auto out = std::vector(3, outputs(toy));
  for (int i = 0; i < 3; ++i) prefill_chunk(runtime, ids[i], toy, 0, 40, out[i], true);
  runtime.synchronize();
  device->misbehave({.seed = 1, .fail_copy = 1.0});
  for (int i = 0; i < 2; ++i) prefill_chunk(runtime, ids[i], toy, 40, 10, out[i], true);
  device->misbehave({});
  // The news comes with a call about another sequence, which may be repeated.
  REQUIRE(contains(complaint([&] { static_cast<void>(step(runtime, ids[2], toy, 40)); }), "failed"));
  REQUIRE(step(runtime, ids[2], toy, 40).size() == 4 * 64);
  for (int i = 0; i < 2; ++i) {
    REQUIRE(code_of([&] { static_cast<void>(step(runtime, ids[i], toy, 50)); }) == Errc::device);
    REQUIRE(code_of([&] { prefill_chunk(runtime, ids[i], toy, 50, 10, out[i], true); }) == Errc::device);
    REQUIRE(code_of([&] { prefill_chunk(runtime, ids[i], toy, 50, 10, out[i], false); }) == Errc::device);
  }
  prefill_chunk(runtime, ids[2], toy, 41, 20, out[2], true);
  runtime.synchronize();
  for (const SequenceId id : ids) runtime.end(id);
  REQUIRE(runtime.info().host_pages_free == runtime.info().host_pages);
  REQUIRE(runtime.info().near_slots_free == runtime.info().near_slots);
}

TEST_CASE("a sequence that is ended before its ordered prompt is known to have failed says so", "[runtime][concurrent]") {
  const Toy toy(kOneLayer, 100, 26);
  const auto device = separate_device();
  Runtime runtime(toy_options(kOneLayer, 400), device);
  const SequenceId ids[] = {runtime.begin(modest()), runtime.begin(modest())};
  auto out = std::vector(2, outputs(toy));
  for (int i = 0; i < 2; ++i) prefill_chunk(runtime, ids[i], toy, 0, 40, out[i], true);
  runtime.synchronize();
  device->misbehave({.seed = 1, .fail_copy = 1.0});
  for (int i = 0; i < 2; ++i) prefill_chunk(runtime, ids[i], toy, 40, 10, out[i], true);
  device->misbehave({});
  REQUIRE(code_of([&] { runtime.end(ids[0]); }) == Errc::device);
  REQUIRE(code_of([&] { runtime.end(ids[0]); }) == Errc::not_found);  // It is gone all the same.
  REQUIRE(code_of([&] { static_cast<void>(step(runtime, ids[1], toy, 50)); }) == Errc::device);
  runtime.end(ids[1]);  // That is known.
  REQUIRE(runtime.info().host_pages_free == runtime.info().host_pages);
  REQUIRE(runtime.info().near_slots_free == runtime.info().near_slots);
}

TEST_CASE("a failed call leaves the healthy work of earlier ordered ones alone", "[runtime][concurrent]") {
  constexpr std::uint32_t kTokens = 700;
  const AttentionShape shape{.layers = 1, .q_heads = 4, .kv_heads = 2, .head_dim = 16};
  const Toy toy(shape, kTokens, 25);
  RuntimeOptions options = toy_options(shape, 2 * kTokens);
  options.near_bytes = 2 * kForced * options.layout().page_bytes();  // Too little for a choice of blocks.
  const PrefillSpec flex{.mode = PrefillMode::flexprefill, .flex = {.gamma = 1.f, .min_budget = 128}};
  const bool ordered = GENERATE(false, true);
  const auto run = [&](bool disturb) {
    Runtime runtime(options, separate_device());
    PolicySpec spec = parse_policy("lfps");
    spec.near = modest().near;
    const SequenceId id = runtime.begin(spec);
    const SequenceId big = runtime.begin(modest(), flex);
    auto out = outputs(toy);
    auto other = outputs(toy);
    if (disturb) prefill_chunk(runtime, big, toy, 0, 256, other, true);
    for (std::uint32_t at = 0; at < 320; at += 64) {
      prefill_chunk(runtime, id, toy, at, 64, out, true, at == 256);
      if (!disturb || at != 256) continue;
      REQUIRE(
          contains(complaint([&] { prefill_chunk(runtime, big, toy, 256, 400, other, ordered); }), "raise near_bytes"));
      REQUIRE(runtime.tokens(big) == 256);
    }
    runtime.synchronize();
    const Stats stats = runtime.stats(id);
    REQUIRE(stats.d2h_bytes == std::uint64_t{2} * 320 * shape.kv_heads * shape.head_dim * 4);
    REQUIRE(stats.prompt.dense_chunks == 5);
    return steps(runtime, id, toy, 320, 340);
  };
  REQUIRE(run(true) == run(false));
}

TEST_CASE("a call of many pieces that failed and was repeated is booked once", "[runtime][concurrent]") {
  constexpr std::uint32_t kTokens = 300;
  const Toy toy(kShape, kTokens, 26);
  RuntimeOptions options = options_with(kTokens, 400);
  options.prefill_chunk = 32;
  std::uint64_t failures = 0;
  const auto run = [&](double chance, std::uint64_t seed) {
    const auto device = separate_device();
    Runtime runtime(options, device);
    const SequenceId id = runtime.begin(parse_policy("lfps"));
    auto out = outputs(toy);
    device->misbehave({.seed = seed, .fail_copy = chance, .fail_verb = chance});
    for (const auto& [at, count] : {std::pair{0u, 120u}, std::pair{120u, 5u}, std::pair{125u, 163u}}) {
      const std::size_t row = std::size_t{kShape.q_heads} * kShape.head_dim;
      for (std::uint32_t layer = 0; layer < kShape.layers; ++layer) {
        for (int attempt = 0;; ++attempt) {
          REQUIRE(attempt < 400);
          try {
            runtime.prefill(
                {.sequence = id,
                 .layer = LayerId{layer},
                 .q = toy.q(layer, at, count),
                 .k = toy.k(layer, at, count),
                 .v = toy.v(layer, at, count),
                 .out = dense_view(out[layer].data() + at * row, DType::f32, count, kShape.q_heads, kShape.head_dim)});
            break;
          } catch (const Error& error) {
            REQUIRE(error.code() == Errc::device);
            ++failures;
          }
        }
      }
    }
    device->misbehave({});
    REQUIRE(worst_dense_error(out, toy, 288) < 2e-5);
    const Stats stats = runtime.stats(id);
    REQUIRE(stats.d2h_bytes == std::uint64_t{2} * kShape.layers * kShape.kv_heads * 288 * kShape.head_dim * 4);
    REQUIRE(stats.prefill_tokens == 288);
    return std::pair{steps(runtime, id, toy, 288, kTokens), stats.prompt.dense_chunks};
  };
  const auto calm = run(0.0, 0);
  for (std::uint64_t seed = 1; seed <= 6; ++seed) {
    CAPTURE(seed);
    REQUIRE(run(0.04, seed) == calm);
  }
  REQUIRE(failures > 10);
}

TEST_CASE("a prompt that failed keeps no pages", "[runtime]") {
  const Toy toy(kOneLayer, 300, 27);
  const auto device = separate_device();
  RuntimeOptions options = toy_options(kOneLayer, 200);  // 14 pages per head.
  Runtime runtime(options, device);
  const SequenceId a = runtime.begin(parse_policy("full"));
  const SequenceId b = runtime.begin(parse_policy("full"));
  auto out = outputs(toy);
  auto other = outputs(toy);
  prefill_chunk(runtime, a, toy, 0, 40, out, false);
  const std::uint32_t free = runtime.info().host_pages_free;
  const auto args = [&](SequenceId id, std::uint32_t at, std::uint32_t count, std::vector<std::vector<float>>& to) {
    return PrefillArgs{
        .sequence = id,
        .layer = LayerId{0},
        .q = toy.q(0, at, count),
        .k = toy.k(0, at, count),
        .v = toy.v(0, at, count),
        .out = dense_view(to[0].data() + at * 256, DType::f32, count, kOneLayer.q_heads, kOneLayer.head_dim)};
  };
  const std::vector<PrefillArgs> batch{args(a, 40, 60, out), args(b, 0, 200, other)};
  REQUIRE(code_of([&] { runtime.prefill(batch); }) == Errc::out_of_capacity);
  REQUIRE(runtime.info().host_pages_free == free);
  device->misbehave({.seed = 1, .fail_verb = 1.0});
  REQUIRE(code_of([&] { runtime.prefill(args(a, 40, 60, out)); }) == Errc::device);
  device->misbehave({});
  REQUIRE(runtime.info().host_pages_free == free);
  // Not repeated but decoded: nothing of the attempt is attended.
  const std::vector<float> stepped = step(runtime, a, toy, 40);
  const std::vector<double> want = toy.dense(0, 40);
  for (std::size_t i = 0; i < want.size(); ++i) REQUIRE(std::abs(want[i] - stepped[i]) < 2e-5);
}

TEST_CASE("a policy that could not begin may begin again", "[runtime][concurrent]") {
  constexpr std::uint32_t kTokens = 310;
  const Toy toy(kShape, kTokens, 28);
  const auto run = [&](bool disturb) {
    const auto device = separate_device();
    RuntimeOptions options = options_with(kTokens, 2000);
    options.promote_pages = 0;
    Runtime runtime(options, device);
    const SequenceId id = runtime.begin(eager("tactic"));
    auto out = outputs(toy);
    prefill_chunk(runtime, id, toy, 0, 300, out, false);
    if (disturb) {
      device->misbehave({.seed = 1, .fail_verb = 1.0});
      REQUIRE(code_of([&] { static_cast<void>(step(runtime, id, toy, 300)); }) == Errc::device);
      device->misbehave({});
    }
    const std::vector<float> out_of_steps = steps(runtime, id, toy, 300, kTokens);
    REQUIRE(runtime.stats(id).prompt.clusters_ns > 0);
    return out_of_steps;
  };
  REQUIRE(run(true) == run(false));
}

TEST_CASE("sequences decode between the chunks of another's prompt", "[runtime][concurrent]") {
  constexpr std::uint32_t kTokens = 260;
  const Toy toy(kShape, kTokens, 29);
  const std::uint32_t page_tokens = GENERATE(8u, 16u, 256u);
  const std::uint32_t chunk = GENERATE(1u, 30u);
  RuntimeOptions options = toy_options(kShape, 2 * kTokens);
  options.page_tokens = page_tokens;
  options.prefill_chunk = chunk;
  options.host_bytes =
      2 * kShape.layers * kShape.kv_heads * (div_up(kTokens, page_tokens) + 1) * options.layout().page_bytes();
  options.near_bytes = options.host_bytes;
  Runtime runtime(options,
                  separate_device({.seed = 3, .max_delay = std::chrono::microseconds(20), .reorder_copies = true}));
  const SequenceId decoding = runtime.begin(parse_policy("full"));
  const SequenceId growing = runtime.begin(parse_policy("full"));
  auto first = outputs(toy);
  auto second = outputs(toy);
  prefill_chunk(runtime, decoding, toy, 0, 3, first, true, true);
  const std::size_t row = std::size_t{kShape.q_heads} * kShape.head_dim;
  std::uint32_t at = 0;
  const std::uint32_t end = chunk == 1 ? 40 : 200;
  for (std::uint32_t token = 3; at < end; ++token) {
    const std::uint32_t count = std::min(chunk, end - at);
    prefill_chunk(runtime, growing, toy, at, count, second, true, at + count == end);
    at += count;
    std::vector<float> stepped(kShape.layers * row);
    for (std::uint32_t layer = 0; layer < kShape.layers; ++layer) {
      runtime.step(
          {.layer = LayerId{layer},
           .sequences = {&decoding, 1},
           .q = toy.q(layer, token, 1),
           .k = toy.k(layer, token, 1),
           .v = toy.v(layer, token, 1),
           .out = dense_view(first[layer].data() + token * row, DType::f32, 1, kShape.q_heads, kShape.head_dim),
           .ordered = true});
    }
  }
  runtime.synchronize();
  REQUIRE(worst_dense_error(first, toy, runtime.tokens(decoding)) < 2e-5);
  REQUIRE(worst_dense_error(second, toy, end) < 2e-5);
  REQUIRE(worst_error(steps(runtime, growing, toy, end, kTokens), toy, end) < 2e-5);
}

TEST_CASE("the least near memory and prompts of one token", "[runtime]") {
  const AttentionShape shape{.layers = 1, .q_heads = 2, .kv_heads = 1, .head_dim = 16};
  const Toy toy(shape, 30, 30);
  RuntimeOptions options = toy_options(shape, 30);
  options.near_bytes = options.layout().page_bytes();
  PolicySpec spec = parse_policy("streaming");
  spec.near.sink_tokens = 0;
  spec.near.recent_tokens = 0;
  Runtime runtime(options, separate_device());
  const SequenceId id = runtime.begin(spec);
  REQUIRE(runtime.info().near_slots == 1);
  auto out = outputs(toy);
  prefill_chunk(runtime, id, toy, 0, 1, out, true, true);
  REQUIRE(step(runtime, id, toy, 1).size() == 32);
  for (std::uint32_t at = 2; at < 29; ++at) prefill_chunk(runtime, id, toy, at, 1, out, true, true);
  REQUIRE(step(runtime, id, toy, 29).size() == 32);
  out[0].resize(32);  // Token 1 was decoded.
  REQUIRE(worst_dense_error(out, toy, 1) < 2e-5);
}
