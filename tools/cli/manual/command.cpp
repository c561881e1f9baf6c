// `sluice manual`: what packages install, and who has none writes by hand.
#include <memory>
#include <string>

#include "tools/cli/manual/manual.hpp"
#include "tools/cli/text/command.hpp"
#include "tools/cli/text/facts.hpp"

namespace sluice::tools {
namespace {

std::string text_of(const CLI::App& app, const std::string& form) {
  if (form == "man") return man_page(app, version());
  if (form == "bash") return bash_completion(app);
  return form == "zsh" ? zsh_completion(app) : fish_completion(app);
}

}  // namespace

void add_manual(CLI::App& app, int& exit_code) {
  auto form = std::make_shared<std::string>();
  auto* command = app.add_subcommand("manual", "Write the manual page, or the completion of a shell");
  command->add_option("form", *form, "man, bash, zsh or fish")
      ->required()
      ->check(CLI::IsMember({"man", "bash", "zsh", "fish"}));
  command->footer(
      "  sluice manual man >~/.local/share/man/man1/sluice.1\n"
      "  sluice manual bash >~/.local/share/bash-completion/completions/sluice\n"
      "  sluice manual zsh >DIR/_sluice, DIR one of $fpath\n"
      "  sluice manual fish >~/.config/fish/completions/sluice.fish");
  command->callback([&app, form, &exit_code] {
    write_stdout(text_of(app, *form));
    exit_code = kOk;
  });
}

}  // namespace sluice::tools
