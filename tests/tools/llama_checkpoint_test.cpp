// A model's files as a whole: what does not belong together, what nobody computes with, and what changes underneath.
#include <fstream>

#include "sluice/error.hpp"
#include "tests/support/catch.hpp"
#include "tests/tools/llama_failure.hpp"
#include "tests/tools/llama_model_files.hpp"
#include "tools/llama/model.hpp"
#include "tools/llama/safetensors.hpp"
#include "tools/llama/weights.hpp"

namespace {

using namespace sluice;
using namespace sluice::tools;
using sluice::test::Failure;
using sluice::test::failure_of;
using sluice::test::mentions;
using sluice::test::TemporaryDirectory;
using sluice::test::TinyModel;

/// How loading these files ends.
Failure load_failure(const TinyModel& files) {
  const TemporaryDirectory scratch;
  files.write(scratch.path());
  return failure_of([&] { const Model model(scratch.path(), {.threads = 1}); });
}

}  // namespace

TEST_CASE("a checkpoint cut off while it is loaded is an error, not a signal", "[llama][checkpoint]") {
  const TemporaryDirectory scratch;
  TinyModel files;
  files.tensors["model.embed_tokens.weight"] = files.tensors["lm_head.weight"] = {4096, 16};
  files.config["vocab_size"] = 4096;
  files.write(scratch.path());
  const auto file = scratch.file("model.safetensors");
  const ModelConfig config = load_config(scratch.file("config.json"));
  const Checkpoint checkpoint(scratch.path());
  std::filesystem::resize_file(file, 4096);
  const auto failure = failure_of([&] { (void)load_weights({.checkpoint = &checkpoint, .seed = 0}, config); });
  CHECK(failure.code == Errc::corrupt);
  CHECK(mentions(failure.message, {"model.safetensors", "truncated"}));
}

TEST_CASE("a whole model loads, with the buffers that old converters left", "[llama][checkpoint]") {
  TinyModel files;
  CHECK_FALSE(load_failure(files).code.has_value());
  files.tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = {2};
  files.tensors["model.rotary_emb.inv_freq"] = {2};
  CHECK_FALSE(load_failure(files).code.has_value());
  files.config["model_type"] = "mistral";
  files.config["architectures"] = {"MistralForCausalLM"};
  files.config["sliding_window"] = nullptr;
  CHECK_FALSE(load_failure(files).code.has_value());
}

TEST_CASE("a tensor that nothing computes with is named", "[llama][checkpoint]") {
  const std::string stray = GENERATE(values<std::string>({
      "model.layers.0.self_attn.q_proj.bias",
      "model.layers.1.self_attn.q_norm.weight",
      "model.layers.0.post_feedforward_layernorm.weight",
      "model.layers.2.input_layernorm.weight",
      "lm_head.bias",
      "vision_tower.patch.weight",
      "model.rotary_emb.inv_freq.weight",
  }));
  TinyModel files;
  files.tensors[stray] = {16};
  const Failure failure = load_failure(files);
  CAPTURE(stray, failure.message);
  CHECK(failure.code == Errc::unsupported);
  CHECK(mentions(failure.message, {"'" + stray + "'"}));
}

TEST_CASE("a tied head may be in the file only if it is the embeddings", "[llama][checkpoint]") {
  TinyModel files;
  files.config["tie_word_embeddings"] = true;
  CHECK_FALSE(load_failure(files).code.has_value());  // bit by bit the same
  files.scales["lm_head.weight"] = 2.f;
  const Failure other = load_failure(files);
  CHECK(other.code == Errc::corrupt);
  CHECK(mentions(other.message, {"tie_word_embeddings", "lm_head.weight"}));
  files.scales.clear();
  files.tensors["lm_head.weight"] = {16, 16};
  CHECK(mentions(load_failure(files).message, {"tie_word_embeddings", "lm_head.weight"}));
  files.tensors.erase("lm_head.weight");
  CHECK_FALSE(load_failure(files).code.has_value());
}

TEST_CASE("weights that no machine holds are refused before a byte is read", "[llama][checkpoint]") {
  const TemporaryDirectory scratch;
  TinyModel files;
  files.write(scratch.path());
  // A sparse file of 2 TiB whose header tells the truth.
  files.config["vocab_size"] = 1 << 20;
  files.config["hidden_size"] = 1 << 19;
  files.config["tie_word_embeddings"] = true;
  std::ofstream(scratch.file("config.json")) << files.config.dump();
  const std::uint64_t hidden = 1 << 19;
  files.tensors["model.embed_tokens.weight"] = {1 << 20, hidden};
  files.tensors.erase("lm_head.weight");
  nlohmann::json header = nlohmann::json::object();
  std::uint64_t end = 0;
  for (auto& [name, shape] : files.tensors) {
    std::uint64_t bytes = 2;
    for (std::uint64_t& extent : shape) {
      if (extent == 16) extent = hidden;
      bytes *= extent;
    }
    header[name] = {{"dtype", "BF16"}, {"shape", shape}, {"data_offsets", {end, end + bytes}}};
    end += bytes;
  }
  const auto file = scratch.write("model.safetensors", sluice::test::safetensors_file(header.dump(), 0));
  std::error_code refused;
  std::filesystem::resize_file(file, std::filesystem::file_size(file) + end, refused);
  if (refused) return;  // a file system without sparse files of this size
  const Failure failure = failure_of([&] { const Model model(scratch.path()); });
  CAPTURE(failure.message);
  CHECK(failure.code == Errc::out_of_capacity);
  CHECK(mentions(failure.message, {"GiB"}));
}
