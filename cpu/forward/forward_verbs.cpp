#include "cpu/forward/forward_verbs.hpp"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <span>
#include <thread>
#include <utility>

#include "cpu/device/host_stream.hpp"
#include "cpu/forward/forward_layer.hpp"
#include "cpu/threads/spin.hpp"
#include "sluice/step/int4.hpp"

namespace sluice::cpu {
namespace {

void copy_codes(const ForwardMemory& m, const ForwardBlockCopy& copy) {
  const std::uint64_t bytes = m.code_page_bytes();
  if (bytes == 0) return;
  for (std::uint32_t plane = 0; plane < m.planes(); ++plane)
    std::memcpy(m.codes + m.far_page(plane, copy.to) * bytes, m.codes + m.far_page(plane, copy.from) * bytes, bytes);
}

void publish(const ForwardMemory& m, std::uint64_t forward, ForwardStatus status) {
  auto& outcome = m.mailbox->outcome;
  m.state->told = forward;
  shared(outcome.status[forward % kMostForwards]).store(status, std::memory_order_relaxed);
  shared(outcome.good).store(m.state->good, std::memory_order_release);  // Histories learn by it alone.
  shared(outcome.forward).store(forward, std::memory_order_release);
}

void apply(const Kernels& kernels, const ForwardMemory& m) {
  const ForwardSlip& slip = *m.slip;
  ForwardState& state = *m.state;
  if (state.planned > state.told) {  // It has not begun, or not come to its end: nor does one that failed before.
    state.forward = state.planned;
    state.status = ForwardStatus::skipped;
    publish(m, state.planned, state.status);
  }
  // Should something here fail, what begins then ends as if the forward before it had failed, which none was.
  state.after = ~std::uint64_t{0};
  state.bucket = slip.bucket;
  state.planned = slip.forward;
  if (state.bucket.whole && state.planned - state.kept >= kNearTurn) state.kept = state.planned;
  std::copy_n(m.slip_tokens, slip.bucket.rows(), m.tokens);
  std::copy_n(m.slip_rows, slip.bucket.decode_rows, m.rows);
  std::copy_n(m.slip_chunks, slip.bucket.prefills, m.chunks);
  for (const ForwardListChange& change : std::span(m.slip_lists, slip.list_changes)) {
    std::copy_n(m.slip_blocks + change.from, change.count,
                m.lists + std::uint64_t{change.list} * m.max_pages + change.page);
  }
  for (const ForwardBlockCopy& copy : std::span(m.slip_copies, slip.block_copies)) copy_codes(m, copy);
  for (const ForwardKeyMean& of : std::span(m.slip_key_means, slip.key_means)) {
    for (std::uint32_t plane = 0; plane < m.planes(); ++plane) renew_key_mean(kernels, m, of, plane);
  }
  acquire_rows(kernels, m);
  state.after = slip.after;
}

void begin(const ForwardMemory& m) {
  ForwardState& state = *m.state;
  state.released = state.asked;
  const bool planned = state.planned > state.forward;
  if (!planned && state.planned > state.told) publish(m, state.planned, ForwardStatus::skipped);
  state.forward = state.planned;
  state.status = !planned                    ? ForwardStatus::unplanned
                 : state.after != state.good ? ForwardStatus::orphaned
                 : state.bucket != m.bucket  ? ForwardStatus::mismatched
                                             : ForwardStatus::running;
}

void cancel(const ForwardMemory& m, std::uint64_t before) {
  ForwardState& state = *m.state;
  state.forward = state.planned;
  state.good = std::min(state.good, before);  // Not of one that failed.
  state.status = ForwardStatus::cancelled;
  publish(m, state.forward, state.status);
  shared(m.mailbox->outcome.cancelled).store(state.forward, std::memory_order_release);
}

void end(const ForwardMemory& m) {
  ForwardState& state = *m.state;
  auto& outcome = m.mailbox->outcome;
  if (state.status == ForwardStatus::cancelled) return;  // A part of a forward, without its beginning.
  if (state.status == ForwardStatus::unplanned) {
    shared(outcome.unplanned).store(++state.unplanned, std::memory_order_release);
    return;
  }
  if (state.status == ForwardStatus::running) {
    state.status = ForwardStatus::done;
    state.good = state.forward;
  }
  shared(outcome.near_tokens).store(state.near_tokens, std::memory_order_relaxed);
  shared(outcome.far_tokens).store(state.far_tokens, std::memory_order_relaxed);
  shared(outcome.fetched_tokens).store(state.fetched_tokens, std::memory_order_relaxed);
  shared(outcome.drawn_heads).store(state.drawn_heads, std::memory_order_relaxed);
  shared(outcome.error_bars).store(state.error_bars, std::memory_order_relaxed);
  shared(outcome.wide_bars).store(state.wide_bars, std::memory_order_relaxed);
  shared(outcome.waited_ns).store(state.waited_ns, std::memory_order_relaxed);
  shared(outcome.awaited).store(state.awaited, std::memory_order_relaxed);
  shared(outcome.promoted).store(state.promoted, std::memory_order_relaxed);
  shared(outcome.near_rows).store(state.near_rows, std::memory_order_relaxed);
  publish(m, state.forward, state.status);
}

void stamp(const ForwardMemory& m, std::uint32_t layer, Stage stage) {
  if (!runs(m)) return;
  const auto now = std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now().time_since_epoch());
  m.stamps_of(m.state->forward, layer)[static_cast<std::size_t>(stage)] = {
      .forward = m.state->forward, .ns = static_cast<std::uint64_t>(now.count())};
}

/// As a stream of a GPU, which knows nothing of forwards, nor of time: it is up to the host to open the gate, within
/// EngineOptions::answer_timeout. Should it fail to, this device is not stuck for good.
void await_answer(const ForwardMemory& m) {
  constexpr std::chrono::microseconds kNap{20};
  constexpr std::chrono::seconds kPatience{120};
  const auto open = [&] {
    return (shared(m.mailbox->gate.word).load(std::memory_order_acquire) & ForwardGate::kOpen) != 0;
  };
  const Deadline deadline = deadline_after(kPatience);
  while (!spin_until(open)) {
    if (RunClock::now() >= deadline) return;  // What comes behind finds no answer.
    std::this_thread::sleep_for(kNap);
  }
}

/// A stream goes on behind a verb that it could not do, such as one that found no memory; the forward does not.
template <class Run>
void queue(const ForwardMemory& m, void* stream, const char* verb, Run run) {
  run_or_enqueue(static_cast<Stream*>(stream), verb, [state = m.state, run = std::move(run)] {
    try {
      run();
    } catch (...) {
      if (state->status == ForwardStatus::running) state->status = ForwardStatus::broken;
      throw;
    }
  });
}

}  // namespace

ForwardVerbs::ForwardVerbs(const Workers& workers, const Kernels* kernels)
    : host_{.workers = workers, .kernels = kernels != nullptr ? *kernels : fastest_kernels()} {}

void ForwardVerbs::apply(const ForwardMemory& memory, ForwardSide& /*side*/, void* stream) {
  queue(memory, stream, "apply", [this, memory] { cpu::apply(host_.kernels, memory); });
}
void ForwardVerbs::fill(const ForwardMemory& memory, ForwardSide& /*side*/, void* stream) {
  queue(memory, stream, "fill", [this, memory] { cpu::fill_rows(host_.kernels, memory); });
}
void ForwardVerbs::cluster(const ForwardMemory& memory, std::span<const ForwardClustering> clusterings, void* stream) {
  queue(memory, stream, "cluster", [this, memory, all = std::vector(clusterings.begin(), clusterings.end())] {
    for (const ForwardClustering& clustering : all) cpu::cluster(host_, memory, clustering);
  });
}
void ForwardVerbs::derive(const ForwardMemory& memory, std::uint32_t plane, std::span<const FarPage> pages,
                          const float* mean, void* stream) {
  run_or_enqueue(static_cast<Stream*>(stream), "derive", [this, memory, plane, pages, mean] {
    cpu::derive(host_.workers, host_.kernels, memory, plane, pages, mean);
  });
}
void ForwardVerbs::begin(const ForwardMemory& memory, void* stream) {
  queue(memory, stream, "begin", [memory] { cpu::begin(memory); });
}
void ForwardVerbs::append(const ForwardMemory& memory, const ForwardLayer& layer) {
  queue(memory, layer.stream, "append", [this, memory, layer] { cpu::append(host_.kernels, memory, layer); });
}
void ForwardVerbs::prefill(const ForwardMemory& memory, const ForwardLayer& layer) {
  queue(memory, layer.stream, "prefill", [this, memory, layer] { cpu::prefill(host_, memory, layer); });
}
void ForwardVerbs::rank(const ForwardMemory& memory, const ForwardLayer& layer) {
  queue(memory, layer.stream, "rank", [this, memory, at = layer.layer] { cpu::rank(host_, memory, at); });
}
void ForwardVerbs::score(const ForwardMemory& memory, const ForwardLayer& layer) {
  queue(memory, layer.stream, "score", [this, memory, layer] { cpu::score(host_, memory, layer); });
}
void ForwardVerbs::propose(const ForwardMemory& memory, const ForwardLayer& layer) {
  queue(memory, layer.stream, "propose", [memory, at = layer.layer] { cpu::propose(memory, at); });
}
void ForwardVerbs::choose(const ForwardMemory& memory, const ForwardLayer& layer) {
  queue(memory, layer.stream, "choose", [this, memory, at = layer.layer] {
    cpu::choose(host_, memory, at);
    cpu::choose_clusters(host_, memory, at);
  });
}
void ForwardVerbs::split(const ForwardMemory& memory, const ForwardLayer& layer) {
  queue(memory, layer.stream, "split", [this, memory, at = layer.layer] { cpu::split(host_.workers, memory, at); });
}
void ForwardVerbs::attend(const ForwardMemory& memory, const ForwardLayer& layer) {
  queue(memory, layer.stream, "attend",
        [this, memory, at = layer.layer] { cpu::attend(host_.workers, host_.kernels, memory, at); });
}
void ForwardVerbs::attend_whole(const ForwardMemory& memory, const ForwardLayer& layer) {
  queue(memory, layer.stream, "attend_whole", [this, memory, layer] { cpu::attend_whole(host_, memory, layer); });
}
void ForwardVerbs::promote(const ForwardMemory& memory, const ForwardLayer& layer) {
  queue(memory, layer.stream, "promote", [memory, at = layer.layer] { cpu::promote(memory, at); });
}
void ForwardVerbs::fetch(const ForwardMemory& memory, const ForwardLayer& layer) {
  queue(memory, layer.stream, "fetch", [this, memory, at = layer.layer] { cpu::fetch(host_.kernels, memory, at); });
}
void ForwardVerbs::await_answer(const ForwardMemory& memory, void* stream) {
  queue(memory, stream, "await_answer", [memory] { cpu::await_answer(memory); });
}
void ForwardVerbs::signal(const ForwardMemory& memory, std::uint64_t ticket, void* stream) {
  queue(memory, stream, "signal",
        [memory, ticket] { shared(memory.mailbox->question.passed).store(ticket, std::memory_order_release); });
}
void ForwardVerbs::tell_read(const ForwardMemory& memory, std::uint64_t forward, void* stream) {
  queue(memory, stream, "tell_read",
        [memory, forward] { shared(memory.slip->read).store(forward, std::memory_order_release); });
}
void ForwardVerbs::merge(const ForwardMemory& memory, const ForwardLayer& layer) {
  queue(memory, layer.stream, "merge", [this, memory, layer] { cpu::merge(host_.kernels, memory, layer); });
}
void ForwardVerbs::audit(const ForwardMemory& memory, const ForwardLayer& layer) {
  queue(memory, layer.stream, "audit", [this, memory, layer] { cpu::audit(host_.kernels, memory, layer); });
}
void ForwardVerbs::stamp(const ForwardMemory& memory, std::uint32_t layer, Stage stage, void* stream) {
  queue(memory, stream, "stamp", [memory, layer, stage] { cpu::stamp(memory, layer, stage); });
}
void ForwardVerbs::cancel(const ForwardMemory& memory, std::uint64_t before, void* stream) {
  queue(memory, stream, "cancel", [memory, before] { cpu::cancel(memory, before); });
}
void ForwardVerbs::see_near(const ForwardMemory& memory, Deadline) {
  for (std::uint32_t block = 0; block < memory.blocks; ++block)
    memory.near_seen[block] = shared(memory.near_held[block]).load(std::memory_order_relaxed);
}
void ForwardVerbs::end(const ForwardMemory& memory, void* stream) {
  queue(memory, stream, "end", [memory] { cpu::end(memory); });
}

}  // namespace sluice::cpu
