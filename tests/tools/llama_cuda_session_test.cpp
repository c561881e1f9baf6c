#include <cmath>
#include <string>
#include <vector>

#include "sluice/runtime.hpp"
#include "tests/support/catch.hpp"
#include "tests/tools/llama_cuda_support.hpp"
#include "tests/tools/llama_decode.hpp"
#include "tests/tools/llama_engine_cases.hpp"
#include "tests/tools/llama_failure.hpp"
#include "tests/tools/llama_golden.hpp"
#include "tools/llama/presets.hpp"
#include "tools/llama/sampler.hpp"
#include "tools/llama/session.hpp"

// Model and runtime on the GPU, the KV cache in host memory.
namespace {

using namespace sluice;
using namespace sluice::tools;
using sluice::test::decode_greedily;
using sluice::test::failure_of;
using sluice::test::GoldenCase;
using sluice::test::max_abs_diff;

/// See llama_cuda_model_test.cpp; bf16 keys and values included.
constexpr float kTolerance = 0.08f;

const Model& testbed_model() {
  static const Model model(test::testbed(), {.threads = 1, .device = test::gpu()});
  return model;
}

RuntimeOptions gpu_options() {
  RuntimeOptions options;
  options.shape = testbed_model().config().shape();
  options.kv_dtype = DType::bf16;
  options.host_bytes = 64 * MiB;
  options.near_bytes = 64 * MiB;
  options.pin_threads = false;
  return options;
}

void check_golden(const RuntimeOptions& options, const std::string& policy) {
  Runtime runtime(options, test::gpu());
  for (const GoldenCase& golden : test::golden_cases()) {
    CAPTURE(golden.prompt.size(), policy, to_string(options.placement), options.page_tokens, options.prefill_chunk);
    Session session(testbed_model(), runtime, parse_policy(policy));
    session.prefill(golden.prompt);
    CHECK(max_abs_diff(session.logits(), golden.logits) < kTolerance);
    CHECK(decode_greedily(session, golden.greedy.size()) == golden.greedy);
    CHECK(session.tokens() == golden.prompt.size() + golden.greedy.size() - 1);
  }
}

}  // namespace

TEST_CASE("the golden tokens come out on the GPU with everything near", "[llama][golden][session][gpu]") {
  RuntimeOptions options = gpu_options();
  options.placement = PlacementMode::near;
  options.page_tokens = GENERATE(16u, 32u);
  check_golden(options, "full:near=100%");
}

TEST_CASE("the golden tokens come out on the GPU at every placement", "[llama][golden][session][gpu]") {
  RuntimeOptions options = gpu_options();
  options.placement =
      GENERATE(PlacementMode::hybrid, PlacementMode::stream, PlacementMode::near, PlacementMode::automatic);
  check_golden(options, GENERATE("full", "full:near=1%"));
}

TEST_CASE("the golden tokens come out on the GPU under the default policy", "[llama][golden][session][gpu]") {
  RuntimeOptions options = gpu_options();
  options.placement = GENERATE(PlacementMode::hybrid, PlacementMode::stream);
  check_golden(options, "sluice");
}

TEST_CASE("chunk size and promotion change no golden token on the GPU", "[llama][golden][session][gpu]") {
  RuntimeOptions options = gpu_options();
  options.prefill_chunk = GENERATE(100u, 4096u);
  options.promote_pages = GENERATE(0u, 64u);
  check_golden(options, "full:near=20%");
}

TEST_CASE("the golden tokens come out of planned forwards on the GPU", "[llama][golden][engine][gpu]") {
  EngineOptions options = test::engine_options(testbed_model(), DType::bf16, GENERATE(100u, 2048u));
  options.near_bytes = GENERATE(0u, 2u, 64u) * MiB;
  const std::string policy = GENERATE("full", "exact | int4 | top_k=all | near=0", "exact | int4 | top_p=1 | near=0");
  test::check_golden_on_engine(testbed_model(), test::gpu(), options, policy, kTolerance);
}

TEST_CASE("a recorded prompt, imported, decodes as it did on the GPU", "[llama][session][gpu]") {
  RuntimeOptions options = gpu_options();
  options.prefill_chunk = GENERATE(100u, 512u);  // 100: the recorded queries span chunks
  const char* policy = GENERATE("full", "sluice");
  const GoldenCase golden = test::golden_cases().at(1);
  CAPTURE(policy, options.prefill_chunk);

  PromptCache prompt;
  {
    Runtime runtime(options, test::gpu());
    Session session(testbed_model(), runtime, parse_policy("full"));
    session.prefill(golden.prompt, {}, &prompt);
    CHECK(decode_greedily(session, golden.greedy.size()) == golden.greedy);
  }
  Runtime runtime(options, test::gpu());
  Session session(testbed_model(), runtime, parse_policy(policy));
  session.import_prompt(prompt);
  CHECK(max_abs_diff(session.logits(), prompt.logits()) == 0.f);
  CHECK(decode_greedily(session, golden.greedy.size()) == golden.greedy);
}

TEST_CASE("a prompt recorded on the CPU decodes on the GPU", "[llama][session][gpu]") {
  const GoldenCase golden = test::golden_cases().at(2);
  PromptCache prompt;
  {
    const Model model(test::testbed());
    Runtime runtime(gpu_options());
    Session session(model, runtime, parse_policy("full"));
    session.prefill(golden.prompt, {}, &prompt);
  }
  Runtime runtime(gpu_options(), test::gpu());
  Session session(testbed_model(), runtime, parse_policy("full"));
  session.import_prompt(prompt);
  CHECK(decode_greedily(session, golden.greedy.size()) == golden.greedy);
}

TEST_CASE("a batch decodes on the GPU as its sessions alone would", "[llama][session][gpu]") {
  Runtime runtime(gpu_options(), test::gpu());
  const auto cases = test::golden_cases();
  const std::size_t copies = GENERATE(1u, 2u);  // batches of 3, for the matrix-vector kernel, and of 6, for cuBLASLt
  std::vector<Session> sessions;
  sessions.reserve(copies * cases.size());
  std::vector<Session*> batch;
  for (std::size_t i = 0; i < copies * cases.size(); ++i) {
    auto& session = sessions.emplace_back(testbed_model(), runtime, parse_policy("full"));
    session.prefill(cases[i % cases.size()].prompt);
    batch.push_back(&session);
  }
  std::vector<int> tokens(batch.size());
  std::vector<std::vector<int>> outputs(batch.size());
  for (std::size_t step = 0; step < cases.front().greedy.size(); ++step) {
    for (std::size_t i = 0; i < batch.size(); ++i) outputs[i].push_back(tokens[i] = argmax(batch[i]->logits()));
    decode_batch(batch, tokens);
  }
  for (std::size_t i = 0; i < batch.size(); ++i) CHECK(outputs[i] == cases[i % cases.size()].greedy);
}

TEST_CASE("model and runtime must be in the same place", "[llama][session][gpu]") {
  Runtime on_gpu(gpu_options(), test::gpu());
  Runtime on_cpu(gpu_options());
  const Model cpu_model(test::testbed());
  CHECK(failure_of([&] { const Session misfit(cpu_model, on_gpu, parse_policy("full")); }).code ==
        Errc::invalid_argument);
  CHECK(failure_of([&] { const Session misfit(testbed_model(), on_cpu, parse_policy("full")); }).code ==
        Errc::invalid_argument);
}

TEST_CASE("random weights of the large shape decode on the GPU with finite logits", "[llama][session][gpu]") {
  ModelConfig config = preset_config("llama-3.1-8b");
  config.num_hidden_layers = 2;  // each is like the others
  const Model model = Model::random(config, 11, {.threads = 1, .device = test::gpu()});
  RuntimeOptions options = gpu_options();
  options.shape = config.shape();
  options.host_bytes = 256 * MiB;
  options.near_bytes = 128 * MiB;
  Runtime runtime(options, test::gpu());
  Session session(model, runtime, parse_policy(GENERATE("full", "sluice")));
  std::vector<int> prompt;
  for (int i = 0; i < 1500; ++i) prompt.push_back((i * 7919) % 128'000);
  session.prefill(prompt);
  for (int step = 0; step < 4; ++step) {
    session.decode(argmax(session.logits()));
    double sum = 0;
    for (const float logit : session.logits()) sum += double{logit} * logit;
    const double deviation = std::sqrt(sum / config.vocab_size);
    CHECK(deviation > 0.5);  // of unit vectors times weights of unit variance per row
    CHECK(deviation < 2.0);
  }
}

TEST_CASE("a chunk of 16,384 tokens gives the logits that short ones give, dense or by blocks",
          "[llama][session][gpu]") {
  ModelConfig config = preset_config("llama-3.1-8b");
  config.num_hidden_layers = 2;
  const Model model = Model::random(config, 11, {.threads = 1, .device = test::gpu()});
  std::vector<int> prompt;
  for (int i = 0; i < 16'500; ++i) prompt.push_back((i * 7919) % 128'000);
  const auto logits = [&](std::uint32_t chunk, const PrefillSpec& prefill) {
    RuntimeOptions options = gpu_options();
    options.shape = config.shape();
    options.host_bytes = 256 * MiB;
    options.near_bytes = 128 * MiB;
    options.prefill_chunk = chunk;
    Runtime runtime(options, test::gpu());
    Session session(model, runtime, parse_policy("full"), prefill);
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
