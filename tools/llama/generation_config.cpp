#include "tools/llama/generation_config.hpp"

#include <array>
#include <cmath>
#include <nlohmann/json.hpp>

#include "sluice/error.hpp"
#include "tools/llama/files.hpp"
#include "tools/llama/json_fields.hpp"
#include "tools/llama/json_text.hpp"

namespace sluice::tools {
namespace {

using nlohmann::json;

constexpr std::uint64_t kMostBytes = std::uint64_t{1} << 20;

/// Keys that change which token is chosen and that Sampler does not have, with the value at which they do not.
struct NeutralSetting {
  const char* name;
  double value;
};
constexpr std::array kNeutralSettings{NeutralSetting{"repetition_penalty", 1},
                                      NeutralSetting{"encoder_repetition_penalty", 1},
                                      NeutralSetting{"min_p", 0},
                                      NeutralSetting{"typical_p", 1},
                                      NeutralSetting{"epsilon_cutoff", 0},
                                      NeutralSetting{"eta_cutoff", 0},
                                      NeutralSetting{"num_beams", 1},
                                      NeutralSetting{"no_repeat_ngram_size", 0},
                                      NeutralSetting{"penalty_alpha", 0}};

/// A finite number in [least, most].
std::optional<float> number(const Fields& fields, const char* name, double least, double most) {
  const json* value = fields.find(name);
  if (value == nullptr) return std::nullopt;
  if (!value->is_number() || !(value->get<double>() >= least && value->get<double>() <= most)) {
    fields.fail(name, "must be a number from " + shown(least) + " to " + shown(most) + ", is " + shown(*value));
  }
  return value->get<float>();
}

std::optional<std::uint32_t> read_top_k(const Fields& fields) {
  const json* value = fields.find("top_k");
  if (value == nullptr) return std::nullopt;
  if (*value == 0 || *value == -1) return 0;  // two ways to say "all"
  return fields.count("top_k");
}

std::vector<std::string> ignored_keys(const Fields& fields) {
  std::vector<std::string> keys;
  for (const auto& [name, neutral] : kNeutralSettings) {
    const json* value = fields.find(name);
    if (value != nullptr && *value != neutral) keys.emplace_back(name);
  }
  return keys;
}

}  // namespace

GenerationConfig parse_generation_config(std::string_view text, const std::string& origin, std::uint32_t vocab_size) {
  const json document = parse_json(text, origin);
  const Fields fields(document, origin);
  GenerationConfig config{.eos_token_ids = fields.token_ids("eos_token_id", vocab_size),
                          .temperature = number(fields, "temperature", 0, 100),
                          .top_p = number(fields, "top_p", 1e-6, 1),
                          .top_k = read_top_k(fields),
                          .ignored = ignored_keys(fields)};
  if (!fields.flag("do_sample")) {  // as in transformers: the likeliest token, whatever else the file says
    config.temperature.reset();
    config.top_p.reset();
    config.top_k.reset();
  } else if (!config.temperature) {
    config.temperature = 1.f;  // transformers' default
  }
  return config;
}

GenerationConfig load_generation_config(const std::filesystem::path& file, std::uint32_t vocab_size) {
  std::string text;
  try {
    text = read_text_file(file, kMostBytes);
  } catch (const Error& error) {
    if (error.code() == Errc::not_found) return {};
    throw;
  }
  return parse_generation_config(text, file.string(), vocab_size);
}

}  // namespace sluice::tools
