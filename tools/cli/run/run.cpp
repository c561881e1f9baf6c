// `sluice run`: text from a Llama whose KV cache lives in host memory.
#include <memory>
#include <type_traits>

#include <CLI/CLI.hpp>

#include "sluice/error.hpp"
#include "tools/cli/device_flags.hpp"
#include "tools/cli/engine_flags.hpp"
#include "tools/cli/far_flag.hpp"
#include "tools/cli/prefill_flags.hpp"
#include "tools/cli/run/generator.hpp"
#include "tools/cli/run/prompt.hpp"
#include "tools/cli/text/command.hpp"
#include "tools/cli/text/values.hpp"
#include "tools/cli/trace/trace.hpp"

namespace sluice::tools {
namespace {

/// The text streams to standard output, unless that holds the report.
void check_outputs(const RunOptions& options) {
  if (options.output.format == Format::csv && OutputTarget(options.output.path).is_stdout()) {
    throw Error(Errc::invalid_argument,
                "-o csv: standard output holds the generated text; give the tables a file, --output FILE.csv");
  }
  if (options.far == "auto" && !options.session.empty())
    throw Error(Errc::invalid_argument,
                "--far auto: what it advises is measured anew by every run, and a session goes on under its own policy "
                "alone; give --far the number that `sluice plan --far auto` prints, or leave out --session");
  require_distinct({{"--output", options.output.path}, {"--trace", options.trace, !options.trace.empty()},
                    {"--session", options.session, !options.session.empty()}});
}

}  // namespace

void add_run(CLI::App& app, int& exit_code) {
  auto options = std::make_shared<RunOptions>();
  auto* command = app.add_subcommand("run", "Generate text with a Llama whose KV cache lives in host memory");
  command->add_option("--model", options->model, "Hugging Face directory: config.json and safetensors")
      ->type_name("DIR");
  command
      ->add_option("--random-weights", options->random_weights,
                   "Instead of --model: a known shape with random weights, for speed: llama-3.1-8b, tiny")
      ->type_name("NAME");
  add_prompt_flags(*command, options->prompt);
  command->add_option("--policy", options->policy, "Policy: a preset or a composition of stages; see `sluice policies`")
      ->capture_default_str();
  command
      ->add_option("--near", options->near,
                   "Share of the tokens that device memory has room for, e.g. 10% [default: 5%, and on a GPU 16K "
                   "tokens, if these take no more than an eighth of its memory]")
      ->type_name("SHARE");
  add_far(*command, options->far);
  add_count(*command, "--max-tokens", options->max_tokens, "Tokens to generate at most", {.least = 1, .most = 1 << 20});
  add_count(*command, "--decode-prompt", options->decode_prompt,
            "Last prompt tokens to read under the policy, one by one, instead of densely");
  add_prefill_flags(*command, options->prefill);
  const auto optional = [](auto& target) {
    return [&target](auto value) { target = static_cast<typename std::decay_t<decltype(target)>::value_type>(value); };
  };
  add_number(*command, "--temperature", std::function<void(double)>(optional(options->temperature)),
             "0: the likeliest token; larger is more random [default: the model's generation_config.json, else 0]",
             {.most = 100.0});
  add_number(*command, "--top-p", std::function<void(double)>(optional(options->top_p)),
             "Sample among the likeliest tokens that hold this share, (0, 1] [default: the model's, else 1]");
  add_count(*command, "--top-k", std::function<void(std::uint64_t)>(optional(options->top_k)),
            "Sample among so many of the likeliest tokens; 0: all [default: the model's, else 0]");
  add_seed(*command, options->seed, "Seed of the sampling");
  add_count(*command, "--audit", options->engine.audit_every,
            "Every N-th step also attends densely and reports coverage; 0: never");
  add_device_flags(*command, options->device);
  add_engine_flags(*command, options->engine, "auto for sluice, else 0");
  add_graphs(*command, options->engine.graphs);
  command
      ->add_option(
          "--session", options->session,
          "File that keeps what was read of the prompt: a prompt that begins with all of it goes on from there")
      ->type_name("FILE");
  add_trace(*command, options->trace);
  add_output(*command, options->output);
  command->footer(
      "Text goes to standard output as it comes, the table to standard error. With -o json standard output\n"
      "holds one object with the text in it; -o csv needs --output. What did not happen has no row in the table.\n"
      "A text ends by the model (stop), --max-tokens (length) or the model's context (context).");
  command->callback([options, &exit_code] {
    check_outputs(*options);
    exit_code = run(*options);
  });
}

}  // namespace sluice::tools
