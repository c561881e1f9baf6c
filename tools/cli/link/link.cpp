#include "tools/cli/link/link.hpp"

#include <memory>

#include <CLI/CLI.hpp>

#include "sluice/error.hpp"
#include "tools/cli/text/command.hpp"
#include "tools/cli/text/values.hpp"

namespace sluice::tools {
namespace {

constexpr const char* kSections = "transfers, gather, load, latency, pinning";

Json config_of(const LinkOptions& options) {
  return {{"device", options.device},
          {"quick", options.quick},
          {"samples", options.samples},
          {"numa_node", options.numa_node < 0 ? Json() : Json(options.numa_node)},
          {"pin_gib", options.pin_gib},
          {"sections", split_list(options.sections, "--sections")},
          {"profile", options.profile.empty() ? Json() : Json(options.profile)}};
}

void check_sections(const LinkOptions& options) {
  for (const std::string& section : split_list(options.sections, "--sections")) {
    const bool known = section == "transfers" || section == "gather" || section == "load" || section == "latency" ||
                       section == "pinning";
    if (!known) throw Error(Errc::invalid_argument, "--sections: unknown section '" + section + "'; have " + kSections);
  }
}

int run(LinkOptions options) {
  check_sections(options);
  if (options.json) options.output.format = Format::json;
  require_distinct(
      {{"--output", options.output.path}, {"--save-profile", options.save_profile, !options.save_profile.empty()}});
  const OutputTarget target(options.output.path);
  if (!options.save_profile.empty()) (void)OutputTarget(options.save_profile);
  LinkFindings findings = measure_link(options);
  Report report{.command = "link", .config = config_of(options)};
  report.extra = {{"link", std::move(findings.facts)}, {"verdict", findings.verdict}};
  report.tables = std::move(findings.tables);
  if (options.output.format == Format::md) {
    std::string text = render(report, options.output.format) + "\nVerdict\n\n";
    for (const std::string& sentence : findings.verdict) text += "- " + sentence + "\n";
    deliver_text(text, target);
    return kOk;
  }
  return deliver(report, options.output.format, target);
}

}  // namespace

void add_link(CLI::App& app, int& exit_code) {
  auto options = std::make_shared<LinkOptions>();
  auto* command = app.add_subcommand("link", "Measure the link between host and GPU, path by path");
  add_count(*command, "--device", options->device, "GPU, as CUDA counts them", {.most = 63});
  command->add_flag("--quick", options->quick, "Fewer sizes and smaller buffers; some ten seconds");
  add_count(*command, "--samples", options->samples, "Samples per figure, of which the median counts",
            {.least = 1, .most = 1000});
  add_count(*command, "--numa-node", options->numa_node, "Node of the host's buffers [default: the GPU's nearest]",
            {.most = 1023})
      ->default_str("");
  add_count(*command, "--pin-gib", options->pin_gib, "Host memory to pin as an engine does, in GiB; 0: none",
            {.most = 4096});
  command->add_option("--sections", options->sections, std::string("Comma list of ") + kSections)
      ->capture_default_str();
  command->add_option("--profile", options->profile, "Judge `auto` by this transfer profile instead of a calibration")
      ->type_name("FILE");
  command
      ->add_option("--save-profile", options->save_profile, "Write the transfer profile here, for --transfer-profile")
      ->type_name("FILE");
  command->add_flag("--json", options->json, "Short for -o json");
  add_output(*command, options->output);
  command->footer(
      "Blocks are scattered on both sides and every path is verified before it is timed. Device times are taken with\n"
      "the stream held at a flag until all is enqueued; landed times include the enqueuing. 1 GB is 10^9 bytes.\n"
      "Exit code 1 if bytes arrive wrong.");
  command->callback([options, &exit_code] { exit_code = run(*options); });
}

}  // namespace sluice::tools
