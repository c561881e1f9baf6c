#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "tools/cli/device_flags.hpp"
#include "tools/cli/engine_flags.hpp"
#include "tools/cli/prefill_flags.hpp"
#include "tools/cli/run/prompt.hpp"
#include "tools/cli/text/output.hpp"
#include "tools/cli/text/report.hpp"
#include "tools/llama/conversation.hpp"
#include "tools/llama/model.hpp"
#include "tools/llama/sampler.hpp"

namespace sluice::tools {

struct RunOptions {
  std::string model;
  std::string random_weights;
  PromptFlags prompt;
  std::string policy = "sluice";
  std::string near;
  std::string far;
  std::uint32_t max_tokens = 128;
  std::uint32_t decode_prompt = 0;
  PrefillFlags prefill;
  std::optional<float> temperature;  ///< as top_p and top_k: by default what generation_config.json says
  std::optional<float> top_p;
  std::optional<std::uint32_t> top_k;
  std::uint64_t seed = SamplerOptions{}.seed;
  EngineFlags engine;
  DeviceFlags device;
  std::string session;  ///< a file that the prompt is kept in; empty: none
  std::string trace;    ///< a file; empty: none
  OutputOptions output;
};

/// Why a text ends.
enum class Finish : std::uint8_t {
  stop,     ///< the model ended it
  length,   ///< --max-tokens
  context,  ///< the model has no position for another token
};

[[nodiscard]] const char* to_string(Finish finish);

/// What was generated and how long it took.
struct Generation {
  std::vector<int> tokens;
  Finish finish = Finish::stop;
  double prefill_s = 0.0;           ///< of the prompt but for the tokens that are decoded
  double first_token_s = 0.0;       ///< prefill, prompt tokens decoded, and the choice of the first token
  std::vector<double> per_token_s;  ///< of each later token
};

/// A flag wins over the model's generation_config.json, and that over the sampler's own default.
[[nodiscard]] SamplerOptions sampler_of(const RunOptions& options, const GenerationConfig& file);

/// Tokens that a prompt of so many leaves room for. The last one is chosen, but never read, and needs no position.
/// @throws Error{Errc::invalid_argument} for a prompt beyond the model's context.
[[nodiscard]] std::uint32_t room_behind(std::size_t prompt_tokens, const ModelConfig& model);

/// Reads a prompt and goes on with it, token by token, to standard output if `stream`.
[[nodiscard]] Generation generate(const RunOptions& options, const SamplerOptions& sampling, const Model& model,
                                  Conversation& conversation, std::span<const int> prompt, bool stream);

/// The text of a model that reads bytes; null for any other.
[[nodiscard]] Json text_of(const Generation& generation, const Model& model);

/// What a table says first of a run: policy, tokens, and how long they took.
void append_run(const Generation& generation, std::size_t prompt_tokens, const PolicySpec& policy,
                std::vector<Column>& columns, std::vector<Json>& row);

/// Generates, and reports.
int run(const RunOptions& options);

}  // namespace sluice::tools
