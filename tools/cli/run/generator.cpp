#include "tools/cli/run/generator.hpp"

#include <algorithm>

#include "sluice/error.hpp"
#include "tools/cli/text/message.hpp"
#include "tools/cli/text/progress_bar.hpp"
#include "tools/cli/text/values.hpp"
#include "tools/llama/tokenizer.hpp"

namespace sluice::tools {
namespace {

double seconds_since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

/// Text for a model that reads bytes, ids for any other.
std::string printable(int token, bool bytes) {
  return bytes ? ByteTokenizer::decode(std::span(&token, 1)) : std::to_string(token) + ' ';
}

class Generator {
 public:
  Generator(const RunOptions& options, const SamplerOptions& sampling, const Model& model, Conversation& session)
      : options_(options),
        sampling_(sampling),
        model_(model),
        session_(session),
        bytes_(ByteTokenizer::fits(model.config())) {}

  Generation run(std::span<const int> prompt, bool stream) {
    Generation result;
    Sampler sampler(sampling_);
    const std::uint32_t room = room_behind(prompt.size(), model_.config());
    const std::uint32_t limit = std::min(options_.max_tokens, room);
    result.finish = options_.max_tokens <= room ? Finish::length : Finish::context;
    auto start = Clock::now();
    read(prompt, result);
    while (result.tokens.size() < limit) {
      const int token = sampler.greedy() ? session_.best() : sampler.next(session_.logits());
      const double took = seconds_since(start);
      if (result.tokens.empty()) {
        result.first_token_s = took;
      } else {
        result.per_token_s.push_back(took);
      }
      if (model_.config().is_eos(token)) {
        result.finish = Finish::stop;
        break;
      }
      result.tokens.push_back(token);
      if (stream) write_stdout(printable(token, bytes_));
      start = Clock::now();
      if (result.tokens.size() < limit) session_.decode(token);
    }
    if (stream) write_stdout("\n");
    return result;
  }

 private:
  void read(std::span<const int> prompt, Generation& result) {
    const std::size_t tail = std::min<std::size_t>(options_.decode_prompt, prompt.size() - 1);
    ProgressBar bar("prefill");
    const auto start = Clock::now();
    session_.prefill(prompt.first(prompt.size() - tail),
                     [&](std::uint32_t done, std::uint32_t total) { bar.update(done, total); });
    result.prefill_s = seconds_since(start);
    for (const int token : prompt.last(tail)) session_.decode(token);
  }

  const RunOptions& options_;
  SamplerOptions sampling_;
  const Model& model_;
  Conversation& session_;
  bool bytes_;
};

}  // namespace

const char* to_string(Finish finish) {
  return finish == Finish::stop ? "stop" : finish == Finish::length ? "length" : "context";
}

SamplerOptions sampler_of(const RunOptions& options, const GenerationConfig& file) {
  const SamplerOptions own;
  for (const std::string& key : file.ignored)
    say("warning: generation_config.json sets " + key + ", which is not applied here");
  return {.temperature = options.temperature.value_or(file.temperature.value_or(own.temperature)),
          .top_p = options.top_p.value_or(file.top_p.value_or(own.top_p)),
          .top_k = options.top_k.value_or(file.top_k.value_or(own.top_k)),
          .seed = options.seed};
}

std::uint32_t room_behind(std::size_t prompt_tokens, const ModelConfig& model) {
  const std::uint32_t most = model.max_position_embeddings;
  if (prompt_tokens > most) {
    throw Error(Errc::invalid_argument, "the prompt's " + std::to_string(prompt_tokens) +
                                            " tokens exceed the model's context of " + std::to_string(most) +
                                            " (max_position_embeddings); shorten the prompt");
  }
  return most - static_cast<std::uint32_t>(prompt_tokens) + 1;
}

Generation generate(const RunOptions& options, const SamplerOptions& sampling, const Model& model,
                    Conversation& conversation, std::span<const int> prompt, bool stream) {
  return Generator(options, sampling, model, conversation).run(prompt, stream);
}

Json text_of(const Generation& generation, const Model& model) {
  return ByteTokenizer::fits(model.config()) ? Json(ByteTokenizer::decode(generation.tokens)) : Json(nullptr);
}

void append_run(const Generation& generation, std::size_t prompt_tokens, const PolicySpec& policy,
                std::vector<Column>& columns, std::vector<Json>& row) {
  const auto add = [&](Column column, Json value) {
    columns.push_back(std::move(column));
    row.push_back(std::move(value));
  };
  double total = 0.0;
  for (const double took : generation.per_token_s) total += took;
  const bool decoded = !generation.per_token_s.empty();
  const auto ms = [&](double fraction) {
    return decoded ? Json(1e3 * percentile(generation.per_token_s, fraction)) : Json();
  };
  add({"policy", "policy"}, policy.name);
  add({"prompt_tokens", "prompt tokens"}, prompt_tokens);
  add({"generated_tokens", "generated tokens"}, generation.tokens.size());
  add({"finish_reason", "ended by"}, to_string(generation.finish));
  add({"ttft_ms", "time to first token, ms", 1}, 1e3 * generation.first_token_s);
  add({"tpot_p50_ms", "time per token p50, ms", 2}, ms(0.50));
  add({"tpot_p99_ms", "time per token p99, ms", 2}, ms(0.99));
  add({"decode_tokens_per_s", "decoded tokens per s", 1},
      decoded ? Json(static_cast<double>(generation.per_token_s.size()) / total) : Json());
}

}  // namespace sluice::tools
