// The runtime with CUDA graphs: what it does without them.
#include <vector>

#include "sluice/cuda.hpp"
#include "sluice/error.hpp"
#include "sluice/runtime.hpp"
#include "tests/gpu/runtime_support.hpp"
#include "tests/gpu/unruly_device.hpp"
#include "tests/support/catch.hpp"

using namespace sluice;
using namespace sluice::test;

namespace {

constexpr AttentionShape kShape{.layers = 2, .q_heads = 8, .kv_heads = 2, .head_dim = 64};

}  // namespace

TEST_CASE("steps with CUDA graphs give the same bits, also under delays", "[gpu][runtime][graph]") {
  const std::string policy = GENERATE("full:near=20%", "topk", "lfps", "history:share_group=on+pages:pages=max(16, 3%) | int4 | top_k=max(64, 1%) | near=20%,recent=32",
                                      "pages:box,pages=12 | int4 | top_p=0.9 | near=0%,sinks=4,recent=8");
  const auto placement = GENERATE(PlacementMode::hybrid, PlacementMode::stream);
  CAPTURE(policy, to_string(placement));
  constexpr std::uint32_t kTokens = 500, kSteps = 120;
  RuntimeOptions options = options_for(kShape, kTokens + kSteps, placement);
  options.near_bytes /= 4;
  const auto run = [&](bool graphs, bool slow) {
    std::shared_ptr<Device> device = make_cuda_device({.graphs = graphs});
    const PinnedModel model(*device, kShape, kTokens + kSteps, 12);
    const Unruliness delays{.seed = 3, .device_delay_us = 200, .host_delay_us = 100, .delay_chance = 0.1};
    if (slow) device = std::make_shared<UnrulyDevice>(device, delays);
    return generate(device, model, policy, options, kTokens, kSteps);
  };
  const std::vector<float> want = run(false, false);
  REQUIRE(run(true, false) == want);
  REQUIRE(run(true, true) == want);
}

TEST_CASE("failed copies beside CUDA graphs end in a clear error, and the step can be repeated",
          "[gpu][runtime][graph]") {
  constexpr std::uint32_t kTokens = 300, kSteps = 60;
  const auto device = make_cuda_device({.graphs = true});
  const PinnedModel model(*device, kShape, kTokens + kSteps, 13);
  const RuntimeOptions options = options_for(kShape, kTokens + kSteps, PlacementMode::stream);
  const std::string policy = "full:near=20%";
  const auto want = generate(device, model, policy, options, kTokens, kSteps);
  Runtime runtime(options, std::make_shared<UnrulyDevice>(device, Unruliness{.seed = 2, .fail_copy = 0.02}));
  const SequenceId id = runtime.begin(parse_policy(policy));
  const auto insist = [](auto&& call) {
    for (int attempt = 0; attempt < 100; ++attempt) {
      try {
        return call();
      } catch (const Error& error) {
        REQUIRE(error.code() == Errc::device);
      }
    }
    FAIL("no attempt came through");
  };
  std::vector<float> got;
  for (std::uint32_t at = 0; at < kTokens + kSteps;) {
    const std::uint32_t count = at < kTokens ? std::min(options.prefill_chunk, kTokens - at) : 1;
    for (std::uint32_t l = 0; l < kShape.layers; ++l) {
      const auto q = model.q(l, at, count), k = model.k(l, at, count), v = model.v(l, at, count);
      insist([&] {
        if (at < kTokens) {
          runtime.prefill({.sequence = id, .layer = LayerId{l}, .q = q, .k = k, .v = v, .out = model.out(count)});
        } else {
          runtime.step({.layer = LayerId{l}, .sequences = {&id, 1}, .q = q, .k = k, .v = v, .out = model.out(1)});
        }
      });
    }
    if (at >= kTokens) {
      const auto out = model.written(1);
      got.insert(got.end(), out.begin(), out.end());
    }
    at += count;
  }
  REQUIRE(relative_error(got, want) < 0.01);
}
