// `sluice bench gpu`: forwards of an Engine against dense attention in device memory, and the kernels alone.
#include <algorithm>
#include <memory>
#include <optional>

#include <CLI/CLI.hpp>

#include "sluice/error.hpp"
#include "tools/cli/bench/batch_rows.hpp"
#include "tools/cli/bench/gpu_attention.hpp"
#include "tools/cli/bench/gpu_pipeline.hpp"
#include "tools/cli/bench/shapes.hpp"
#include "tools/cli/dense_flag.hpp"
#include "tools/cli/engine_flags.hpp"
#include "tools/cli/far_flag.hpp"
#include "tools/cli/synthetic/synthetic.hpp"
#include "tools/cli/text/values.hpp"
#include "tools/cli/trace/trace.hpp"

namespace sluice::tools {
namespace {

int run(const BenchGpuOptions& options) {
  (void)parse_pattern(options.pattern);
  const std::vector<std::string> sections = split_list(options.sections, "--sections");
  for (const std::string& section : sections) {
    if (section != "attention" && section != "kernels" && section != "pipeline")
      throw Error(Errc::invalid_argument,
                  "--sections: unknown section '" + section + "'; have attention, kernels, pipeline");
  }
  const bool attention = std::ranges::find(sections, "attention") != sections.end();
  if (!options.trace.empty() && !attention)
    throw Error(Errc::invalid_argument,
                "--trace: of the sections attention alone writes one; say --sections attention");
  if (options.costs && (!attention || options.dense_only))
    throw Error(Errc::invalid_argument,
                "--costs: only forwards of an engine have them; say --sections attention, without --dense-only");
  const AttentionShape shape = named_shape(options.shape_name, options.shape);
  const std::vector<std::uint32_t> lengths = parse_counts(options.lengths, "--length");
  (void)parse_prefetch(options.prefetch);
  const std::vector<GpuCase> cases = gpu_cases(options);
  BenchGpuOptions streaming = options;
  streaming.placements = to_string(PlacementMode::stream);
  const std::vector<GpuCase> streamed = gpu_cases(streaming);
  require_distinct({{"--output", options.output.path}, {"--trace", options.trace, !options.trace.empty()}});
  const OutputTarget target(options.output.path);
  const OutputTarget trace_target(options.trace);
  Report report{.command = "bench gpu",
                .config = {{"shape", options.shape_name},
                           {"q_heads", shape.q_heads},
                           {"kv_heads", shape.kv_heads},
                           {"head_dim", shape.head_dim},
                           {"lengths", lengths},
                           {"policies", split_policies(options.policies)},
                           {"placements", split_list(options.placements, "--placements")},
                           {"rows", options.rows},
                           {"ragged", options.ragged},
                           {"far", options.far},
                           {"pattern", options.pattern},
                           {"sinks", options.sinks},
                           {"layers", options.layers},
                           {"kv_dtype", to_string(options.kv_dtype)},
                           {"threads", options.threads},
                           {"steps", options.steps},
                           {"warm_up", options.warm_up},
                           {"repeats", options.repeats},
                           {"promotions", options.promotions},
                           {"prefetch", split_list(options.prefetch, "--prefetch")},
                           {"page_tokens", options.page_tokens},
                           {"near", options.near_share ? Json(*options.near_share) : Json()},
                           {"dense_tokens", dense_tokens_json(options.dense_tokens.value_or(0))},
                           {"seed", options.seed},
                           {"device", options.device.device},
                           {"link_rows", options.device.link_rows}}};
  ProgressBar bar("bench");
  const InterruptScope interrupts;
  std::optional<GpuRig> rig;
  const auto ready = [&]() -> GpuRig& {
    if (rig) return *rig;
    rig.emplace(options, shape);
    report.config["device"] = rig->device()->info().name;
    report.config["fetch_share"] = fetch_share_json(options.fetch_share);
    report.config["handover"] = to_string(rig->handover());
    return *rig;
  };
  std::string trace;
  for (const std::string& section : sections) {
    if (interrupted()) break;
    if (section == "attention") {
      trace = bench_gpu_attention(ready(), lengths, cases, bar, report);
    } else if (section == "pipeline") {
      bench_gpu_pipeline(ready(), lengths, streamed, bar, report);
    } else {
      bar.update(0, 1, "kernels");
      report.tables.push_back(bench_gpu_kernels(options.device, shape, options.page_tokens));
    }
  }
  return deliver_beside(report, options.output.format, target, trace, trace_target);
}

}  // namespace

void add_bench_gpu(CLI::App& bench, int& exit_code) {
  auto options = std::make_shared<BenchGpuOptions>();
  options->device.device = "cuda";
  auto* command = bench.add_subcommand("gpu", "Decode attention with the KV cache in host memory against dense in HBM");
  command->add_option("--shape", options->shape_name, "One of " + shape_names())->capture_default_str();
  add_shape_flags(*command, options->shape);
  command->add_option("--length", options->lengths, "Comma list of context lengths in tokens, K allowed")
      ->capture_default_str();
  command->add_option("--policies", options->policies, "Policies to measure; see `sluice eval --help`")
      ->capture_default_str();
  command
      ->add_option("--placements", options->placements,
                   "Comma list of hybrid, stream, and near: device memory has room for all tokens")
      ->capture_default_str();
  add_fetch_share(*command, options->fetch_share);
  add_handover(*command, options->handover);
  add_batch_rows(*command, options->rows, options->ragged);
  add_far(*command, options->far);
  command->add_option("--pattern", options->pattern, "Attention: structured (heavy tokens, slashes) or uniform (noise)")
      ->capture_default_str();
  add_sinks(*command, options->sinks);
  add_count(*command, "--page-tokens", options->page_tokens, "Tokens per page, of policies that name none",
            {.least = 8, .most = 256});
  add_kv_dtype(*command, "--kv-dtype", options->kv_dtype, "Element type of keys and values in host memory");
  add_count(*command, "--layers", options->layers, "Layers of a forward", {.least = 1, .most = 256});
  add_count(*command, "--threads", options->threads, "Threads that answer the far part; 0: the cores less one",
            {.most = 4096});
  add_count(*command, "--steps", options->steps, "Timed forwards; times are medians over them",
            {.least = 1, .most = 4096});
  add_count(*command, "--warm-up", options->warm_up, "Forwards before those, in which tokens come near",
            {.most = 4096});
  add_count(*command, "--repeats", options->repeats,
            "Engines that are timed one after the other: the median of them, and the worst", {.least = 1, .most = 100});
  add_count(*command, "--promotions", options->promotions, "Tokens of a KV head that a forward brings near, at most",
            {.most = kMostPromotions});
  command->add_option("--near", options->near_share, "Share of the pages that device memory has room for")
      ->check(CLI::Range(0.0, 1.0))
      ->default_str(kUsualNearText);
  add_dense_tokens(*command, options->dense_tokens, "0");
  add_seed(*command, options->seed, "Seed of the synthetic layer");
  command->add_option("--sections", options->sections, "Comma list of attention, kernels, pipeline")
      ->capture_default_str();
  command
      ->add_option("--prefetch", options->prefetch,
                   "Comma list for the section pipeline. on: rows that were attended before come near; off: none does, "
                   "and what is far is fetched when it is chosen, as with --promotions 0")
      ->capture_default_str();
  command->add_flag("--costs", options->costs,
                    "Also show what a layer takes beyond what it reads: kernels, the question, the answer's way back");
  command->add_flag("--dense-only", options->dense_only, "Only dense attention in device memory");
  add_device_flags(*command, options->device);
  add_trace(*command, options->trace);
  add_output(*command, options->output);
  command->footer(
      "Every layer of every sequence is the same synthetic layer, in memory of its own. With every token chosen the\n"
      "engine must give dense attention before anything is timed. A time is from the plan until the forward is known\n"
      "to have ended, divided by the layers; `calling` is the part of it in which the calling thread works, `waited` "
      "that\n"
      "in which the device waits for the CPU, `answer` what the CPU takes from seeing a question to its answer, and\n"
      "`promoted` tokens brought near per forward, layer and KV head, `missed` query heads of a layer whose choice "
      "was\n"
      "not foreseen and took a second look at all scores. No step comes twice.\n"
      "Of --costs `scan` is what is read to choose and `near` near rows, by their bytes at the highest rate at which\n"
      "dense attention read in the run, which should have a long or a large one; `far` is the answer, `fixed` what is\n"
      "left of a layer. `verbs` are what an engine enqueues, some without a launch; of `graph nodes` a layer has its\n"
      "part of those that begin and end a forward, of the time its part of what a forward takes once: take a model's\n"
      "layers.\n"
      "The section pipeline places policies `stream`, whatever --placements says: what the CPU chooses crosses the\n"
      "link. By forwards that are traced behind those that are timed `choice` is what the CPU takes to choose for a\n"
      "layer, `waited` what the device waits for that, `exposed` what it waits for the link, to attend rows and to\n"
      "bring them near. `goal` is 1.15 x (choice + exposed bytes / rate of the link) + 12 us, by the rate of "
      "scattered\n"
      "pages in the device's transfer profile; without a GPU, of host memory. That what is attended does not depend "
      "on\n"
      "--prefetch is checked. What a device chooses by itself has no such parts.");
  command->callback([options, &exit_code] { exit_code = run(*options); });
}

}  // namespace sluice::tools
