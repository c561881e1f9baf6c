// `sluice bench serve`: requests that come at random, served by an engine that an Admission decides for.
#include <algorithm>
#include <memory>

#include "cpu/device/host_device.hpp"
#include "sluice/admission.hpp"
#include "sluice/error.hpp"
#include "tools/cli/bench/bench.hpp"
#include "tools/cli/bench/serve_load.hpp"
#include "tools/cli/bench/serve_loop.hpp"
#include "tools/cli/bench/shapes.hpp"
#include "tools/cli/device_flags.hpp"
#include "tools/cli/engine_flags.hpp"
#include "tools/cli/prefill_flags.hpp"
#include "tools/cli/text/values.hpp"

namespace sluice::tools {
namespace {

struct BenchServeOptions {
  std::string shape_name = "llama-3.1-8b";
  AttentionShape shape{.layers = 4, .q_heads = 0, .kv_heads = 0, .head_dim = 0};  ///< zeros: from shape_name
  std::string policies = "sluice";
  std::string rates = "1,4";
  LoadOptions load;
  std::uint32_t batch = 8;
  std::uint32_t prefills = 4;
  double slowdown = 0.0;
  std::uint64_t watermark_pages = 0, near_pages = 0, near_pages_per_sequence = 0;
  EngineFlags engine;
  DeviceFlags device;
  OutputOptions output;
};

AttentionShape shape_of(const BenchServeOptions& options) {
  AttentionShape shape = named_shape(options.shape_name, options.shape);
  shape.layers = options.shape.layers;
  validate(shape);
  return shape;
}

std::vector<double> parse_rates(const std::string& text) {
  std::vector<double> rates;
  for (const std::string& rate : split_list(text))
    rates.push_back(parse_number(rate, "--rates", {.least = 0.0, .most = 1e6}));
  if (rates.empty()) throw Error(Errc::invalid_argument, "--rates: the list is empty; name at least one, e.g. 1,4");
  return rates;
}

class ServeBench {
 public:
  ServeBench(const BenchServeOptions& options, const AttentionShape& shape, std::shared_ptr<Device> device)
      : options_(options),
        shape_(shape),
        device_(std::move(device)),
        load_(make_load(options.load)),
        queue_(device_->create_stream("caller")),
        rows_(*device_, shape, options.batch + options.engine.prefill_chunk) {
    table_ = {.key = "serve",
              .title = "Requests served as they come, attention alone; rate: requests a second, 0: all at once",
              .columns = {{"policy", "policy"},
                          {"rate_per_s", "rate", 2},
                          {"requests", "requests"},
                          {"seconds", "seconds", 2},
                          {"answer_tokens_per_s", "tokens/s", 1},
                          {"ttft_p50_ms", "TTFT p50 ms", 1},
                          {"ttft_p99_ms", "TTFT p99", 1},
                          {"tbt_p50_ms", "TBT p50 ms", 2},
                          {"tbt_p99_ms", "TBT p99", 2},
                          {"preemptions", "preempted"},
                          {"largest_batch", "batch"},
                          {"forwards", "forwards"},
                          {"prompt_tokens", "prompts"},
                          {"computed_prompt_tokens", "computed"},
                          {"answer_tokens", "answers"}}};
  }

  void run(const std::string& policy, double rate) {
    PolicySpec spec = parse_policy(policy);
    spec.dense_layers = spec.dense_every = 0;  // What is timed is a layer that the policy works in.
    const EngineOptions sizes = engine_options(spec);
    AdmissionOptions admission = admission_options(sizes);
    admission.watermark_pages = options_.watermark_pages;
    admission.near_pages = options_.near_pages;
    admission.near_pages_per_sequence = options_.near_pages_per_sequence;
    admission.slowdown = options_.slowdown;
    void* const native = queue_->native_handle();
    ServeLoop loop(sizes, admission, spec, device_, rows_, native != nullptr ? native : queue_.get());
    const LoadRequest first{.prompt = std::min(load_.front().prompt, 32u), .answer = 2};
    (void)loop.run({&first, 1}, 0.0);  // Threads and kernels are there from then on.
    add_row(policy, rate, loop.run(load_, rate));
  }
  [[nodiscard]] Table take() { return std::move(table_); }

 private:
  /// Host memory for the `batch` longest requests, unless the user says how much.
  [[nodiscard]] EngineOptions engine_options(const PolicySpec& policy) const {
    const std::uint32_t page_tokens = page_tokens_for(policy, options_.engine);
    std::vector<std::uint32_t> tokens;
    for (const LoadRequest& request : load_) tokens.push_back(request.prompt + request.answer);
    std::ranges::sort(tokens, std::greater<>());
    EngineOptions sizes =
        sized(options_.engine, shape_, {&policy, 1}, {.page_tokens = page_tokens, .tokens = tokens[0]});
    const PageLayout layout{.page_tokens = page_tokens, .head_dim = shape_.head_dim, .dtype = sizes.kv_dtype};
    const std::uint64_t page_bytes = layout.page_bytes() * shape_.layers * shape_.kv_heads;
    if (options_.engine.host_bytes == 0) {
      sizes.host_bytes = 0;
      for (std::size_t i = 0; i < std::min<std::size_t>(options_.batch, tokens.size()); ++i)
        sizes.host_bytes += div_up(tokens[i], page_tokens) * page_bytes;
    }
    sizes.largest.decode_rows = sizes.sequences = options_.batch;
    sizes.largest.prefill_rows = options_.engine.prefill_chunk;
    sizes.largest.prefills = options_.prefills;
    if (sizes.cpu_sequences != 0) sizes.cpu_sequences = options_.batch;
    if (sizes.cluster_sequences != 0) sizes.cluster_sequences = options_.batch;
    return sizes;
  }

  void add_row(const std::string& policy, double rate, const ServeResult& result) {
    table_.rows.push_back({policy, rate, load_.size(), result.seconds,
                           static_cast<double>(result.answer_tokens) / result.seconds, percentile(result.first_ms, 0.5),
                           percentile(result.first_ms, 0.99), percentile(result.between_ms, 0.5),
                           percentile(result.between_ms, 0.99), result.preempted, result.largest_batch, result.forwards,
                           result.prompt_tokens, result.computed_tokens, result.answer_tokens});
  }

  const BenchServeOptions& options_;
  AttentionShape shape_;
  std::shared_ptr<Device> device_;
  std::vector<LoadRequest> load_;
  std::unique_ptr<Stream> queue_;
  RandomRows rows_;
  Table table_;
};

Json config_of(const BenchServeOptions& options, const AttentionShape& shape, const Device& device) {
  return {{"shape", options.shape_name},
          {"layers", shape.layers},
          {"q_heads", shape.q_heads},
          {"kv_heads", shape.kv_heads},
          {"head_dim", shape.head_dim},
          {"policies", split_policies(options.policies)},
          {"rates", parse_rates(options.rates)},
          {"requests", options.load.requests},
          {"prompt", options.load.prompt},
          {"answer", options.load.answer},
          {"spread", options.load.spread},
          {"lengths", options.load.lengths.empty() ? Json() : Json(options.load.lengths)},
          {"seed", options.load.seed},
          {"batch", options.batch},
          {"prefill_chunk", options.engine.prefill_chunk},
          {"prefills", options.prefills},
          {"host_bytes", options.engine.host_bytes},
          {"near_bytes", options.engine.near_bytes},
          {"placement", to_string(options.engine.placement)},
          {"fetch_share", options.engine.fetch_share.share},
          {"handover", to_string(options.engine.handover)},
          {"slowdown", options.slowdown},
          {"watermark_pages", options.watermark_pages},
          {"near_pages", options.near_pages},
          {"near_pages_per_sequence", options.near_pages_per_sequence},
          {"threads", options.engine.threads},
          {"device", device.info().name}};
}

int run(BenchServeOptions& options) {
  const AttentionShape shape = shape_of(options);
  const std::vector<std::string> policies = split_policies(options.policies);
  (void)parse_policies(options.policies);
  const std::vector<double> rates = parse_rates(options.rates);
  const OutputTarget target(options.output.path);
  std::shared_ptr<Device> device = make_device(options.device);
  advise(options.engine.fetch_share, device.get(), options.engine.threads);
  if (!device)
    device = std::make_shared<cpu::HostDevice>(
        std::make_shared<const cpu::Workers>(cpu::Topology(), cpu::WorkersOptions{.threads = options.engine.threads}));
  choose_chunk(options.engine, device.get(), {});
  ServeBench bench(options, shape, device);
  ProgressBar bar("bench");
  const InterruptScope interrupts;
  try {
    for (std::size_t i = 0; i < policies.size() * rates.size(); ++i) {
      const std::string& policy = policies[i / rates.size()];
      const double rate = rates[i % rates.size()];
      bar.update(i, policies.size() * rates.size(), policy + " at " + shortest(rate));
      bench.run(policy, rate);
    }
  } catch (const Interrupted&) {  // The rows that are finished are a result.
  }
  Report report{.command = "bench serve", .config = config_of(options, shape, *device)};
  report.tables.push_back(bench.take());
  return deliver(report, options.output.format, target);
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

}  // namespace

void add_bench_serve(CLI::App& bench, int& exit_code) {
  auto options = std::make_shared<BenchServeOptions>();
  auto* command =
      bench.add_subcommand("serve", "Requests that come at random: throughput and latency by policy and rate");
  command->add_option("--shape", options->shape_name, "One of " + shape_names())->capture_default_str();
  add_shape_flags(*command, options->shape);
  add_count(*command, "--layers", options->shape.layers, "Layers of a forward", {.least = 1, .most = 256});
  command->add_option("--policies", options->policies, "Policies to measure; see `sluice eval --help`")
      ->capture_default_str();
  command->add_option("--rates", options->rates, "Comma list of requests a second, on average; 0: all come at once")
      ->capture_default_str();
  add_load_flags(*command, options->load);
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
  add_engine_flags(*command, options->engine);
  add_device_flags(*command, options->device);
  add_output(*command, options->output);
  command->footer(
      "Requests come as a Poisson process and are served first come, first served: rows that decode and chunks of\n"
      "prompts in one forward. A forward is attention alone, of random queries, keys and values. TTFT: from a "
      "request's\n"
      "arrival to its first token, TBT: from one of its tokens to the next. Of the youngest the memory is taken where\n"
      "--host-size is too small for all that run (preempted); its tokens are computed again (computed). By default "
      "the\n"
      "longest requests fit together.");
  command->callback([options, &exit_code] { exit_code = run(*options); });
}

}  // namespace sluice::tools
