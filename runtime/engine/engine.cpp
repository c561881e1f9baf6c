#include "sluice/engine.hpp"

#include <algorithm>
#include <string>
#include <utility>

#include "cpu/host_device.hpp"
#include "runtime/engine/impl.hpp"
#include "scheduler/plan/forward_rows.hpp"

namespace sluice {
namespace {

using runtime::look;

std::shared_ptr<Device> device_or_host(std::shared_ptr<Device> device, std::shared_ptr<cpu::Workers> workers) {
  if (device) return device;
  return std::make_shared<cpu::HostDevice>(std::move(workers));
}

ForwardVerbs& verbs_of(Device& device) {
  ForwardVerbs* const verbs = device.forward_verbs();
  if (verbs == nullptr) throw Error(Errc::unsupported, "device '" + device.info().name + "' has no verbs of a forward");
  return *verbs;
}

/// The node nearest to the device: its memory is what the link reaches first.
std::uint32_t node_of(const cpu::Topology& topology, const Device& device) {
  return topology.nearest_node(device.info().pci_bus_id).value_or(0);
}

runtime::FarWorkersOptions far_options(const EngineOptions& options, const cpu::Topology& topology,
                                       std::uint32_t numa_node) {
  const std::uint32_t cores = topology.cores();
  constexpr std::uint32_t kMostThatNap = 3;
  const std::uint32_t threads = options.threads != 0 ? options.threads : std::max(cores, 2u) - 1;
  return {.threads = threads,
          .pin = options.pin_threads,
          .spin = cores > kMostThatNap && threads < cores,
          .numa_node = numa_node,
          .before_answer = options.before_answer};
}

void validated(const EngineOptions& options) { runtime::validate(options); }

std::string number(std::uint64_t value) { return std::to_string(value); }

/// Why a forward that ended did not get to its end.
std::string reason_of(ForwardStatus status) {
  switch (status) {
    case ForwardStatus::abandoned:
      return "the far part was not answered in time; with more threads or a longer answer_timeout that may not recur";
    case ForwardStatus::orphaned: return "the forward before it failed";
    case ForwardStatus::mismatched: return "what ran was captured or enqueued for another bucket; use the plan's";
    case ForwardStatus::skipped:
      return "the next one was planned before its layers were enqueued or its graph replayed";
    default: return "it was taken back";
  }
}

}  // namespace

Engine::Impl::Impl(const EngineOptions& chosen, std::shared_ptr<Device> given)
    : options((validated(chosen), chosen)),
      topology(cpu::chosen_cores({}, options.cores)),
      workers(std::make_shared<cpu::Workers>(topology, cpu::WorkersOptions{.threads = 1, .pin = false})),
      device(device_or_host(std::move(given), workers)),
      verbs(verbs_of(*device)),
      memory(options, *device, verbs, topology, node_of(topology, *device), *workers),
      far(memory.largest(), far_options(options, topology, node_of(topology, *device)), topology),
      table(memory.largest().blocks, memory.largest().near_blocks),
      programs(options.in_flight) {
  copies.reserve(options.sequences);
  for (std::uint32_t i = options.sequences; i > 0; --i) free_lists.push_back(i - 1);
}

Engine::Impl::Sequence& Engine::Impl::at(SequenceId id) {
  const auto found = sequences.find(id.value);
  if (found == sequences.end()) throw Error(Errc::not_found, "there is no sequence " + number(id.value));
  return found->second;
}

Engine::Impl::Sequence& Engine::Impl::resting(SequenceId id, const char* what) {
  Sequence& sequence = at(id);
  if (importing != 0 && programs.newest().items.front().sequence == id) take_back(importing);
  if (programs.has(id))
    throw Error(Errc::invalid_argument, std::string(what) + ": sequence " + number(id.value) +
                                            " is part of a forward under way; finish or cancel it first");
  return sequence;
}

SequenceId Engine::Impl::add(const PolicySpec& spec) {
  if (free_lists.empty())
    throw Error(Errc::out_of_capacity, "as many sequences live as EngineOptions::sequences says; end one first");
  const SequenceId id{next_id};
  sequences.emplace(id.value, Sequence{.spec = spec, .pages = {free_lists.back(), memory.largest().max_pages}});
  free_lists.pop_back();
  ++next_id;
  return id;
}

std::uint32_t Engine::Impl::pages_of(std::uint32_t tokens) const noexcept {
  return static_cast<std::uint32_t>(div_up(tokens, memory.largest().layout.page_tokens));
}

Engine::Engine(const EngineOptions& options, std::shared_ptr<Device> device)
    : impl_(std::make_unique<Impl>(options, std::move(device))) {}

Engine::~Engine() = default;

SequenceId Engine::begin(const PolicySpec& policy) {
  validate(policy);
  const std::string reason =
      scheduler::forward_unserved(policy, impl_->options.largest, impl_->memory.largest().max_window);
  if (!reason.empty())
    throw Error(Errc::unsupported, "the engine cannot serve this policy: " + reason +
                                       "; `exact | int4 | top_p=0.95 | near=0` is one that it can");
  return impl_->add(policy);
}

SequenceId Engine::fork(SequenceId id, std::uint32_t tokens) {
  Impl& all = *impl_;
  const Impl::Sequence& parent = all.resting(id, "fork");
  if (tokens > parent.tokens)
    throw Error(Errc::invalid_argument, "fork: sequence " + number(id.value) + " has " + number(parent.tokens) +
                                            " tokens, and " + number(tokens) + " are asked for");
  const SequenceId child = all.add(parent.spec);
  Impl::Sequence& fork = all.at(child);
  fork.pages.share(parent.pages, all.pages_of(tokens), all.table);
  fork.tokens = fork.planned = tokens;
  return child;
}

void Engine::truncate(SequenceId id, std::uint32_t tokens) {
  Impl::Sequence& sequence = impl_->resting(id, "truncate");
  if (tokens > sequence.tokens)
    throw Error(Errc::invalid_argument, "truncate: sequence " + number(id.value) + " has " + number(sequence.tokens) +
                                            " tokens, and is to keep " + number(tokens));
  sequence.pages.shrink(impl_->pages_of(tokens), impl_->table);
  sequence.tokens = sequence.planned = tokens;
}

void Engine::import_prefix(SequenceId id, LayerId layer, const TensorView& k, const TensorView& v, void* stream) {
  Impl& all = *impl_;
  const AttentionShape& shape = all.options.shape;
  const auto fits = [&](const TensorView& x) {
    return x.tokens == k.tokens && x.heads == shape.kv_heads && x.head_dim == shape.head_dim;
  };
  if (k.tokens == 0 || k.tokens > all.options.import_rows || !fits(k) || !fits(v))
    throw Error(Errc::invalid_argument, "import_prefix: k and v must be [1 to " + number(all.options.import_rows) +
                                            " tokens, kv_heads, head_dim], and alike");
  const Bucket bucket{
      .decode_rows = 0, .prefill_rows = all.options.import_rows, .max_tokens = all.memory.largest().largest.max_tokens};
  if (layer.value == 0) {
    Impl::Sequence& sequence = all.resting(id, "import_prefix");
    if (!all.programs.empty())
      throw Error(Errc::invalid_argument, "import_prefix: forward " + number(all.programs.newest().forward) +
                                              " is under way; finish or cancel it first");
    std::vector<Impl::Wanted> wanted{
        {.sequence = &sequence, .item = {.sequence = id, .tokens = k.tokens, .prefill = true}}};
    all.require_room(wanted, bucket.max_tokens);
    all.importing = all.send(std::move(wanted), bucket, stream);
  } else if (all.importing == 0 || all.programs.newest().items.front().sequence != id ||
             all.programs.newest().items.front().tokens != k.tokens || all.next_layer != layer.value ||
             layer.value >= shape.layers) {
    throw Error(Errc::invalid_argument,
                "import_prefix: layers come in order, with as many tokens as layer 0; begin again with that");
  }
  const ForwardMemory m = all.memory.of(bucket);
  if (layer.value == 0) all.verbs.begin(m, stream);
  all.verbs.append(m, {.layer = layer.value, .q = {}, .k = k, .v = v, .out = {}, .stream = stream});
  if (++all.next_layer < shape.layers) return;
  all.verbs.end(m, stream);
  const bool done = all.await_end(all.importing) == ForwardStatus::done;
  (void)all.retire(all.importing, done);
  if (!done) throw Error(Errc::device, "import_prefix: its layers did not run one after the other; import it again");
}

Batch Engine::plan(std::span<const PlanItem> items, const Bucket& asked, void* stream) {
  Impl& all = *impl_;
  if (all.importing != 0)
    throw Error(Errc::invalid_argument, "plan: an import is under way; give it its other layers, or end its sequence");
  if (all.programs.full())
    throw Error(Errc::invalid_argument, "plan: " + number(all.options.in_flight) +
                                            " forwards are planned and not finished; finish or cancel one, or raise "
                                            "EngineOptions::in_flight");
  const Bucket bucket = all.resolved(asked, "plan");
  std::vector<Impl::Wanted> wanted = all.checked(items, bucket);
  all.require_room(wanted, bucket.max_tokens);
  const Batch batch{.forward = all.send(std::move(wanted), bucket, stream), .bucket = bucket};
  if (bucket.decode_rows != 0) all.far.wake(batch.forward);
  return batch;
}

void Engine::attend(const Bucket& asked, LayerId layer, const TensorView& q, const TensorView& k, const TensorView& v,
                    const MutableTensorView& out, void* stream, float* lse) {
  Impl& all = *impl_;
  const Bucket bucket = all.resolved(asked, "attend");
  const AttentionShape& shape = all.options.shape;
  const auto require = [&](const auto& x, std::uint32_t heads, const char* name) {
    if (x.tokens == bucket.rows() && x.heads == heads && x.head_dim == shape.head_dim) return;
    throw Error(Errc::invalid_argument, std::string("attend: ") + name + " must be [" + number(bucket.rows()) + ", " +
                                            number(heads) + ", " + number(shape.head_dim) + "]");
  };
  require(q, shape.q_heads, "q");
  require(k, shape.kv_heads, "k");
  require(v, shape.kv_heads, "v");
  require(out, shape.q_heads, "out");
  if (all.importing != 0)
    throw Error(Errc::invalid_argument, "attend: an import is under way; give it its other layers, or begin it again");
  if (all.next_layer == kNone)
    throw Error(Errc::invalid_argument, "attend: a layer of this forward could not be enqueued; cancel it");
  if (layer.value >= shape.layers || (layer.value != 0 && layer.value != all.next_layer))
    throw Error(Errc::invalid_argument,
                "attend: layer " + number(layer.value) + " is not the next; layers come in order");
  const ForwardMemory m = all.memory.of(bucket);
  const ForwardLayer call{.layer = layer.value, .q = q, .k = k, .v = v, .out = out, .lse = lse, .stream = stream};
  // Should one of these throw, part of the layer is enqueued: it cannot be repeated.
  if (!all.programs.empty()) all.next_layer = kNone;
  if (layer.value == 0) all.verbs.begin(m, stream);
  all.verbs.append(m, call);
  if (bucket.prefills != 0) all.verbs.prefill(m, call);
  if (bucket.decode_rows != 0) {
    all.verbs.score(m, call);
    all.verbs.choose(m, call);
    all.verbs.split(m, call);
    all.verbs.attend(m, call);
    all.verbs.merge(m, call);
  }
  if (layer.value + 1 == shape.layers) all.verbs.end(m, stream);
  all.next_layer = layer.value + 1;
}

void Engine::finish(const Batch& batch) {
  Impl& all = *impl_;
  if (all.programs.find(batch.forward) == nullptr || batch.forward == all.importing)
    throw Error(Errc::invalid_argument, "finish: forward " + number(batch.forward) + " is not under way");
  const ForwardStatus status = all.await_end(batch.forward);
  // Late answers write where the next forward's will.
  all.await_idle();
  const runtime::Program program = all.retire(batch.forward, status == ForwardStatus::done);
  if (status == ForwardStatus::done) return;
  std::string text =
      "forward " + number(batch.forward) + " did not get to its end: " + reason_of(status) + ". Without new tokens:";
  for (const PlanItem& item : program.items) text += " sequence " + number(item.sequence.value);
  throw Error(Errc::device, text + "; plan and run it again");
}

void Engine::cancel(const Batch& batch) {
  Impl& all = *impl_;
  if (all.programs.find(batch.forward) == nullptr || batch.forward == all.importing)
    throw Error(Errc::invalid_argument, "cancel: forward " + number(batch.forward) + " is not under way");
  all.take_back(batch.forward);
}

void Engine::end(SequenceId id) {
  Impl& all = *impl_;
  Impl::Sequence& sequence = all.resting(id, "end");
  sequence.pages.shrink(0, all.table);
  all.free_lists.push_back(sequence.pages.slot());  // Has had room since the engine was built.
  all.sequences.erase(id.value);
}

std::uint32_t Engine::tokens(SequenceId id) const { return impl_->at(id).tokens; }

bool Engine::can_admit(std::uint32_t tokens) const noexcept {
  return !impl_->free_lists.empty() && tokens <= impl_->memory.largest().largest.max_tokens &&
         impl_->pages_of(tokens) <= impl_->table.free();
}

EngineMemoryUse Engine::memory() const noexcept {
  EngineMemoryUse use = impl_->memory.use();
  use.partials = impl_->far.bytes();
  use.far_pages_used = (impl_->table.blocks() - impl_->table.free()) * impl_->memory.block_bytes();
  use.near_pages_used = impl_->table.near() * impl_->memory.block_bytes();
  return use;
}

std::uint64_t Engine::far_bytes(SequenceId id) const {
  return impl_->at(id).pages.pages() * impl_->memory.block_bytes();
}

EngineStats Engine::stats() const noexcept {
  const ForwardMailbox& mailbox = impl_->mailbox();
  return {.asked = look(mailbox.question.asked),
          .unplanned = look(mailbox.outcome.unplanned),
          .near_tokens = look(mailbox.outcome.near_tokens),
          .far_tokens = look(mailbox.outcome.far_tokens),
          .waited_ns = look(mailbox.outcome.waited_ns),
          .answer_ns = impl_->far.answer_ns()};
}

const EngineOptions& Engine::options() const noexcept { return impl_->options; }

}  // namespace sluice
