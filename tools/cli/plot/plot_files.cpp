#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include <CLI/CLI.hpp>

#include "sluice/error.hpp"
#include "tools/cli/eval/report.hpp"
#include "tools/cli/plot/plot.hpp"
#include "tools/cli/text/command.hpp"
#include "tools/llama/files.hpp"

namespace sluice::tools {
namespace {

struct PlotOptions {
  std::vector<std::string> files;
  std::string output;
};

PlotSeries& series_of(Plot& plot, const std::string& name) {
  const auto known = std::ranges::find(plot.series, name, &PlotSeries::name);
  return known != plot.series.end() ? *known : plot.series.emplace_back(PlotSeries{.name = name, .points = {}});
}

/// The points of a report's tasks, a series for each policy. What has not said how much it read has none.
void add_points(const std::string& file, Plot& plot) {
  const auto refuse = [&](const std::string& cause) {
    throw Error(Errc::corrupt,
                "'" + file + "' " + cause + "; write it by `sluice eval -o json --output FILE`, or `python -m sluice "
                "eval --json FILE`");
  };
  const Json document = Json::parse(read_text_file(file), nullptr, false);
  if (document.is_discarded()) refuse("is no JSON");
  const Json::json_pointer place("/tasks/results");
  if (!document.is_object() || !document.contains(place) || !document.at(place).is_array()) {
    refuse("is no report of eval with tasks");
  }
  for (const Json& row : document.at(place)) {
    const bool whole = row.is_object() && row.contains("policy") && row["policy"].is_string() &&
                       row.contains("accuracy") && row["accuracy"].is_number();
    if (!whole) refuse("has a row without policy or accuracy");
    const Json bytes = row.value("bytes", Json());
    if (row.value("task", Json()) == kAllTasks || !bytes.is_number()) continue;
    series_of(plot, row["policy"]).points.push_back({bytes.get<double>(), row["accuracy"].get<double>()});
  }
}

int run(const PlotOptions& options) {
  const OutputTarget target(options.output);
  Plot plot{.title = "Accuracy against bytes read",
            .x_title = "bytes, share of dense attention's",
            .y_title = "accuracy",
            .series = {}};
  for (const std::string& file : options.files) add_points(file, plot);
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
