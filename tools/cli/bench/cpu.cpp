#include <algorithm>
#include <cmath>
#include <memory>

#include <CLI/CLI.hpp>

#include "cpu/stages/shapes.hpp"
#include "sluice/error.hpp"
#include "tools/cli/bench/batch_rows.hpp"
#include "tools/cli/bench/bench.hpp"
#include "tools/cli/bench/shapes.hpp"
#include "tools/cli/text/facts.hpp"
#include "tools/cli/text/values.hpp"

namespace sluice::tools {
namespace {

Json config_of(const BenchCpuOptions& options) {
  return {{"shape", options.shape_name},
          {"q_heads", options.shape.q_heads},
          {"kv_heads", options.shape.kv_heads},
          {"head_dim", options.shape.head_dim},
          {"lengths", parse_counts(options.lengths, "--length")},
          {"rows", parse_counts(options.rows, "--rows")},
          {"ragged", options.ragged},
          {"policies", split_policies(options.policies)},
          {"alpha", options.alpha == 0.0 ? Json() : Json(options.alpha)},
          {"budget", options.budget.empty() ? Json() : Json(options.budget)},
          {"group_correlation", options.group_correlation},
          {"pattern", options.pattern},
          {"sinks", options.sinks},
          {"page_tokens", options.page_tokens},
          {"dtype", to_string(options.dtype)},
          {"threads", options.threads},
          {"steps", options.steps},
          {"repeat", options.repeat},
          {"seed", options.seed}};
}

int run(BenchCpuOptions options) {
  options.shape = named_shape(options.shape_name, options.shape);
  (void)parse_pattern(options.pattern);
  const std::vector<std::string> sections = split_list(options.sections, "--sections");
  for (const std::string& section : sections) {
    if (section != "attention" && section != "kernels") {
      throw Error(Errc::invalid_argument, "--sections: unknown section '" + section + "'; have attention, kernels");
    }
  }
  const OutputTarget target(options.output.path);
  BenchMachine machine(options.threads);
  const PageLayout layout{
      .page_tokens = options.page_tokens, .head_dim = options.shape.head_dim, .dtype = options.dtype};
  for (const std::string& reason : cpu::unsupported_reasons(options.shape, layout)) {
    throw Error(Errc::unsupported, "bench cpu: " + reason);
  }
  Report report{.command = "bench cpu", .config = config_of(options)};
  report.config["isa"] = machine.host.kernels.name;
  ProgressBar bar("bench");
  const InterruptScope interrupts;
  for (const std::string& section : sections) {
    if (interrupted()) break;
    report.tables.push_back(section == "attention" ? bench_attention(options, machine, bar)
                                                   : bench_kernels(options, machine));
  }
  return deliver(report, options.output.format, target);
}

void add_cpu(CLI::App& bench, int& exit_code) {
  auto options = std::make_shared<BenchCpuOptions>();
  auto* command = bench.add_subcommand("cpu", "Attention and selection on the host: dense, exact top-k, LFPS");
  command->add_option("--shape", options->shape_name, "One of " + shape_names())->capture_default_str();
  add_shape_flags(*command, options->shape);
  command->add_option("--length", options->lengths, "Comma list of context lengths in tokens, K allowed")
      ->capture_default_str();
  add_batch_rows(*command, options->rows, options->ragged);
  command
      ->add_option("--policies", options->policies,
                   "Policies to hold against dense attention; see `sluice eval --help`")
      ->capture_default_str();
  add_number(*command, "--alpha", options->alpha,
             "Threshold of history policies; larger selects less [default: the policy's]", {.most = 10.0})
      ->default_str("");
  command->add_option("--budget", options->budget,
                      "Tokens per query head as a share (2%) or a count [default: the policy's]");
  add_number(*command, "--group-correlation", options->group_correlation,
             "How far the query heads of a group want the same tokens, [0, 1]");
  command->add_option("--pattern", options->pattern, "Attention: structured (heavy tokens, slashes) or uniform (noise)")
      ->capture_default_str();
  add_sinks(*command, options->sinks);
  add_count(*command, "--page-tokens", options->page_tokens, "Tokens per page", {.least = 8, .most = 256});
  add_kv_dtype(*command, "--dtype", options->dtype, "Element type of keys and values");
  add_count(*command, "--threads", options->threads, "Threads of everything measured; 0: all cores", {.most = 4096});
  add_count(*command, "--steps", options->steps, "Decode steps; times are medians over them",
            {.least = 1, .most = 4096});
  add_count(*command, "--repeat", options->repeat, "Passes over the steps, each with fresh history",
            {.least = 1, .most = 1000});
  add_seed(*command, options->seed, "Seed of the synthetic layer");
  command->add_option("--sections", options->sections, "Comma list of attention, kernels")->capture_default_str();
  add_output(*command, options->output);
  command->footer(
      "One layer, all its heads, on synthetic heavy-tailed attention; caches are emptied between measurements.\n"
      "The sequences of --rows are other ones each, and are attended in one call, by dense attention too.\n"
      "Results are checked before anything is timed; a wrong one ends the run with exit code 1.");
  command->callback([options, &exit_code] { exit_code = run(*options); });
}

}  // namespace

CacheEvictor::CacheEvictor() {
  const std::uint64_t bytes = std::clamp(2 * last_level_cache_bytes(), 64 * MiB, 1 * GiB);
  data_.assign(bytes / sizeof(std::uint64_t), 1);
}

void CacheEvictor::evict() {
  // Written, so that no line stays shared or clean; the values do not matter.
  constexpr std::size_t kWordsPerLine = 8;
  for (std::size_t i = 0; i < data_.size(); i += kWordsPerLine) ++data_[i];
}

SyntheticPattern parse_pattern(const std::string& text) {
  if (text == "structured") return SyntheticPattern::structured;
  if (text == "uniform") return SyntheticPattern::uniform;
  throw Error(Errc::invalid_argument, "--pattern: '" + text + "' is no pattern; have structured, uniform");
}

double relative_error(std::span<const float> got, std::span<const float> want) {
  double difference = 0.0, size = 0.0;
  for (std::size_t i = 0; i < want.size(); ++i) {
    difference += std::pow(static_cast<double>(got[i]) - want[i], 2);
    size += std::pow(static_cast<double>(want[i]), 2);
  }
  return size == 0.0 ? std::sqrt(difference) : std::sqrt(difference / size);
}

void add_bench(CLI::App& app, int& exit_code) {
  auto* bench = app.add_subcommand("bench", "Measure this machine");
  bench->require_subcommand(1);
  add_cpu(*bench, exit_code);
  add_bench_gpu(*bench, exit_code);
  add_bench_prefill(*bench, exit_code);
  add_bench_decode(*bench, exit_code);
  add_bench_serve(*bench, exit_code);
}

}  // namespace sluice::tools
