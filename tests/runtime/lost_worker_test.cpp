// A worker of a runtime that does not return in time, and goes on when the runtime has been destroyed. What it uses
// must still be there; the address sanitizer would tell.

#include <memory>
#include <random>
#include <string>
#include <vector>

#include "runtime/impl.hpp"
#include "tests/runtime/toy.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/stall.hpp"

namespace sluice::test {
namespace {

constexpr AttentionShape kShape{.layers = 2, .q_heads = 8, .kv_heads = 4, .head_dim = 128};
constexpr std::uint32_t kPrompt = 320;
constexpr std::uint32_t kTokens = 326;

/// The caller's tensors, which stay.
struct Tensors {
  Toy toy{kShape, kTokens, 5};
  std::vector<float> out = std::vector<float>(std::size_t{kPrompt} * kShape.q_heads * kShape.head_dim);
};

void run(Runtime& runtime, Tensors& tensors, const std::string& policy) {
  const Toy& toy = tensors.toy;
  const auto out = [&](std::uint32_t count) {
    return dense_view(tensors.out.data(), DType::f32, count, kShape.q_heads, kShape.head_dim);
  };
  const SequenceId id = runtime.begin(parse_policy(policy));
  for (std::uint32_t at = 0; at < kPrompt; at += 64) {
    for (std::uint32_t layer = 0; layer < kShape.layers; ++layer) {
      runtime.prefill({.sequence = id,
                       .layer = LayerId{layer},
                       .q = toy.q(layer, at, 64),
                       .k = toy.k(layer, at, 64),
                       .v = toy.v(layer, at, 64),
                       .out = out(64),
                       .last = at + 64 == kPrompt});
    }
  }
  for (std::uint32_t token = kPrompt; token < kTokens; ++token) {
    for (std::uint32_t layer = 0; layer < kShape.layers; ++layer) {
      runtime.step({.layer = LayerId{layer},
                    .sequences = {&id, 1},
                    .q = toy.q(layer, token, 1),
                    .k = toy.k(layer, token, 1),
                    .v = toy.v(layer, token, 1),
                    .out = out(1)});
    }
  }
  runtime.end(id);
}

}  // namespace

TEST_CASE("a worker that comes back late finds all of its runtime", "[runtime][lost]") {
  const std::string policy = GENERATE("lfps", "magicpig", "tactic", "psa", "topk", "twilight", "sluice");
  const auto seed = GENERATE(1u, 2u, 3u, 4u);
  std::mt19937 rng(seed);
  const auto skip = seed == 1 ? 0u : static_cast<std::uint32_t>(rng() % 120);
  CAPTURE(policy, skip);
  Tensors tensors;
  Stall stall(skip);
  RuntimeOptions options = toy_options(kShape, kTokens);
  options.threads = 3;
  options.audit_every = 2;
  options.timeout = std::chrono::milliseconds(seed % 2 == 0 ? 3 : 30);
  bool lost = false;
  try {
    auto runtime = std::make_unique<Runtime>(std::make_unique<Runtime::Impl>(options, nullptr, stall.hook()));
    try {
      run(*runtime, tensors, policy);
    } catch (const Error& error) {
      REQUIRE(error.code() == Errc::timeout);
      lost = true;
      REQUIRE_THROWS_AS((void)runtime->begin(parse_policy(policy)), Error);
    }
  } catch (const Error& error) {  // While it was built.
    REQUIRE(error.code() == Errc::timeout);
    lost = true;
  }
  if (seed == 1) REQUIRE(lost);
  stall.await_end();
}

}  // namespace sluice::test
