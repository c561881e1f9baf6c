#pragma once

#include <array>
#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>

#include "scheduler/step_graph.hpp"
#include "sluice/device.hpp"
#include "sluice/trace.hpp"

namespace sluice::runtime {

/// What the nodes of a step graph do. A cpu node computes before it returns; a device or link node only
/// enqueues on its lane's stream.
class NodeRunner {
 public:
  virtual ~NodeRunner() = default;
  virtual void issue(scheduler::NodeKind kind) = 0;
};

/// Runs step graphs over the three lanes. The caller's thread is the cpu lane; the device and link lanes
/// are streams. An edge between two streams becomes an event wait; an edge from a stream to the cpu becomes a
/// flag in pinned memory, polled under a deadline; an edge from the cpu is free, because cpu nodes have
/// finished when later nodes are issued.
class Executor {
 public:
  /// `device` and `link` must outlive the executor. `trace` may be null.
  Executor(Device& device, Stream& link, std::chrono::milliseconds timeout, TraceSink* trace);

  /// Destroys the device's stream, and with it what a run that timed out left queued. Nothing may be run
  /// after it. The link's stream refers to this executor's flags and must be gone before it is destroyed.
  void stop() noexcept { device_stream_.reset(); }

  /// Issues all nodes that are not in the background and returns when all of them are done.
  /// @throws Error{Errc::device} naming node and layer, or what a node threw, after both streams have run dry, so
  /// that nothing still refers to the caller's memory; Error{Errc::timeout} if they have not.
  /// With `Finish::queued` it returns as soon as everything is issued and the cpu's nodes are done. What is still queued
  /// then is the run's tail. One tail at most is under way: a graph hands over to the cpu, which the device's stream
  /// reaches behind the tail before. If that tail failed, the run throws, and `take_late_failure` says why.
  enum class Finish : std::uint8_t { done, queued };
  void run(const scheduler::StepGraph& graph, std::uint32_t layer, NodeRunner& runner, Finish finish = Finish::done);

  [[nodiscard]] Stream& device_stream() noexcept { return *device_stream_; }
  /// Reports work that ran outside a graph, in the background; nothing without a trace. Thread-safe.
  void trace(const scheduler::Node& node, std::uint32_t layer, Clock::time_point begin, Clock::time_point end) const;
  /// Time that the caller's thread has spent waiting for the device or the link since the last call.
  [[nodiscard]] std::uint64_t take_wait_ns() noexcept;
  /// Adds what a node of the cpu lane has waited itself.
  void add_wait(Clock::duration span) noexcept;

  /// The newest run's tail has not been seen to end.
  [[nodiscard]] bool has_tail() const noexcept { return unseen_; }
  /// Sees whether the tail has ended, without waiting.
  void look_at_tail();
  /// Waits for the end of the tail.  @throws Error{Errc::timeout}
  void await_tail(Deadline deadline);
  /// Why a tail that has ended failed; empty if it did not, or was asked for before.
  [[nodiscard]] std::string take_late_failure() noexcept { return std::exchange(late_, {}); }

  /// Blocks until everything queued on both streams has run; failures are dropped, but a tail's. False past the
  /// timeout: then work may still be in flight and the memory it uses must stay.
  [[nodiscard]] bool drain() noexcept;

 private:
  static constexpr std::size_t kMaxNodes = 16;

  /// True if something outside the node's own stream waits for it: another lane, or the end of the step.
  [[nodiscard]] bool needs_signal(const scheduler::StepGraph& graph, std::uint32_t index, Finish finish) const;
  void issue(const scheduler::StepGraph& graph, std::uint32_t index, std::uint32_t layer, NodeRunner& runner,
             Finish finish);
  void trace_streams(const scheduler::StepGraph& graph, std::uint32_t layer);
  void await(const scheduler::StepGraph& graph, std::uint32_t index, std::uint32_t layer, Deadline deadline);
  [[nodiscard]] bool is_final(const Event& event, Deadline deadline) const;
  [[noreturn]] void throw_timeout(const std::string& what) const;
  [[nodiscard]] Stream& stream(Lane lane) noexcept { return lane == Lane::device ? *device_stream_ : link_; }

  Device& device_;
  std::chrono::milliseconds timeout_;
  std::chrono::microseconds spin_;
  TraceSink* trace_;
  std::unique_ptr<Stream> device_stream_;
  Stream& link_;
  std::unique_ptr<Buffer> flag_memory_;
  Flag* flags_ = nullptr;  // [kMaxNodes], in pinned memory
  std::array<std::unique_ptr<Event>, kMaxNodes> events_;
  std::unique_ptr<Event> dry_;
  std::array<Clock::time_point, kMaxNodes> issued_{};
  std::unique_ptr<Event> tail_;  // behind all that a queued run left, whose failure it takes
  bool unseen_ = false;          // it has not been seen to end
  std::string late_;             // why it failed
  std::uint64_t run_ = 0;  // the value that this run's flags rise to
  std::uint64_t wait_ns_ = 0;
};

}  // namespace sluice::runtime
