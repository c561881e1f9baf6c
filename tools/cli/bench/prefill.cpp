#include <cstdint>
#include <memory>

#include <CLI/CLI.hpp>

#include "sluice/engine.hpp"
#include "tools/cli/bench/batch_rows.hpp"
#include "tools/cli/bench/bench.hpp"
#include "tools/cli/bench/prefill_bench.hpp"
#include "tools/cli/bench/shapes.hpp"
#include "tools/cli/device_flags.hpp"
#include "tools/cli/prefill_flags.hpp"
#include "tools/cli/text/progress_bar.hpp"
#include "tools/cli/text/values.hpp"

namespace sluice::tools {
namespace {

int run(BenchPrefillOptions options) {
  const AttentionShape shape = options.shape = named_shape(options.shape_name, options.shape);
  const OutputTarget target(options.output.path);
  PrefillBench bench(options);
  ProgressBar bar("bench");
  const InterruptScope interrupts;
  try {
    bench.run(bar);
  } catch (const Interrupted&) {  // The rows that are finished are a result.
  }
  Report report{.command = "bench prefill",
                .config = {{"shape", options.shape_name},
                           {"q_heads", shape.q_heads},
                           {"kv_heads", shape.kv_heads},
                           {"head_dim", shape.head_dim},
                           {"lengths", bench.lengths()},
                           {"rows", bench.rows()},
                           {"ragged", options.ragged},
                           {"structures", split_list(options.structures, "--structures")},
                           {"gammas", listed(options.gammas, "--gammas")},
                           {"others", listed(options.others, "--others")},
                           {"tau", options.flex.tau},
                           {"min_budget", options.flex.min_budget},
                           {"max_budget", options.flex.max_budget},
                           {"lines", options.flex.lines},
                           {"flattened", options.flex.flattened},
                           {"chunk", options.chunk},
                           {"clusters", options.clusters},
                           {"layers", shape.layers},
                           {"page_tokens", options.page_tokens},
                           {"dtype", to_string(options.dtype)},
                           {"threads", options.threads},
                           {"repeat", bench.samples()},
                           {"seed", options.seed},
                           {"device", bench.device().name}}};
  report.tables.push_back(bench.take());
  if (options.clusters != 0) report.tables.push_back(bench.take_clusters());
  return deliver(report, options.output.format, target);
}

}  // namespace

void add_bench_prefill(CLI::App& bench, int& exit_code) {
  auto options = std::make_shared<BenchPrefillOptions>();
  auto* command = bench.add_subcommand("prefill", "Attention of one layer of a prompt: dense, and by FlexPrefill");
  command->add_option("--shape", options->shape_name, "One of " + shape_names())->capture_default_str();
  add_shape_flags(*command, options->shape);
  command->add_option("--length", options->lengths,
                      "Comma list of prompt lengths in tokens, K allowed [default: 2K,8K on the host, "
                      "4K,16K,64K,128K,256K on a GPU]");
  add_batch_rows(*command, options->rows, options->ragged);
  command
      ->add_option("--structures", options->structures,
                   "Comma list of vertical_slash, narrow_slash, query_aware, uniform (the worst)")
      ->capture_default_str();
  command->add_option("--gammas", options->gammas, "Comma list of FlexPrefill's gamma; \"\": dense attention alone")
      ->capture_default_str();
  command->add_option("--others", options->others,
                      "Comma list of baselines that choose blocks, too: streaming[@SINKS+WINDOW], "
                      "minference[@PATTERN[:SIZES]]");
  add_flexprefill_flags(*command, options->flex);
  add_count(*command, "--chunk", options->chunk, "Longer prompts are also attended in chunks of so many tokens",
            {.least = 1, .most = 1 << 20});
  add_count(*command, "--clusters", options->clusters,
            "Also k-means of the prompts' keys in clusters of so many tokens, as `tactic | int4` does behind a prompt "
            "(32 there); 0: none",
            {.most = 1024});
  add_count(*command, "--page-tokens", options->page_tokens, "Tokens per page", {.least = 8, .most = 256});
  add_dtype(*command, "--dtype", options->dtype, "Element type of queries, keys, values and outputs");
  add_count(*command, "--threads", options->threads, "Threads of host work; 0: all cores", {.most = 4096});
  add_count(*command, "--repeat", options->repeat, "Samples of every time [default: 3 on the host, 5 on a GPU]",
            {.least = 1, .most = 1000})
      ->default_str("");
  add_seed(*command, options->seed, "Seed of the synthetic prompts");
  add_device_flags(*command, options->device);
  add_output(*command, options->output);
  command->footer(
      "Rows of every attention are checked against float64 before it is timed; a wrong one ends the run with exit\n"
      "code 1. The prompts of --rows are other ones each; their chunks that begin at the same token are one call, of\n"
      "dense attention too. The rows of auto are no measurements of their own: they are put together from those above\n"
      "them by what the rule would do in a model of the shape's layers, all like this one. Values are noise, so that\n"
      "the error is that of the hardest case.");
  command->callback([options, &exit_code] { exit_code = run(*options); });
}

}  // namespace sluice::tools
