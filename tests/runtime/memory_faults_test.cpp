// A process that runs short of memory: every allocation of a session may be the one that fails. The caller gets an Error,
// never another exception and never the end of the process; the sequences of the call are whole or named as lost, and
// others go on.
#include <string>

#include "sluice/error.hpp"
#include "tests/runtime/toy.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/failing_new.hpp"

using namespace sluice;
using namespace sluice::test;

namespace {

constexpr AttentionShape kShape{.layers = 2, .q_heads = 4, .kv_heads = 2, .head_dim = 16};
constexpr std::uint32_t kPrompt = 80;
constexpr std::uint32_t kTokens = 86;

bool is_lost(const Error& error) { return std::string(error.what()).find("lost") != std::string::npos; }

/// Outputs of a session, made before anything may fail, which stay until nothing that is queued writes to them.
struct Outputs {
  std::vector<std::vector<float>> prompt =
      std::vector(kShape.layers, std::vector<float>(std::size_t{kPrompt} * kShape.q_heads * kShape.head_dim));
  std::vector<float> steps =
      std::vector<float>(std::size_t{kTokens - kPrompt} * kShape.layers * kShape.q_heads * kShape.head_dim);
};

void run_session(Runtime& runtime, const PolicySpec& spec, const Toy& toy, Outputs& outputs, Drive drive) {
  const SequenceId id = runtime.begin(spec);
  const std::size_t row = std::size_t{kShape.q_heads} * kShape.head_dim;
  for (std::uint32_t at = 0; at < kPrompt; at += 40) {
    for (std::uint32_t layer = 0; layer < kShape.layers; ++layer) {
      runtime.prefill({.sequence = id,
                       .layer = LayerId{layer},
                       .q = toy.q(layer, at, 40),
                       .k = toy.k(layer, at, 40),
                       .v = toy.v(layer, at, 40),
                       .out = dense_view(outputs.prompt[layer].data() + at * row, DType::f32, 40, kShape.q_heads,
                                         kShape.head_dim),
                       .ordered = drive == Drive::queued,
                       .last = at + 40 == kPrompt});
    }
  }
  for (std::uint32_t token = kPrompt; token < kTokens; ++token) {
    step_into(runtime, id, toy, token, outputs.steps.data() + (token - kPrompt) * kShape.layers * row, drive);
  }
  runtime.synchronize();
}

/// A session of one sequence beside another, with one allocation that fails on the way.
struct Survival {
  bool reached = false;   ///< there was such an allocation
  bool reported = false;  ///< the caller got an error
};
Survival survive_session(Drive drive, const PolicySpec& spec, const Toy& toy, long which, const std::vector<float>& want) {
  Outputs outputs;
  Runtime runtime(toy_options(kShape, 3 * kTokens), device_of(drive));
  const SequenceId other = runtime.begin(parse_policy("full"));
  prefill(runtime, other, toy, kPrompt, 64, drive);
  Survival survival;
  fail_allocation(which);
  try {
    run_session(runtime, spec, toy, outputs, drive);
    survival.reached = one_failed();
    REQUIRE(worst_difference(outputs.steps, want) < 1e-5);
  } catch (const Error& error) {
    survival = {.reached = one_failed(), .reported = true};
    REQUIRE(std::string(error.what()).size() > 20);
    REQUIRE(error.code() != Errc::timeout);
  }
  // Whoever had no part in it decodes on; news of what was lost may come once.
  std::vector<float> got;
  for (int attempt = 0; attempt < 2 && got.empty(); ++attempt) {
    try {
      runtime.synchronize();
      got = decode_rest(runtime, other, toy, kPrompt);
    } catch (const Error& error) {
      INFO(error.what());
      REQUIRE(attempt == 0);
      REQUIRE(is_lost(error));
    }
  }
  REQUIRE(worst_error(got, toy, kPrompt) < 2e-5);
  runtime.end(other);
  return survival;
}

}  // namespace

TEST_CASE("every allocation of a session may fail", "[memory_faults]") {
  const Drive drive = GENERATE(Drive::waiting, Drive::queued);
  const std::string policy = GENERATE("full:near=30%", "history:share_group=on+pages:pages=max(16, 3%) | int4 | top_k=max(64, 1%) | near=30%,recent=16", "tactic", "magicpig",
                                      "pages:box,pages=3 | int4 | top_p=0.8 | near=0,sinks=4,recent=8");
  CAPTURE(to_string(drive), policy);
  const Toy toy(kShape, kTokens, 77);
  std::vector<float> want;
  {
    Runtime runtime(toy_options(kShape, 3 * kTokens), device_of(drive));
    Outputs outputs;
    run_session(runtime, parse_policy(policy), toy, outputs, drive);
    want = outputs.steps;
  }
  int failures = 0;
  bool reached = true;
  for (long which = 0; reached; which += 1 + which / 12) {
    CAPTURE(which);
    const Survival survival = survive_session(drive, parse_policy(policy), toy, which, want);
    reached = survival.reached;
    failures += survival.reported ? 1 : 0;
    REQUIRE(which < 1'000'000);
  }
  REQUIRE(failures > 20);
}

TEST_CASE("a runtime that cannot be built for want of memory says so", "[memory_faults]") {
  const Drive drive = GENERATE(Drive::waiting, Drive::queued);
  const auto options = toy_options(kShape, kTokens);
  const auto device = device_of(drive);
  int failures = 0;
  bool reached = true;
  for (long which = 0; reached; which += 1 + which / 30) {
    CAPTURE(which);
    fail_allocation(which);
    try {
      const Runtime runtime(options, device);
      reached = one_failed();
    } catch (const Error& error) {
      reached = one_failed();
      ++failures;
      REQUIRE(error.code() == Errc::out_of_capacity);
    }
  }
  REQUIRE(failures > 5);
}
