#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

#include "cpu/kernels/kernels.hpp"
#include "cpu/machine/topology.hpp"
#include "runtime/engine/far_choice.hpp"
#include "runtime/engine/far_notes.hpp"
#include "runtime/engine/shares.hpp"
#include "sluice/forward_memory.hpp"
#include "sluice/partial.hpp"

namespace sluice::runtime {

struct FarWorkersOptions {
  std::uint32_t threads = 1;
  bool pin = true;
  bool spin = true;  ///< while a forward is under way; else they nap, where others want the cores
  std::uint32_t numa_node = 0;
  std::function<void()> before_answer{};  ///< see EngineOptions
};

/// Threads that answer the device's questions: policies choose, where there are some, then far rows are attended, in
/// place. They watch the mailbox from `wake` until the forward has ended, let policies learn from what was chosen while
/// there is nothing to answer, and sleep otherwise.
/// Thread safety: `wake` and `idle` from one thread.
class FarWorkers {
 public:
  /// `memory` is copied; what it points to must outlive this, and so must `choice` and `notes`.
  /// @throws Error{Errc::device} if the system has no thread left.
  FarWorkers(const ForwardMemory& memory, FarChoice& choice, FarNotes& notes, const FarWorkersOptions& options,
             const cpu::Topology& topology);
  ~FarWorkers();
  FarWorkers(const FarWorkers&) = delete;
  FarWorkers& operator=(const FarWorkers&) = delete;

  /// Forward `forward` may ask from now on.
  void wake(std::uint64_t forward);
  /// Whether every question that was asked is answered.
  [[nodiscard]] bool idle() const noexcept;
  /// Of host memory that the threads work in.
  [[nodiscard]] std::uint64_t bytes() const noexcept { return partials_.size() * sizeof(float); }
  /// From when a thread saw a question until it was answered, over all questions.
  [[nodiscard]] std::uint64_t answer_ns() const noexcept { return answer_ns_.load(std::memory_order_relaxed); }

 private:
  /// Addresses of K rows: a thread's own, as many as the largest part has.
  using Rows = std::vector<const std::byte*>;
  /// What is asked.
  struct Question {
    std::uint64_t asked = 0;
    std::uint64_t forward = 0;
    std::uint32_t layer = 0;
  };
  /// Some far rows of one row and KV head, which one thread attends. How a list is cut depends on its length alone, so
  /// that answers do not depend on the threads.
  struct Part {
    std::uint32_t index = 0;  ///< row * kv_heads + KV head
    std::uint32_t part = 0;
    std::uint32_t parts = 0;  ///< of the list
    std::uint32_t begin = 0;
    std::uint32_t end = 0;
  };
  void work(std::uint32_t thread, const std::stop_token& stop);
  void answer(std::uint64_t asked, std::uint32_t thread);
  /// Returns when all policies have chosen. Whether the last of them did so here.
  [[nodiscard]] bool choose(const Question& question, std::uint32_t choices, std::uint32_t thread);
  /// Who has done the last piece of work says that the question is answered.
  void say(const Question& question);
  /// A piece of work that was claimed; written down if its forward is traced.
  template <class Work>
  void do_piece(const Question& question, Stage stage, std::uint32_t thread, const Work& work);
  /// A piece of work begins, the first perhaps.
  void begin_piece(std::uint64_t asked);
  [[nodiscard]] std::uint32_t all_parts() const noexcept;
  [[nodiscard]] std::uint32_t parts_of(std::uint32_t index) const noexcept;
  /// A list, and how many parts the lists before it have.
  struct Cursor {
    std::uint32_t index = 0;
    std::uint32_t first = 0;
  };
  /// The `at`-th part of the question that stands. `cursor` moves to its list: who asks for later and later parts of
  /// one question looks at every list once.
  [[nodiscard]] Part part_at(std::uint32_t at, Cursor& cursor) const noexcept;
  /// Who ends a list's last part merges them.
  void attend(const Question& question, const Part& part, Rows& rows);
  void attend_part(const Question& question, const Part& part, Rows& rows, const ChosenList* chosen);
  /// Where a list's result goes.
  [[nodiscard]] Partial whole_of(std::uint32_t index) const noexcept;
  /// Where the result of a part that is not its list's first waits for the others.
  [[nodiscard]] Partial place_of(std::uint32_t index, std::uint32_t part) noexcept;
  [[nodiscard]] bool under_way() const noexcept;

  const ForwardMemory memory_;
  FarChoice& choice_;
  FarNotes& notes_;
  const FarWorkersOptions options_;
  const cpu::Kernels& kernels_;
  std::atomic<std::uint64_t> expected_{0};
  Shares choices_;
  std::atomic<std::uint64_t> chosen_{0};  ///< newest question all of whose choices were made
  Shares parts_;
  std::atomic<std::uint64_t> seen_{0};    ///< newest question that work was begun on
  std::atomic<std::int64_t> seen_ns_{0};  ///< when that was
  std::atomic<std::uint64_t> answer_ns_{0};
  std::vector<std::atomic<std::uint32_t>> part_ends_;  ///< [decode_rows, kv_heads] parts of the list that are done
  const std::uint32_t most_parts_;
  std::vector<float> partials_;  ///< [decode_rows, kv_heads, most_parts, group, head_dim + 1]
  std::mutex mutex_;
  std::condition_variable_any woken_;
  std::vector<Rows> rows_;             ///< [threads]
  std::vector<std::jthread> threads_;  ///< last: they use all of the above
};

}  // namespace sluice::runtime
