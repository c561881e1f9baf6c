#include "sluice/engine.hpp"

#include <algorithm>
#include <atomic>
#include <string>
#include <thread>
#include <unordered_map>
#include <utility>
#include <vector>

#include "cpu/frame_set.hpp"
#include "cpu/host_device.hpp"
#include "cpu/spin.hpp"
#include "cpu/topology.hpp"
#include "cpu/workers.hpp"
#include "runtime/engine/engine_memory.hpp"
#include "runtime/engine/far_workers.hpp"
#include "runtime/engine/mailbox.hpp"
#include "runtime/engine/pending_changes.hpp"
#include "runtime/kv/near_blocks.hpp"
#include "scheduler/layer_policy.hpp"
#include "sluice/error.hpp"

namespace sluice {
namespace {

using runtime::EngineMemory;
using runtime::FarWorkers;
using runtime::look;
using runtime::NearBlocks;
using runtime::PendingChanges;

/// Why this engine cannot serve a policy that parses; empty if it can.
std::string unserved(const PolicySpec& spec, const DecodeBucket& bucket) {
  if (spec.sources != static_cast<std::uint8_t>(Source::exact) || spec.estimate != Estimate::int4 ||
      spec.budget.kind != BudgetKind::top_k)
    return "it is not of the form `exact | int4 | top_k=COUNT`";
  if (spec.near.share != 0.f) return "it attends a share of pages near; say near=0";
  if (spec.bypass_threshold != 0.f) return "it bypasses heads; say bypass=off";
  if (spec.dense_layers != 0 || spec.dense_every != 0) return "it has dense layers";
  const std::uint64_t window = std::uint64_t{spec.near.sink_tokens} + std::max(spec.near.recent_tokens, 1u);
  if (window > bucket.max_window)
    return "sinks and recent tokens are " + std::to_string(window) + ", and EngineOptions::max_window " +
           std::to_string(bucket.max_window);
  return {};
}

struct Sequence {
  PolicySpec spec;
  std::uint32_t list = 0;
  std::uint32_t tokens = 0;
  std::vector<std::uint32_t> blocks;
};

std::shared_ptr<Device> device_or_host(std::shared_ptr<Device> device, std::shared_ptr<cpu::Workers> workers) {
  if (device) return device;
  return std::make_shared<cpu::HostDevice>(std::move(workers));
}

DecodeVerbs& verbs_of(Device& device) {
  DecodeVerbs* const verbs = device.decode_verbs();
  if (verbs == nullptr)
    throw Error(Errc::unsupported, "device '" + device.info().name + "' has no verbs for captured forwards");
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

}  // namespace

struct Engine::Impl {
  Impl(const EngineOptions& chosen, std::shared_ptr<Device> given)
      : options((validated(chosen), chosen)),
        workers(std::make_shared<cpu::Workers>(topology, cpu::WorkersOptions{.threads = 1, .pin = false})),
        device(device_or_host(std::move(given), workers)),
        verbs(verbs_of(*device)),
        memory(options, *device, verbs, topology, node_of(topology, *device), *workers),
        far(memory.decode(), far_options(options, topology, node_of(topology, *device)), topology),
        free_blocks(memory.decode().blocks),
        near(memory.decode().near_blocks, memory.decode().blocks),
        pending(memory.decode().blocks) {
    batch.reserve(options.rows);
    for (std::uint32_t i = options.sequences; i > 0; --i) free_lists.push_back(i - 1);
  }

  Sequence& at(SequenceId id) {
    const auto found = sequences.find(id.value);
    if (found == sequences.end()) throw Error(Errc::not_found, "there is no sequence " + std::to_string(id.value));
    return found->second;
  }
  [[nodiscard]] DecodeMailbox& mailbox() const noexcept { return *memory.decode().mailbox; }

  void require_none_under_way(const char* what) const {
    if (under_way == 0) return;
    throw Error(Errc::invalid_argument, std::string(what) + ": forward " + std::to_string(under_way) +
                                            " is under way; finish or cancel it first");
  }

  /// Blocks for tokens [0, tokens) of each; all of them, or none. Throws before it changes anything.
  void make_room(const std::vector<std::pair<Sequence*, std::uint32_t>>& wanted) {
    const DecodeMemory& m = memory.decode();
    std::uint64_t needed = 0;
    for (const auto& [sequence, tokens] : wanted) {
      if (tokens > m.bucket.max_tokens)
        throw Error(Errc::out_of_capacity, "a sequence would have " + std::to_string(tokens) +
                                               " tokens, and may have " + std::to_string(m.bucket.max_tokens) +
                                               "; raise max_tokens and host_bytes");
      needed += div_up(tokens, m.layout.page_tokens) -
                std::min<std::uint64_t>(div_up(tokens, m.layout.page_tokens), sequence->blocks.size());
    }
    if (needed > free_blocks.size())
      throw Error(Errc::out_of_capacity, "the host pool has " + std::to_string(free_blocks.size()) + " blocks of " +
                                             std::to_string(m.layout.page_tokens) + " tokens left, and " +
                                             std::to_string(needed) + " are needed; end sequences or raise host_bytes");
    for (const auto& [sequence, tokens] : wanted) {
      while (sequence->blocks.size() * m.layout.page_tokens < tokens) add_block(*sequence);
    }
  }

  void add_block(Sequence& sequence) noexcept {
    const auto page = static_cast<std::uint32_t>(sequence.blocks.size());
    const std::uint32_t block = free_blocks.take_lowest();
    sequence.blocks.push_back(block);  // Has had room since it began.
    pending.list({.list = sequence.list, .page = page, .block = block});
    const bool stays = page * memory.decode().layout.page_tokens < sequence.spec.near.sink_tokens;
    const auto seat = near.bring(block, stays);
    if (!seat) return;
    if (seat->evicted != kNone) pending.near({.block = seat->evicted});
    pending.near({.block = block, .near = seat->near});
  }

  DecodeRow row_of(const Sequence& sequence, std::uint32_t tokens) const {
    const PolicySpec& spec = sequence.spec;
    DecodeRow row{.list = sequence.list, .tokens = tokens};
    row.sink_end = std::min(spec.near.sink_tokens, tokens);
    const std::uint32_t recent = std::max(spec.near.recent_tokens, 1u);
    row.recent_begin = std::max(row.sink_end, tokens - std::min(recent, tokens));
    row.picks = std::min(scheduler::budget_tokens(spec.budget, tokens), row.recent_begin - row.sink_end);
    return row;
  }

  /// Hands the plan to the device. The slip before has been taken: nothing is under way.
  std::uint64_t send(const DecodeMemory& m, std::span<const DecodeRow> rows, void* stream) {
    std::fill(std::copy(rows.begin(), rows.end(), m.slip_rows), m.slip_rows + m.bucket.rows, DecodeRow{});
    std::ranges::copy(pending.lists(), m.slip_lists);
    std::ranges::copy(pending.near(), m.slip_near);
    *m.slip = {.forward = planned + 1,
               .list_changes = static_cast<std::uint32_t>(pending.lists().size()),
               .near_changes = static_cast<std::uint32_t>(pending.near().size())};
    verbs.apply(m, stream);
    pending.clear();
    plan_stream = stream;
    next_layer = 0;
    return under_way = ++planned;
  }

  template <class Ready>
  void await(const Ready& ready, const char* what) const {
    const Deadline deadline = deadline_after(options.timeout);
    while (!cpu::spin_until(ready)) {
      if (RunClock::now() >= deadline) throw Error(Errc::timeout, what);
      std::this_thread::sleep_for(std::chrono::microseconds(50));
    }
  }

  /// True if it ran to its end.
  bool await_end(std::uint64_t forward) {
    await([&] { return look(mailbox().outcome.forward) >= forward; },
          "the forward has not ended; was every layer enqueued, or the graph replayed?");
    const bool done = std::atomic_ref(mailbox().outcome.status).load(std::memory_order_relaxed) == DecodeStatus::done;
    // Late answers write where the next forward's will.
    await([&] { return far.idle(); }, "the threads that attend the far part have not answered in time");
    under_way = 0;
    return done;
  }

  /// Takes back what is planned, behind all that its stream has. The device may be asking meanwhile: the workers stay
  /// awake until it has published that it does not.
  void take_back() {
    verbs.cancel(memory.decode(), plan_stream);
    await([&] { return look(mailbox().outcome.cancelled) >= under_way; },
          "the plan's stream has not come to its end; what else is enqueued there?");
    await([&] { return far.idle(); }, "the threads that attend the far part have not answered in time");
    under_way = 0;
    importing = {};
  }

  EngineOptions options;
  cpu::Topology topology;
  std::shared_ptr<cpu::Workers> workers;  ///< of the construction, and of an embedded device
  std::shared_ptr<Device> device;
  DecodeVerbs& verbs;
  EngineMemory memory;
  FarWorkers far;

  cpu::FrameSet free_blocks;
  NearBlocks near;
  std::vector<std::uint32_t> free_lists;
  std::unordered_map<std::uint64_t, Sequence> sequences;
  std::uint64_t next_id = 1;

  PendingChanges pending;
  std::uint64_t planned = 0;
  std::uint64_t under_way = 0;  ///< the forward that was planned and not finished; 0: none
  void* plan_stream = nullptr;
  std::vector<SequenceId> batch;
  std::uint32_t next_layer = 0;  ///< of the forward that is planned; kNone: one could not be enqueued
  struct Import {
    SequenceId sequence;
    std::uint32_t tokens = 0;  ///< 0: none is under way
  } importing;
};

Engine::Engine(const EngineOptions& options, std::shared_ptr<Device> device)
    : impl_(std::make_unique<Impl>(options, std::move(device))) {}

Engine::~Engine() = default;

SequenceId Engine::begin(const PolicySpec& policy) {
  validate(policy);
  const std::string reason = unserved(policy, impl_->memory.decode().bucket);
  if (!reason.empty()) throw Error(Errc::unsupported, "the engine cannot serve this policy: " + reason);
  if (impl_->free_lists.empty())
    throw Error(Errc::out_of_capacity, "as many sequences live as EngineOptions::sequences says; end one first");
  const SequenceId id{impl_->next_id};
  Sequence sequence{.spec = policy, .list = impl_->free_lists.back(), .blocks = {}};
  sequence.blocks.reserve(impl_->memory.decode().max_pages);
  impl_->sequences.emplace(id.value, std::move(sequence));
  impl_->free_lists.pop_back();
  ++impl_->next_id;
  return id;
}

void Engine::import_prefix(SequenceId id, LayerId layer, const TensorView& k, const TensorView& v, void* stream) {
  Impl& all = *impl_;
  Sequence& sequence = all.at(id);
  const DecodeMemory& m = all.memory.import();
  const auto fits = [&](const TensorView& x) {
    return x.tokens == k.tokens && x.heads == m.shape.kv_heads && x.head_dim == m.shape.head_dim;
  };
  if (k.tokens == 0 || k.tokens > m.bucket.rows || !fits(k) || !fits(v))
    throw Error(Errc::invalid_argument, "import_prefix: k and v must be [1 to " + std::to_string(m.bucket.rows) +
                                            " tokens, kv_heads, head_dim], and alike");
  if (layer.value == 0) {
    if (all.importing.tokens != 0 && all.importing.sequence == id) all.take_back();
    all.require_none_under_way("import_prefix");
    std::vector<DecodeRow> rows;
    for (std::uint32_t i = 0; i < k.tokens; ++i)
      rows.push_back({.list = sequence.list, .tokens = sequence.tokens + i + 1});
    all.make_room({{&sequence, sequence.tokens + k.tokens}});
    all.batch.clear();
    (void)all.send(m, rows, stream);
    all.importing = {.sequence = id, .tokens = k.tokens};
    all.verbs.begin(m, stream);
  } else if (all.under_way == 0 || all.importing.sequence != id || all.importing.tokens != k.tokens ||
             all.next_layer != layer.value || layer.value >= m.shape.layers) {
    throw Error(Errc::invalid_argument,
                "import_prefix: layers come in order, with as many tokens as layer 0; begin again with that");
  }
  const DecodeLayer call{.layer = layer.value, .q = {}, .k = k, .v = v, .out = {}, .stream = stream};
  all.verbs.append(m, call);
  if (++all.next_layer < m.shape.layers) return;
  all.verbs.end(m, stream);
  (void)all.await_end(all.under_way);
  all.importing = {};
  sequence.tokens += k.tokens;
}

Batch Engine::plan(std::span<const SequenceId> ids, void* stream) {
  Impl& all = *impl_;
  all.require_none_under_way("plan");
  const DecodeMemory& m = all.memory.decode();
  if (ids.size() > m.bucket.rows)
    throw Error(Errc::invalid_argument, "plan: " + std::to_string(ids.size()) + " sequences, and a forward has " +
                                            std::to_string(m.bucket.rows) + " rows; raise EngineOptions::rows");
  std::vector<std::pair<Sequence*, std::uint32_t>> wanted;
  std::vector<DecodeRow> rows;
  for (const SequenceId id : ids) {
    Sequence& sequence = all.at(id);
    for (const auto& [other, tokens] : wanted) {
      if (other == &sequence)
        throw Error(Errc::invalid_argument, "plan: sequence " + std::to_string(id.value) + " is there twice");
    }
    wanted.emplace_back(&sequence, sequence.tokens + 1);
    rows.push_back(all.row_of(sequence, sequence.tokens + 1));
    if (rows.back().picks > m.bucket.max_picks)
      throw Error(Errc::out_of_capacity, "plan: a query head of sequence " + std::to_string(id.value) + " may choose " +
                                             std::to_string(rows.back().picks) +
                                             " tokens, and EngineOptions::max_picks is " +
                                             std::to_string(m.bucket.max_picks));
  }
  all.make_room(wanted);
  all.batch.assign(ids.begin(), ids.end());
  const Batch batch{.forward = all.send(m, rows, stream)};
  all.far.wake(batch.forward);
  return batch;
}

void Engine::attend(LayerId layer, const TensorView& q, const TensorView& k, const TensorView& v,
                    const MutableTensorView& out, void* stream, float* lse) {
  Impl& all = *impl_;
  const DecodeMemory& m = all.memory.decode();
  const auto require = [&](const auto& x, std::uint32_t heads, const char* name) {
    if (x.tokens == m.bucket.rows && x.heads == heads && x.head_dim == m.shape.head_dim) return;
    throw Error(Errc::invalid_argument, std::string("attend: ") + name + " must be [" + std::to_string(m.bucket.rows) +
                                            ", " + std::to_string(heads) + ", " + std::to_string(m.shape.head_dim) +
                                            "]");
  };
  require(q, m.shape.q_heads, "q");
  require(k, m.shape.kv_heads, "k");
  require(v, m.shape.kv_heads, "v");
  require(out, m.shape.q_heads, "out");
  if (all.importing.tokens != 0)
    throw Error(Errc::invalid_argument, "attend: an import is under way; give it its other layers, or begin it again");
  if (all.next_layer == kNone)
    throw Error(Errc::invalid_argument, "attend: a layer of this forward could not be enqueued; cancel it");
  if (layer.value >= m.shape.layers || (layer.value != 0 && layer.value != all.next_layer))
    throw Error(Errc::invalid_argument,
                "attend: layer " + std::to_string(layer.value) + " is not the next; layers come in order");
  const DecodeLayer call{.layer = layer.value, .q = q, .k = k, .v = v, .out = out, .lse = lse, .stream = stream};
  // Should one of these throw, part of the layer is enqueued: it cannot be repeated.
  if (all.under_way != 0) all.next_layer = kNone;
  if (layer.value == 0) all.verbs.begin(m, stream);
  all.verbs.append(m, call);
  all.verbs.score(m, call);
  all.verbs.choose(m, call);
  all.verbs.split(m, call);
  all.verbs.attend(m, call);
  all.verbs.merge(m, call);
  if (layer.value + 1 == m.shape.layers) all.verbs.end(m, stream);
  all.next_layer = layer.value + 1;
}

void Engine::finish(const Batch& batch) {
  Impl& all = *impl_;
  if (batch.forward != all.under_way || batch.forward == 0)
    throw Error(Errc::invalid_argument, "finish: forward " + std::to_string(batch.forward) + " is not under way");
  if (all.await_end(batch.forward)) {
    for (const SequenceId id : all.batch) ++all.at(id).tokens;
    return;
  }
  std::string text = "forward " + std::to_string(batch.forward) +
                     " was given up: the far part was not answered in time. Without their new token:";
  for (const SequenceId id : all.batch) text += " sequence " + std::to_string(id.value);
  throw Error(Errc::device,
              text + "; plan and run it again, with more threads or a longer answer_timeout if that recurs");
}

void Engine::cancel(const Batch& batch) {
  Impl& all = *impl_;
  if (batch.forward != all.under_way || batch.forward == 0)
    throw Error(Errc::invalid_argument, "cancel: forward " + std::to_string(batch.forward) + " is not under way");
  all.take_back();
}

void Engine::end(SequenceId id) {
  Impl& all = *impl_;
  Sequence& sequence = all.at(id);
  if (all.importing.tokens != 0 && all.importing.sequence == id) all.take_back();
  if (all.under_way != 0 && std::find(all.batch.begin(), all.batch.end(), id) != all.batch.end())
    throw Error(Errc::invalid_argument, "end: sequence " + std::to_string(id.value) +
                                            " is part of a forward under way; finish or cancel it first");
  for (const std::uint32_t block : sequence.blocks) {
    if (all.near.drop(block)) all.pending.near({.block = block});
    all.free_blocks.insert(block);
  }
  all.pending.forget_list(sequence.list);
  all.free_lists.push_back(sequence.list);  // Has had room since the engine was built.
  all.sequences.erase(id.value);
}

std::uint32_t Engine::tokens(SequenceId id) const { return impl_->at(id).tokens; }
EngineStats Engine::stats() const noexcept {
  const DecodeMailbox& mailbox = impl_->mailbox();
  return {.asked = look(mailbox.question.asked),
          .unplanned = look(mailbox.outcome.unplanned),
          .near_tokens = look(mailbox.outcome.near_tokens),
          .far_tokens = look(mailbox.outcome.far_tokens),
          .waited_ns = look(mailbox.outcome.waited_ns),
          .answer_ns = impl_->far.answer_ns()};
}
const EngineOptions& Engine::options() const noexcept { return impl_->options; }

}  // namespace sluice
