#include "sluice/error.hpp"
#include "tests/support/catch.hpp"
#include "tests/tools/llama_cuda_support.hpp"
#include "tests/tools/llama_failure.hpp"
#include "tests/tools/llama_fake_attention.hpp"
#include "tests/tools/llama_golden.hpp"
#include "tools/llama/model.hpp"
#include "tools/llama/presets.hpp"
#include "tools/llama/sampler.hpp"
#include "tools/llama/staging.hpp"

// The model's arithmetic on the GPU, its attention by the formula on the CPU: no engine is involved.
namespace {

using namespace sluice;
using namespace sluice::tools;
using sluice::test::failure_of;
using sluice::test::GoldenCase;
using sluice::test::max_abs_diff;

/// The same arithmetic with bf16 roundings, emulated in float32, is within 0.026 of the float32 reference.
constexpr float kTolerance = 0.08f;
constexpr std::chrono::milliseconds kTimeout{20'000};

/// Plain attention for calls in device memory.
class DeviceAttention {
 public:
  explicit DeviceAttention(const AttentionShape& shape)
      : plain_(shape),
        courier_(*test::gpu(), test::gpu_stream(), kTimeout),
        staging_(*test::gpu(), test::gpu_stream(), kTimeout) {}

  void operator()(const AttentionCall& call) {
    using Slot = TensorCourier::Slot;
    const std::vector<float> q = widen(courier_.to_host(Slot::q, call.q));
    const std::vector<float> k = widen(courier_.to_host(Slot::k, call.k));
    const std::vector<float> v = widen(courier_.to_host(Slot::v, call.v));
    std::vector<float> out(q.size());
    const auto view = [&](auto& values, std::uint32_t heads) {
      return dense_view(values.data(), DType::f32, call.q.tokens, heads, call.q.head_dim);
    };
    plain_({.layer = call.layer,
            .q = view(q, call.q.heads),
            .k = view(k, call.k.heads),
            .v = view(v, call.v.heads),
            .out = view(out, call.q.heads)});
    const std::vector<std::uint16_t> rounded = test::to_bf16(out);
    staging_.to_device(call.out.data, rounded.size() * 2, [&](std::span<std::byte> piece, std::uint64_t offset) {
      std::memcpy(piece.data(), reinterpret_cast<const std::byte*>(rounded.data()) + offset, piece.size());
    });
  }

 private:
  static std::vector<float> widen(const TensorView& view) {
    REQUIRE(view.dtype == DType::bf16);
    std::vector<float> values;
    for (std::uint32_t token = 0; token < view.tokens; ++token) {
      for (std::uint32_t head = 0; head < view.heads; ++head) {
        const auto* row = reinterpret_cast<const std::uint16_t*>(view.row(token, head));
        for (std::uint32_t i = 0; i < view.head_dim; ++i) values.push_back(tools::from_bf16(row[i]));
      }
    }
    return values;
  }

  test::PlainAttention plain_;
  TensorCourier courier_;
  Staging staging_;
};

struct Decoder : test::Decoder<DeviceAttention> {
  explicit Decoder(const Model& m) : test::Decoder<DeviceAttention>(m, &test::gpu_stream()) {}
};

const Model& testbed_model() {
  static const Model model(test::testbed(), {.threads = 1, .device = test::gpu()});
  return model;
}

}  // namespace

TEST_CASE("the model on the GPU reproduces the reference's tokens, and its logits within bf16",
          "[llama][golden][gpu]") {
  const Model& model = testbed_model();
  CHECK(model.device() == test::gpu().get());
  for (const GoldenCase& golden : test::golden_cases()) {
    CAPTURE(golden.prompt.size());
    Decoder decoder(model);
    decoder.feed(golden.prompt, 256);
    CHECK(max_abs_diff(decoder.logits, golden.logits) < kTolerance);
    std::vector<int> greedy;
    while (greedy.size() < golden.greedy.size()) {
      greedy.push_back(argmax(decoder.logits));
      decoder.feed(std::span(greedy).last(1), 1);
    }
    CHECK(greedy == golden.greedy);
  }
}

TEST_CASE("chunks of every product kernel compute the same logits on the GPU", "[llama][gpu]") {
  const GoldenCase golden = test::golden_cases().front();
  for (const std::size_t chunk : {1u, 2u, 3u, 4u, 5u, 9u, 28u}) {
    CAPTURE(chunk);
    Decoder parts(testbed_model());
    parts.feed(golden.prompt, chunk);
    CHECK(max_abs_diff(parts.logits, golden.logits) < kTolerance);
  }
}

TEST_CASE("random weights make the same model on GPU and CPU", "[llama][gpu]") {
  const ModelConfig config = preset_config("tiny");
  const Model near = Model::random(config, 3, {.threads = 1, .device = test::gpu()});
  const Model far = Model::random(config, 3, {.threads = 1});
  CHECK(near.parameters() == far.parameters());
  std::vector<PlacedToken> tokens;
  for (std::uint32_t i = 0; i < 40; ++i) tokens.push_back({static_cast<int>(i * 7 % config.vocab_size), i});

  // 1 row: the matrix-vector kernel; 9: cuBLASLt.
  const std::uint32_t rows = GENERATE(1u, 4u, 9u);
  std::vector<float> near_logits(std::size_t{rows} * config.vocab_size);
  std::vector<float> far_logits(near_logits.size());
  DeviceAttention near_attention(config.shape());
  Activations near_work;
  near_work.stream = &test::gpu_stream();
  near.forward(tokens, std::ref(near_attention), near_work);
  near.logits(near_work, rows, near_logits);
  test::PlainAttention far_attention(config.shape());
  Activations far_work;
  far.forward(tokens, std::ref(far_attention), far_work);
  far.logits(far_work, rows, far_logits);
  CHECK(max_abs_diff(near_logits, far_logits) < 0.03f);  // emulated: 0.006
}

TEST_CASE("a model on the GPU refuses what it cannot do", "[llama][gpu]") {
  Activations no_stream;
  const std::vector<PlacedToken> token = {{256, 0}};
  bool asked = false;
  const auto attend = [&](const AttentionCall&) { asked = true; };
  CHECK(failure_of([&] { testbed_model().forward(token, attend, no_stream); }).code == Errc::invalid_argument);
  CHECK_FALSE(asked);

  ModelConfig odd = preset_config("tiny");
  odd.intermediate_size = 100;
  const auto failure = failure_of([&] { (void)Model::random(odd, 1, {.threads = 1, .device = test::gpu()}); });
  CHECK(failure.code == Errc::unsupported);
  CHECK(test::mentions(failure.message, {"intermediate_size", "100", "8"}));

  ModelConfig huge = preset_config("llama-3.1-8b");
  huge.vocab_size = 1u << 24;  // As large as is taken for one: more than a GPU holds.
  CHECK(failure_of([&] { (void)Model::random(huge, 1, {.threads = 1, .device = test::gpu()}); }).code ==
        Errc::out_of_capacity);
}
