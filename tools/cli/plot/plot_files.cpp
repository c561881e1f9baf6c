#include "tools/cli/plot/plot_files.hpp"

#include <algorithm>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include <CLI/CLI.hpp>

#include "sluice/error.hpp"
#include "tools/cli/text/command.hpp"
#include "tools/llama/files.hpp"

namespace sluice::tools {
namespace {

struct PlotOptions {
  std::vector<std::string> files;
  std::string output;
};

PlotSeries& series_of(Plot& plot, const std::string& name) {
  const auto named = [&](const PlotSeries& known) { return known.name == name; };
  const auto known = std::find_if(plot.series.begin(), plot.series.end(), named);
  if (known != plot.series.end()) return *known;
  return plot.series.emplace_back(PlotSeries{.name = name, .points = {}});
}

/// Rows of the table `eval`, if the report has one with all that a plot shows.
Json rows_of(const std::string& file) {
  const auto refuse = [&](const std::string& cause) {
    throw Error(Errc::corrupt, "'" + file + "' " + cause + "; write it by `sluice eval -o json --output FILE`");
  };
  const Json document = Json::parse(read_text_file(file), nullptr, false);
  if (document.is_discarded()) refuse("is no JSON");
  const Json::json_pointer place("/results/eval");
  if (!document.is_object() || !document.contains(place) || !document.at(place).is_array()) {
    refuse("is no report of `sluice eval` with tasks");
  }
  for (const Json& row : document.at(place)) {
    const bool named = row.is_object() && row.contains("policy") && row["policy"].is_string() &&
                       row.contains("prefill") && row["prefill"].is_string() && row.contains("accuracy") &&
                       row["accuracy"].is_number();
    if (!named || !row.contains("near_bytes_share") || !row.contains("far_bytes_share")) {
      refuse("has a row without policy, prefill, accuracy, near_bytes_share or far_bytes_share");
    }
  }
  return document.at(place);
}

int run(const PlotOptions& options) {
  const OutputTarget target(options.output);
  Json rows = Json::array();
  for (const std::string& file : options.files) {
    for (const Json& row : rows_of(file)) rows.push_back(row);
  }
  target.commit(to_svg(accuracy_plot(rows)));
  return kOk;
}

}  // namespace

Plot accuracy_plot(const Json& rows) {
  Plot plot{.title = "Accuracy against bytes of K, V and digests read",
            .x_title = "bytes, share of dense attention's",
            .y_title = "accuracy",
            .series = {}};
  std::set<std::string> prefills;
  for (const Json& row : rows) prefills.insert(row.at("prefill").get<std::string>());
  for (const Json& row : rows) {
    const Json& near = row.at("near_bytes_share");
    const Json& far = row.at("far_bytes_share");
    if (!near.is_number() || !far.is_number()) continue;  // It never decoded.
    const auto policy = row.at("policy").get<std::string>();
    const std::string name = prefills.size() > 1 ? policy + ", " + row.at("prefill").get<std::string>() : policy;
    series_of(plot, name).points.push_back({near.get<double>() + far.get<double>(), row.at("accuracy").get<double>()});
  }
  return plot;
}

void add_plot(CLI::App& app, int& exit_code) {
  auto options = std::make_shared<PlotOptions>();
  auto* command = app.add_subcommand("plot", "Draw what several runs of `sluice eval` found, as one SVG");
  command->add_option("FILES", options->files, "Reports of `sluice eval -o json`")->required()->type_name("FILE");
  command->add_option("--output", options->output, "Write the SVG to this file [default: standard output]")
      ->type_name("FILE");
  command->callback([options, &exit_code] { exit_code = run(*options); });
}

}  // namespace sluice::tools
