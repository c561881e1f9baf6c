#include "sluice/engine.hpp"

#include <algorithm>
#include <string>
#include <utility>

#include "cpu/device/host_device.hpp"
#include "cpu/machine/rank_cores.hpp"
#include "runtime/call.hpp"
#include "runtime/engine/engine_options.hpp"
#include "runtime/engine/parking.hpp"
#include "scheduler/plan/dense_advice.hpp"
#include "scheduler/plan/fetch_advice.hpp"
#include "scheduler/plan/forward_rows.hpp"

namespace sluice {
namespace {

using runtime::look;

/// They compute while the threads that answer wait, and go by no share of cores: they are bound to those that the user
/// has named, which nobody else has.
std::shared_ptr<cpu::Workers> embedded_workers(const EngineOptions& options, const cpu::Topology& topology) {
  return std::make_shared<cpu::Workers>(topology,
                                        cpu::WorkersOptions{.threads = options.threads,
                                                            .pin = options.pin_threads && !options.cores.empty(),
                                                            .spin = std::chrono::microseconds(0),
                                                            .timeout = options.timeout});
}

std::shared_ptr<Device> device_or_host(std::shared_ptr<Device> device, std::shared_ptr<cpu::Workers> workers) {
  if (device) return device;
  return std::make_shared<cpu::HostDevice>(std::move(workers));
}

ForwardVerbs& verbs_of(Device& device) {
  ForwardVerbs* const verbs = device.forward_verbs();
  if (verbs == nullptr)
    throw Error(Errc::unsupported, "device '" + device.info().name +
                                       "' has no verbs of a forward; build the engine on a CUDA or a host device");
  return *verbs;
}

/// The node nearest to the device: its memory is what the link reaches first.
std::uint32_t node_of(const cpu::Topology& topology, const Device& device) {
  return topology.nearest_node(device.info().pci_bus_id).value_or(0);
}

runtime::FarWorkersOptions far_options(const EngineOptions& options, const EngineSizes& sizes, bool own_processor) {
  return {.threads = options.threads,
          // Who drives a GPU wants a core for itself; else the caller only waits, and cores are the device's, too: with
          // none spared nobody spins on them.
          .spare = own_processor ? 1u : 0u,
          .pin = options.pin_threads,
          .jobs = sizes.cpu_sequences != 0 || options.largest.audit,
          .timeout = options.answer_timeout,
          .before_answer = options.before_answer};
}

cpu::CoreShares::Lease share_of(const EngineOptions& options, const cpu::Topology& topology, std::uint32_t numa_node) {
  return cpu::CoreShares::of_process().take(
      {.topology = topology, .numa_node = numa_node, .named = !options.cores.empty()});
}

/// Tokens up to which it pays to attend all of a sequence, without a GPU.
std::uint32_t dense_tokens(const EngineOptions& options) {
  return scheduler::dense_tokens_of_cpu(parse_policy("sluice"), options.shape, options.kv_dtype);
}

/// On a GPU if all of its rows are near, and in batches of as many sequences as there may be, whatever a forward has,
/// since what is attended must not depend on that.
std::uint32_t dense_tokens(const EngineOptions& options, const Device& device) {
  if (!device.info().own_processor) return dense_tokens(options);
  const PageLayout near = runtime::far_layout(options).near();
  const std::uint64_t planes = std::uint64_t{options.shape.layers} * options.shape.kv_heads;
  const std::uint64_t room = options.near_bytes / (near.page_bytes() * planes) * near.page_tokens;
  const std::uint32_t rows = std::max(1u, options.largest.decode_rows / options.largest.drafts);
  const std::uint64_t pays =
      scheduler::dense_tokens_of_device(options.shape, near, device.rates(near.page_bytes()).near_gbps, rows);
  const std::uint64_t each = std::min(room / rows, pays);
  return static_cast<std::uint32_t>(each) / near.page_tokens * near.page_tokens;
}

/// Many lists are shared by the link and the threads, if there is a link.
void settle_fetching(EngineOptions& options, const Device& device, const cpu::Topology& topology) {
  if (options.fetch_share != kFetchAuto) return;
  options.fetch_share = 0.f;
  if (!device.info().own_processor || options.placement != PlacementMode::hybrid) return;
  const std::uint64_t lists = std::uint64_t{options.largest.decode_rows} * options.shape.kv_heads;
  if (lists < std::max(options.fetch_lists, scheduler::kFetchLists)) return;
  const PageLayout far = runtime::far_layout(options);
  const std::uint32_t threads = options.threads != 0 ? options.threads : std::max(2u, topology.cores()) - 1;
  options.fetch_share = scheduler::advised_fetch_share(device.rates(far.page_bytes()).link_gbps,
                                                       scheduler::gbps_of_threads(threads));
  if (options.fetch_share != 0.f) options.fetch_lists = std::max(options.fetch_lists, scheduler::kFetchLists);
}

/// The embedded host device does without forecasts: the cores that would read the few keys of one are those that would
/// read all keys to choose of them.
EngineSizes settled(EngineSizes sizes, bool embedded) {
  sizes.forecasts = sizes.forecasts && !embedded;
  return sizes;
}

/// What the device has no kernels for, automatic prompts do without; and who waits is as suits it.
EngineSizes settled(EngineOptions& options, const EngineSizes& sizes, const Device& on, const ForwardVerbs& verbs,
                    const cpu::Topology& topology, bool embedded) {
  const DeviceInfo& device = on.info();
  settle_fetching(options, on, topology);
  if (options.dense_tokens == kDenseAuto) options.dense_tokens = dense_tokens(options, on);
  if (runtime::prefill_of(options.prefill).flex.flattened && device.own_processor)
    throw Error(Errc::unsupported,
                "prefill: query blocks that choose together (flattened) are of the CPU alone, and '" + device.name +
                    "' is another device; let each choose for itself");
  if (options.prefill.mode == PrefillMode::automatic && !verbs.sparse_prefill(options.shape))
    options.prefill.mode = PrefillMode::full;
  if (options.handover == Handover::automatic) options.handover = device.handover;
  if (options.handover == Handover::stream && !device.stream_waits)
    throw Error(Errc::unsupported, "handover is stream, and streams of device '" + device.name +
                                       "' cannot wait for a word of memory by themselves; use device or host");
  return settled(sizes, embedded || options.handover != Handover::device);
}

/// The same for the embedded host device, without building one: it can do all that options may ask for.
EngineSizes settled_on_host(EngineOptions& options, const EngineSizes& sizes) {
  if (options.fetch_share == kFetchAuto) options.fetch_share = 0.f;
  if (options.dense_tokens == kDenseAuto) options.dense_tokens = dense_tokens(options);
  if (options.handover == Handover::automatic) options.handover = cpu::HostDeviceOptions{}.handover;
  return settled(sizes, true);
}

}  // namespace

Engine::Impl::Impl(runtime::ResolvedOptions chosen, std::shared_ptr<Device> given)
    : options(std::move(chosen.options)),
      topology(cpu::chosen_cores({}, options.cores, given ? given->info() : DeviceInfo{})),
      embedded(given ? nullptr : embedded_workers(options, topology)),
      device(device_or_host(std::move(given), embedded)),
      verbs(verbs_of(*device)),
      sizes(settled(options, chosen.sizes, *device, verbs, topology, embedded != nullptr)),
      memory(options, sizes, *device, verbs, topology, node_of(topology, *device)),
      side(verbs.make_side()),
      choice(memory.largest(), cpu::fastest_kernels(), options.answer_timeout),
      far_notes(memory.largest()),
      table(memory.largest().blocks),
      parking(std::make_unique<Parking>(*this)),
      programs(options.in_flight),
      watchdog(options.handover == Handover::stream
                   ? std::make_unique<runtime::AnswerWatchdog>(mailbox(), options.answer_timeout)
                   : nullptr),
      far(memory.largest(), choice, far_notes, far_options(options, sizes, device->info().own_processor),
          share_of(options, topology, node_of(topology, *device))) {
  copies.reserve(memory.copies());
  for (std::uint32_t i = options.sequences; i > 0; --i) free_lists.push_back(i - 1);
  for (std::uint32_t i = sizes.cpu_sequences; i > 0; --i) free_tails.push_back(i - 1);
  for (std::uint32_t i = sizes.cluster_sequences; i > 0; --i) free_clusters.push_back(i - 1);
}

EngineStats Engine::Impl::stats() const noexcept {
  const auto& [question, answer, gate, outcome] = mailbox();
  const runtime::PrefixCache* const known = seen_prefixes.load(std::memory_order_acquire);
  const std::uint64_t listed = look(outcome.far_tokens);
  const bool streams = options.placement == PlacementMode::stream;
  const std::uint64_t in_place = streams ? choice.kept_tokens() : listed;
  return {.asked = look(question.asked),
          .unplanned = look(outcome.unplanned),
          .near_tokens = look(outcome.near_tokens),
          .far_tokens = in_place + choice.far_tokens(),
          .fetched_tokens = look(outcome.fetched_tokens) + listed - std::min(listed, in_place),
          .promoted = look(outcome.promoted),
          .scored = choice.scored(),
          .estimated = look(counted.estimated),
          .ranked_pages = look(counted.ranked_pages),
          .missed = look(outcome.missed),
          .drawn_heads = look(outcome.drawn_heads),
          .error_bars = look(outcome.error_bars),
          .wide_bars = look(outcome.wide_bars),
          .waited_ns = look(outcome.waited_ns) + look(counted.waited_ns),
          .awaited = look(outcome.awaited),
          .answer_ns = far.answer_ns(),
          .sparse_chunks = look(counted.sparse_chunks),
          .dense_chunks = look(counted.dense_chunks),
          .kept_blocks = look(counted.kept_blocks),
          .causal_blocks = look(counted.causal_blocks),
          .matched_tokens = look(counted.matched_tokens),
          .evicted_blocks = known != nullptr ? known->evicted() : 0,
          .stalls = look(counted.stalls)};
}

Engine::Engine(const EngineOptions& options, std::shared_ptr<Device> device)
    : impl_(translated([&] { return std::make_unique<Impl>(runtime::with_policies(options), std::move(device)); })) {}

Engine::~Engine() {
  const bool device_lost = impl_->embedded ? impl_->embedded->lost() : impl_->device->lost();
  const bool threads_lost = !impl_->far.stop(impl_->options.timeout);
  if (device_lost) {
    cpu::keep_for_good(std::move(impl_));
  } else if (threads_lost) {
    runtime::FarWorkers& stuck = impl_->far;
    stuck.keep(std::move(impl_));
  }
}

EngineMemoryUse memory_needed(const EngineOptions& options, Device* device) {
  return translated([&] {
    auto [chosen, sizes] = runtime::with_policies(options);
    if (device == nullptr) {
      const EngineSizes made = settled_on_host(chosen, sizes);
      return runtime::EngineMemory::needed(chosen, made, nullptr);
    }
    const ForwardVerbs& verbs = verbs_of(*device);
    const cpu::Topology topology = cpu::chosen_cores({}, options.cores, device->info());
    const EngineSizes made = settled(chosen, sizes, *device, verbs, topology, false);
    return runtime::EngineMemory::needed(chosen, made, &verbs);
  });
}

EngineOptions resolved(const EngineOptions& options) {
  return translated([&] {
    auto [made, sizes] = runtime::with_policies(options);
    made.cpu_sequences = sizes.cpu_sequences;
    made.cluster_sequences = sizes.cluster_sequences;
    return made;
  });
}

SequenceId Engine::begin(const PolicySpec& policy) {
  return translated([&] { return impl_->begin(policy); });
}
SequenceId Engine::begin(const PolicySpec& policy, std::span<const std::int32_t> prompt, std::uint64_t salt) {
  return translated([&] { return impl_->begin(policy, prompt, salt); });
}
std::uint32_t Engine::match_prefix(const PolicySpec& policy, std::span<const std::int32_t> prompt,
                                   std::uint64_t salt) const noexcept {
  return impl_->match_prefix(policy, prompt, salt);
}
void Engine::name_tokens(SequenceId sequence, std::uint32_t first, std::span<const std::int32_t> ids) {
  translated([&] { impl_->name_tokens(sequence, first, ids); });
}
void Engine::preempt(SequenceId sequence) {
  translated([&] { impl_->preempt(sequence); });
}
SequenceId Engine::fork(SequenceId sequence, std::uint32_t tokens) {
  return translated([&] { return impl_->fork(sequence, tokens, nullptr); });
}
SequenceId Engine::fork(SequenceId sequence, std::uint32_t tokens, const PolicySpec& policy) {
  return translated([&] { return impl_->fork(sequence, tokens, &policy); });
}
void Engine::truncate(SequenceId sequence, std::uint32_t tokens) {
  translated([&] { impl_->truncate(sequence, tokens); });
}
std::uint64_t Engine::park(SequenceId sequence, std::span<std::byte> area, std::string_view model) const {
  return translated([&] { return impl_->parking->park(sequence, area, model); });
}
void Engine::park(SequenceId sequence, const std::string& file, std::string_view model) const {
  translated([&] { impl_->parking->park(sequence, file, model); });
}
std::uint64_t Engine::park_bytes(SequenceId sequence, std::string_view model) const {
  return translated([&] { return impl_->parking->park_bytes(sequence, model); });
}
SequenceId Engine::resume(std::span<const std::byte> area, std::string_view model) {
  return translated([&] {
    runtime::MemorySource source(area);
    return impl_->parking->resume(source, model);
  });
}
SequenceId Engine::resume(const std::string& file, std::string_view model) {
  return translated([&] {
    runtime::FileSource source(file);
    return impl_->parking->resume(source, model);
  });
}
void Engine::import_prefix(SequenceId sequence, LayerId layer, const TensorView& k, const TensorView& v, void* stream,
                           const TensorView& q) {
  translated([&] { impl_->import_prefix(sequence, layer, k, v, stream, q); });
}
Batch Engine::plan(std::span<const PlanItem> items, const Bucket& bucket, void* stream) {
  return translated([&] { return impl_->plan(items, bucket, stream); });
}
void Engine::attend(const Bucket& bucket, LayerId layer, const AttendArgs& args) {
  translated([&] { impl_->attend(bucket, layer, args); });
}
void Engine::finish(const Batch& batch) {
  translated([&] { impl_->finish(batch); });
}
void Engine::cancel(const Batch& batch) {
  translated([&] { impl_->cancel(batch); });
}
const ForwardTrace& Engine::trace(const Batch& batch) const {
  return translated([&]() -> const ForwardTrace& { return impl_->trace(batch); });
}
void Engine::end(SequenceId sequence) {
  translated([&] { impl_->end(sequence); });
}

void Engine::watch(SequenceId sequence, std::span<const std::uint32_t> tokens) {
  translated([&] { impl_->watch(sequence, tokens); });
}

AuditReport Engine::audit(SequenceId sequence) const {
  return translated([&] {
    const auto& report = impl_->at(sequence).audit;
    return report ? *report : AuditReport{};
  });
}

std::uint32_t Engine::tokens(SequenceId id) const { return impl_->at(id).tokens; }

EngineMemoryUse Engine::memory() const noexcept {
  impl_->parking->release_late();
  EngineMemoryUse use = impl_->memory.use();
  use.partials = impl_->far.bytes() + impl_->far_notes.bytes();
  use.policies = impl_->policy_bytes();
  const runtime::BlockTable& table = impl_->table;
  use.far_pages_used = (table.blocks() - table.free() - table.idle()) * impl_->memory.block_bytes();
  use.far_pages_cached = table.idle() * impl_->memory.block_bytes();
  use.prefixes = impl_->names_bytes();
  use.near_pages_used = look(impl_->mailbox().outcome.near_rows) * 2 * impl_->memory.largest().layout.row_bytes();
  return use;
}

std::uint64_t Engine::far_bytes(SequenceId id) const {
  return impl_->at(id).held_blocks() * impl_->memory.block_bytes();
}

EngineStats Engine::stats() const noexcept { return impl_->stats(); }

void Engine::pin_caller() {
  translated([&] { impl_->pins.pin(impl_->topology, impl_->far.caller_place()); });
}
void Engine::unpin_caller() noexcept { impl_->pins.unpin(impl_->topology); }

const EngineOptions& Engine::options() const noexcept { return impl_->options; }
const EngineSizes& Engine::sizes() const noexcept { return impl_->sizes; }

bool Engine::captures() const noexcept { return impl_->captures(); }

}  // namespace sluice
