#include <numeric>

#include "sluice/error.hpp"
#include "tests/support/catch.hpp"
#include "tests/tools/llama_fake_attention.hpp"
#include "tests/tools/llama_golden.hpp"
#include "tests/tools/llama_model_files.hpp"
#include "tools/llama/model.hpp"
#include "tools/llama/sampler.hpp"

namespace {

using namespace sluice;
using namespace sluice::tools;
using sluice::test::GoldenCase;
using sluice::test::max_abs_diff;
using sluice::test::PlainAttention;

using Decoder = test::Decoder<test::PlainAttention>;

}  // namespace

TEST_CASE("the model with plain attention reproduces the reference's logits and greedy tokens", "[llama][golden]") {
  const Model model(test::testbed(), {.threads = 2});
  const auto cases = test::golden_cases();
  REQUIRE(cases.size() == 3);
  for (const GoldenCase& golden : cases) {
    CAPTURE(golden.prompt.size());
    Decoder decoder(model);
    decoder.feed(golden.prompt, 256);
    CHECK(max_abs_diff(decoder.logits, golden.logits) < 2e-3f);
    std::vector<int> greedy;
    while (greedy.size() < golden.greedy.size()) {
      greedy.push_back(argmax(decoder.logits));
      decoder.feed(std::span(greedy).last(1), 1);
    }
    CHECK(greedy == golden.greedy);
  }
}

TEST_CASE("chunks of a prompt and single steps compute the same logits", "[llama]") {
  const Model model(test::testbed());
  const GoldenCase golden = test::golden_cases().front();
  Decoder whole(model);
  whole.feed(golden.prompt, golden.prompt.size());
  for (const std::size_t chunk : {1u, 2u, 9u, 27u}) {
    CAPTURE(chunk);
    Decoder parts(model);
    parts.feed(golden.prompt, chunk);
    CHECK(max_abs_diff(parts.logits, whole.logits) < 1e-3f);
  }
}

TEST_CASE("the number of threads does not change a bit of the logits", "[llama]") {
  const GoldenCase golden = test::golden_cases().front();
  const Model one(test::testbed(), {.threads = 1});
  const Model three(test::testbed(), {.threads = 3});
  REQUIRE(one.threads() == 1);
  REQUIRE(three.threads() == 3);
  Decoder a(one);
  Decoder b(three);
  a.feed(golden.prompt, 20);
  b.feed(golden.prompt, 20);
  CHECK(a.logits == b.logits);
  CHECK_THROWS_AS(Model(test::testbed(), {.threads = 4097}), Error);
}

TEST_CASE("logits of several rows are those of each row", "[llama]") {
  const Model model(test::testbed());
  const std::size_t vocabulary = model.config().vocab_size;
  const std::vector<PlacedToken> tokens = {{256, 0}, {'a', 1}, {'b', 2}};
  PlainAttention attention(model.config().shape());
  Activations work;
  model.forward(tokens, std::ref(attention), work);
  std::vector<float> two(2 * vocabulary);
  std::vector<float> one(vocabulary);
  model.logits(work, 2, two);
  model.logits(work, 1, one);
  CHECK(max_abs_diff(std::span(two).last(vocabulary), one) < 1e-4f);
  CHECK(max_abs_diff(std::span(two).first(vocabulary), one) > 0.1f);
  CHECK_THROWS_AS(model.logits(work, 4, two), Error);
  CHECK_THROWS_AS(model.logits(work, 1, two), Error);
}

TEST_CASE("a token outside the vocabulary is refused before attention is asked", "[llama]") {
  const Model model(test::testbed());
  Activations work;
  bool asked = false;
  for (const int token : {-1, 320, 1 << 30}) {
    const std::vector<PlacedToken> tokens = {{256, 0}, {token, 1}};
    CHECK_THROWS_AS(model.forward(
                        tokens, [&](const AttentionCall&) { asked = true; }, work),
                    Error);
  }
  CHECK_FALSE(asked);
}

TEST_CASE("a rehearsed query is the layer's own where the layer before adds nothing, and is given if asked for",
          "[llama]") {
  const bool adds = GENERATE(false, true);
  const bool asked = GENERATE(true, false);
  CAPTURE(adds, asked);
  test::TinyModel files;
  files.dtype = "F32";
  const char* const products[] = {"model.layers.0.self_attn.o_proj.weight", "model.layers.0.mlp.down_proj.weight"};
  for (const char* name : products) files.scales[name] = adds ? 300.f : 0.f;
  const test::TemporaryDirectory directory;
  files.write(directory.path());
  const Model model(directory.path(), {.threads = 1});
  Activations work;
  work.rehearse = asked;
  PlainAttention attention(model.config().shape());
  std::uint32_t layers = 0;
  const auto attend = [&](const AttentionCall& call) {
    attention(call);
    ++layers;
    REQUIRE(call.rehearsed.tokens == (asked && call.layer.value == 1 ? call.q.tokens : 0));
    float largest = 0.f;
    for (std::uint32_t row = 0; row < call.rehearsed.tokens; ++row) {
      for (std::uint32_t head = 0; head < call.q.heads; ++head) {
        const auto* const q = reinterpret_cast<const float*>(call.q.row(row, head));
        const auto* const rehearsed = reinterpret_cast<const float*>(call.rehearsed.row(row, head));
        for (std::uint32_t c = 0; c < call.q.head_dim; ++c) largest = std::max(largest, std::abs(q[c] - rehearsed[c]));
      }
    }
    if (call.rehearsed.tokens != 0) REQUIRE((adds ? largest > 1e-4f : largest == 0.f));
  };
  const std::vector<PlacedToken> tokens = {{3, 0}, {9, 1}, {20, 2}};
  model.forward(tokens, attend, work);
  REQUIRE(layers == 2);
}
