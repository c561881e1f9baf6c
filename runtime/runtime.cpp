#include "sluice/runtime.hpp"

#include <algorithm>
#include <map>
#include <string>
#include <utility>

#include "cpu/backend.hpp"
#include "cpu/host_device.hpp"
#include "cpu/host_pool.hpp"
#include "cpu/topology.hpp"
#include "cpu/workers.hpp"
#include "runtime/pipeline.hpp"
#include "runtime/prompt.hpp"
#include "sluice/error.hpp"

namespace sluice {
namespace {

RuntimeOptions checked(RuntimeOptions options) {
  validate(options);
  if (options.near_bytes == 0) options.near_bytes = options.host_bytes / 4;
  options.near_bytes = std::max(options.near_bytes, options.layout().page_bytes());
  return options;
}

void require(bool condition, const std::string& message) {
  if (!condition) throw Error(Errc::invalid_argument, message);
}

template <class View>
void require_tensor(const View& view, const char* name, std::uint32_t tokens, std::uint32_t heads, std::uint32_t head_dim) {
  const auto text = [](std::uint32_t a, std::uint32_t b, std::uint32_t c) {
    return "[" + std::to_string(a) + ", " + std::to_string(b) + ", " + std::to_string(c) + "]";
  };
  require(view.tokens == tokens && view.heads == heads && view.head_dim == head_dim,
          std::string(name) + " is " + text(view.tokens, view.heads, view.head_dim) + "; this call needs " +
              text(tokens, heads, head_dim));
  require(view.data != nullptr, std::string(name) + ".data is null");
}

}  // namespace

struct Runtime::Impl {
  Impl(const RuntimeOptions& wanted, std::shared_ptr<Device> given);
  ~Impl();

  [[nodiscard]] runtime::Sequence& find(SequenceId id) const;
  void require_order(const runtime::Sequence& sequence, std::uint32_t layer, std::uint32_t fresh) const;
  void require_whole() const;
  void add_prompt(SequenceId id, LayerId layer, const TensorView& k, const TensorView& v, const TensorView& last_q,
                  const PrefillArgs* attend);
  /// Runs a call; a timeout leaves work in flight, after which only the destructor is safe.
  template <class Call>
  void guarded(Call&& call);

  RuntimeOptions options;
  cpu::Topology topology;
  std::shared_ptr<const cpu::Workers> workers;
  cpu::Backend host;
  std::shared_ptr<Device> device;
  cpu::HostPool pool;
  std::unique_ptr<Buffer> near_memory;
  std::unique_ptr<Buffer> staging;
  // Before everything with a thread or a stream: background work and queued verbs refer to sequences.
  std::map<SequenceId, std::unique_ptr<runtime::Sequence>> sequences;
  runtime::TransferEngine link;
  runtime::Residency residency;
  CostRates rates;
  runtime::Pipeline pipeline;
  runtime::Prompt prompt;

  std::uint64_t last_id = 0;
  Stats ended;
  bool broken = false;
};

namespace {

std::uint32_t pool_node(const RuntimeOptions& options, const cpu::Topology& topology) {
  const std::uint32_t node = options.numa_node.value_or(0);
  require(node < topology.numa_nodes(), "numa_node is " + std::to_string(node) + "; this machine has " +
                                            std::to_string(topology.numa_nodes()) + " (0-based)");
  return node;
}

std::shared_ptr<const cpu::Workers> make_workers(const RuntimeOptions& options, const cpu::Topology& topology) {
  return std::make_shared<cpu::Workers>(
      topology,
      cpu::WorkersOptions{.threads = options.threads,
                          .pin = options.pin_threads,
                          .numa_node = pool_node(options, topology),
                          .timeout = options.timeout});
}

std::uint32_t staging_pages(const RuntimeOptions& options) {
  // A chunk may start anywhere in a page, hence one page more per KV head than it fills.
  return static_cast<std::uint32_t>(options.shape.kv_heads * (div_up(options.prefill_chunk, options.page_tokens) + 1));
}

}  // namespace

Runtime::Impl::Impl(const RuntimeOptions& wanted, std::shared_ptr<Device> given)
    : options(checked(wanted)),
      workers(make_workers(options, topology)),
      host(*workers),
      device(given ? std::move(given)
                   : std::make_shared<cpu::HostDevice>(workers, cpu::HostDeviceOptions{.memory_bytes = 0,
                                                                                      .flag_timeout = options.timeout,
                                                                                      .misbehaviour = {}})),
      pool({.layout = options.layout(), .bytes = options.host_bytes, .numa_node = pool_node(options, topology)}, topology,
           *workers, *device),
      near_memory(device->allocate(options.near_bytes / options.layout().page_bytes() * options.layout().page_bytes())),
      staging(device->allocate(staging_pages(options) * options.layout().page_bytes())),
      link(*device, pool),
      residency(static_cast<std::uint32_t>(options.near_bytes / options.layout().page_bytes()), near_memory->data(),
                options.page_tokens, options.placement, link),
      rates(options.placement == PlacementMode::automatic
                ? cpu::measure_rates(*workers, host, options.shape, options.layout())
                : CostRates{}),
      pipeline({.options = options,
                .device = *device,
                .workers = *workers,
                .host = host,
                .pool = pool,
                .link = link,
                .residency = residency,
                .staging = staging->data(),
                .staging_pages = staging_pages(options),
                .rates = rates}),
      prompt(options, *device, pool, link, pipeline.executor().device_stream(), staging->data(), staging_pages(options)) {}

Runtime::Impl::~Impl() {
  // Streams first: what a call that timed out left queued refers to flags, buffers and pages.
  link.stop();
  pipeline.executor().stop();
}

runtime::Sequence& Runtime::Impl::find(SequenceId id) const {
  const auto at = sequences.find(id);
  if (at == sequences.end()) {
    throw Error(Errc::not_found, "sequence " + std::to_string(id.value) + " does not exist or was ended");
  }
  return *at->second;
}

void Runtime::Impl::require_order(const runtime::Sequence& sequence, std::uint32_t layer, std::uint32_t fresh) const {
  require(layer < options.shape.layers, "layer " + std::to_string(layer) + " of a model with " +
                                            std::to_string(options.shape.layers) + " layers");
  const std::uint32_t have = sequence.layers[layer].tokens;
  if (layer == 0) {
    require(sequence.layers.back().tokens == have, "layer 0 was given new tokens before the last layer had the old ones");
  } else {
    require(sequence.layers[layer - 1].tokens == have + fresh,
            "layer " + std::to_string(layer) + " must follow layer " + std::to_string(layer - 1) +
                " with the same tokens; it has " + std::to_string(have) + " of " +
                std::to_string(sequence.layers[layer - 1].tokens));
  }
}

void Runtime::Impl::require_whole() const {
  if (broken || workers->lost()) {
    throw Error(Errc::device, "an earlier call timed out with work in flight; destroy this runtime and build another");
  }
}

template <class Call>
void Runtime::Impl::guarded(Call&& call) {
  require_whole();
  try {
    call();
  } catch (const Error& error) {
    // A worker lost on a stream's thread shows as a failure of the device, but its body is in flight as well.
    broken = error.code() == Errc::timeout || workers->lost();
    if (broken && error.code() != Errc::timeout) throw Error(Errc::timeout, error.what());
    throw;
  }
}

void Runtime::Impl::add_prompt(SequenceId id, LayerId layer, const TensorView& k, const TensorView& v,
                               const TensorView& last_q, const PrefillArgs* attend) {
  runtime::Sequence& sequence = find(id);
  require_order(sequence, layer.value, k.tokens);
  require(k.tokens > 0, "k has no tokens");
  require_tensor(k, "k", k.tokens, options.shape.kv_heads, options.shape.head_dim);
  require_tensor(v, "v", k.tokens, options.shape.kv_heads, options.shape.head_dim);
  require(k.dtype == v.dtype && k.token_stride == v.token_stride, "k and v differ in dtype or token stride");
  if (last_q.tokens != 0) require_tensor(last_q, "last_q", last_q.tokens, options.shape.q_heads, options.shape.head_dim);
  require(last_q.tokens <= k.tokens, "last_q has more tokens than the chunk");

  guarded([&] {
    runtime::LayerState& state = sequence.layers[layer.value];
    const auto holds = [](const runtime::HeadPages& head) { return !head.held.empty(); };
    if (state.policy || std::any_of(state.heads.begin(), state.heads.end(), holds)) {
      // A prompt after decoding, or after a first step that failed: what was built from the old prompt is built again,
      // and near copies of the open page would miss the new rows.
      pipeline.settle(sequence);
      state.policy.reset();
      residency.release(state);
    }
    prompt.append(sequence, state, k, v);
    if (attend != nullptr) prompt.attend(state, attend->q, attend->out);
    prompt.remember(sequence, state, last_q);
    state.tokens += k.tokens;
    if (layer.value + 1 == options.shape.layers) sequence.stats.prefill_tokens += k.tokens;
  });
}

Runtime::Runtime(const RuntimeOptions& options, std::shared_ptr<Device> device)
    : impl_(std::make_unique<Impl>(options, std::move(device))) {}

Runtime::~Runtime() = default;

SequenceId Runtime::begin(const PolicySpec& policy, const PrefillSpec& prefill) {
  Impl& self = *impl_;
  self.require_whole();
  validate(policy);
  validate(prefill);
  const std::vector<std::string> reasons =
      self.device->backend().unsupported_reasons(self.options.shape, self.options.layout());
  if (!reasons.empty()) {
    std::string text = "this device cannot serve the shape:";
    for (const std::string& reason : reasons) text += " " + reason + ";";
    text.pop_back();
    throw Error(Errc::unsupported, text);
  }
  const std::uint64_t heads = std::uint64_t{self.options.shape.layers} * self.options.shape.kv_heads;
  const std::uint64_t longest = self.pool.frames() / heads;  // A sequence has no more pages than the host pool.
  const auto must = [&](const PolicySpec& spec) {
    return std::min<std::uint64_t>(self.residency.forced_pages(spec), longest) * heads;
  };
  std::uint64_t forced = must(policy);
  for (const auto& [id, sequence] : self.sequences) forced += must(sequence->spec);
  if (forced > self.residency.pool().slots()) {
    throw Error(Errc::out_of_capacity,
                "sinks, recent window and open pages of all sequences need " + std::to_string(forced) +
                    " near pages; the near pool has " + std::to_string(self.residency.pool().slots()) +
                    "; raise near_bytes to " + std::to_string(forced * self.options.layout().page_bytes()) +
                    " or shrink the window");
  }
  self.pipeline.reserve(static_cast<std::uint32_t>(self.sequences.size() + 1), policy);

  auto sequence = std::make_unique<runtime::Sequence>();
  sequence->id = SequenceId{++self.last_id};
  sequence->spec = policy;
  sequence->prefill = prefill;
  sequence->layers.resize(self.options.shape.layers);
  for (runtime::LayerState& layer : sequence->layers) layer.heads.resize(self.options.shape.kv_heads);
  const SequenceId id = sequence->id;
  self.sequences.emplace(id, std::move(sequence));
  return id;
}

void Runtime::prefill(const PrefillArgs& args) {
  const AttentionShape& shape = impl_->options.shape;
  require_tensor(args.q, "q", args.k.tokens, shape.q_heads, shape.head_dim);
  require_tensor(args.out, "out", args.k.tokens, shape.q_heads, shape.head_dim);
  impl_->add_prompt(args.sequence, args.layer, args.k, args.v, args.q, &args);
}

void Runtime::prefill(std::span<const PrefillArgs> batch) {
  for (const PrefillArgs& args : batch) prefill(args);
}

void Runtime::import_prefix(const ImportArgs& args) {
  impl_->add_prompt(args.sequence, args.layer, args.k, args.v, args.last_q, nullptr);
}

void Runtime::step(const StepArgs& args) {
  Impl& self = *impl_;
  const AttentionShape& shape = self.options.shape;
  const auto batch = static_cast<std::uint32_t>(args.sequences.size());
  if (batch == 0) return;
  require_tensor(args.q, "q", batch, shape.q_heads, shape.head_dim);
  require_tensor(args.k, "k", batch, shape.kv_heads, shape.head_dim);
  require_tensor(args.v, "v", batch, shape.kv_heads, shape.head_dim);
  require_tensor(args.out, "out", batch, shape.q_heads, shape.head_dim);
  require(args.k.dtype == args.v.dtype, "k and v differ in dtype");
  require(args.out.head_stride == shape.head_dim, "out.head_stride must be head_dim: heads of a token are dense");
  std::vector<runtime::Sequence*> sequences;
  for (const SequenceId id : args.sequences) {
    runtime::Sequence& sequence = self.find(id);
    self.require_order(sequence, args.layer.value, 1);
    require(std::find(sequences.begin(), sequences.end(), &sequence) == sequences.end(),
            "sequence " + std::to_string(id.value) + " appears twice in the batch");
    sequences.push_back(&sequence);
  }
  self.guarded([&] { self.pipeline.step(args, sequences); });
}

Stream& Runtime::device_stream() noexcept { return impl_->pipeline.executor().device_stream(); }

void Runtime::end(SequenceId id) {
  Impl& self = *impl_;
  runtime::Sequence& sequence = self.find(id);
  self.guarded([&] { self.pipeline.settle(sequence); });
  for (runtime::LayerState& layer : sequence.layers) {
    self.residency.release(layer);
    for (runtime::HeadPages& head : layer.heads) {
      while (head.pages() != 0) self.pool.release(head.pop());
    }
  }
  self.ended.merge(sequence.stats);
  self.sequences.erase(id);
}

std::uint32_t Runtime::tokens(SequenceId sequence) const { return impl_->find(sequence).layers.back().tokens; }

Stats Runtime::stats(SequenceId sequence) const { return impl_->find(sequence).stats; }

AuditReport Runtime::audit(SequenceId sequence) const { return impl_->find(sequence).audit.report; }

void Runtime::watch(SequenceId sequence, std::span<const std::uint32_t> tokens) {
  std::vector<std::uint32_t> watched(tokens.begin(), tokens.end());
  std::sort(watched.begin(), watched.end());
  watched.erase(std::unique(watched.begin(), watched.end()), watched.end());
  impl_->find(sequence).audit.watched = std::move(watched);
}

Stats Runtime::stats() const {
  Stats sum = impl_->ended;
  for (const auto& [id, sequence] : impl_->sequences) sum.merge(sequence->stats);
  return sum;
}

RuntimeInfo Runtime::info() const {
  const Impl& self = *impl_;
  return {.device = self.device->info().name,
          .isa = self.host.isa(),
          .threads = self.workers->threads(),
          .host_pages = self.pool.frames(),
          .host_pages_free = self.pool.free_frames(),
          .near_slots = self.residency.pool().slots(),
          .near_slots_free = self.residency.pool().free_slots(),
          .page_bytes = self.options.layout().page_bytes(),
          .rates = self.rates};
}

const RuntimeOptions& Runtime::options() const noexcept { return impl_->options; }

}  // namespace sluice
