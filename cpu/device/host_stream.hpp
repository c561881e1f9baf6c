#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <span>
#include <stop_token>
#include <string>
#include <thread>
#include <utility>
#include <variant>
#include <vector>

#include "cpu/device/fault_injector.hpp"
#include "cpu/device/host_event.hpp"
#include "sluice/device.hpp"
#include "sluice/error.hpp"

namespace sluice::cpu {

struct HostStreamOptions {
  std::string name;
  std::chrono::milliseconds flag_timeout{};
  std::uint64_t actor = 0;  ///< tells this stream's faults from those of its siblings
};

/// An in-order queue on a thread of its own. Every operation runs even after one has failed; the first
/// failure is kept until the next record or signal passes it on. Destroying the stream finishes the
/// operation that runs, if it is not a wait, and drops the rest: dropped events and flags fail.
class HostStream final : public Stream {
 public:
  /// @throws Error{Errc::out_of_capacity} if the system has no thread left.
  HostStream(const HostStreamOptions& options, std::shared_ptr<FaultInjector> injector);
  ~HostStream() override = default;

  void copy(std::span<const Copy> batch) override;
  void fill(std::span<std::byte> memory, std::byte value) override;
  void record(Event& event) override;
  void wait(const Event& event) override;
  void signal(Flag& flag, std::uint64_t value) override;
  void wait(const Flag& flag, std::uint64_t value) override;
  void synchronize(Deadline deadline) override;

  /// Enqueues a function; an exception of it is a failure of the stream. `what` names it in the reason and
  /// must be a string literal.
  void enqueue(const char* what, std::function<void()> run);

 private:
  struct CopyBatch {
    std::vector<Copy> copies;
  };
  struct Call {
    const char* what;
    std::function<void()> run;
  };
  struct Record {
    std::shared_ptr<Point> point;
  };
  struct WaitPoint {
    std::shared_ptr<Point> point;
  };
  struct Signal {
    Flag* flag;
    std::uint64_t value;
  };
  struct WaitFlag {
    const Flag* flag;
    std::uint64_t value;
  };
  using Work = std::variant<CopyBatch, Call, Record, WaitPoint, Signal, WaitFlag>;
  struct Operation {
    Work work;
    Fault fault;
  };

  void push(Work work, FaultSite site);
  void run(const std::stop_token& stop);
  void execute(Operation& operation, const std::stop_token& stop) noexcept;
  void abandon(const Operation& operation) noexcept;
  void perform(CopyBatch& batch, const Fault& fault, const std::stop_token& stop);
  void perform(Call& call, const Fault& fault, const std::stop_token& stop);
  void perform(Record& record, const Fault& fault, const std::stop_token& stop);
  void perform(WaitPoint& wait, const Fault& fault, const std::stop_token& stop);
  void perform(Signal& signal, const Fault& fault, const std::stop_token& stop);
  void perform(WaitFlag& wait, const Fault& fault, const std::stop_token& stop);
  void fail(const char* what, const char* reason) noexcept;
  [[nodiscard]] std::string take_failure() noexcept;

  const HostStreamOptions options_;
  const std::shared_ptr<FaultInjector> injector_;
  FaultSequence sequence_;  ///< the enqueuing thread's

  std::mutex mutex_;
  std::condition_variable_any filled_;
  std::condition_variable drained_;
  std::deque<Operation> queue_;            ///< guarded by mutex_
  std::atomic<std::uint64_t> pending_{0};  ///< enqueued and not finished; written under mutex_

  std::string failure_;  ///< since the last event; the stream thread's while anything is pending
  std::jthread thread_;  ///< last: it stops before anything above goes
};

/// Runs a verb now without a stream, later with one. What `run` captures must hold until the stream has passed.
/// @throws Error{Errc::invalid_argument} if the stream is none of a host device.
template <class Run>
void run_or_enqueue(Stream* stream, const char* verb, Run&& run) {
  if (stream == nullptr) return run();
  auto* const queue = dynamic_cast<HostStream*>(stream);
  if (queue == nullptr)
    throw Error(Errc::invalid_argument, std::string(verb) + ": the stream belongs to another kind of device");
  queue->enqueue(verb, std::forward<Run>(run));
}

}  // namespace sluice::cpu
