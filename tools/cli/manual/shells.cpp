#include <string>
#include <vector>

#include "tools/cli/manual/manual.hpp"

namespace sluice::tools {
namespace {

std::vector<const CLI::App*> commands_of(const CLI::App& app) {
  return app.get_subcommands([](const CLI::App* each) { return !each->get_name().empty(); });
}

/// "--length", or "-V" where there is nothing longer.
std::vector<std::string> words_of(const CLI::Option& option) {
  std::vector<std::string> words;
  for (const std::string& name : option.get_lnames()) words.push_back("--" + name);
  if (words.empty()) {
    for (const std::string& name : option.get_snames()) words.push_back("-" + name);
  }
  return words;
}

/// Inside of single quotes.
std::string shell_word(const std::string& text) {
  std::string safe;
  for (const char c : text) safe += c == '\'' ? "'\\''" : std::string(1, c == '\n' ? ' ' : c);
  return "'" + safe + "'";
}

struct BashCases {
  std::string paths;  ///< "'sluice run'|'sluice bench'|..."
  std::string words;  ///< a case for each
};

void add_cases(const CLI::App& app, const std::string& path, BashCases& cases) {
  std::string words;
  for (const CLI::App* command : commands_of(app)) words += ' ' + command->get_name();
  for (const CLI::Option* option : app.get_options()) {
    for (const std::string& word : words_of(*option)) words += ' ' + word;
  }
  cases.words += "    " + shell_word(path) + ") words=" + shell_word(words.substr(words.empty() ? 0 : 1)) + " ;;\n";
  for (const CLI::App* command : commands_of(app)) {
    const std::string below = path + ' ' + command->get_name();
    cases.paths += (cases.paths.empty() ? "" : "|") + shell_word(below);
    add_cases(*command, below, cases);
  }
}

void add_fish(const CLI::App& app, const std::vector<std::string>& path, std::string& out) {
  std::string seen = "__fish_use_subcommand";
  if (!path.empty()) {
    seen.clear();
    for (const std::string& word : path)
      seen += (seen.empty() ? "" : "; and ") + ("__fish_seen_subcommand_from " + word);
  }
  std::string others;
  for (const CLI::App* command : commands_of(app)) others += ' ' + command->get_name();
  const bool alone = path.empty() || others.empty();
  const std::string fresh = alone ? seen : seen + "; and not __fish_seen_subcommand_from" + others;
  for (const CLI::App* command : commands_of(app)) {
    const std::string summary = command->get_description();
    out += "complete -c sluice -f -n " + shell_word(fresh) + " -a " + command->get_name() + " -d " +
           shell_word(summary.substr(0, summary.find('\n'))) + "\n";
  }
  for (const CLI::Option* option : app.get_options()) {
    std::string names;
    for (const std::string& name : option->get_lnames()) names += " -l " + name;
    for (const std::string& name : option->get_snames()) names += " -s " + name;
    if (names.empty()) continue;
    const bool takes_value = option->get_items_expected_max() > 0;
    out += "complete -c sluice -n " + shell_word(seen) + names + (takes_value ? " -r" : "") + " -d " +
           shell_word(option->get_description()) + "\n";
  }
  for (const CLI::App* command : commands_of(app)) {
    std::vector<std::string> below = path;
    below.push_back(command->get_name());
    add_fish(*command, below, out);
  }
}

}  // namespace

std::string bash_completion(const CLI::App& app) {
  BashCases cases;
  add_cases(app, "sluice", cases);
  // Words are compared with what was typed, not expanded; where none fits, files are offered.
  return "# Completion of sluice: made by `sluice manual bash`.\n"
         "_sluice() {\n"
         "  local current=${COMP_WORDS[COMP_CWORD]} path=sluice words= i\n"
         "  for ((i = 1; i < COMP_CWORD; ++i)); do\n"
         "    case \"$path ${COMP_WORDS[i]}\" in\n"
         "    " + cases.paths + ") path=\"$path ${COMP_WORDS[i]}\" ;;\n"
         "    esac\n"
         "  done\n"
         "  case $path in\n" + cases.words +
         "  esac\n"
         "  COMPREPLY=($(compgen -W \"$words\" -- \"$current\"))\n"
         "  [[ ${#COMPREPLY[@]} -gt 0 ]] || COMPREPLY=($(compgen -f -- \"$current\"))\n"
         "}\n"
         "complete -o filenames -F _sluice sluice\n";
}

std::string zsh_completion(const CLI::App& app) {
  return "#compdef sluice\nautoload -U +X bashcompinit && bashcompinit\n" + bash_completion(app);
}

std::string fish_completion(const CLI::App& app) {
  std::string out = "# Completion of sluice: made by `sluice manual fish`.\n";
  add_fish(app, {}, out);
  return out;
}

}  // namespace sluice::tools
