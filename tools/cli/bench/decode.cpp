// `sluice bench decode`: time per token of a whole model, its attention by an Engine, against dense attention in device
// memory.
#include <memory>

#include <CLI/CLI.hpp>

#include "sluice/error.hpp"
#include "tools/cli/bench/bench.hpp"
#include "tools/cli/bench/decode_bench.hpp"
#include "tools/cli/device_flags.hpp"
#include "tools/cli/engine_flags.hpp"
#include "tools/cli/far_flag.hpp"
#include "tools/cli/synthetic/prompt_pattern.hpp"
#include "tools/cli/text/values.hpp"

namespace sluice::tools {
namespace {

int run(BenchDecodeOptions& options) {
  const OutputTarget target(options.output.path);
  const std::vector<DecodeMethod> methods = parse_methods(options.methods);
  const std::vector<std::uint32_t> lengths = parse_counts(options.lengths, "--length");
  const std::vector<std::uint32_t> batches = parse_counts(options.batches, "--batch");
  const std::vector<std::uint64_t> kv_sizes = parse_kv_sizes(options.kv_sizes);
  (void)parse_share(options.near, "--near");
  if (!options.structure.empty()) (void)parse_prompt_structure(options.structure, "--structure");
  if (options.drafts != 1 && batches != std::vector<std::uint32_t>{1})
    throw Error(Errc::invalid_argument, "--drafts beside --batch: drafts are timed of one sequence; leave one out");
  for (const DecodeMethod& method : methods)  // Refused before anything is built.
    if (!method.dense && options.far != "auto")
      (void)with_far(method.name.substr(method.name.find('/') + 1), options.far, {}, {});
  const std::shared_ptr<Device> device = make_device(options.device);
  DecodeBench bench(options, device);
  ProgressBar bar("bench");
  const InterruptScope interrupts;
  try {
    for (const std::uint32_t length : lengths) {
      for (const std::uint64_t kv_bytes : kv_sizes) {
        for (const std::uint32_t batch : batches) bench.run(length, batch, kv_bytes, methods, bar);
      }
    }
  } catch (const Interrupted&) {  // The rows that are finished are a result.
  }
  Report report{.command = "bench decode",
                .config = {{"model", options.model},
                           {"random_weights", options.random_weights},
                           {"structure", options.structure.empty() ? Json() : Json(options.structure)},
                           {"seed", options.seed},
                           {"lengths", lengths},
                           {"batches", batches},
                           {"kv_sizes", kv_sizes},
                           {"methods", options.methods},
                           {"near", options.near},
                           {"far", options.far},
                           {"fetch_share", fetch_share_json(options.fetch_share)},
                           {"handover", to_string(options.handover)},
                           {"graphs", to_string(options.graphs)},
                           {"kv_dtype", to_string(options.kv_dtype)},
                           {"steps", options.steps},
                           {"warm_up", options.warm_up},
                           {"audited", options.audited},
                           {"drafts", options.drafts},
                           {"threads", options.threads},
                           {"device", bench.device().info().name},
                           {"transfer", options.device.transfer}}};
  report.tables.push_back(bench.take());
  report.tables.push_back(bench.take_room());
  return deliver(report, options.output.format, target);
}

}  // namespace

void add_bench_decode(CLI::App& bench, int& exit_code) {
  auto options = std::make_shared<BenchDecodeOptions>();
  options->device.device = "cuda";
  auto* command = bench.add_subcommand("decode", "Time per token of a whole model on the GPU, by placement and policy");
  command->add_option("--model", options->model, "Hugging Face directory [default: --random-weights]")
      ->type_name("DIR");
  command->add_option("--random-weights", options->random_weights, "A known shape with random weights")
      ->type_name("NAME")
      ->capture_default_str();
  auto* structure =
      command
          ->add_option(
              "--structure", options->structure,
              "Attend synthetic rows instead of the model's: vertical_slash, narrow_slash, query_aware, or uniform, "
              "of which nothing can be left out; each layer and sequence has its own "
              "[default: the model's rows behind random ones]")
          ->type_name("NAME");
  add_seed(*command, options->seed, "Seed of --structure")->needs(structure);
  command->add_option("--length", options->lengths, "Comma list of prompt lengths in tokens, K allowed")
      ->capture_default_str();
  command
      ->add_option(
          "--methods", options->methods,
          "Semicolon list of dense (everything in device memory) and PLACEMENT/POLICY, PLACEMENT being hybrid, "
          "stream, or near (room for all tokens in device memory); ratios are to the first that has room")
      ->capture_default_str();
  command->add_option("--batch", options->batches, "Comma list of numbers of sequences that decode together")
      ->capture_default_str();
  command
      ->add_option("--kv-size", options->kv_sizes,
                   "Comma list of device memory for keys and values with all that goes with them, K/M/G allowed: dense "
                   "takes as many sequences at a time as fit, of hybrid and stream what is left is near "
                   "[default: what --near takes]")
      ->type_name("SIZES");
  command->add_option("--near", options->near, "Share of the tokens that device memory has room for")
      ->type_name("SHARE")
      ->capture_default_str();
  add_far(*command, options->far);
  add_fetch_share(*command, options->fetch_share);
  add_handover(*command, options->handover);
  add_graphs(*command, options->graphs);
  add_kv_dtype(*command, "--kv-dtype", options->kv_dtype, "Element type of keys and values in host memory");
  add_count(*command, "--steps", options->steps, "Timed tokens", {.least = 1, .most = 4096});
  add_count(*command, "--warm-up", options->warm_up, "Tokens before those", {.most = 4096});
  add_count(*command, "--audit", options->audited,
            "Tokens behind those that are held against exact attention, to say how much of it is covered",
            {.most = 4096});
  add_count(*command, "--drafts", options->drafts,
            "Also forwards of as many new tokens of a sequence, one of which stays: one by one, and together",
            {.least = 1, .most = kMostGroup});
  add_count(*command, "--threads", options->threads, "Threads of host work; 0: all cores", {.most = 4096});
  add_device_flags(*command, options->device);
  add_output(*command, options->output);
  command->footer(
      "The prompt's keys and values are random numbers, or synthetic, and imported without computing them; decoding\n"
      "is the model's own: with --structure, too, all that it computes but which rows are attended. Forwards are CUDA\n"
      "graphs as --graphs says; those of dense are enqueued layer by layer. Same tokens: share that is as by the "
      "first\n"
      "method. With --drafts times are of forwards, which accept one token of those that they verify.");
  command->callback([options, &exit_code] { exit_code = run(*options); });
}

}  // namespace sluice::tools
