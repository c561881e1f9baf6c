// The whole runtime on a GPU: the same answers as on the host device, whatever is near, whoever attends, however slow
// or unreliable streams and copies are.
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

TEST_CASE("the GPU gives the host device's answers for every policy and placement", "[gpu][runtime]") {
  const std::string policy =
      GENERATE("full", "full:near=0", "streaming", "topk", "lfps", "tactic:mass=100%", "magicpig", "sluice",
               "history+pages:pages=max(16, 3%) | int4 | top_k=100% | near=3%", "pages:box,pages=12 | int4 | top_p=0.9 | near=0%,sinks=4,recent=8",
               "exact | int4 | top_p=0.9 | near=10%");
  const auto placement =
      GENERATE(PlacementMode::hybrid, PlacementMode::stream, PlacementMode::near, PlacementMode::automatic);
  CAPTURE(policy, to_string(placement));
  constexpr std::uint32_t kTokens = 700, kSteps = 20;
  const auto device = make_cuda_device();
  const PinnedModel model(*device, kShape, kTokens + kSteps, 3);
  const RuntimeOptions options = options_for(kShape, kTokens + kSteps, placement);
  const auto on_gpu = generate(device, model, policy, options, kTokens, kSteps);
  const auto on_host = generate(nullptr, model, policy, options, kTokens, kSteps);
  // Page ranking and estimates round differently on the two, so that a page or token at the edge may be chosen by one
  // alone.
  const bool ranks = (policy.starts_with("sluice") || policy.find("int4") != std::string::npos) &&
                     placement != PlacementMode::near;
  REQUIRE(relative_error(on_gpu, on_host) < (ranks ? 0.05 : 0.01));
}

TEST_CASE("a prompt clustered by the GPU decodes the same in every run, and about as on the host", "[gpu][runtime]") {
  const auto head_dim = GENERATE(64u, 128u);
  CAPTURE(head_dim);
  constexpr std::uint32_t kTokens = 1'500, kSteps = 8;
  const AttentionShape shape{.layers = 2, .q_heads = 8, .kv_heads = 2, .head_dim = head_dim};
  const auto device = make_cuda_device();
  const PinnedModel model(*device, shape, kTokens + kSteps, 7);
  const RuntimeOptions options = options_for(shape, kTokens + kSteps, PlacementMode::hybrid);
  const auto first = generate(device, model, "tactic", options, kTokens, kSteps);
  REQUIRE(first == generate(device, model, "tactic", options, kTokens, kSteps));
  // A key between two centroids may go to either, so that the two attend to somewhat different tokens.
  REQUIRE(relative_error(first, generate(nullptr, model, "tactic", options, kTokens, kSteps)) < 0.3);
}

TEST_CASE("on the GPU any near share gives dense attention if everything is attended", "[gpu][runtime]") {
  const std::string policy = GENERATE("full:near=0", "full:near=30%", "full:near=100%",
                                      "pages:quest | progressive=1,microbatch=3 | near=0,sinks=4,recent=20");
  const auto placement = GENERATE(PlacementMode::hybrid, PlacementMode::stream);
  const auto page_tokens = GENERATE(8u, 16u, 64u);
  const auto head_dim = GENERATE(64u, 128u);
  CAPTURE(policy, to_string(placement), page_tokens, head_dim);
  constexpr std::uint32_t kTokens = 500, kSteps = 8;
  const AttentionShape shape{.layers = 1, .q_heads = 6, .kv_heads = 2, .head_dim = head_dim};
  const auto device = make_cuda_device();
  const PinnedModel model(*device, shape, kTokens + kSteps, 5);
  RuntimeOptions options = options_for(shape, kTokens + kSteps, placement);
  options.page_tokens = page_tokens;
  options.host_bytes *= 2;
  const auto got = generate(device, model, policy, options, kTokens, kSteps);
  RuntimeOptions near = options;
  near.placement = PlacementMode::near;
  near.near_bytes = options.host_bytes;
  const auto want = generate(device, model, "full", near, kTokens, kSteps);
  REQUIRE(relative_error(got, want) < 0.01);
}

TEST_CASE("ten thousand steps under delays on both sides are the calm run, bit by bit", "[gpu][runtime][soak]") {
  const std::string policy = GENERATE("history:share_group=on+pages:pages=max(16, 3%) | int4 | top_k=max(64, 1%) | near=20%,recent=32", "lfps");
  const auto placement = GENERATE(PlacementMode::hybrid, PlacementMode::automatic);
  if (placement == PlacementMode::automatic && policy == "lfps") return;  // Three of the four: 3 x 3,400 steps.
  CAPTURE(policy, to_string(placement));
  constexpr std::uint32_t kTokens = 600, kSteps = 3400;
  const AttentionShape shape{.layers = 2, .q_heads = 4, .kv_heads = 2, .head_dim = 64};
  const auto device = make_cuda_device();
  const PinnedModel model(*device, shape, kTokens + kSteps, 9);
  RuntimeOptions options = options_for(shape, kTokens + kSteps, placement);
  options.near_bytes /= 4;  // Slots change hands all the time.
  if (placement == PlacementMode::automatic)
    options.placement = PlacementMode::stream;  // Rates are measured, hence not repeatable.
  const auto calm = generate(device, model, policy, options, kTokens, kSteps);
  const Unruliness slow{.seed = 11, .device_delay_us = 200, .host_delay_us = 100, .delay_chance = 0.05};
  const auto delayed = generate(std::make_shared<UnrulyDevice>(device, slow), model, policy, options, kTokens, kSteps);
  REQUIRE(calm == delayed);
}

TEST_CASE("progressive attention under delays on both sides is the calm run, bit by bit", "[gpu][runtime]") {
  const std::string rule = GENERATE("least", "median", "certified");
  CAPTURE(rule);
  constexpr std::uint32_t kTokens = 900, kSteps = 60;
  const auto device = make_cuda_device();
  const PinnedModel model(*device, kShape, kTokens + kSteps, 10);
  RuntimeOptions options = options_for(kShape, kTokens + kSteps, PlacementMode::stream);
  options.near_bytes /= 4;  // Slots change hands all the time.
  const std::string policy = "pages:quest | progressive=0.8,microbatch=2,rule=" + rule + " | near=0,sinks=4,recent=20";
  const auto calm = generate(device, model, policy, options, kTokens, kSteps);
  const Unruliness slow{.seed = 12, .device_delay_us = 200, .host_delay_us = 100, .delay_chance = 0.05};
  const auto delayed = generate(std::make_shared<UnrulyDevice>(device, slow), model, policy, options, kTokens, kSteps);
  REQUIRE(calm == delayed);
}

TEST_CASE("failed copies end in a clear error or change nothing, and no page is lost", "[gpu][runtime]") {
  const auto seed = GENERATE(range(1, 21));
  CAPTURE(seed);
  constexpr std::uint32_t kTokens = 400, kSteps = 40;
  const auto device = make_cuda_device();
  const PinnedModel model(*device, kShape, kTokens + kSteps, 4);
  RuntimeOptions options = options_for(kShape, kTokens + kSteps, PlacementMode::hybrid);
  const auto unruly =
      std::make_shared<UnrulyDevice>(device, Unruliness{.seed = static_cast<std::uint64_t>(seed), .fail_copy = 0.05});
  Runtime runtime(options, unruly);
  const SequenceId id = runtime.begin(parse_policy("full:near=20%"));
  std::uint32_t failures = 0;
  const auto insist = [&](auto&& call) {
    for (int attempt = 0;; ++attempt) {
      try {
        call();
        return;
      } catch (const Error& error) {
        CAPTURE(std::string(error.what()));
        REQUIRE(error.code() == Errc::device);
        REQUIRE(attempt < 50);
        ++failures;
      }
    }
  };
  for (std::uint32_t at = 0; at < kTokens; at += 100) {
    for (std::uint32_t l = 0; l < kShape.layers; ++l) {
      insist([&] {
        runtime.prefill({.sequence = id,
                         .layer = LayerId{l},
                         .q = model.q(l, at, 100),
                         .k = model.k(l, at, 100),
                         .v = model.v(l, at, 100),
                         .out = model.out(100)});
      });
    }
  }
  std::vector<float> outs;
  for (std::uint32_t token = kTokens; token < kTokens + kSteps; ++token) {
    for (std::uint32_t l = 0; l < kShape.layers; ++l) {
      insist([&] {
        runtime.step({.layer = LayerId{l},
                      .sequences = std::span(&id, 1),
                      .q = model.q(l, token, 1),
                      .k = model.k(l, token, 1),
                      .v = model.v(l, token, 1),
                      .out = model.out(1)});
      });
    }
    const auto out = model.written(1);
    outs.insert(outs.end(), out.begin(), out.end());
  }
  runtime.end(id);
  REQUIRE(runtime.info().host_pages_free == runtime.info().host_pages);
  const auto want = generate(device, model, "full:near=20%", options, kTokens, kSteps);
  REQUIRE(relative_error(outs, want) < 0.01);
}

TEST_CASE("a refused pinning and an exhausted device pool say so", "[gpu][runtime]") {
  const auto device = make_cuda_device();
  const RuntimeOptions options = options_for(kShape, 400, PlacementMode::hybrid);
  try {
    Runtime runtime(options, std::make_shared<UnrulyDevice>(device, Unruliness{.refuse_pinning = true}));
    FAIL("a pool was built without pinned memory");
  } catch (const Error& error) {
    REQUIRE(error.code() == Errc::device);
    REQUIRE(std::string(error.what()).find("pinning") != std::string::npos);
  }
  try {
    Runtime runtime(options, make_cuda_device({.memory_bytes = 64 * KiB, .profile = nullptr}));
    FAIL("near memory was found where there is none");
  } catch (const Error& error) {
    REQUIRE(error.code() == Errc::out_of_capacity);
  }
  Runtime runtime(options, device);  // Nothing stayed registered.
  REQUIRE(runtime.info().host_pages_free == runtime.info().host_pages);
}

TEST_CASE("steps that return while queued give the same outputs", "[gpu][runtime]") {
  constexpr std::uint32_t kTokens = 600, kSteps = 64;
  const auto device = make_cuda_device();
  const PinnedModel model(*device, kShape, kTokens + kSteps, 8);
  RuntimeOptions options = options_for(kShape, kTokens + kSteps, PlacementMode::hybrid);
  options.near_bytes /= 4;
  const std::string policy = "history:share_group=on+pages:pages=max(16, 3%) | int4 | top_k=max(64, 1%) | near=20%,recent=32";
  const auto want = generate(device, model, policy, options, kTokens, kSteps);
  Runtime runtime(options, device);
  const SequenceId id = runtime.begin(parse_policy(policy));
  prompt(runtime, id, model, kTokens);
  const std::uint64_t row = std::uint64_t{kShape.q_heads} * kShape.head_dim;
  const auto outs = device->allocate_pinned(kSteps * kShape.layers * row * sizeof(float));
  for (std::uint32_t i = 0; i < kSteps; ++i) {
    for (std::uint32_t l = 0; l < kShape.layers; ++l) {
      std::byte* out = outs->data() + (std::uint64_t{i} * kShape.layers + l) * row * sizeof(float);
      runtime.step({.layer = LayerId{l},
                    .sequences = std::span(&id, 1),
                    .q = model.q(l, kTokens + i, 1),
                    .k = model.k(l, kTokens + i, 1),
                    .v = model.v(l, kTokens + i, 1),
                    .out = dense_view<std::byte>(out, DType::f32, 1, kShape.q_heads, kShape.head_dim),
                    .ordered = true});
    }
  }
  runtime.device_stream().synchronize(deadline_after(std::chrono::seconds(10)));
  std::vector<float> got;
  for (std::uint32_t i = 0; i < kSteps; ++i) {
    const auto* from =
        reinterpret_cast<const float*>(outs->data()) + (std::uint64_t{i} * kShape.layers + kShape.layers - 1) * row;
    got.insert(got.end(), from, from + row);
  }
  runtime.end(id);
  REQUIRE(got == want);
}
