// Steps and prompts that return once they are queued, on a device with memory of its own: whatever the caller does next,
// what is queued keeps what it refers to, and a failure that shows late names the sequences that it concerns.
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "tests/runtime/prompt_toy.hpp"
#include "tests/support/catch.hpp"

using namespace sluice;
using namespace sluice::test;

namespace {

constexpr std::uint32_t kPrompt = 150;
constexpr std::uint32_t kTokens = 180;

cpu::Misbehaviour slow(std::uint64_t seed) {
  return {.seed = seed, .max_delay = std::chrono::microseconds(300), .reorder_copies = true};
}

std::size_t step_floats(const AttentionShape& shape) {
  return std::size_t{shape.layers} * shape.q_heads * shape.head_dim;
}

}  // namespace

TEST_CASE("a prompt of many sequences whose end is known decodes like each of them alone", "[queued]") {
  const std::string policy = GENERATE("lfps", "sluice", "history+pages | int4 | top_k=32 | near=10%");
  const auto sequences = GENERATE(1u, 2u, 3u, 5u);
  const bool ordered = GENERATE(false, true);
  CAPTURE(policy, sequences, ordered);
  std::vector<Toy> toys;
  std::vector<std::vector<float>> want;
  for (std::uint32_t i = 0; i < sequences; ++i) {
    toys.emplace_back(kShape, kTokens, 300 + i);
    Runtime runtime(options_with(sequences * kTokens, 400), separate_device());
    const SequenceId id = runtime.begin(parse_policy(policy));
    auto out = outputs(toys[i]);
    prefill_chunk(runtime, id, toys[i], 0, kPrompt, out, ordered, true);
    want.push_back(decode_rest(runtime, id, toys[i], kPrompt));
  }

  RuntimeOptions options = options_with(sequences * kTokens + 400, sequences * 400);
  options.prefill_chunk = kPrompt;  // Every sequence is a group of its own.
  Runtime runtime(options, separate_device());
  std::vector<SequenceId> ids;
  std::vector<std::vector<std::vector<float>>> out;
  for (const Toy& toy : toys) {
    ids.push_back(runtime.begin(parse_policy(policy)));
    out.push_back(outputs(toy));
  }
  for (std::uint32_t layer = 0; layer < kShape.layers; ++layer) {
    std::vector<PrefillArgs> batch;
    for (std::uint32_t i = 0; i < sequences; ++i) {
      batch.push_back({.sequence = ids[i],
                       .layer = LayerId{layer},
                       .q = toys[i].q(layer, 0, kPrompt),
                       .k = toys[i].k(layer, 0, kPrompt),
                       .v = toys[i].v(layer, 0, kPrompt),
                       .out = dense_view(out[i][layer].data(), DType::f32, kPrompt, kShape.q_heads, kShape.head_dim),
                       .ordered = ordered,
                       .last = true});
    }
    runtime.prefill(batch);
  }
  for (std::uint32_t i = 0; i < sequences; ++i) {
    CAPTURE(i);
    REQUIRE(worst_difference(decode_rest(runtime, ids[i], toys[i], kPrompt), want[i]) < 1e-5);
  }
}

TEST_CASE("sequences may begin and end while steps are queued", "[queued]") {
  const auto placement = GENERATE(PlacementMode::hybrid, PlacementMode::near, PlacementMode::stream);
  const std::string policy = GENERATE("full", "streaming:recent=180", "topk:budget=100%");
  const auto layers = GENERATE(1u, 2u);
  const auto seed = GENERATE(range(0ull, 3ull));
  CAPTURE(to_string(placement), policy, layers, seed);
  const AttentionShape shape{.layers = layers, .q_heads = 4, .kv_heads = 2, .head_dim = 16};
  const Toy toy(shape, kTokens, 310);
  RuntimeOptions options = toy_options(shape, 20 * kTokens);
  options.placement = placement;
  Runtime runtime(options, separate_device(slow(seed)));
  const SequenceId id = runtime.begin(parse_policy(policy));
  prefill(runtime, id, toy, kPrompt, 64, Drive::queued);

  std::vector<float> out((kTokens - kPrompt) * step_floats(shape));
  std::vector<SequenceId> others;
  std::vector<float> ignored(100 * step_floats(shape));
  for (std::uint32_t token = kPrompt; token < kTokens; ++token) {
    step_into(runtime, id, toy, token, out.data() + (token - kPrompt) * step_floats(shape), Drive::queued);
    switch ((token - kPrompt) % 4) {
      case 0: others.push_back(runtime.begin(parse_policy(policy))); break;  // Makes room for one more.
      case 1:
        for (std::uint32_t layer = 0; layer < layers; ++layer) {
          runtime.prefill({.sequence = others.back(),
                           .layer = LayerId{layer},
                           .q = toy.q(layer, 0, 40),
                           .k = toy.k(layer, 0, 40),
                           .v = toy.v(layer, 0, 40),
                           .out = dense_view(ignored.data(), DType::f32, 40, shape.q_heads, shape.head_dim),
                           .ordered = true});
        }
        break;
      case 2: step_into(runtime, others.back(), toy, 40, ignored.data(), Drive::queued); break;
      case 3:
        if ((token - kPrompt) % 8 != 3) break;
        runtime.end(others.back());  // Right behind a step of it.
        others.pop_back();
    }
  }
  runtime.synchronize();
  REQUIRE(worst_error(out, toy, kPrompt) < 2e-5);
  for (const SequenceId other : others) runtime.end(other);
  runtime.end(id);
  REQUIRE(runtime.info().host_pages_free == runtime.info().host_pages);
  REQUIRE(runtime.info().near_slots_free == runtime.info().near_slots);
}

TEST_CASE("a runtime may go while steps are queued", "[queued]") {
  const auto placement = GENERATE(PlacementMode::hybrid, PlacementMode::near, PlacementMode::stream);
  CAPTURE(to_string(placement));
  const Toy toy(kShape, kTokens, 311);
  std::vector<float> out(10 * step_floats(kShape));  // Stays until the runtime is gone.
  RuntimeOptions options = toy_options(kShape, 2 * kTokens);
  options.placement = placement;
  Runtime runtime(options, separate_device(slow(7)));
  const SequenceId id = runtime.begin(parse_policy("full:near=30%"));
  prefill(runtime, id, toy, kPrompt, 64, Drive::queued);
  for (std::uint32_t i = 0; i < 10; ++i) {
    step_into(runtime, id, toy, kPrompt + i, out.data() + i * step_floats(kShape), Drive::queued);
  }
  SUCCEED("and nothing that is queued outlives what it refers to");
}

TEST_CASE("a queued step that fails costs its own sequences, names them, and no others", "[queued]") {
  constexpr AttentionShape shape{.layers = 2, .q_heads = 4, .kv_heads = 2, .head_dim = 16};
  constexpr int kSequences = 4;
  std::uint32_t lost_in_all = 0;
  for (std::uint64_t seed = 0; seed < 60; ++seed) {
    CAPTURE(seed);
    const auto device = separate_device();
    RuntimeOptions options = toy_options(shape, kSequences * 2 * kTokens);
    options.placement = seed % 2 == 0 ? PlacementMode::near : PlacementMode::hybrid;
    Runtime runtime(options, device);
    std::vector<Toy> toys;
    std::vector<SequenceId> ids;
    for (int i = 0; i < kSequences; ++i) {
      toys.emplace_back(shape, kTokens, 320 + i);
      ids.push_back(runtime.begin(parse_policy("full")));
      prefill(runtime, ids.back(), toys.back(), kPrompt, 64, Drive::queued);
    }
    std::vector<std::vector<float>> out(kSequences, std::vector<float>((kTokens - kPrompt) * step_floats(shape)));
    std::set<int> lost;
    const auto learn = [&](const std::string& text) {
      REQUIRE(text.size() > 20);
      for (int i = 0; i < kSequences; ++i) {
        const std::string who = "sequence " + std::to_string(ids[i].value);
        if (contains(text, (who + " is lost").c_str())) lost.insert(i);
      }
    };
    device->misbehave({.seed = seed, .fail_verb = 0.003});
    for (std::uint32_t token = kPrompt; token < kTokens; ++token) {
      for (int i = 0; i < kSequences; ++i) {
        for (std::uint32_t layer = 0; layer < shape.layers && lost.count(i) == 0; ++layer) {
          const std::size_t at = ((token - kPrompt) * shape.layers + layer) * shape.q_heads * shape.head_dim;
          const StepArgs args{.layer = LayerId{layer},
                              .sequences = {&ids[i], 1},
                              .q = toys[i].q(layer, token, 1),
                              .k = toys[i].k(layer, token, 1),
                              .v = toys[i].v(layer, token, 1),
                              .out = dense_view(out[i].data() + at, DType::f32, 1, shape.q_heads, shape.head_dim),
                              .ordered = true};
          int attempts = 0;
          for (bool done = false; !done && lost.count(i) == 0;) {
            REQUIRE(++attempts < 50);
            try {
              runtime.step(args);
              done = true;
            } catch (const Error& error) {
              REQUIRE(error.code() == Errc::device);
              learn(error.what());
            }
          }
        }
      }
    }
    device->misbehave({});
    learn(complaint([&] { runtime.synchronize(); }) + std::string(21, ' '));
    for (int i = 0; i < kSequences; ++i) {
      CAPTURE(i);
      if (lost.count(i) != 0) {
        REQUIRE(contains(complaint([&] { (void)step(runtime, ids[i], toys[i], kTokens - 1); }), "end it"));
      } else {
        REQUIRE(runtime.tokens(ids[i]) == kTokens);
        REQUIRE(worst_error(out[i], toys[i], kPrompt) < 2e-5);
      }
      runtime.end(ids[i]);
    }
    lost_in_all += static_cast<std::uint32_t>(lost.size());
    REQUIRE(runtime.info().host_pages_free == runtime.info().host_pages);
    REQUIRE(runtime.info().near_slots_free == runtime.info().near_slots);
  }
  REQUIRE(lost_in_all > 10);
  REQUIRE(lost_in_all < 60 * kSequences / 2);
}
