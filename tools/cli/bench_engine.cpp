// `sluice bench engine`: forwards of an Engine against dense attention in device memory.
#include <algorithm>
#include <cstring>
#include <memory>

#include "sluice/engine.hpp"
#include "sluice/error.hpp"
#include "tools/cli/bench.hpp"
#include "tools/cli/bench_device.hpp"
#include "tools/cli/bench_graph.hpp"
#include "tools/cli/bench_shapes.hpp"
#include "tools/cli/device_copies.hpp"
#include "tools/cli/values.hpp"

namespace sluice::tools {
namespace {

struct BenchEngineOptions {
  std::string shape_name = "llama-3.1-8b";
  std::string lengths = "8K,32K,128K";
  std::string policy = "exact | int4 | top_k=max(64, 1%) | near=0,sinks=4,recent=128";
  std::string pattern = "structured";
  std::uint32_t rows = 1;
  std::uint32_t layers = 4;
  std::uint32_t threads = 0;
  std::uint32_t steps = 32;
  std::uint32_t warm_up = 64;
  std::uint32_t promotions = EngineOptions{}.promotions;
  double near_share = 0.05;
  std::uint64_t seed = 0;
  DeviceFlags device;
  OutputOptions output;
};

constexpr std::uint32_t kDensePageTokens = 256;
constexpr double kTolerance = 1e-2;
constexpr std::chrono::minutes kPatience{2};

/// One engine with as many equal sequences as it has rows, all layers alike.
class Forwards {
 public:
  Forwards(const BenchEngineOptions& options, const SyntheticLayer& layer, const std::string& policy,
           std::shared_ptr<Device> device)
      : layer_(layer), device_(std::move(device)), queue_(device_->create_stream("caller")) {
    const SyntheticOptions& synthetic = layer.options();
    shape_ = synthetic.shape;
    shape_.layers = options.layers;
    EngineOptions sizes{.shape = shape_, .largest = {.decode_rows = options.rows}, .sequences = options.rows};
    const std::uint32_t tokens = synthetic.tokens + synthetic.steps;
    const std::uint64_t blocks = div_up(tokens, sizes.page_tokens) + 1;
    const std::uint64_t block = synthetic.layout.page_bytes() * shape_.layers * shape_.kv_heads;
    sizes.host_bytes = blocks * block * options.rows;
    sizes.near_bytes =
        static_cast<std::uint64_t>(options.near_share * static_cast<double>(blocks)) * block * options.rows;
    sizes.largest.max_tokens = static_cast<std::uint32_t>(blocks) * sizes.page_tokens;
    sizes.import_rows = std::min(4096u, synthetic.tokens);
    sizes.threads = options.threads;
    sizes.promotions = options.promotions;
    const PolicySpec spec = parse_policy(policy);
    sizes.largest.top_k = false;
    sizes.max_picks = sizes.max_ranked = sizes.max_window = sizes.prompt_queries = 1;
    make_room_for(spec, sizes.largest.max_tokens, sizes);
    if (sizes.cpu_sequences != 0) sizes.cpu_sequences = options.rows;
    // The embedded device has no queue that could be handed to strangers.
    stream_ = queue_->native_handle() != nullptr ? queue_->native_handle() : queue_.get();
    engine_ = std::make_unique<Engine>(sizes, device_);
    take_tensors();
    for (std::uint32_t row = 0; row < options.rows; ++row) {
      items_.push_back({.sequence = engine_->begin(spec)});
      import(items_.back().sequence);
    }
  }

  /// Microseconds of a layer, of the next `count` steps: from the plan until the outputs are known to be there.
  std::vector<double> time(const DeviceSteps& steps, std::uint32_t count, bool graph, std::vector<double>* calling) {
    // What is captured reads and writes the same tensors every time; a step's are copied there.
    std::unique_ptr<CapturedWork> captured;
    if (graph) captured = capture(stream_, [this] { attend(); });
    std::vector<double> us;
    for (std::uint32_t i = 0; i < count; ++i) {
      stop_if_interrupted();
      put_step(steps, next_step_++);
      const Clock::time_point begin = Clock::now();
      const Batch batch = engine_->plan(items_, bucket(), stream_);
      captured ? captured->replay() : attend();
      const Clock::time_point queued = Clock::now();
      engine_->finish(batch);
      const Clock::time_point end = Clock::now();
      us.push_back(std::chrono::duration<double, std::micro>(end - begin).count() / shape_.layers);
      if (calling != nullptr)
        calling->push_back(std::chrono::duration<double, std::micro>(queued - begin).count() / shape_.layers);
    }
    queue_->synchronize(deadline_after(kPatience));
    return us;
  }

  /// One forward, of the next step.
  void run_one(const DeviceSteps& steps) {
    put_step(steps, next_step_++);
    const Batch batch = engine_->plan(items_, bucket(), stream_);
    attend();
    engine_->finish(batch);
    queue_->synchronize(deadline_after(kPatience));
  }

  /// Output of one layer and row, of the forward that was run last.
  [[nodiscard]] std::vector<float> out() const {
    return downloaded<float>(*device_, *queue_, out_->data(), std::size_t{shape_.q_heads} * shape_.head_dim);
  }
  [[nodiscard]] EngineStats stats() const { return engine_->stats(); }

 private:
  [[nodiscard]] const Bucket& bucket() const { return engine_->options().largest; }

  void take_tensors() {
    const std::uint64_t rows = bucket().rows();
    q_ = device_->allocate(rows * shape_.q_heads * shape_.head_dim * sizeof(float));
    k_ = device_->allocate(rows * shape_.kv_heads * layer_.options().layout.row_bytes());
    v_ = device_->allocate(rows * shape_.kv_heads * layer_.options().layout.row_bytes());
    out_ = device_->allocate(rows * shape_.q_heads * shape_.head_dim * sizeof(float));
  }

  void import(SequenceId id) {
    const SyntheticOptions& options = layer_.options();
    const std::uint32_t chunk = engine_->options().import_rows;
    const std::uint64_t row = options.layout.row_bytes() * shape_.kv_heads;
    const auto k = device_->allocate_pinned(row * chunk);
    const auto v = device_->allocate_pinned(row * chunk);
    for (std::uint32_t at = 0; at < options.tokens; at += chunk) {
      const std::uint32_t count = std::min(chunk, options.tokens - at);
      gather_rows(layer_, at, count, false, k->data());
      gather_rows(layer_, at, count, true, v->data());
      const auto view = [&](const std::byte* data) {
        return dense_view(data, options.layout.dtype, count, shape_.kv_heads, shape_.head_dim);
      };
      for (std::uint32_t l = 0; l < shape_.layers; ++l)
        engine_->import_prefix(id, LayerId{l}, view(k->data()), view(v->data()), stream_);
    }
  }

  void put_step(const DeviceSteps& steps, std::uint32_t step) {
    const std::uint64_t q = std::uint64_t{shape_.q_heads} * shape_.head_dim * sizeof(float);
    const std::uint64_t kv = shape_.kv_heads * layer_.options().layout.row_bytes();
    std::vector<Copy> copies;
    for (std::uint32_t row = 0; row < bucket().rows(); ++row) {
      copies.push_back({.to = q_->data() + row * q, .from = steps.q(step).data, .bytes = q});
      copies.push_back({.to = k_->data() + row * kv, .from = steps.k(step).data, .bytes = kv});
      copies.push_back({.to = v_->data() + row * kv, .from = steps.v(step).data, .bytes = kv});
    }
    queue_->copy(copies);
    queue_->synchronize(deadline_after(kPatience));
  }

  void attend() {
    const std::uint32_t rows = bucket().rows();
    const DType dtype = layer_.options().layout.dtype;
    const auto in = [&](const Buffer& buffer, DType type, std::uint32_t heads) {
      return dense_view<const std::byte>(buffer.data(), type, rows, heads, shape_.head_dim);
    };
    for (std::uint32_t l = 0; l < shape_.layers; ++l) {
      engine_->attend(bucket(), LayerId{l}, in(*q_, DType::f32, shape_.q_heads), in(*k_, dtype, shape_.kv_heads),
                      in(*v_, dtype, shape_.kv_heads),
                      dense_view(out_->data(), DType::f32, rows, shape_.q_heads, shape_.head_dim), stream_);
    }
  }

  const SyntheticLayer& layer_;
  AttentionShape shape_;
  std::shared_ptr<Device> device_;
  std::unique_ptr<Stream> queue_;
  void* stream_ = nullptr;
  std::unique_ptr<Engine> engine_;
  std::uint32_t next_step_ = 0;  ///< no step comes twice: its pages would lie near the second time
  std::unique_ptr<Buffer> q_, k_, v_, out_;
  std::vector<PlanItem> items_;
};

class EngineBench {
 public:
  EngineBench(const BenchEngineOptions& options, const AttentionShape& shape)
      : options_(options),
        shape_(shape),
        device_(make_device(options.device)),
        builders_(std::make_shared<const cpu::Workers>(topology_, cpu::WorkersOptions{})) {
    if (!device_) device_ = std::make_shared<cpu::HostDevice>(builders_);
    table_ = {.key = "engine",
              .title = "Forwards of an engine per layer (median; dense: as many launches as rows, in HBM, same run)",
              .columns = {{"length_tokens", "length"},
                          {"rows", "rows"},
                          {"mode", "mode"},
                          {"layer_us", "us/layer", 1},
                          {"layer_p95_us", "p95", 1},
                          {"calling_us", "calling", 1},
                          {"waited_us", "waited", 1},
                          {"answer_us", "answer", 1},
                          {"dense_us", "dense", 1},
                          {"speedup_over_dense", "x dense", 2},
                          {"near_share", "near", 2, Column::Show::percent},
                          {"far_share", "far", 2, Column::Show::percent},
                          {"promoted", "promoted", 1},
                          {"error", "error", 4}}};
  }

  void run(std::uint32_t length, ProgressBar& bar) {
    bar.update(0, 3, std::to_string(length) + " tokens: building");
    SyntheticOptions synthetic{.shape = shape_,
                               .layout = {.head_dim = shape_.head_dim, .dtype = DType::bf16},
                               .tokens = length,
                               .steps = options_.warm_up + options_.steps,
                               .prompt_queries = std::min(32u, length)};
    synthetic.pattern = parse_pattern(options_.pattern);
    synthetic.seed = options_.seed;
    const SyntheticLayer layer(synthetic, topology_, builders_);
    const DeviceSteps steps(layer, *device_);
    DenseOnDevice dense(layer, steps, *device_, kDensePageTokens);
    const std::vector<float> want = dense.attend(0);
    const double dense_us = percentile(dense.time(9), 0.5) * options_.rows;
    check(layer, steps, want, length);
    for (const bool graph : {false, true}) {
      if (graph && !can_capture(*device_)) continue;
      bar.update(graph ? 2 : 1, 3, std::to_string(length) + " tokens: " + (graph ? "graph" : "enqueued"));
      Forwards forwards(options_, layer, options_.policy, device_);
      (void)forwards.time(steps, options_.warm_up, graph, nullptr);
      const EngineStats before = forwards.stats();
      std::vector<double> calling;
      const std::vector<double> us = forwards.time(steps, options_.steps, graph, &calling);
      const EngineStats after = forwards.stats();
      add_row(length, graph, us, calling, dense_us, before, after);
    }
  }
  [[nodiscard]] Table take() { return std::move(table_); }
  [[nodiscard]] const DeviceInfo& device() const noexcept { return device_->info(); }

 private:
  /// Everything chosen must be dense attention; what the policy's choice is off by is a result.
  void check(const SyntheticLayer& layer, const DeviceSteps& steps, const std::vector<float>& want,
             std::uint32_t length) {
    Forwards whole(options_, layer, "exact | int4 | top_k=all | near=0,sinks=4,recent=128", device_);
    error_ = relative_error(first_out(whole, steps), want);
    if (!(error_ <= kTolerance))
      throw Error(Errc::device, "bench engine: dense attention of " + std::to_string(length) +
                                    " tokens is wrong (relative error " + std::to_string(error_) +
                                    "); nothing of it was timed");
    Forwards chosen(options_, layer, options_.policy, device_);
    error_ = relative_error(first_out(chosen, steps), want);
  }

  static std::vector<float> first_out(Forwards& forwards, const DeviceSteps& steps) {
    forwards.run_one(steps);
    return forwards.out();
  }

  void add_row(std::uint32_t length, bool graph, const std::vector<double>& us, const std::vector<double>& calling,
               double dense_us, const EngineStats& before, const EngineStats& after) {
    const double layers = static_cast<double>(options_.steps) * options_.layers;
    const double all = layers * options_.rows * shape_.kv_heads * (length + options_.warm_up + 0.5 * options_.steps);
    const auto per_layer_us = [&](std::uint64_t ns) { return 1e-3 * static_cast<double>(ns) / layers; };
    const double median = percentile(us, 0.5);
    table_.rows.push_back({length, options_.rows, graph ? "graph" : "enqueued", median, percentile(us, 0.95),
                           percentile(calling, 0.5), per_layer_us(after.waited_ns - before.waited_ns),
                           per_layer_us(after.answer_ns - before.answer_ns), dense_us, dense_us / median,
                           static_cast<double>(after.near_tokens - before.near_tokens) / all,
                           static_cast<double>(after.far_tokens - before.far_tokens) / all,
                           static_cast<double>(after.promoted - before.promoted) / (layers * shape_.kv_heads), error_});
  }

  const BenchEngineOptions& options_;
  AttentionShape shape_;
  cpu::Topology topology_;
  std::shared_ptr<Device> device_;
  std::shared_ptr<const cpu::Workers> builders_;
  double error_ = 0.0;
  Table table_;
};

int run(const BenchEngineOptions& options) {
  (void)parse_pattern(options.pattern);
  (void)parse_policy(options.policy);
  const AttentionShape shape = named_shape(options.shape_name);
  const OutputTarget target(options.output.path);
  Report report{.command = "bench engine",
                .config = {{"shape", options.shape_name},
                           {"lengths", parse_counts(options.lengths, "--length")},
                           {"policy", options.policy},
                           {"pattern", options.pattern},
                           {"rows", options.rows},
                           {"layers", options.layers},
                           {"threads", options.threads},
                           {"steps", options.steps},
                           {"warm_up", options.warm_up},
                           {"promotions", options.promotions},
                           {"near", options.near_share},
                           {"seed", options.seed}}};
  ProgressBar bar("bench");
  const InterruptScope interrupts;
  EngineBench bench(options, shape);
  report.config["device"] = bench.device().name;
  try {
    for (const std::uint32_t length : parse_counts(options.lengths, "--length")) bench.run(length, bar);
  } catch (const Interrupted&) {  // The rows that are finished are a result.
  }
  report.tables.push_back(bench.take());
  return deliver(report, options.output.format, target);
}

}  // namespace

void add_bench_engine(CLI::App& bench, int& exit_code) {
  auto options = std::make_shared<BenchEngineOptions>();
  options->device.device = "cuda";
  auto* command =
      bench.add_subcommand("engine", "Forwards that are planned once, enqueued or replayed as a CUDA graph");
  command->add_option("--shape", options->shape_name, "One of " + shape_names())->capture_default_str();
  command->add_option("--length", options->lengths, "Comma list of context lengths in tokens, K allowed")
      ->capture_default_str();
  command->add_option("--policy", options->policy, "A policy that the engine serves")->capture_default_str();
  command->add_option("--pattern", options->pattern, "Attention: structured (heavy tokens, slashes) or uniform (noise)")
      ->capture_default_str();
  add_count(*command, "--rows", options->rows, "Sequences of a forward", {.least = 1, .most = 64});
  add_count(*command, "--layers", options->layers, "Layers of a forward", {.least = 1, .most = 256});
  add_count(*command, "--threads", options->threads, "Threads that answer the far part; 0: the cores less one",
            {.most = 4096});
  add_count(*command, "--steps", options->steps, "Timed forwards; times are medians over them",
            {.least = 1, .most = 4096});
  add_count(*command, "--warm-up", options->warm_up, "Forwards before those, in which tokens come near",
            {.most = 4096});
  add_count(*command, "--promotions", options->promotions, "Tokens of a KV head that a forward brings near, at most",
            {.most = kMostPromotions});
  command->add_option("--near", options->near_share, "Share of the pages that device memory has room for")
      ->check(CLI::Range(0.0, 1.0))
      ->capture_default_str();
  add_seed(*command, options->seed, "Seed of the synthetic layer");
  add_device_flags(*command, options->device);
  add_output(*command, options->output);
  command->footer(
      "Every layer of every sequence is the same synthetic layer, in memory of its own. With every token chosen the\n"
      "engine must give dense attention before anything is timed. A time is from the plan until the forward is known\n"
      "to have ended, divided by the layers; `calling` is the part of it in which the calling thread works, `waited` "
      "that\n"
      "in which the device waits for the CPU, `answer` what the CPU takes from seeing a question to its answer, and\n"
      "`promoted` tokens brought near per forward, layer and KV head. No step comes twice.");
  command->callback([options, &exit_code] { exit_code = run(*options); });
}

}  // namespace sluice::tools
