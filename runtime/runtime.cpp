#include "sluice/runtime.hpp"

#include <algorithm>
#include <atomic>
#include <functional>
#include <map>
#include <string>
#include <utility>

#include "cpu/backend.hpp"
#include "cpu/host_device.hpp"
#include "cpu/host_pool.hpp"
#include "cpu/topology.hpp"
#include "cpu/workers.hpp"
#include "runtime/impl.hpp"
#include "sluice/error.hpp"

namespace sluice {
namespace {

RuntimeOptions checked(RuntimeOptions options) {
  validate(options);
  if (options.near_bytes == 0) options.near_bytes = options.host_bytes / 4;
  options.near_bytes = std::max(options.near_bytes, options.layout().page_bytes());
  return options;
}

/// `device` may be null.
std::uint32_t pool_node(const RuntimeOptions& options, const cpu::Topology& topology, const Device* device) {
  if (!options.numa_node) return device == nullptr ? 0 : topology.nearest_node(device->info().pci_bus_id).value_or(0);
  const std::uint32_t node = *options.numa_node;
  require(node < topology.numa_nodes(), "numa_node is " + std::to_string(node) + "; this machine has " +
                                            std::to_string(topology.numa_nodes()) + " (0-based)");
  return node;
}

/// The host's rates are measured, the device's are what it says of itself.
CostRates make_rates(const RuntimeOptions& options, const cpu::Workers& workers, cpu::Backend& host,
                     const Device& device) {
  if (options.placement != PlacementMode::automatic) return {};
  CostRates rates = cpu::measure_rates(workers, host, options.shape, options.layout());
  const DeviceRates own = device.rates(options.layout().page_bytes());
  if (own.near_gbps > 0.0) rates.near_gbps = own.near_gbps;
  if (own.link_gbps > 0.0) {
    rates.link_gbps = own.link_gbps;
    rates.link_latency_us = own.link_latency_us;
  }
  return rates;
}

std::shared_ptr<const cpu::Workers> make_workers(const RuntimeOptions& options, const cpu::Topology& topology,
                                                 std::uint32_t numa_node,
                                                 const std::function<void(std::uint32_t)>& before_body) {
  return std::make_shared<cpu::Workers>(topology, cpu::WorkersOptions{.threads = options.threads,
                                                                      .pin = options.pin_threads,
                                                                      .numa_node = numa_node,
                                                                      .timeout = options.timeout,
                                                                      .before_body = before_body});
}

std::uint32_t chunk_pages_of(const RuntimeOptions& options) {
  // A chunk may start anywhere in a page, hence one page more per KV head than it fills.
  return static_cast<std::uint32_t>(options.shape.kv_heads * (div_up(options.prefill_chunk, options.page_tokens) + 1));
}

std::uint32_t window_pages_of(const RuntimeOptions& options, const Device& device) {
  // What is read in place needs no window. Where it is not, prompts get by with this much even if no near slot is free.
  constexpr std::uint32_t kLeastWindow = 2 * kPrefillBlock;
  if (!device.info().separate_memory) return 0;
  return static_cast<std::uint32_t>(options.shape.kv_heads * div_up(kLeastWindow, options.page_tokens));
}

}  // namespace

Runtime::Impl::Impl(const RuntimeOptions& wanted, std::shared_ptr<Device> given,
                    const std::function<void(std::uint32_t thread)>& before_body)
    : options(checked(wanted)),
      topology(cpu::chosen_cores({}, options.cores)),
      numa_node(pool_node(options, topology, given.get())),
      workers(make_workers(options, topology, numa_node, before_body)),
      host(*workers),
      own_device(given == nullptr),
      device(given ? std::move(given)
                   : std::make_shared<cpu::HostDevice>(workers, cpu::HostDeviceOptions{.memory_bytes = 0,
                                                                                       .flag_timeout = options.timeout,
                                                                                       .misbehaviour = {}})),
      pool({.layout = options.layout(), .bytes = options.host_bytes, .numa_node = numa_node}, topology, *workers,
           *device),
      near_slots(static_cast<std::uint32_t>(options.near_bytes / options.layout().page_bytes())),
      chunk_pages(chunk_pages_of(options)),
      window_pages(window_pages_of(options, *device)),
      memory(device->allocate((std::uint64_t{near_slots} + runtime::PromptMemory::total(chunk_pages, window_pages)) *
                              options.layout().page_bytes())),
      link(*device, pool),
      residency(near_slots, memory->data(), options.page_tokens, options.placement, link),
      rates(make_rates(options, *workers, host, *device)),
      pipeline({.options = options,
                .device = *device,
                .workers = *workers,
                .host = host,
                .pool = pool,
                .link = link,
                .residency = residency,
                .staging = memory->data() + near_slots * options.layout().page_bytes(),
                .staging_pages = runtime::PromptMemory::total(chunk_pages, window_pages),
                .rates = rates}),
      prompt({.options = options,
              .device = *device,
              .pool = pool,
              .link = link,
              .near = residency.pool(),
              .memory = memory->data(),
              .chunk_pages = chunk_pages,
              .window_pages = window_pages,
              .device_stream = pipeline.executor().device_stream(),
              .heir = pipeline}) {}

Runtime::Impl::~Impl() { (void)stop(); }

bool Runtime::Impl::stop() noexcept {
  // Streams first: what a call that timed out left queued refers to flags, buffers and pages.
  prompt.stop();
  link.stop();
  pipeline.executor().stop();
  return pipeline.stop();
}

runtime::Sequence& Runtime::Impl::find(SequenceId id) const {
  const auto at = sequences.find(id);
  if (at == sequences.end()) {
    throw Error(Errc::not_found, "sequence " + std::to_string(id.value) + " does not exist or was ended");
  }
  return *at->second;
}

runtime::Sequence& Runtime::Impl::find_whole(SequenceId id) const {
  runtime::Sequence& sequence = find(id);
  if (sequence.lost.empty()) return sequence;
  throw Error(Errc::device,
              "sequence " + std::to_string(id.value) + " is lost: " + sequence.lost + "; end it and begin another");
}

void Runtime::Impl::require_order(const runtime::Sequence& sequence, std::uint32_t layer, std::uint32_t fresh) const {
  require(layer < options.shape.layers,
          "layer " + std::to_string(layer) + " of a model with " + std::to_string(options.shape.layers) + " layers");
  const std::uint32_t have = sequence.layers[layer].tokens;
  if (layer == 0) {
    require(sequence.layers.back().tokens == have,
            "layer 0 was given new tokens before the last layer had the old ones");
  } else {
    require(sequence.layers[layer - 1].tokens == have + fresh,
            "layer " + std::to_string(layer) + " must follow layer " + std::to_string(layer - 1) +
                " with the same tokens; it has " + std::to_string(have) + " of " +
                std::to_string(sequence.layers[layer - 1].tokens));
  }
}

void Runtime::Impl::require_whole() const {
  if (broken || lost()) {
    throw Error(Errc::device, "an earlier call timed out with work in flight; destroy this runtime and build another");
  }
}

void Runtime::Impl::lose(std::span<runtime::Sequence* const> concerned) {
  for (runtime::Sequence* sequence : concerned) {
    if (sequence->lost.empty()) sequence->lost = "no host memory";  // Short enough to need none.
  }
  std::string text = kNoMemory.what();
  for (const runtime::Sequence* sequence : concerned) {
    text += "; sequence " + std::to_string(sequence->id.value) + " is lost, end it";
  }
  throw Error(Errc::out_of_capacity, text);
}

Runtime::Runtime(const RuntimeOptions& options, std::shared_ptr<Device> device)
    : impl_(translated([&] { return std::make_unique<Impl>(options, std::move(device)); })) {}

Runtime::Runtime(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}

Runtime::~Runtime() {
  if (!impl_->stop() || (!impl_->own_device && impl_->device->lost())) {
    cpu::keep_for_good(std::move(impl_));
  } else if (impl_->workers->lost()) {
    const cpu::Workers& workers = *impl_->workers;
    workers.keep(std::move(impl_));
  }
}

SequenceId Runtime::begin(const PolicySpec& policy, const PrefillSpec& prefill) {
  return translated([&] { return impl_->begin(policy, prefill); });
}

SequenceId Runtime::Impl::begin(const PolicySpec& policy, const PrefillSpec& prefill_spec) {
  require_whole();
  validate(policy);
  validate(prefill_spec);
  const std::vector<std::string> reasons = device->backend().unsupported_reasons(options.shape, options.layout());
  if (!reasons.empty()) {
    std::string text = "this device cannot serve the shape:";
    for (const std::string& reason : reasons) text += " " + reason + ";";
    text.pop_back();
    throw Error(Errc::unsupported, text);
  }
  const std::uint64_t heads = std::uint64_t{options.shape.layers} * options.shape.kv_heads;
  const std::uint64_t longest = pool.frames() / heads;  // A sequence has no more pages than the host pool.
  const auto must = [&](const PolicySpec& spec) {
    return std::min<std::uint64_t>(residency.forced_pages(spec), longest) * heads;
  };
  std::uint64_t forced = must(policy);
  for (const auto& [id, sequence] : sequences) forced += must(sequence->spec);
  if (forced > residency.pool().slots()) {
    throw Error(Errc::out_of_capacity, "sinks, recent window and open pages of all sequences need " +
                                           std::to_string(forced) + " near pages; the near pool has " +
                                           std::to_string(residency.pool().slots()) + "; raise near_bytes to " +
                                           std::to_string(forced * options.layout().page_bytes()) +
                                           " or shrink the window");
  }
  pipeline.settle_tail();  // What it refers to may move.
  pipeline.reserve(static_cast<std::uint32_t>(sequences.size() + 1), policy);

  auto sequence = std::make_unique<runtime::Sequence>();
  sequence->id = SequenceId{++last_id};
  sequence->spec = policy;
  sequence->prefill = prefill_spec;
  sequence->layers.resize(options.shape.layers);
  for (runtime::LayerState& layer : sequence->layers) {
    layer.heads.resize(options.shape.kv_heads);
    layer.flushed = device->create_event();
  }
  const SequenceId id = sequence->id;
  sequences.emplace(id, std::move(sequence));
  return id;
}

void Runtime::step(const StepArgs& args) {
  translated([&] { impl_->step(args); });
}

void Runtime::Impl::step(const StepArgs& args) {
  const AttentionShape& shape = options.shape;
  const auto batch = static_cast<std::uint32_t>(args.sequences.size());
  if (batch == 0) return;
  require_tensor(args.q, "q", batch, shape.q_heads, shape.head_dim);
  require_tensor(args.k, "k", batch, shape.kv_heads, shape.head_dim);
  require_tensor(args.v, "v", batch, shape.kv_heads, shape.head_dim);
  require_tensor(args.out, "out", batch, shape.q_heads, shape.head_dim);
  require(args.k.dtype == args.v.dtype, "k and v differ in dtype");
  require(args.out.head_stride == shape.head_dim, "out.head_stride must be head_dim: heads of a token are dense");
  pipeline.look_back();
  pipeline.throw_news();
  std::vector<runtime::Sequence*> members;
  for (const SequenceId id : args.sequences) {
    runtime::Sequence& sequence = find_whole(id);
    require_order(sequence, args.layer.value, 1);
    require(std::find(members.begin(), members.end(), &sequence) == members.end(),
            "sequence " + std::to_string(id.value) + " appears twice in the batch");
    members.push_back(&sequence);
  }
  guarded(members, [&] {
    prompt.settle();
    pipeline.step(args, members);
  });
}

Stream& Runtime::device_stream() noexcept { return impl_->pipeline.executor().device_stream(); }

void Runtime::end(SequenceId id) {
  translated([&] { impl_->end(id); });
}

void Runtime::Impl::end(SequenceId id) {
  runtime::Sequence& sequence = find(id);
  const bool known = !sequence.lost.empty();
  guarded({}, [&] {
    try {
      prompt.settle();
    } catch (const Error& error) {
      if (error.code() == Errc::timeout) throw;  // Other sequences that it is about say so when they are to go on.
    }
    pipeline.settle(sequence);
  });
  for (runtime::LayerState& layer : sequence.layers) {
    residency.release(layer);
    for (runtime::HeadPages& head : layer.heads) {
      while (head.pages() != 0) pool.release(head.pop());
    }
  }
  pipeline.forget(sequence);
  ended.merge(sequence.stats);
  const std::string lost = known ? "" : std::move(sequence.lost);
  sequences.erase(id);
  if (!lost.empty())
    throw Error(Errc::device, "sequence " + std::to_string(id.value) + " is ended, but what it had queued failed: " + lost +
                                  "; do not use what its last calls computed");
}

void Runtime::synchronize() {
  translated([&] {
    impl_->guarded({}, [&] {
      impl_->prompt.settle();
      impl_->pipeline.settle_tail();
      impl_->pipeline.executor().device_stream().synchronize(deadline_after(impl_->options.timeout));
      impl_->pipeline.throw_news();
    });
  });
}

std::uint32_t Runtime::tokens(SequenceId sequence) const { return impl_->find(sequence).layers.back().tokens; }

Stats Runtime::stats(SequenceId sequence) const {
  return translated([&] { return impl_->find(sequence).stats; });
}

AuditReport Runtime::audit(SequenceId sequence) const {
  return translated([&] { return impl_->find(sequence).audit.report; });
}

void Runtime::watch(SequenceId sequence, std::span<const std::uint32_t> tokens) {
  translated([&] {
    std::vector<std::uint32_t> watched(tokens.begin(), tokens.end());
    std::sort(watched.begin(), watched.end());
    watched.erase(std::unique(watched.begin(), watched.end()), watched.end());
    impl_->find(sequence).audit.watched = std::move(watched);
  });
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
          .numa_node = self.numa_node,
          .host_pages = self.pool.frames(),
          .host_pages_free = self.pool.free_frames(),
          .near_slots = self.residency.pool().slots(),
          .near_slots_free = self.residency.pool().free_slots(),
          .page_bytes = self.options.layout().page_bytes(),
          .rates = self.rates};
}

const RuntimeOptions& Runtime::options() const noexcept { return impl_->options; }

}  // namespace sluice
