#include <cmath>
#include <vector>

#include "sluice/error.hpp"
#include "tests/support/catch.hpp"
#include "tests/tools/llama_failure.hpp"
#include "tests/tools/llama_fake_attention.hpp"
#include "tools/llama/bf16.hpp"
#include "tools/llama/model.hpp"
#include "tools/llama/presets.hpp"
#include "tools/llama/random_weights.hpp"

namespace {

using namespace sluice;
using namespace sluice::tools;
using sluice::test::failure_of;

std::vector<float> logits_of(const Model& model) {
  test::PlainAttention attention(model.config().shape());
  Activations work;
  std::vector<float> logits(model.config().vocab_size);
  const std::vector<PlacedToken> tokens = {{256, 0}, {'a', 1}, {'b', 2}, {'c', 3}};
  model.forward(tokens, std::ref(attention), work);
  model.logits(work, 1, logits);
  return logits;
}

}  // namespace

TEST_CASE("the large preset is Llama-3.1-8B", "[llama][config]") {
  const ModelConfig config = preset_config("llama-3.1-8b");
  CHECK(config.shape() == AttentionShape{.layers = 32, .q_heads = 32, .kv_heads = 8, .head_dim = 128});
  CHECK(config.hidden_size == 4096);
  CHECK(config.rope_scaling == RopeScaling{});
  const auto failure = failure_of([] { (void)preset_config("llama-9"); });
  CHECK(failure.code == Errc::not_found);
  CHECK(test::mentions(failure.message, {"llama-9", "llama-3.1-8b", "tiny"}));
}

TEST_CASE("drawn numbers have mean 0 and deviation 1, and depend on seed, name and index", "[llama]") {
  const std::uint64_t key = random_key(1, "a");
  constexpr std::uint64_t kCount = 100'000;
  double sum = 0;
  double squares = 0;
  for (std::uint64_t i = 0; i < kCount; ++i) {
    const double x = random_normal(key, i);
    sum += x;
    squares += x * x;
  }
  CHECK(std::abs(sum / kCount) < 0.02);
  CHECK(std::abs(squares / kCount - 1) < 0.02);
  CHECK(key != random_key(2, "a"));
  CHECK(key != random_key(1, "b"));
  CHECK(random_normal(key, 0) != random_normal(key, 1));
}

TEST_CASE("a model of random weights is its seed's, with logits of deviation 1", "[llama]") {
  const ModelConfig config = preset_config("tiny");
  const std::vector<float> first = logits_of(Model::random(config, 5, {.threads = 1}));
  CHECK(first == logits_of(Model::random(config, 5, {.threads = 1})));
  CHECK(first != logits_of(Model::random(config, 6, {.threads = 1})));
  double squares = 0;
  for (const float logit : first) squares += double{logit} * logit;
  CHECK(std::abs(std::sqrt(squares / config.vocab_size) - 1) < 0.3);
}

TEST_CASE("random weights beyond the machine's memory are refused before any is drawn", "[llama]") {
  ModelConfig config = preset_config("llama-3.1-8b");
  config.num_hidden_layers = 4'096;
  const auto failure = failure_of([&] { (void)Model::random(config, 1, {.threads = 1}); });
  CHECK(failure.code == Errc::out_of_capacity);
  CHECK(test::mentions(failure.message, {"GiB", "GPU"}));
  config.num_hidden_layers = 2'147'483'647;  // the list of its tensors alone would not fit
  const auto endless = failure_of([&] { (void)Model::random(config, 1, {.threads = 1}); });
  CHECK(endless.code == Errc::invalid_argument);
  CHECK(test::mentions(endless.message, {"num_hidden_layers", "2147483647"}));
}

TEST_CASE("bf16 rounds to nearest, ties to even", "[llama]") {
  CHECK(from_bf16(to_bf16(1.f)) == 1.f);
  CHECK(from_bf16(to_bf16(1.f + 0x1p-8f)) == 1.f);                // a tie: down to even
  CHECK(from_bf16(to_bf16(1.f + 3 * 0x1p-8f)) == 1.f + 0x1p-6f);  // a tie: up to even
  CHECK(from_bf16(to_bf16(-1.f - 0x1.8p-8f)) == -1.f - 0x1p-7f);
  CHECK(std::isinf(from_bf16(to_bf16(3.4e38f))));
  CHECK(std::isnan(from_bf16(to_bf16(std::nanf("")))));
}
