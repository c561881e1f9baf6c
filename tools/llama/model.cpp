#include "tools/llama/model.hpp"

#include <string>
#include <system_error>
#include <utility>

#include "sluice/error.hpp"
#include "tools/llama/engine.hpp"
#include "tools/llama/one_error.hpp"
#include "tools/llama/weights.hpp"

namespace sluice::tools {
namespace {

/// Null for everything that is ordinary memory.
std::shared_ptr<Device> real_device(const ModelOptions& options) {
  return options.device && options.device->info().own_processor ? options.device : nullptr;
}

[[noreturn]] void refuse_model(const std::string& why) { throw Error(Errc::invalid_argument, why); }

}  // namespace

Model::Model(ModelConfig config, const WeightSource& source, const ModelOptions& options)
    : config_(std::move(config)),
      device_(real_device(options)),
      engine_(device_ ? make_cuda_engine(config_, source, options) : make_host_engine(config_, source, options)) {}

Model::Model(const std::filesystem::path& directory, const ModelOptions& options)
    : Model(as_one_error("load the model", [&] { return load(directory, options); })) {}

Model Model::load(const std::filesystem::path& directory, const ModelOptions& options) {
  std::error_code unknown;
  if (!std::filesystem::is_directory(directory, unknown))
    throw Error(Errc::not_found, directory.string() + ": there is no such folder; --model is one with config.json and "
                                                      "safetensors, as Hugging Face has them");
  ModelConfig config = load_config(directory / "config.json");
  GenerationConfig generation = load_generation_config(directory / "generation_config.json", config.vocab_size);
  if (!generation.eos_token_ids.empty()) config.eos_token_ids = generation.eos_token_ids;
  const Checkpoint checkpoint(directory);
  Model model(std::move(config), {.checkpoint = &checkpoint, .progress = options.progress}, options);
  model.generation_ = std::move(generation);
  if (!model.device_) model.kv_dtype_ = checkpoint.tensors().find(kEmbeddingsName)->second.dtype;
  return model;
}

Model Model::random(const ModelConfig& config, std::uint64_t seed, const ModelOptions& options) {
  validate(config);
  return as_one_error("draw the model", [&] {
    return Model(config, {.checkpoint = nullptr, .seed = seed, .progress = options.progress}, options);
  });
}

Model::~Model() = default;
Model::Model(Model&&) noexcept = default;
Model& Model::operator=(Model&&) noexcept = default;

const ModelConfig& Model::config() const noexcept { return config_; }
const GenerationConfig& Model::generation() const noexcept { return generation_; }
DType Model::kv_dtype() const noexcept { return kv_dtype_; }
std::uint64_t Model::parameters() const noexcept { return engine_->parameters(); }
std::uint32_t Model::threads() const noexcept { return engine_->threads(); }
const char* Model::isa() const noexcept { return engine_->isa(); }
Device* Model::device() const noexcept { return device_.get(); }

void Model::require_token(int token) const {
  if (token < 0 || static_cast<std::uint32_t>(token) >= config_.vocab_size) {
    throw Error(Errc::invalid_argument, "token id " + std::to_string(token) + " is not in the model's vocabulary [0, " +
                                            std::to_string(config_.vocab_size) + ")");
  }
}

void Model::forward(std::span<const PlacedToken> tokens, const Attend& attend, Activations& work) const {
  for (const PlacedToken& placed : tokens) require_token(placed.token);
  work.rows = work.chosen = 0;
  if (tokens.empty()) return;
  as_one_error("run the model", [&] { engine_->forward(tokens, attend, work); });
  work.rows = static_cast<std::uint32_t>(tokens.size());
}

void Model::choose(Activations& work, std::uint32_t rows) const {
  if (rows == 0 || rows > work.rows)
    refuse_model("logits of " + std::to_string(rows) + " rows are asked for, and the last forward pass had " +
           std::to_string(work.rows));
  work.chosen = 0;
  as_one_error("run the model", [&] { engine_->choose(work, rows); });
  work.chosen = rows;
}

void Model::decode(std::span<const PlacedToken> tokens, const Attend& attend, Activations& work, Launch launch) const {
  if (tokens.empty()) refuse_model("decode needs at least one token");
  if (work.rehearse && device() != nullptr)
    throw Error(Errc::unsupported,
                "the policy chooses by rehearsed queries, which a model on a GPU does not compute; run it on the CPU "
                "(--device host), or leave the stage rehearsed out");
  for (const PlacedToken& placed : tokens) require_token(placed.token);
  work.rows = work.chosen = 0;
  as_one_error("run the model", [&] { engine_->decode(tokens, attend, work, launch); });
  work.rows = work.chosen = static_cast<std::uint32_t>(tokens.size());
}

void Model::likeliest(Activations& work, std::span<Likeliest> out) const {
  if (out.size() > work.chosen)
    refuse_model(std::to_string(out.size()) + " rows are asked for, and " + std::to_string(work.chosen) +
                 " have logits");
  as_one_error("run the model", [&] { engine_->likeliest(work, out); });
}

void Model::chosen_logits(Activations& work, std::uint32_t first, std::span<float> out) const {
  if (out.size() % config_.vocab_size != 0 || first + out.size() / config_.vocab_size > work.chosen)
    refuse_model("logits from row " + std::to_string(first) + " on into " + std::to_string(out.size()) + " floats; " +
           std::to_string(work.chosen) + " rows of " + std::to_string(config_.vocab_size) + " have some");
  as_one_error("run the model", [&] { engine_->logits(work, first, out); });
}

void Model::logits(Activations& work, std::uint32_t rows, std::span<float> out) const {
  if (out.size() != std::size_t{rows} * config_.vocab_size)
    refuse_model("logits of " + std::to_string(rows) + " rows into " + std::to_string(out.size()) + " floats");
  choose(work, rows);
  chosen_logits(work, 0, out);
}

void Engine::decode(std::span<const PlacedToken> tokens, const Attend& attend, Activations& work, Launch) const {
  forward(tokens, attend, work);
  choose(work, static_cast<std::uint32_t>(tokens.size()));
}

}  // namespace sluice::tools
