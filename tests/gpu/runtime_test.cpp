// The whole runtime on a GPU: the same answers as on the host device, whatever is near, whoever attends, however slow
// or unreliable streams and copies are.
#include <cmath>
#include <cstring>
#include <random>
#include <vector>

#include "sluice/cuda.hpp"
#include "sluice/error.hpp"
#include "sluice/runtime.hpp"
#include "tests/gpu/unruly_device.hpp"
#include "tests/support/catch.hpp"

using namespace sluice;
using namespace sluice::test;

namespace {

constexpr AttentionShape kShape{.layers = 2, .q_heads = 8, .kv_heads = 2, .head_dim = 64};

/// A model that exists only as numbers, in pinned memory, which both kinds of device read.
class PinnedModel {
 public:
  PinnedModel(Device& device, const AttentionShape& shape, std::uint32_t tokens, std::uint32_t seed)
      : shape_(shape),
        tokens_(tokens),
        q_(device.allocate_pinned(bytes(shape.q_heads))),
        k_(device.allocate_pinned(bytes(shape.kv_heads))),
        v_(device.allocate_pinned(bytes(shape.kv_heads))),
        out_(device.allocate_pinned(bytes(shape.q_heads) + 64)) {
    std::mt19937 rng(seed);
    std::normal_distribution<float> normal;
    for (const auto* buffer : {&q_, &k_, &v_}) {
      auto* values = reinterpret_cast<float*>((*buffer)->data());
      // Rounded to bf16 as the cache will hold them, so that both devices start from the same numbers.
      for (std::size_t i = 0; i < (*buffer)->bytes() / sizeof(float); ++i) {
        std::uint32_t bits = 0;
        const float value = normal(rng);
        std::memcpy(&bits, &value, sizeof bits);
        bits &= 0xffff0000u;
        std::memcpy(&values[i], &bits, sizeof bits);
      }
    }
    auto* k = reinterpret_cast<float*>(k_->data());
    const std::size_t row = std::size_t{shape.kv_heads} * shape.head_dim;
    for (std::uint32_t token = 0; token < shape.layers * tokens; token += 37) {
      for (std::size_t c = 0; c < row; ++c) k[token * row + c] *= 4.f;
    }
  }
  [[nodiscard]] TensorView q(std::uint32_t layer, std::uint32_t token, std::uint32_t count) const {
    return view(q_, layer, token, count, shape_.q_heads);
  }
  [[nodiscard]] TensorView k(std::uint32_t layer, std::uint32_t token, std::uint32_t count) const {
    return view(k_, layer, token, count, shape_.kv_heads);
  }
  [[nodiscard]] TensorView v(std::uint32_t layer, std::uint32_t token, std::uint32_t count) const {
    return view(v_, layer, token, count, shape_.kv_heads);
  }
  [[nodiscard]] MutableTensorView out(std::uint32_t count) const {
    return dense_view<std::byte>(out_->data(), DType::f32, count, shape_.q_heads, shape_.head_dim);
  }
  [[nodiscard]] std::vector<float> written(std::uint32_t count) const {
    const auto* from = reinterpret_cast<const float*>(out_->data());
    return {from, from + std::size_t{count} * shape_.q_heads * shape_.head_dim};
  }
  [[nodiscard]] const AttentionShape& shape() const noexcept { return shape_; }

 private:
  [[nodiscard]] std::uint64_t bytes(std::uint32_t heads) const {
    return std::uint64_t{shape_.layers} * tokens_ * heads * shape_.head_dim * sizeof(float);
  }
  [[nodiscard]] TensorView view(const std::unique_ptr<Buffer>& buffer, std::uint32_t layer, std::uint32_t token,
                                std::uint32_t count, std::uint32_t heads) const {
    const std::uint64_t row = std::uint64_t{heads} * shape_.head_dim * sizeof(float);
    return dense_view<const std::byte>(buffer->data() + (std::uint64_t{layer} * tokens_ + token) * row, DType::f32,
                                       count, heads, shape_.head_dim);
  }
  AttentionShape shape_;
  std::uint32_t tokens_;
  std::unique_ptr<Buffer> q_, k_, v_, out_;
};

RuntimeOptions options_for(const AttentionShape& shape, std::uint32_t tokens, PlacementMode placement) {
  RuntimeOptions options;
  options.shape = shape;
  options.placement = placement;
  options.prefill_chunk = 128;
  options.threads = 4;
  options.pin_threads = false;
  options.timeout = std::chrono::seconds(20);
  const std::uint64_t pages = div_up(tokens, options.page_tokens) + 1;
  options.host_bytes = pages * shape.layers * shape.kv_heads * options.layout().page_bytes();
  options.near_bytes = options.host_bytes;
  return options;
}

void prompt(Runtime& runtime, SequenceId id, const PinnedModel& model, std::uint32_t tokens) {
  const std::uint32_t chunk = runtime.options().prefill_chunk;
  for (std::uint32_t at = 0; at < tokens; at += chunk) {
    const std::uint32_t count = std::min(chunk, tokens - at);
    for (std::uint32_t l = 0; l < model.shape().layers; ++l) {
      runtime.prefill({.sequence = id,
                       .layer = LayerId{l},
                       .q = model.q(l, at, count),
                       .k = model.k(l, at, count),
                       .v = model.v(l, at, count),
                       .out = model.out(count)});
    }
  }
}

/// Outputs of the last layer, step by step.
std::vector<float> decode(Runtime& runtime, SequenceId id, const PinnedModel& model, std::uint32_t first,
                          std::uint32_t steps) {
  std::vector<float> outs;
  for (std::uint32_t token = first; token < first + steps; ++token) {
    for (std::uint32_t l = 0; l < model.shape().layers; ++l) {
      runtime.step({.layer = LayerId{l},
                    .sequences = std::span(&id, 1),
                    .q = model.q(l, token, 1),
                    .k = model.k(l, token, 1),
                    .v = model.v(l, token, 1),
                    .out = model.out(1)});
    }
    const std::vector<float> out = model.written(1);
    outs.insert(outs.end(), out.begin(), out.end());
  }
  return outs;
}

std::vector<float> generate(std::shared_ptr<Device> device, const PinnedModel& model, const std::string& policy,
                            RuntimeOptions options, std::uint32_t tokens, std::uint32_t steps) {
  Runtime runtime(options, std::move(device));
  const std::uint32_t all = runtime.info().host_pages_free;
  const SequenceId id = runtime.begin(parse_policy(policy));
  prompt(runtime, id, model, tokens);
  std::vector<float> outs = decode(runtime, id, model, tokens, steps);
  runtime.end(id);
  REQUIRE(runtime.info().host_pages_free == all);
  REQUIRE(runtime.info().near_slots_free == runtime.info().near_slots);
  return outs;
}

double relative_error(const std::vector<float>& got, const std::vector<float>& want) {
  REQUIRE(got.size() == want.size());
  double difference = 0.0, size = 0.0;
  for (std::size_t i = 0; i < want.size(); ++i) {
    difference += std::pow(static_cast<double>(got[i]) - want[i], 2);
    size += std::pow(static_cast<double>(want[i]), 2);
  }
  return std::sqrt(difference / size);
}

}  // namespace

TEST_CASE("the GPU gives the host device's answers for every policy and placement", "[gpu][runtime]") {
  const std::string policy =
      GENERATE("full", "full:near=0", "streaming", "topk", "lfps", "sluice", "sluice:budget=100%");
  const auto placement =
      GENERATE(PlacementMode::hybrid, PlacementMode::stream, PlacementMode::near, PlacementMode::automatic);
  CAPTURE(policy, to_string(placement));
  constexpr std::uint32_t kTokens = 700, kSteps = 20;
  const auto device = make_cuda_device();
  const PinnedModel model(*device, kShape, kTokens + kSteps, 3);
  const RuntimeOptions options = options_for(kShape, kTokens + kSteps, placement);
  const auto on_gpu = generate(device, model, policy, options, kTokens, kSteps);
  const auto on_host = generate(nullptr, model, policy, options, kTokens, kSteps);
  // Page ranking rounds differently on the two, so that a page at the edge may be chosen by one alone.
  const bool ranks = policy.starts_with("sluice") && placement != PlacementMode::near;
  REQUIRE(relative_error(on_gpu, on_host) < (ranks ? 0.05 : 0.01));
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
  const std::string policy = GENERATE("sluice:near=20%,recent=32", "lfps");
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
  const std::string policy = "sluice:near=20%,recent=32";
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
