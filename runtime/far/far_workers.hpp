#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <stop_token>
#include <utility>
#include <vector>

#include "cpu/machine/core_shares.hpp"
#include "cpu/threads/crew.hpp"
#include "cpu/threads/kept.hpp"
#include "runtime/background/job.hpp"
#include "runtime/far/far_choice.hpp"
#include "runtime/far/far_notes.hpp"
#include "runtime/far/far_parts.hpp"
#include "runtime/far/presence.hpp"
#include "runtime/far/shares.hpp"
#include "sluice/step/forward_memory.hpp"

namespace sluice::runtime {

struct FarWorkersOptions {
  std::uint32_t threads = 0;  ///< 0: one for each core of the share but `spare`, one at least
  std::uint32_t spare = 0;    ///< cores that are left to others
  bool pin = true;
  bool jobs = false;                         ///< one thread more, for these alone: they go on beside forwards
  std::chrono::milliseconds timeout{1'000};  ///< of one thread's waits for another that chooses
  std::function<void()> before_answer{};     ///< see EngineOptions
  std::function<std::uint64_t()> times_taken = runtime::times_taken;  ///< what the system says of the calling thread
};

/// Threads that answer the device's questions: policies choose, where there are some, and far rows are attended in
/// place, those of a list as soon as it is chosen for. They watch the mailbox from `wake` until the forward has ended,
/// let policies learn from what was chosen and do pieces of jobs while there is nothing to answer, and sleep otherwise.
/// A piece is not interrupted by a question: the first thread does none, half of them do none while a forward is under
/// way, and one thread that answers nothing sees to it that jobs go on.
///
/// They spin while they watch if the process has enough cores for that and the share more than there are threads; else
/// they nap. Should the share be another when a forward is planned, they move: some then sleep until it is larger.
/// Thread safety: the public functions from one thread.
class FarWorkers {
 public:
  /// `memory` is copied; what it points to must outlive this, and so must `choice` and `notes`.
  /// @throws Error{Errc::out_of_capacity} if the system has no thread left.
  FarWorkers(const ForwardMemory& memory, FarChoice& choice, FarNotes& notes, const FarWorkersOptions& options,
             cpu::CoreShares::Lease cores);
  FarWorkers(const FarWorkers&) = delete;
  FarWorkers& operator=(const FarWorkers&) = delete;

  /// Forward `forward` may ask from now on.
  void wake(std::uint64_t forward);
  /// Threads that have nothing else to do begin to work for it. It owns what they use.
  void begin(std::shared_ptr<Job> job);
  /// Ends the threads. Whether all of them have within `timeout`; if not, they use what this was built on, and this,
  /// until they have: `keep` it then. Their cores are others' in any case.
  [[nodiscard]] bool stop(std::chrono::milliseconds timeout) noexcept;
  /// As cpu::Crew's.
  void keep(std::unique_ptr<cpu::Kept> owner) noexcept { threads_.keep(std::move(owner)); }
  /// Whether every question that was asked is answered.
  [[nodiscard]] bool idle() const noexcept;
  /// Of host memory that the threads work in.
  [[nodiscard]] std::uint64_t bytes() const noexcept { return parts_.bytes(); }
  /// From when a thread saw a question until it was answered, over all questions.
  [[nodiscard]] std::uint64_t answer_ns() const noexcept { return answer_ns_.load(std::memory_order_relaxed); }
  /// Threads that answer, as of the newest plan; the others sleep.
  [[nodiscard]] std::uint32_t active() const noexcept { return active_.load(std::memory_order_relaxed); }
  /// Whether these spin.
  [[nodiscard]] bool spins() const noexcept { return spins_.load(std::memory_order_relaxed); }
  /// The core that the threads leave to the caller, as of the newest plan: where it ran then, if one of them was bound
  /// there; kNone if they need all there are.
  [[nodiscard]] std::uint32_t caller_place() noexcept;
  /// Threads that answer nothing for a while, as others take their cores, see Presence: at most half of the active ones.
  [[nodiscard]] std::uint32_t aside() const noexcept { return aside_.load(std::memory_order_relaxed); }
  /// Threads that sleep until they are woken, and how often they all have looked whether there is a reason to get up.
  [[nodiscard]] std::uint32_t asleep() const noexcept { return asleep_.load(std::memory_order_relaxed); }
  [[nodiscard]] std::uint64_t stirrings() const noexcept { return stirrings_.load(std::memory_order_relaxed); }

 private:
  static constexpr std::chrono::microseconds kNap{20};
  /// How many threads a share of so many cores is for.
  [[nodiscard]] std::uint32_t threads_on(std::uint32_t cores) const noexcept;
  /// Goes by the share as it is now.
  void settle_in() noexcept;
  /// Where the calling thread runs on a core of these, they go to the one that was left to it. A thread that spins does
  /// not give way, and the system takes milliseconds to see that another core is free.
  void make_way() noexcept;
  /// Binds the calling thread to its core, where it is not bound to that (`pu`) already.
  void move(std::uint32_t thread, std::uint32_t& pu) const noexcept;
  void work(std::uint32_t thread, const std::stop_token& stop);
  void work_for_jobs(const std::stop_token& stop);
  /// Threads that answer, and may do pieces of jobs now.
  [[nodiscard]] std::uint32_t most_helpers() const noexcept;
  [[nodiscard]] bool may_help(std::uint32_t thread) const noexcept {
    return thread != 0 && jobs_.any() && helping_.load(std::memory_order_relaxed) < most_helpers();
  }
  void help() noexcept;
  /// The thread does nothing until it can be relied on again, unless too many do so: as many as may then come back, too,
  /// when fewer are active.
  void stand_aside(std::uint32_t thread, std::uint64_t seen, Presence& presence, const std::stop_token& stop);
  /// Until there may be a question newer than `seen`.
  void sleep(std::uint32_t thread, std::uint64_t seen, const std::stop_token& stop);
  void answer(std::uint64_t asked, std::uint32_t thread, const std::stop_token& stop);
  /// Opens lists, claiming one after the other, until none is left: those that are as the device has them, then one for
  /// each choice.
  void open_lists(const FarQuestion& question, std::uint32_t items, std::uint32_t thread);
  /// Does pieces of others' choices until none is left.
  void help_to_choose(const FarQuestion& question, std::uint32_t thread);
  /// Attends parts of lists that are open until none is left.
  void attend_parts(const FarQuestion& question, std::uint32_t thread);
  [[nodiscard]] bool all_open(std::uint64_t asked) const noexcept {
    return open_.load(std::memory_order_acquire) >= asked;
  }
  /// What there has been to do besides choosing: another one whenever there may be more.
  struct Offers {
    std::uint64_t opened = 0;  ///< lists
    std::uint64_t shared = 0;  ///< calls of those that choose
    friend bool operator==(const Offers&, const Offers&) = default;
  };
  [[nodiscard]] Offers offers() const noexcept {
    return {.opened = parts_.opened(), .shared = choice_.calls().shared()};
  }
  /// Until there is more to do than there was, or there will not be. False: a thread that has begun to choose does not
  /// come back. Should it after all, what is left of the question is its own.
  [[nodiscard]] bool await_more(std::uint64_t asked, const Offers& before, const std::stop_token& stop) const;
  /// Who has done the last piece of work says that the question is answered.
  void say(const FarQuestion& question);
  /// A piece of work that was claimed; written down if its forward is traced.
  template <class Work>
  void do_piece(const FarQuestion& question, Stage stage, std::uint32_t thread, const Work& work);
  /// A piece of work begins, the first perhaps.
  void begin_piece(std::uint64_t asked);
  [[nodiscard]] bool under_way() const noexcept;

  const ForwardMemory memory_;
  FarChoice& choice_;
  FarNotes& notes_;
  const FarWorkersOptions options_;
  cpu::CoreShares::Lease cores_;
  std::uint64_t generation_ = 0;  ///< of the share that is gone by
  std::atomic<std::uint32_t> active_{1};
  std::atomic<bool> spins_{false};
  std::atomic<std::uint32_t> aside_{0};
  std::atomic<std::uint32_t> asleep_{0};
  std::atomic<std::uint64_t> stirrings_{0};
  std::atomic<std::uint64_t> expected_{0};
  Shares items_;                        ///< the lists as the device has them, then every choice
  std::atomic<std::uint64_t> open_{0};  ///< newest question all of whose lists are open
  FarParts parts_;
  std::atomic<std::uint64_t> seen_{0};    ///< newest question that work was begun on
  std::atomic<std::int64_t> seen_ns_{0};  ///< when that was
  std::atomic<std::uint64_t> answer_ns_{0};
  Jobs jobs_;
  std::atomic<std::uint32_t> helping_{0};  ///< threads that answer, when they are back
  std::mutex mutex_;
  std::condition_variable_any woken_;
  std::condition_variable_any job_came_;
  std::condition_variable_any resettled_;  ///< fewer threads, or more, are active
  const std::uint32_t most_;                        ///< threads that answer
  std::uint32_t caller_place_ = kNone;
  bool leaves_core_ = false;  ///< to the caller, for itself
  std::vector<std::atomic<std::uint32_t>> places_;  ///< [threads, then the one for jobs] PU that it runs on
  cpu::Crew threads_;                              ///< last: they use all of the above
};

}  // namespace sluice::runtime
