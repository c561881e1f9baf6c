// `sluice bench serve`: requests that come at random, served by an engine that an Admission decides for.
#include <algorithm>
#include <cmath>
#include <memory>
#include <optional>

#include <CLI/CLI.hpp>

#include "cpu/device/host_device.hpp"
#include "sluice/error.hpp"
#include "tools/cli/bench/bench.hpp"
#include "tools/cli/bench/serve_bench.hpp"
#include "tools/cli/bench/shapes.hpp"
#include "tools/cli/model_source.hpp"
#include "tools/cli/prefill_flags.hpp"
#include "tools/cli/text/message.hpp"
#include "tools/cli/text/values.hpp"

namespace sluice::tools {
namespace {

AttentionShape shape_of(const BenchServeOptions& options) {
  AttentionShape shape = named_shape(options.shape_name, options.shape);
  shape.layers = options.shape.layers;
  validate(shape);
  return shape;
}

std::vector<double> parse_rates(const BenchServeOptions& options) {
  std::vector<double> rates;
  for (const std::string& rate : split_list(options.rates, "--rates"))
    rates.push_back(parse_number(rate, "--rates", {.least = 0.0, .most = 1e6}));
  if (rates.empty()) throw Error(Errc::invalid_argument, "--rates: the list is empty; name at least one, e.g. 1,4");
  if (!options.bisect) return rates;
  if (!options.limits.judge())
    throw Error(Errc::invalid_argument, "--bisect: nothing is to be held; give --tbt-limit, --queue-limit or both");
  std::ranges::sort(rates);
  if (rates.front() == 0.0)
    throw Error(Errc::invalid_argument,
                "--rates: 0, all at once, is not the lowest of rates; leave it out of --bisect");
  return rates;
}

/// As many requests as come at the highest rate.
std::vector<LoadRequest> load_of(const BenchServeOptions& options, const std::vector<double>& rates) {
  const double seconds = options.limits.seconds;
  const double most = std::ranges::max(rates);
  if (seconds == 0.0 || most == 0.0) return make_load(options.load);
  LoadOptions plenty = options.load;
  plenty.requests = static_cast<std::uint32_t>(std::min(1e6, std::ceil(2.0 * seconds * most) + 32.0));
  const std::vector<LoadRequest> load = make_load(plenty);
  const auto coming = coming_within(load, most, seconds);
  return {coming.begin(), coming.end()};
}

Json config_of(const BenchServeOptions& options, const AttentionShape& shape, const Device& device) {
  return {{"shape", options.shape_name},
          {"model", options.model},
          {"random_weights", options.random_weights},
          {"structure", options.structure},
          {"layers", shape.layers},
          {"q_heads", shape.q_heads},
          {"kv_heads", shape.kv_heads},
          {"head_dim", shape.head_dim},
          {"policies", split_policies(options.policies)},
          {"rates", parse_rates(options)},
          {"requests", options.load.requests},
          {"prompt", options.load.prompt},
          {"answer", options.load.answer},
          {"spread", options.load.spread},
          {"lengths", options.load.lengths.empty() ? Json() : Json(options.load.lengths)},
          {"seed", options.load.seed},
          {"seconds", options.limits.seconds},
          {"tbt_limit_ms", options.limits.between_ms},
          {"queue_limit_s", options.limits.queued_s},
          {"bisect", options.bisect},
          {"kv_bytes", options.kv_bytes},
          {"batch", options.batch},
          {"prefill_chunk", options.engine.prefill_chunk},
          {"prefills", options.prefills},
          {"host_bytes", options.engine.host_bytes},
          {"near_bytes", options.engine.near_bytes},
          {"placement", to_string(options.engine.placement)},
          {"fetch_share", fetch_share_json(options.engine.fetch_share)},
          {"handover", to_string(options.engine.handover)},
          {"graphs", to_string(options.graphs)},
          {"slowdown", options.slowdown},
          {"watermark_pages", options.watermark_pages},
          {"near_pages", options.near_pages},
          {"near_pages_per_sequence", options.near_pages_per_sequence},
          {"threads", options.engine.threads},
          {"device", device.info().name}};
}

std::shared_ptr<Device> device_of(BenchServeOptions& options) {
  std::shared_ptr<Device> device = make_device(options.device);
  choose_chunk(options.engine, device.get());
  if (device) return device;
  return std::make_shared<cpu::HostDevice>(
      std::make_shared<const cpu::Workers>(cpu::Topology(), cpu::WorkersOptions{.threads = options.engine.threads}));
}

Report report_of(const BenchServeOptions& options, const AttentionShape& shape, const Device& device,
                 const ServeBench& bench) {
  return {.command = "bench serve", .config = config_of(options, shape, device), .tables = bench.tables()};
}

/// One method at every rate, or at those that tell which is the last that holds.
void run_method(const BenchServeOptions& options, const ServeMethod& method, const std::vector<double>& rates,
                ServeBench& bench, const std::function<void(double)>& next, const std::function<void()>& row_done) {
  const auto run_one = [&](double rate) {
    next(rate);
    const bool held = bench.run(rate);
    row_done();
    return held;
  };
  bench.take_method(method);
  if (options.bisect) {
    (void)largest_that_holds(rates, run_one);
  } else {
    for (const double rate : rates) (void)run_one(rate);
  }
  bench.close_method();
}

/// One that fails does not take the others along; whether none did.
/// @throws Error if none was measured
bool run_all(const BenchServeOptions& options, const std::vector<ServeMethod>& methods,
             const std::vector<double>& rates, ServeBench& bench, const std::function<void()>& row_done) {
  ProgressBar bar("bench");
  std::optional<Error> failure;
  for (std::size_t m = 0; m < methods.size(); ++m) {
    std::size_t done = m * rates.size();
    const auto next = [&](double rate) {
      bar.update(done++, methods.size() * rates.size(), methods[m].name + " at " + shortest(rate));
    };
    try {
      run_method(options, methods[m], rates, bench, next, row_done);
    } catch (const Error& error) {
      if (methods.size() == 1) throw;
      say("error: " + methods[m].name + ": " + error.what());
      failure = error;
    }
  }
  if (failure && bench.tables().front().rows.empty()) throw Error(*failure);
  return !failure;
}

int run(BenchServeOptions& options) {
  const std::vector<ServeMethod> methods = parse_serve_methods(options);
  const std::vector<double> rates = parse_rates(options);
  (void)parse_prompt_structure(options.structure, "--structure");
  const std::vector<LoadRequest> load = load_of(options, rates);
  const OutputTarget target(options.output.path);
  const bool whole = !options.model.empty() || !options.random_weights.empty();
  std::optional<AttentionShape> shape;
  if (!whole) shape = shape_of(options);  // Refused before anything is built.
  const std::shared_ptr<Device> device = device_of(options);
  std::optional<Model> model;
  if (whole) {
    model = load_model(options.model, options.random_weights, options.engine.threads, device);
    shape = model->config().shape();
  }
  ServeBench bench(options, *shape, model ? &*model : nullptr, device, load);
  bench.check(methods);
  // What there is if this is ended before its time. A disk that is full may not be so at the end.
  const auto row_done = [&] {
    if (!target.is_file() || options.output.format == Format::csv) return;
    try {
      target.commit(render(report_of(options, *shape, *device, bench), options.output.format));
    } catch (const Error& error) {
      say(std::string(error.what()) + ". The rows so far are kept for the end");
    }
  };
  const InterruptScope interrupts;
  bool whole_table = true;
  try {
    whole_table = run_all(options, methods, rates, bench, row_done);
  } catch (const Interrupted&) {  // The rows that are finished are a result.
  }
  const ExitCode code = deliver(report_of(options, *shape, *device, bench), options.output.format, target);
  return code == kOk && !whole_table ? kFailed : code;
}

void add_load_flags(CLI::App& command, LoadOptions& load) {
  add_count(command, "--requests", load.requests, "Requests of each run", {.least = 1, .most = 1'000'000});
  add_count(command, "--prompt", load.prompt, "Mean length of prompts in tokens", {.least = 1, .most = 1u << 28});
  add_count(command, "--answer", load.answer, "Mean length of answers in tokens", {.least = 1, .most = 1u << 28});
  add_number(command, "--spread", load.spread,
             "Of both lengths, which are log-normal: standard deviation of their logarithms", {.most = 4.0});
  command.add_option("--lengths", load.lengths, "CSV file of prompt,answer lengths instead, taken in order and again")
      ->type_name("FILE");
  add_seed(command, load.seed, "Seed of arrivals and lengths");
}

void add_model_flags(CLI::App& command, BenchServeOptions& options) {
  auto* model = command.add_option("--model", options.model, "Hugging Face directory: forwards of a whole model")
                    ->type_name("DIR");
  command
      .add_option("--random-weights", options.random_weights,
                  "Or a known shape with random weights; --shape and --layers are of attention alone")
      ->type_name("NAME")
      ->excludes(model);
  command
      .add_option(
          "--structure", options.structure,
          "What is attended: vertical_slash, narrow_slash, query_aware, or uniform, of which nothing can be left out")
      ->capture_default_str();
  add_size(
      command, "--kv-size", options.kv_bytes,
      "Device memory for keys and values with all that goes with them, K/M/G allowed: dense serves as many requests "
      "at a time as fit, of others what is left is near [default: what --near-size says]");
}

void add_limit_flags(CLI::App& command, BenchServeOptions& options) {
  ServeLimits& limits = options.limits;
  add_number(
      command, "--seconds", limits.seconds,
      "Requests come for so long, as many as that is at each rate; what has not ended half as long after is left; "
      "0: --requests, and all of them end",
      {.most = 1e6});
  add_number(command, "--tbt-limit", limits.between_ms,
             "Milliseconds that the 99th percentile of the times between tokens is to hold; 0: any", {.most = 1e6});
  add_number(command, "--queue-limit", limits.queued_s,
             "Seconds that the median of the times from arrival to admission is to hold; 0: any", {.most = 1e6});
  command.add_flag("--bisect", options.bisect, "Only the rates that tell which is the last that holds the limits");
}

}  // namespace

void add_bench_serve(CLI::App& bench, int& exit_code) {
  auto options = std::make_shared<BenchServeOptions>();
  auto* command =
      bench.add_subcommand("serve", "Requests that come at random: throughput and latency by policy and rate");
  command->add_option("--shape", options->shape_name, "One of " + shape_names())->capture_default_str();
  add_shape_flags(*command, options->shape);
  add_count(*command, "--layers", options->shape.layers, "Layers of a forward", {.least = 1, .most = 256});
  add_model_flags(*command, *options);
  command
      ->add_option(
          "--policies", options->policies,
          "Policies to measure; see `sluice eval --help`. PLACEMENT/POLICY, e.g. stream/psa: in that placement "
          "instead of --placement; dense: everything attended, and all of it in device memory, see --kv-size")
      ->capture_default_str();
  command->add_option("--rates", options->rates, "Comma list of requests a second, on average; 0: all come at once")
      ->capture_default_str();
  add_load_flags(*command, options->load);
  add_limit_flags(*command, *options);
  add_count(*command, "--batch", options->batch, "Requests that run at once, at most", {.least = 1, .most = 4096});
  add_count(*command, "--prefills", options->prefills, "Chunks of prompts in a forward, at most",
            {.least = 1, .most = 256});
  add_number(
      *command, "--slowdown", options->slowdown,
      "Beside prompts that are read, answers come this many times as slowly, on the average; 0: --prefill-chunk",
      {.most = 1e3});
  add_count(*command, "--watermark", options->watermark_pages, "Pages that an admission leaves free while others run");
  add_count(*command, "--near-pages", options->near_pages,
            "Device pages that all running requests share; 0: no bound");
  add_count(*command, "--near-pages-per-request", options->near_pages_per_sequence,
            "Of these, what each takes: what one iteration needs; 0: all pages that it has");
  add_graphs(*command, options->graphs);
  add_engine_flags(*command, options->engine);
  add_device_flags(*command, options->device);
  add_output(*command, options->output);
  command->footer(
      "Requests come as a Poisson process and are served first come, first served: rows that decode and chunks of\n"
      "prompts in one forward. All policies get the same requests; what they attend is synthetic and alike in all\n"
      "layers, whatever a model computes around it. TTFT: from a request's arrival to its first token, TBT: from one "
      "of\n"
      "its tokens to the next. Of the youngest the memory is taken where --host-size, or --kv-size of dense, is too\n"
      "small for all that run (preempted); its tokens are computed again (computed). By default the longest requests\n"
      "fit together. A run whose limits cannot be held any more ends at once.");
  command->callback([options, &exit_code] { exit_code = run(*options); });
}

}  // namespace sluice::tools
