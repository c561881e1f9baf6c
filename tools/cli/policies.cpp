#include <memory>

#include <CLI/CLI.hpp>

#include "sluice/policy.hpp"
#include "tools/cli/text/command.hpp"

namespace sluice::tools {
namespace {

int run(const OutputOptions& output) {
  const OutputTarget target(output.path);
  Report report{.command = "policies", .config = Json::object()};
  Table table{.key = "policies",
              .columns = {{"policy", "policy"}, {"composition", "composition"}, {"summary", "summary"}}};
  for (const PolicyPreset& preset : policy_presets()) {
    table.rows.push_back({preset.spec.name, to_string(preset.spec), preset.summary});
  }
  report.tables.push_back(std::move(table));
  return deliver(report, output.format, target);
}

}  // namespace

void add_policies(CLI::App& app, int& exit_code) {
  auto output = std::make_shared<OutputOptions>();
  auto* command = app.add_subcommand("policies", "List the policy presets and what they are composed of");
  add_output(*command, *output);
  command->footer(
      "A policy is a preset, with options: lfps:alpha=0.3,budget=2%\n"
      "or sources joined by +, then stages behind bars, as the compositions above are written:\n"
      "  history+pages | top_p=0.95\n"
      "  pages:quest,budget=8192 | int4 | top_p=0.9\n"
      "  clusters | fitted=0.9 | near=10%\n"
      "  scores | top_k=2048, by scores that a program hands to the engine\n"
      "A preset may have stages too: twilight | near=10%. What does not go together says why.");
  command->callback([output, &exit_code] { exit_code = run(*output); });
}

}  // namespace sluice::tools
