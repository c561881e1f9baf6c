#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <thread>
#include <utility>

#include "runtime/background/job.hpp"

namespace sluice::runtime {

/// What is lent to threads until it is taken back.
/// Thread safety: `Use` by any thread; `end` by the owner.
class Loan {
 public:
  /// A thread uses it while this lives, if it is still there.
  class Use {
   public:
    explicit Use(Loan& loan) noexcept : loan_(loan) {
      // Sequentially consistent with `end`: either it finds the thread, or the thread that it has ended.
      ++loan_.users_;
      there_ = !loan_.ended_;
    }
    ~Use() { --loan_.users_; }
    Use(const Use&) = delete;
    Use& operator=(const Use&) = delete;
    [[nodiscard]] explicit operator bool() const noexcept { return there_; }

   private:
    Loan& loan_;
    bool there_;
  };

  /// Waits for those that use it, as for a lock that they hold.
  void end() noexcept {
    constexpr std::chrono::microseconds kNap{50};
    ended_ = true;
    while (users_ != 0) std::this_thread::sleep_for(kNap);
  }

 private:
  std::atomic<std::uint32_t> users_{0};
  std::atomic<bool> ended_{false};
};

/// A job whose pieces use what is the caller's: its memory, its file, its stack. They do until it is awaited in vain or
/// this goes: then a thread that is late finds nothing to do, and one in the midst of a piece is waited for as if the
/// caller did that itself. That is without a deadline, as a write of the caller's would be, so pieces are short: a file
/// system that hangs keeps the caller.
class BorrowingJob {
 public:
  /// `begin(pieces, piece)`: has threads begin to work for a job, which it returns.
  template <class Begin>
  BorrowingJob(const Begin& begin, std::uint32_t pieces, std::function<void(std::uint32_t)> piece)
      : pieces_(pieces),
        loan_(std::make_shared<Loan>()),
        job_(begin(pieces, [this, loan = loan_, piece = std::move(piece)](std::uint32_t i) {
          const Loan::Use use(*loan);
          if (!use) return;
          piece(i);
          done_.fetch_add(1, std::memory_order_relaxed);
        })) {}
  ~BorrowingJob() {
    job_->abandon();
    loan_->end();
  }
  BorrowingJob(const BorrowingJob&) = delete;
  BorrowingJob& operator=(const BorrowingJob&) = delete;

  /// As Job's, but that a piece which took longer than `timeout` and was done well in the end counts: what a slow disk
  /// has written need not be written again.
  [[nodiscard]] bool await(std::chrono::milliseconds timeout) noexcept {
    if (job_->await(timeout)) return true;
    loan_->end();
    return done_.load(std::memory_order_relaxed) == pieces_;
  }
  void rethrow() { job_->rethrow(); }

 private:
  const std::uint32_t pieces_;
  std::atomic<std::uint32_t> done_{0};  ///< pieces, by threads that use the loan
  std::shared_ptr<Loan> loan_;
  std::shared_ptr<Job> job_;
};

}  // namespace sluice::runtime
