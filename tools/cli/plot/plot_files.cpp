#include <algorithm>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include <CLI/CLI.hpp>

#include "sluice/error.hpp"
#include "sluice/prefill.hpp"
#include "tools/cli/eval/report.hpp"
#include "tools/cli/plot/plot.hpp"
#include "tools/cli/text/command.hpp"
#include "tools/llama/files.hpp"

namespace sluice::tools {
namespace {

const Json::json_pointer kResults("/tasks/results");

struct PlotOptions {
  std::vector<std::string> files;
  std::string output;
};

PlotSeries& series_of(Plot& plot, const std::string& name) {
  const auto known = std::ranges::find(plot.series, name, &PlotSeries::name);
  return known != plot.series.end() ? *known : plot.series.emplace_back(PlotSeries{.name = name, .points = {}});
}

/// A report of eval with tasks.
Json report_of(const std::string& file) {
  const auto refuse = [&](const std::string& cause) {
    throw Error(Errc::corrupt, "'" + file + "' " + cause +
                                   "; write it by `sluice eval -o json --output FILE`, or `python -m sluice "
                                   "eval --json FILE`");
  };
  Json document = Json::parse(read_text_file(file), nullptr, false);
  if (document.is_discarded()) refuse("is no JSON");
  if (!document.is_object() || !document.contains(kResults) || !document.at(kResults).is_array())
    refuse("is no report of eval with tasks");
  for (const Json& row : document.at(kResults)) {
    const bool whole = row.is_object() && row.contains("policy") && row["policy"].is_string() &&
                       row.contains("accuracy") && row["accuracy"].is_number();
    if (!whole) refuse("has a row without policy or accuracy");
  }
  return document;
}

/// How a report's prompts were attended, where its configuration says it: of the command, and of the package.
std::string prefill_of(const Json& report) {
  for (const char* const place : {"/config/prefill/name", "/config/option/prefill_mode"}) {
    const Json::json_pointer at(place);
    if (report.contains(at) && report.at(at).is_string()) return report.at(at);
  }
  return to_string(PrefillMode::full);
}

/// A series for each policy, and each way to attend prompts if there are several. What has not said how much it read
/// has no point.
void add_points(const std::vector<Json>& reports, Plot& plot) {
  std::set<std::string> prefills;
  for (const Json& report : reports) prefills.insert(prefill_of(report));
  for (const Json& report : reports) {
    const std::string prefill = prefills.size() > 1 ? ", " + prefill_of(report) : "";
    for (const Json& row : report.at(kResults)) {
      const Json bytes = row.value("bytes", Json());
      if (row.value("task", Json()) == kAllTasks || !bytes.is_number()) continue;
      PlotSeries& series = series_of(plot, row["policy"].get<std::string>() + prefill);
      series.points.push_back({bytes.get<double>(), row["accuracy"].get<double>()});
    }
  }
}

int run(const PlotOptions& options) {
  const OutputTarget target(options.output);
  Plot plot{.title = "Accuracy against bytes read",
            .x_title = "bytes, share of dense attention's",
            .y_title = "accuracy",
            .series = {}};
  std::vector<Json> reports;
  for (const std::string& file : options.files) reports.push_back(report_of(file));
  add_points(reports, plot);
  target.commit(to_svg(plot));
  return kOk;
}

}  // namespace

void add_plot(CLI::App& app, int& exit_code) {
  auto options = std::make_shared<PlotOptions>();
  auto* command = app.add_subcommand("plot", "Draw what several runs of eval found, as one SVG");
  command->add_option("FILES", options->files, "Reports of `sluice eval -o json`, or `python -m sluice eval --json`")
      ->required()
      ->type_name("FILE");
  command->add_option("--output", options->output, "Write the SVG to this file [default: standard output]")
      ->type_name("FILE");
  command->callback([options, &exit_code] { exit_code = run(*options); });
}

}  // namespace sluice::tools
