#include "tools/cli/eval/passages.hpp"

#include <CLI/CLI.hpp>

#include "sluice/error.hpp"
#include "tools/cli/text/command.hpp"
#include "tools/cli/text/values.hpp"

namespace sluice::tools {

void add_passage_flags(CLI::App& command, PassageFlags& flags) {
  command
      .add_option("--text", flags.text, "Also compare predictions: passages of this text are read on under each policy")
      ->type_name("FILE");
  command.add_option("--text-lengths", flags.lengths, "Comma list of lengths of passages in tokens, K allowed")
      ->capture_default_str();
  add_count(command, "--text-tokens", flags.tokens, "Last tokens of a passage that are read under the policy",
            {.least = 2, .most = 1 << 20});
}

std::vector<std::uint32_t> passage_lengths(const PassageFlags& flags) {
  if (flags.text.empty()) return {};
  const std::vector<std::uint32_t> lengths = parse_counts(flags.lengths, "--text-lengths");
  for (const std::uint32_t length : lengths) {
    if (length > flags.tokens + 1) continue;
    throw Error(Errc::invalid_argument, "--text-lengths: a passage of " + std::to_string(length) +
                                            " tokens has nothing before the " + std::to_string(flags.tokens) +
                                            " that are read under the policy; lower --text-tokens");
  }
  return lengths;
}

std::vector<Task> passages_of(std::string_view text, std::uint32_t length_tokens, std::uint32_t count) {
  const std::size_t bytes = length_tokens - 1;  // BOS is a token too
  const std::size_t room = text.size() / bytes;
  if (room < count) {
    throw Error(Errc::invalid_argument, "--text: has " + std::to_string(text.size()) + " bytes, room for " +
                                            std::to_string(room) + " passages of " + std::to_string(length_tokens) +
                                            " tokens; lower --count from " + std::to_string(count) +
                                            ", or give more text");
  }
  std::vector<Task> passages(count);
  for (std::uint32_t i = 0; i < count; ++i) passages[i].prompt = text.substr(i * (text.size() / count), bytes);
  return passages;
}

}  // namespace sluice::tools
