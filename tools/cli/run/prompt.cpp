#include "tools/cli/run/prompt.hpp"

#include <CLI/CLI.hpp>

#include "sluice/error.hpp"
#include "tools/llama/files.hpp"
#include "tools/llama/tokenizer.hpp"

namespace sluice::tools {
void add_prompt_flags(CLI::App& app, PromptFlags& flags) {
  auto* source = app.add_option_group("prompt", "The prompt, one of");
  source->add_option("--prompt", flags.text, "Text of the prompt (UTF-8)")->type_name("TEXT");
  source->add_option("--prompt-file", flags.file, "File that holds the text; - reads standard input")
      ->type_name("FILE");
  source
      ->add_option("--prompt-tokens", flags.tokens,
                   "File of token ids, numbers or a JSON array; - reads standard input")
      ->type_name("FILE");
  source->require_option(1);
}

std::vector<int> read_prompt(const PromptFlags& flags, const ModelConfig& model) {
  if (!flags.tokens.empty()) return read_token_file(flags.tokens, model.vocab_size);
  if (!ByteTokenizer::fits(model)) {
    throw Error(Errc::invalid_argument,
                "--prompt: this model has a vocabulary of its own, which this tool does not read; "
                "`python -m sluice run --model DIR --file FILE` does, or pass ids by --prompt-tokens FILE");
  }
  const std::string origin = flags.file.empty() ? "--prompt" : "--prompt-file " + flags.file;
  const std::string text = flags.file.empty() ? flags.text : read_input(flags.file);
  if (text.empty()) throw Error(Errc::invalid_argument, origin + ": the prompt is empty; give at least one character");
  require_utf8(text, origin);
  return ByteTokenizer::encode(text);
}

}  // namespace sluice::tools
