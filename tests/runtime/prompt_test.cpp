// The prompt phase on a device whose memory is apart: prefixes loaded over the link, windows, write-through beside it.
#include <memory>
#include <string>
#include <vector>

#include "sluice/error.hpp"
#include "tests/runtime/prompt_toy.hpp"
#include "tests/support/catch.hpp"

using namespace sluice;
using namespace sluice::test;

TEST_CASE("every chunk size gives dense attention, with prefixes loaded whole", "[runtime][concurrent]") {
  constexpr std::uint32_t kTokens = 75;
  const Toy toy(kShape, kTokens, 3);
  const bool ordered = GENERATE(false, true);
  for (std::uint32_t chunk = 1; chunk <= kTokens; ++chunk) {
    CAPTURE(chunk, ordered);
    Runtime runtime(options_with(kTokens, 200), separate_device());
    const SequenceId id = runtime.begin(parse_policy("full"));
    REQUIRE(worst_dense_error(prompt(runtime, id, toy, kTokens, chunk, ordered), toy, kTokens) < 2e-5);
    REQUIRE(runtime.tokens(id) == kTokens);
    runtime.end(id);
  }
}

TEST_CASE("a prefix that does not fit comes in windows, with the same result", "[runtime][concurrent]") {
  constexpr std::uint32_t kTokens = 1400;
  constexpr AttentionShape kSmall{.layers = 2, .q_heads = 4, .kv_heads = 2, .head_dim = 16};
  const Toy toy(kSmall, kTokens, 4);
  const bool ordered = GENERATE(false, true);
  const std::uint32_t chunk = GENERATE(64u, 50u);
  RuntimeOptions options = toy_options(kSmall, kTokens);
  options.near_bytes = 4 * kForced * options.layout().page_bytes();  // Of 2 x 88 pages per layer.
  Runtime runtime(options, separate_device());
  const SequenceId id = runtime.begin(modest());
  const auto windowed = prompt(runtime, id, toy, kTokens, chunk, ordered);
  options.near_bytes = 4 * options.host_bytes;
  Runtime roomy(options, separate_device());
  const SequenceId other = roomy.begin(modest());
  const auto whole = prompt(roomy, other, toy, kTokens, chunk, ordered);
  for (std::uint32_t layer = 0; layer < kSmall.layers; ++layer) {
    REQUIRE(worst_difference(windowed[layer], whole[layer]) < 1e-5);
  }
  REQUIRE(runtime.stats(id).h2d_bytes == roomy.stats(other).h2d_bytes);
  const std::size_t row = std::size_t{kSmall.q_heads} * kSmall.head_dim;
  for (const std::uint32_t token : {0u, 63u, 700u, kTokens - 1}) {
    const std::vector<double> want = toy.dense(1, token);
    for (std::size_t i = 0; i < row; ++i) REQUIRE(std::abs(want[i] - windowed[1][token * row + i]) < 2e-5);
  }
}

TEST_CASE("chunks longer than a prefill chunk, and a prefix in near memory, change nothing", "[runtime]") {
  constexpr std::uint32_t kTokens = 300;
  const Toy toy(kShape, kTokens, 5);
  Runtime runtime(options_with(kTokens, 2000), separate_device());
  const SequenceId id = runtime.begin(parse_policy("full"));
  auto out = outputs(toy);
  prefill_chunk(runtime, id, toy, 0, 150, out, true);  // prefill_chunk is 64.
  // Decoding brings pages near and opens one; a second prompt goes on from there.
  const std::size_t row = std::size_t{kShape.q_heads} * kShape.head_dim;
  for (std::uint32_t token = 150; token < 155; ++token) {
    const std::vector<float> stepped = step(runtime, id, toy, token);
    for (std::uint32_t layer = 0; layer < kShape.layers; ++layer) {
      std::copy_n(stepped.begin() + layer * row, row, out[layer].begin() + token * row);
    }
  }
  REQUIRE(runtime.info().near_slots_free < runtime.info().near_slots);
  prefill_chunk(runtime, id, toy, 155, kTokens - 155, out, true);
  runtime.synchronize();
  REQUIRE(worst_dense_error(out, toy, kTokens) < 2e-5);
}

TEST_CASE("a ragged batch equals its sequences one by one", "[runtime][concurrent]") {
  const Toy toy(kShape, 260, 6);
  const std::uint64_t near_pages = GENERATE(std::uint64_t{4} * kForced, std::uint64_t{2000});
  const bool ordered = GENERATE(false, true);
  RuntimeOptions options = options_with(3 * 260, near_pages);
  Runtime runtime(options, separate_device());
  struct Part {
    std::uint32_t first, count;
  };
  // Prefixes of different lengths, one empty; then a chunk each, one of a token and one longer than a prefill chunk.
  const std::vector<std::vector<Part>> calls{{{0, 10}, {0, 33}}, {{10, 1}, {33, 100}, {0, 7}}, {{11, 40}, {133, 20}, {7, 9}}};
  std::vector<SequenceId> ids;
  for (int i = 0; i < 3; ++i) ids.push_back(runtime.begin(modest()));
  std::vector<std::vector<std::vector<float>>> out(3, outputs(toy));
  const std::size_t row = std::size_t{kShape.q_heads} * kShape.head_dim;
  for (const auto& parts : calls) {
    for (std::uint32_t layer = 0; layer < kShape.layers; ++layer) {
      std::vector<PrefillArgs> batch;
      for (std::size_t s = 0; s < parts.size(); ++s) {
        const auto [first, count] = parts[s];
        batch.push_back({.sequence = ids[s],
                         .layer = LayerId{layer},
                         .q = toy.q(layer, first, count),
                         .k = toy.k(layer, first, count),
                         .v = toy.v(layer, first, count),
                         .out = dense_view(out[s][layer].data() + first * row, DType::f32, count, kShape.q_heads,
                                           kShape.head_dim),
                         .ordered = ordered});
      }
      runtime.prefill(batch);
    }
  }
  runtime.synchronize();
  const std::vector<std::uint32_t> lengths{51, 153, 16};
  for (std::size_t s = 0; s < 3; ++s) {
    CAPTURE(s);
    REQUIRE(runtime.tokens(ids[s]) == lengths[s]);
    REQUIRE(worst_dense_error(out[s], toy, lengths[s]) < 2e-5);
  }
  const PrefillArgs twice{.sequence = ids[0], .layer = LayerId{0}, .q = toy.q(0, 0, 1), .k = toy.k(0, 0, 1),
                          .v = toy.v(0, 0, 1),
                          .out = dense_view(out[0][0].data(), DType::f32, 1, kShape.q_heads, kShape.head_dim)};
  const std::vector<PrefillArgs> batch{twice, twice};
  REQUIRE(contains(complaint([&] { runtime.prefill(batch); }), "appears twice in the batch"));
}

TEST_CASE("delays and reordered copies change no bit of a prompt", "[runtime][concurrent]") {
  constexpr std::uint32_t kTokens = 170;
  const Toy toy(kShape, kTokens, 7);
  const std::uint64_t near_pages = GENERATE(std::uint64_t{60}, std::uint64_t{400});
  RuntimeOptions options = options_with(kTokens, near_pages);
  options.prefill_chunk = 32;
  const auto run = [&](const cpu::Misbehaviour& misbehaviour) {
    Runtime runtime(options, separate_device(misbehaviour));
    const SequenceId id = runtime.begin(parse_policy("lfps"));
    auto out = prompt(runtime, id, toy, kTokens - 6, 32, true);
    for (std::uint32_t token = kTokens - 6; token < kTokens; ++token) out.push_back(step(runtime, id, toy, token));
    return out;
  };
  const auto calm = run({});
  for (std::uint64_t seed = 1; seed <= 12; ++seed) {
    CAPTURE(seed, near_pages);
    REQUIRE(run({.seed = seed, .max_delay = std::chrono::microseconds(200), .reorder_copies = true}) == calm);
  }
}

TEST_CASE("a prompt chunk that failed may be repeated; an ordered one shows in a later call", "[runtime][concurrent]") {
  constexpr std::uint32_t kTokens = 120;
  const Toy toy(kShape, kTokens, 8);
  std::uint64_t failures = 0;
  for (std::uint64_t seed = 1; seed <= 20; ++seed) {
    CAPTURE(seed);
    const auto device = separate_device();
    Runtime runtime(options_with(kTokens, 400), device);
    const SequenceId id = runtime.begin(parse_policy("full"));
    device->misbehave({.seed = seed, .fail_copy = 0.1, .fail_verb = 0.1});
    auto out = outputs(toy);
    for (std::uint32_t at = 0; at < kTokens; at += 40) {
      for (std::uint32_t layer = 0; layer < kShape.layers; ++layer) {
        const std::size_t row = std::size_t{kShape.q_heads} * kShape.head_dim;
        for (int attempt = 0;; ++attempt) {
          REQUIRE(attempt < 100);
          try {
            runtime.prefill({.sequence = id,
                             .layer = LayerId{layer},
                             .q = toy.q(layer, at, 40),
                             .k = toy.k(layer, at, 40),
                             .v = toy.v(layer, at, 40),
                             .out = dense_view(out[layer].data() + at * row, DType::f32, 40, kShape.q_heads, kShape.head_dim)});
            break;
          } catch (const Error& error) {
            REQUIRE(error.code() == Errc::device);
            ++failures;
          }
        }
      }
    }
    device->misbehave({});
    REQUIRE(worst_dense_error(out, toy, kTokens) < 2e-5);
    const Stats stats = runtime.stats(id);
    REQUIRE(stats.d2h_bytes == std::uint64_t{2} * kShape.layers * kShape.kv_heads * kTokens * kShape.head_dim * 4);
  }
  REQUIRE(failures > 50);

  const auto device = separate_device();
  Runtime runtime(options_with(kTokens, 400), device);
  const SequenceId id = runtime.begin(parse_policy("full"));
  auto out = outputs(toy);
  prefill_chunk(runtime, id, toy, 0, 40, out, true);
  device->misbehave({.seed = 1, .fail_verb = 1.0});
  const std::string text = complaint([&] {
    prefill_chunk(runtime, id, toy, 40, 40, out, true);  // Its prefix lies in near slots that are lent.
    runtime.synchronize();
  });
  REQUIRE(contains(text, "failed"));
  device->misbehave({});
  runtime.end(id);
  REQUIRE(runtime.info().host_pages_free == runtime.info().host_pages);
  REQUIRE(runtime.info().near_slots_free == runtime.info().near_slots);
}

TEST_CASE("what a prompt hands over to decoding is what the first step would build", "[runtime][concurrent]") {
  constexpr std::uint32_t kTokens = 400;
  const Toy toy(kShape, kTokens, 9);
  const std::string policy = GENERATE(as<std::string>{}, "sluice", "lfps", "quest:budget=64", "twilight", "tactic",
                                      "pages:quest,budget=64 | int4 | top_k=32 | near=10%", "magicpig");
  CAPTURE(policy);
  const auto run = [&](bool separate, bool last) {
    RuntimeOptions options = options_with(kTokens, 2000);
    options.promote_pages = 0;
    Runtime runtime(options, separate ? separate_device() : nullptr);
    const SequenceId id = runtime.begin(parse_policy(policy));
    auto out = outputs(toy);
    for (std::uint32_t at = 0; at < 390; at += 130) prefill_chunk(runtime, id, toy, at, 130, out, true, last && at == 260);
    std::vector<float> steps;
    for (std::uint32_t token = 390; token < kTokens; ++token) {
      const std::vector<float> now = step(runtime, id, toy, token);
      steps.insert(steps.end(), now.begin(), now.end());
    }
    return steps;
  };
  const std::vector<float> built_by_step = run(false, false);
  REQUIRE(run(false, true) == built_by_step);
  REQUIRE(run(true, false) == run(true, true));
  REQUIRE(worst_difference(run(true, true), built_by_step) < 1e-5);
}

TEST_CASE("a prompt may go on after it was said to end", "[runtime][concurrent]") {
  constexpr std::uint32_t kTokens = 200;
  const Toy toy(kShape, kTokens, 10);
  const auto run = [&](bool last) {
    Runtime runtime(options_with(kTokens, 2000), separate_device());
    const SequenceId id = runtime.begin(parse_policy("history:share_group=on+pages:pages=max(16, 3%) | int4 | top_k=max(64, 1%) | near=3%"));
    auto out = outputs(toy);
    prefill_chunk(runtime, id, toy, 0, 90, out, true, last);
    prefill_chunk(runtime, id, toy, 90, 100, out, true, last);
    std::vector<float> steps;
    for (std::uint32_t token = 190; token < kTokens; ++token) {
      const std::vector<float> now = step(runtime, id, toy, token);
      steps.insert(steps.end(), now.begin(), now.end());
    }
    return steps;
  };
  REQUIRE(run(true) == run(false));
}

TEST_CASE("flexprefill with everything to keep equals dense; without room it says so", "[runtime]") {
  constexpr std::uint32_t kTokens = 700;
  constexpr AttentionShape kSmall{.layers = 2, .q_heads = 4, .kv_heads = 2, .head_dim = 16};
  const Toy toy(kSmall, kTokens, 11);
  RuntimeOptions options = toy_options(kSmall, kTokens);
  options.near_bytes = 4 * options.host_bytes;
  const bool separate = GENERATE(false, true);
  PrefillSpec spec{.mode = PrefillMode::flexprefill, .flex = {.gamma = 1.f, .min_budget = 128}};
  {
    Runtime runtime(options, separate ? separate_device() : nullptr);
    const SequenceId dense = runtime.begin(modest());
    const SequenceId flex = runtime.begin(modest(), spec);
    REQUIRE(runtime.info().host_pages != 0);
    const auto want = prompt(runtime, dense, toy, kTokens / 2, 64, true);
    const auto got = prompt(runtime, flex, toy, kTokens / 2, 64, true);
    for (std::uint32_t layer = 0; layer < kSmall.layers; ++layer) REQUIRE(worst_difference(want[layer], got[layer]) < 1e-5);
    const PromptStats stats = runtime.stats(flex).prompt;
    REQUIRE(stats.sparse_chunks > 0);
    REQUIRE(stats.kept_blocks == stats.causal_blocks);
  }
  if (!separate) return;
  options.near_bytes = 2 * kForced * options.layout().page_bytes();
  Runtime tight(options, separate_device());
  const SequenceId flex = tight.begin(modest(), spec);
  REQUIRE(contains(complaint([&] { prompt(tight, flex, toy, kTokens, 64, false); }), "raise near_bytes"));
  spec.mode = PrefillMode::automatic;
  const SequenceId automatic = tight.begin(modest(), spec);
  REQUIRE_THROWS_AS(tight.begin(modest(), {.flex = {.gamma = 0.f}}), Error);
  static_cast<void>(automatic);
}
