#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

#include "cpu/kernels.hpp"
#include "cpu/topology.hpp"
#include "sluice/decode.hpp"

namespace sluice::runtime {

struct FarWorkersOptions {
  std::uint32_t threads = 1;
  bool pin = true;
  bool spin = true;  ///< while a forward is under way; else they nap, where others want the cores
  std::uint32_t numa_node = 0;
  std::function<void()> before_answer{};  ///< see EngineOptions
};

/// Threads that answer the device's questions: attention of a layer's far rows, in place. They watch the mailbox from
/// `wake` until the forward has ended, and sleep otherwise.
/// Thread safety: `wake` and `idle` from one thread.
class FarWorkers {
 public:
  /// `memory` is copied; what it points to must outlive this.  @throws Error{Errc::device} if the system has no thread left.
  FarWorkers(const DecodeMemory& memory, const FarWorkersOptions& options, const cpu::Topology& topology);
  ~FarWorkers();
  FarWorkers(const FarWorkers&) = delete;
  FarWorkers& operator=(const FarWorkers&) = delete;

  /// Forward `forward` may ask from now on.
  void wake(std::uint64_t forward);
  /// Whether every question that was asked is answered.
  [[nodiscard]] bool idle() const noexcept;

 private:
  /// Addresses of K rows: a thread's own, as long as the longest list.
  using Rows = std::vector<const std::byte*>;
  void work(Rows& rows, const std::stop_token& stop);
  void answer(std::uint64_t asked, Rows& rows);
  void attend(std::uint32_t layer, std::uint32_t index, Rows& rows) const;
  [[nodiscard]] bool under_way() const noexcept;

  const DecodeMemory memory_;
  const FarWorkersOptions options_;
  const cpu::Kernels& kernels_;
  std::atomic<std::uint64_t> expected_{0};
  /// Question in the upper half, modulo 2^32; its next row and KV head in the lower.
  std::atomic<std::uint64_t> claims_{0};
  std::atomic<std::uint32_t> finished_{0};  ///< rows and KV heads of the question
  std::mutex mutex_;
  std::condition_variable_any woken_;
  std::vector<Rows> rows_;  ///< [threads]
  std::vector<std::jthread> threads_;  ///< last: they use all of the above
};

}  // namespace sluice::runtime
