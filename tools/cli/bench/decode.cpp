// `sluice bench decode`: time per token of a whole model, its attention by an Engine, against dense attention in device
// memory.
#include <algorithm>
#include <functional>
#include <memory>
#include <optional>

#include "sluice/engine.hpp"
#include "sluice/error.hpp"
#include "tools/cli/bench/bench.hpp"
#include "tools/cli/bench/dense_cache.hpp"
#include "tools/cli/bench/random_numbers.hpp"
#include "tools/cli/device_flags.hpp"
#include "tools/cli/engine_columns.hpp"
#include "tools/cli/engine_flags.hpp"
#include "tools/cli/model_source.hpp"
#include "tools/cli/text/values.hpp"
#include "tools/llama/sampler.hpp"

namespace sluice::tools {
namespace {

struct BenchDecodeOptions {
  std::string model;
  std::string random_weights = "llama-3.1-8b";
  std::string lengths = "32K,128K";
  std::string methods = "dense;hybrid/sluice;stream/sluice";
  std::string near = "5%";
  DType kv_dtype = DType::bf16;
  std::uint32_t steps = 16;
  std::uint32_t warm_up = 16;
  std::uint32_t threads = 0;
  DeviceFlags device;
  OutputOptions output;
};

constexpr std::uint32_t kImportChunk = 4096;

/// A placement and the policy that runs under it, e.g. `hybrid/sluice`; or `dense`: everything in device memory.
struct Method {
  std::string name;
  bool dense = false;
  PlacementMode placement{};
  PolicySpec policy;
};

Method parse_method(const std::string& name) {
  if (name == "dense") return {.name = name, .dense = true, .placement = {}, .policy = {}};
  const std::size_t slash = name.find('/');
  if (slash == std::string::npos)
    throw Error(Errc::invalid_argument,
                "--methods: '" + name + "' lacks its placement; write dense or PLACEMENT/POLICY, e.g. hybrid/sluice");
  return {.name = name,
          .placement = parse_placement(name.substr(0, slash)),
          .policy = parse_policy(name.substr(slash + 1))};
}

std::vector<Method> parse_methods(const std::string& text) {
  std::vector<Method> methods;
  for (std::size_t at = 0; at < text.size();) {
    const std::size_t end = std::min(text.find(';', at), text.size());
    methods.push_back(parse_method(text.substr(at, end - at)));
    at = end + 1;
  }
  if (methods.empty())
    throw Error(Errc::invalid_argument, "--methods: the list is empty; name at least one, e.g. hybrid/sluice");
  return methods;
}

/// Random keys, values and queries in pinned memory. Every chunk of every layer starts at another place of one pool.
class RandomPrompt {
 public:
  RandomPrompt(Device& device, const AttentionShape& shape)
      : shape_(shape), pool_(device.allocate_pinned(kPoolElements * sizeof(std::uint16_t))) {
    fill_random_bf16({reinterpret_cast<std::uint16_t*>(pool_->data()), kPoolElements});
  }
  [[nodiscard]] TensorView rows(std::uint32_t salt, std::uint32_t tokens, std::uint32_t heads) const {
    const std::uint64_t elements = std::uint64_t{tokens} * heads * shape_.head_dim;
    const std::uint64_t places = (kPoolElements - elements) / shape_.head_dim;
    const std::byte* data =
        pool_->data() + std::uint64_t{salt} * 2'654'435'761u % places * shape_.head_dim * sizeof(std::uint16_t);
    return dense_view(data, DType::bf16, tokens, heads, shape_.head_dim);
  }

 private:
  static constexpr std::size_t kPoolElements = 24u << 20;
  AttentionShape shape_;
  std::unique_ptr<Buffer> pool_;
};

/// put(layer, k, v, queries) for every chunk of the prompt, layer by layer; queries of its newest tokens come last.
void for_each_chunk(
    const RandomPrompt& prompt, const AttentionShape& shape, std::uint32_t tokens,
    const std::function<void(LayerId, const TensorView&, const TensorView&, const TensorView&)>& put) {
  constexpr std::uint32_t kQueries = 32;
  std::uint32_t salt = 0;
  for (std::uint32_t at = 0; at < tokens; at += kImportChunk) {
    const std::uint32_t count = std::min(kImportChunk, tokens - at);
    const std::uint32_t shown = at + count == tokens ? std::min(kQueries, count) : 0;
    for (LayerId layer{0}; layer.value < shape.layers; ++layer.value, salt += 3) {
      put(layer, prompt.rows(salt + 1, count, shape.kv_heads), prompt.rows(salt + 2, count, shape.kv_heads),
          prompt.rows(salt + 3, shown, shape.q_heads));
    }
  }
}

/// One method at one length: attention for a model's forwards of one token, behind a prompt that it holds.
class Attention {
 public:
  virtual ~Attention() = default;
  virtual void begin() {}
  virtual void attend(const AttentionCall& call) = 0;
  virtual void end() {}
};

class DenseAttention final : public Attention {
 public:
  DenseAttention(const AttentionShape& shape, const RandomPrompt& prompt, std::uint32_t tokens, std::uint32_t steps,
                 Device& device, Stream& stream)
      : stream_(stream), cache_(shape, tokens + steps, device) {
    for_each_chunk(prompt, shape, tokens, [&](LayerId layer, const TensorView& k, const TensorView& v, const TensorView&) {
      cache_.append(layer, k, v, stream_);
    });
    stream_.synchronize(deadline_after(std::chrono::minutes(2)));
  }
  void attend(const AttentionCall& call) override { cache_.attend(call, stream_); }

 private:
  Stream& stream_;
  DenseCache cache_;
};

class EngineAttention final : public Attention {
 public:
  EngineAttention(const EngineOptions& options, const PolicySpec& policy, const RandomPrompt& prompt,
                  std::uint32_t tokens, const std::shared_ptr<Device>& device, Stream& stream)
      : stream_(stream.native_handle()), engine_(options, device), item_{.sequence = engine_.begin(policy)} {
    bucket_ = engine_.options().largest;
    bucket_.prefill_rows = bucket_.prefills = 0;
    for_each_chunk(prompt, options.shape, tokens,
                   [&](LayerId layer, const TensorView& k, const TensorView& v, const TensorView& q) {
                     engine_.import_prefix(item_.sequence, layer, k, v, stream_, q);
                   });
  }
  void begin() override { batch_ = engine_.plan({&item_, 1}, bucket_, stream_); }
  void attend(const AttentionCall& call) override {
    engine_.attend(bucket_, call.layer, call.q, call.k, call.v, call.out, stream_);
  }
  void end() override { engine_.finish(batch_); }
  [[nodiscard]] const sluice::Engine& engine() const noexcept { return engine_; }

 private:
  void* stream_;
  sluice::Engine engine_;
  PlanItem item_;
  Bucket bucket_;
  Batch batch_;
};

class DecodeBench {
 public:
  DecodeBench(const BenchDecodeOptions& options, std::shared_ptr<Device> device)
      : options_(options),
        device_(std::move(device)),
        model_(load_model(options.model, options.model.empty() ? options.random_weights : "", options.threads, device_)),
        shape_(model_.config().shape()),
        prompt_(*device_, shape_),
        stream_(device_->create_stream("bench")),
        near_(parse_share(options.near, "--near")) {
    table_ = {.key = "decode",
              .title = "Time per output token behind a random prompt; " + std::string(kDecodeNote),
              .columns = {},
              .rows = {}};
  }

  void run(std::uint32_t length, const std::vector<Method>& methods, ProgressBar& bar) {
    std::optional<double> first;
    for (std::size_t m = 0; m < methods.size(); ++m) {
      bar.update(m, methods.size(), std::to_string(length) + " tokens: " + methods[m].name);
      run(length, methods[m], first);
    }
  }
  [[nodiscard]] Table take() { return std::move(table_); }

 private:
  [[nodiscard]] EngineOptions sizes(const Method& method, std::uint32_t length) const {
    EngineFlags flags;
    flags.placement = method.placement;
    flags.kv_dtype = options_.kv_dtype;
    flags.threads = options_.threads;
    flags.prefill_chunk = 1;
    EngineOptions sizes = sized(flags, shape_, {&method.policy, 1},
                                {.page_tokens = page_tokens_for(method.policy, flags),
                                 .tokens = length + options_.warm_up + options_.steps,
                                 .near = near_});
    sizes.import_rows = std::min(kImportChunk, length);
    return sizes;
  }

  void run(std::uint32_t length, const Method& method, std::optional<double>& first) {
    DecodeScore score;
    std::vector<double> token_ms;
    std::uint64_t device_bytes = 0;
    PageLayout layout{.page_tokens = 16, .head_dim = shape_.head_dim, .dtype = DType::bf16};
    if (method.dense) {
      DenseAttention attention(shape_, prompt_, length, options_.warm_up + options_.steps, *device_, *stream_);
      (void)decode(attention, length, options_.warm_up);
      token_ms = decode(attention, length + options_.warm_up, options_.steps);
    } else {
      EngineAttention attention(sizes(method, length), method.policy, prompt_, length, device_, *stream_);
      layout.page_tokens = attention.engine().options().page_tokens;
      layout.dtype = options_.kv_dtype;
      (void)decode(attention, length, options_.warm_up);
      const EngineStats before = attention.engine().stats();
      token_ms = decode(attention, length + options_.warm_up, options_.steps);
      score.stats = since(before, attention.engine().stats());
      score.tokens = options_.steps;
      for (std::uint32_t i = 0; i < options_.steps; ++i) score.dense_tokens += length + options_.warm_up + i + 1;
      device_bytes = attention.engine().memory().device();
    }
    const double p50 = percentile(token_ms, 0.5);
    if (!first) first = p50;
    std::vector<Column> columns = {{"length_tokens", "length"},          {"method", "method"},
                                   {"tpot_p50_ms", "ms/token", 2},       {"tpot_p95_ms", "p95", 2},
                                   {"speedup_over_first", "x first", 2}, {"device_bytes", "device B"}};
    std::vector<Json> row = {length,
                             method.name,
                             p50,
                             percentile(token_ms, 0.95),
                             *first / p50,
                             method.dense ? Json() : Json(device_bytes)};
    append_decode(score, shape_, layout, columns, row);
    table_.columns = std::move(columns);
    table_.rows.push_back(std::move(row));
  }

  /// Milliseconds of each token.
  std::vector<double> decode(Attention& attention, std::uint32_t position, std::uint32_t steps) {
    Activations work;
    work.stream = stream_.get();
    work.timeout = std::chrono::minutes(2);
    std::vector<float> logits(model_.config().vocab_size);
    std::vector<double> token_ms;
    for (std::uint32_t i = 0; i < steps; ++i) {
      stop_if_interrupted();  // Nothing is queued here: the logits were waited for.
      const Clock::time_point begin = Clock::now();
      const PlacedToken placed{token_, position + i};
      attention.begin();
      model_.forward(std::span(&placed, 1), [&](const AttentionCall& call) { attention.attend(call); }, work);
      attention.end();
      model_.logits(work, 1, logits);
      token_ = argmax(logits);
      token_ms.push_back(std::chrono::duration<double, std::milli>(Clock::now() - begin).count());
    }
    return token_ms;
  }

  const BenchDecodeOptions& options_;
  std::shared_ptr<Device> device_;
  Model model_;
  AttentionShape shape_;
  RandomPrompt prompt_;
  std::unique_ptr<Stream> stream_;
  double near_;
  int token_ = 1;
  Table table_;
};

int run(const BenchDecodeOptions& options) {
  const OutputTarget target(options.output.path);
  const std::vector<Method> methods = parse_methods(options.methods);
  const std::vector<std::uint32_t> lengths = parse_counts(options.lengths, "--length");
  (void)parse_share(options.near, "--near");
  const std::shared_ptr<Device> device = make_device(options.device);
  if (!device) throw Error(Errc::invalid_argument, "bench decode: --device must be cuda or cuda:N");
  DecodeBench bench(options, device);
  ProgressBar bar("bench");
  const InterruptScope interrupts;
  try {
    for (const std::uint32_t length : lengths) bench.run(length, methods, bar);
  } catch (const Interrupted&) {  // The rows that are finished are a result.
  }
  Report report{.command = "bench decode",
                .config = {{"model", options.model},
                           {"random_weights", options.random_weights},
                           {"lengths", lengths},
                           {"methods", options.methods},
                           {"near", options.near},
                           {"kv_dtype", to_string(options.kv_dtype)},
                           {"steps", options.steps},
                           {"warm_up", options.warm_up},
                           {"threads", options.threads},
                           {"device", device->info().name},
                           {"transfer", options.device.transfer}}};
  report.tables.push_back(bench.take());
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
  command->add_option("--length", options->lengths, "Comma list of prompt lengths in tokens, K allowed")
      ->capture_default_str();
  command
      ->add_option("--methods", options->methods,
                   "Semicolon list of dense (everything in device memory) and PLACEMENT/POLICY; ratios are to the first")
      ->capture_default_str();
  command->add_option("--near", options->near, "Share of the tokens that device memory has room for")
      ->type_name("SHARE")
      ->capture_default_str();
  add_kv_dtype(*command, "--kv-dtype", options->kv_dtype, "Element type of keys and values in host memory");
  add_count(*command, "--steps", options->steps, "Timed tokens", {.least = 1, .most = 4096});
  add_count(*command, "--warm-up", options->warm_up, "Tokens before those", {.most = 4096});
  add_count(*command, "--threads", options->threads, "Threads of host work; 0: all cores", {.most = 4096});
  add_device_flags(*command, options->device);
  add_output(*command, options->output);
  command->footer(
      "The prompt's keys and values are random numbers, imported without computing them; decoding is the model's own,\n"
      "enqueued layer by layer.");
  command->callback([options, &exit_code] { exit_code = run(*options); });
}

}  // namespace sluice::tools
