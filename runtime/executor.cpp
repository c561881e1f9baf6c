#include "runtime/executor.hpp"

#include <algorithm>
#include <exception>
#include <new>
#include <string>
#include <utility>

#include "runtime/marked_range.hpp"
#include "runtime/wait.hpp"
#include "sluice/error.hpp"

namespace sluice::runtime {
namespace {

using scheduler::Node;
using scheduler::StepGraph;

std::uint64_t nanoseconds(Clock::duration span) {
  return static_cast<std::uint64_t>(std::chrono::duration_cast<std::chrono::nanoseconds>(span).count());
}

/// A stream that was too short of memory even to record an event may still have to be waited for.
bool is_dry(Stream& stream, Deadline deadline) noexcept {
  try {
    stream.synchronize(deadline);
  } catch (const std::exception& error) {
    return !is_timeout(error);
  }
  return true;
}

std::uint64_t nanoseconds(Clock::time_point point) { return nanoseconds(point.time_since_epoch()); }

}  // namespace

Executor::Executor(Device& device, Stream& link, std::chrono::milliseconds timeout, TraceSink* trace)
    : device_(device),
      timeout_(timeout),
      // A GPU is not slowed by a spinning waiter; the embedded device's threads may want this very core.
      spin_(device.info().own_processor ? 100 * kSpin : kSpin),
      trace_(trace),
      device_stream_(device.create_stream("device")),
      link_(link),
      flag_memory_(device.allocate_pinned(sizeof(Flag) * kMaxNodes)) {
  flags_ = new (flag_memory_->data()) Flag[kMaxNodes];
  for (auto& event : events_) event = device.create_event();
  dry_ = device.create_event();
  tail_ = device.create_event();
}

void Executor::run(const StepGraph& graph, std::uint32_t layer, NodeRunner& runner, Finish finish) {
  if (trace_ != nullptr) finish = Finish::done;  // A trace wants every node's end.
  if (graph.nodes.size() > kMaxNodes) throw Error(Errc::unsupported, "step graph has too many nodes");
  const Deadline deadline = deadline_after(timeout_);
  ++run_;
  try {
    // What the device does before anyone waits for it; a trace wants every node apart.
    if (trace_ == nullptr) device_stream_->begin_batch();
    for (std::uint32_t i = 0; i < graph.nodes.size(); ++i) {
      const Node& node = graph.nodes[i];
      if (node.background) continue;
      if (node.lane != Lane::device) device_stream_->end_batch();
      for (const std::uint32_t before : node.after) {
        const Lane from = graph.nodes[before].lane;
        if (from == Lane::cpu || from == node.lane) continue;
        if (node.lane == Lane::cpu) {
          await(graph, before, layer, deadline);
        } else {
          stream(node.lane).wait(*events_[before]);
        }
      }
      issue(graph, i, layer, runner, finish);
    }
    device_stream_->end_batch();
    if (finish == Finish::queued) {
      await_tail(deadline);  // Seen to end by now, unless no node handed over to the cpu.
      device_stream_->record(*tail_);
      unseen_ = true;
      return;
    }
    for (std::uint32_t i = 0; i < graph.nodes.size(); ++i) {
      if (needs_signal(graph, i, finish)) await(graph, i, layer, deadline);
    }
    if (trace_ != nullptr) trace_streams(graph, layer);
  } catch (const std::exception& error) {
    if (drain()) throw;
    throw Error(Errc::timeout, std::string(error.what()) +
                                   "; nor did the queued work finish within another timeout of " +
                                   std::to_string(timeout_.count()) + " ms");
  }
}

bool Executor::needs_signal(const StepGraph& graph, std::uint32_t index, Finish finish) const {
  const Node& node = graph.nodes[index];
  if (node.lane == Lane::cpu || node.background) return false;
  if (trace_ != nullptr) return true;  // Every node's end is wanted, and what takes a failure must be looked at.
  bool waited_for = false;
  for (const Node& later : graph.nodes) {
    if (later.background) continue;
    for (const std::uint32_t before : later.after) {
      if (before != index) continue;
      if (later.lane != node.lane) return true;
      waited_for = true;
    }
  }
  return !waited_for && finish == Finish::done;
}

void Executor::issue(const StepGraph& graph, std::uint32_t index, std::uint32_t layer, NodeRunner& runner,
                     Finish finish) {
  const Node& node = graph.nodes[index];
  issued_[index] = Clock::now();
  {
    const MarkedRange range(device_, to_string(node.kind));
    runner.issue(node.kind);
  }
  if (node.lane == Lane::cpu) {
    if (trace_ != nullptr) trace(node, layer, issued_[index], Clock::now());
    return;
  }
  // The event takes the failure and its reason; the flag only says that the stream got here.
  if (!needs_signal(graph, index, finish)) return;
  if (node.lane == Lane::device) device_stream_->end_batch();
  stream(node.lane).record(*events_[index]);
  stream(node.lane).signal(flags_[index], run_);
}

void Executor::trace_streams(const StepGraph& graph, std::uint32_t layer) {
  // A stream works in order: a node began when it was issued or when the node before it was done.
  std::array<Clock::time_point, 3> free{};
  for (std::uint32_t i = 0; i < graph.nodes.size(); ++i) {
    const Node& node = graph.nodes[i];
    if (node.background || node.lane == Lane::cpu) continue;
    Clock::time_point& last = free[static_cast<std::size_t>(node.lane)];
    const Clock::time_point end = events_[i]->time();
    trace(node, layer, std::max(issued_[i], last), end);
    last = end;
  }
}

void Executor::trace(const Node& node, std::uint32_t layer, Clock::time_point begin, Clock::time_point end) const {
  if (trace_ == nullptr) return;
  trace_->record({.name = to_string(node.kind),
                  .lane = node.lane,
                  .layer = layer,
                  .begin_ns = nanoseconds(begin),
                  .end_ns = nanoseconds(std::max(begin, end))});
}

void Executor::await(const StepGraph& graph, std::uint32_t index, std::uint32_t layer, Deadline deadline) {
  const Node& node = graph.nodes[index];
  const Clock::time_point begin = Clock::now();
  const bool came = [&] {
    const MarkedRange range(device_, "wait for the device");
    return wait_until([&] { return flags_[index].state(run_) != Flag::State::pending; }, deadline, spin_);
  }();
  wait_ns_ += nanoseconds(Clock::now() - begin);
  const auto what = [&] { return std::string(to_string(node.kind)) + " of layer " + std::to_string(layer); };
  if (!came) throw_timeout(what());
  if (node.lane == Lane::device) {
    await_tail(deadline);  // The stream has passed it.
    if (!late_.empty()) throw Error(Errc::device, late_);
  }
  // The flag says that the stream got there; only a final event says how.
  if (!is_final(*events_[index], deadline)) throw_timeout(what());
  if (flags_[index].state(run_) == Flag::State::failed || events_[index]->state() == Event::State::failed) {
    throw Error(Errc::device, what() + " failed: " + events_[index]->reason());
  }
}

bool Executor::is_final(const Event& event, Deadline deadline) const {
  return wait_until([&] { return event.state() != Event::State::pending; }, deadline, spin_);
}

void Executor::throw_timeout(const std::string& what) const {
  throw Error(Errc::timeout, what + " did not finish within " + std::to_string(timeout_.count()) +
                                 " ms; raise the timeout if the machine is merely busy");
}

void Executor::look_at_tail() {
  if (!unseen_ || tail_->state() == Event::State::pending) return;
  unseen_ = false;
  if (tail_->state() == Event::State::failed) late_ = tail_->reason();
}

void Executor::await_tail(Deadline deadline) {
  if (!unseen_) return;
  if (!is_final(*tail_, deadline)) throw_timeout("what a step had left queued");
  look_at_tail();
}

bool Executor::drain() noexcept {
  const Deadline deadline = deadline_after(timeout_);
  bool dry = true;
  for (Stream* lane : {device_stream_.get(), &link_}) {
    try {
      lane->record(*dry_);  // Takes what failed since the last event, so that the next run starts clean.
      lane->synchronize(deadline);
    } catch (const std::exception& error) {
      dry = dry && !is_timeout(error) && is_dry(*lane, deadline);
    }
  }
  look_at_tail();
  return dry;
}

void Executor::add_wait(Clock::duration span) noexcept { wait_ns_ += nanoseconds(span); }

std::uint64_t Executor::take_wait_ns() noexcept { return std::exchange(wait_ns_, 0); }

}  // namespace sluice::runtime
