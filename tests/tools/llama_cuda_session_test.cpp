// A model on the GPU, its keys and values in host memory, its attention planned forwards of an Engine.
#include <cmath>
#include <string>
#include <vector>

#include "tests/support/catch.hpp"
#include "tests/tools/llama_cuda_support.hpp"
#include "tests/tools/llama_decode.hpp"
#include "tests/tools/llama_engine_cases.hpp"
#include "tests/tools/llama_failure.hpp"
#include "tests/tools/llama_golden.hpp"
#include "tools/llama/presets.hpp"
#include "tools/llama/sampler.hpp"

namespace {

using namespace sluice;
using namespace sluice::tools;
using sluice::test::decode_greedily;
using sluice::test::failure_of;
using sluice::test::GoldenCase;

/// See llama_cuda_model_test.cpp; bf16 keys and values included.
constexpr float kTolerance = 0.08f;

const Model& testbed_model() {
  static const Model model(test::testbed(), {.threads = 1, .device = test::gpu()});
  return model;
}

EngineOptions gpu_options(std::uint32_t chunk) { return test::engine_options(testbed_model(), DType::bf16, chunk); }

/// Two layers of the large shape; each is like the others.
Model large_layers() {
  ModelConfig config = preset_config("llama-3.1-8b");
  config.num_hidden_layers = 2;
  return Model::random(config, 11, {.threads = 1, .device = test::gpu()});
}

EngineOptions options_of(const Model& model, std::uint32_t chunk) {
  EngineOptions options = test::engine_options(model, DType::bf16, chunk);
  options.host_bytes = 256 * MiB;
  options.largest.max_tokens = 0;
  return options;
}

}  // namespace

TEST_CASE("the golden tokens come out on the GPU wherever keys and values are", "[llama][golden][engine][gpu]") {
  EngineOptions options = gpu_options(GENERATE(100u, 2048u));
  options.near_bytes = GENERATE(0u, 2u, 64u) * MiB;
  options.placement = GENERATE(PlacementMode::hybrid, PlacementMode::stream);
  const std::string policy =
      GENERATE("full", "sluice", "exact | int4 | top_k=all | near=0", "exact | int4 | top_p=1 | near=0");
  test::check_golden_on_engine(testbed_model(), test::gpu(), options, policy, kTolerance);
}

TEST_CASE("a recorded prompt, imported, decodes as it did on the GPU", "[llama][engine][gpu]") {
  // With chunks of 100 tokens the recorded queries span some.
  test::check_imported(testbed_model(), test::gpu(), gpu_options(GENERATE(100u, 512u)), GENERATE("full", "sluice"),
                       kTolerance);
}

TEST_CASE("a prompt recorded on the CPU decodes on the GPU", "[llama][engine][gpu]") {
  const GoldenCase golden = test::golden_cases().at(2);
  PromptCache prompt;
  {
    const Model model(test::testbed());
    sluice::Engine engine(test::engine_options(model, DType::bf16, 512), nullptr);
    EngineSession session(model, engine, nullptr, parse_policy("full"));
    session.prefill(golden.prompt, {}, &prompt);
  }
  sluice::Engine engine(gpu_options(512), test::gpu());
  EngineSession session(testbed_model(), engine, test::gpu(), parse_policy("full"));
  session.import_prompt(prompt);
  CHECK(decode_greedily(session, golden.greedy.size()) == golden.greedy);
}

TEST_CASE("a batch decodes on the GPU as its sessions alone would", "[llama][engine][gpu]") {
  // Batches of 3, for the matrix-vector kernel, and of 6, for cuBLASLt.
  test::check_batch(testbed_model(), test::gpu(), gpu_options(2048), GENERATE(1u, 2u));
}

TEST_CASE("random weights of the large shape decode on the GPU with finite logits", "[llama][engine][gpu]") {
  const Model model = large_layers();
  sluice::Engine engine(options_of(model, 2048), test::gpu());
  EngineSession session(model, engine, test::gpu(), parse_policy(GENERATE("full", "sluice")));
  std::vector<int> prompt;
  for (int i = 0; i < 1500; ++i) prompt.push_back((i * 7919) % 128'000);
  session.prefill(prompt);
  for (int step = 0; step < 4; ++step) {
    session.decode(argmax(session.logits()));
    double sum = 0;
    for (const float logit : session.logits()) sum += double{logit} * logit;
    const double deviation = std::sqrt(sum / model.config().vocab_size);
    CHECK(deviation > 0.5);  // of unit vectors times weights of unit variance per row
    CHECK(deviation < 2.0);
  }
}

TEST_CASE("a chunk of 16,384 tokens gives the logits that short ones give, dense or by blocks",
          "[llama][engine][gpu]") {
  const Model model = large_layers();
  std::vector<int> prompt;
  for (int i = 0; i < 16'500; ++i) prompt.push_back((i * 7919) % 128'000);
  const auto logits = [&](std::uint32_t chunk, const PrefillSpec& prefill) {
    EngineOptions options = options_of(model, chunk);
    options.prefill = prefill;
    sluice::Engine engine(options, test::gpu());
    EngineSession session(model, engine, test::gpu(), parse_policy("full"));
    session.prefill(prompt);
    return std::vector<float>(session.logits().begin(), session.logits().end());
  };
  const std::vector<float> want = logits(2048, {});
  // With gamma 1 every block with any weight is kept.
  const PrefillSpec everything{.mode = PrefillMode::flexprefill, .flex = {.gamma = 1.f}};
  for (const PrefillSpec& prefill : {PrefillSpec{}, everything}) {
    const std::vector<float> got = logits(16'384, prefill);
    double difference = 0, size = 0;
    for (std::size_t i = 0; i < want.size(); ++i) {
      difference += std::pow(double{got[i]} - want[i], 2);
      size += std::pow(double{want[i]}, 2);
    }
    CAPTURE(to_string(prefill.mode));
    CHECK(std::sqrt(difference / size) < 0.03);  // Products are rounded to bf16 in another order.
  }
}
