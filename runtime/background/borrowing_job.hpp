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

/// A job whose pieces use what is the caller's: its memory, its file, its stack. They do while this lives: then a
/// thread that is late finds nothing to do, and one in the midst of a piece is waited for as if the caller did that
/// itself. So pieces are short and wait for nothing.
class BorrowingJob {
 public:
  /// `begin(pieces, piece)`: has threads begin to work for a job, which it returns.
  template <class Begin>
  BorrowingJob(const Begin& begin, std::uint32_t pieces, std::function<void(std::uint32_t)> piece)
      : loan_(std::make_shared<Loan>()), job_(begin(pieces, [loan = loan_, piece = std::move(piece)](std::uint32_t i) {
          if (const Loan::Use use(*loan); use) piece(i);
        })) {}
  ~BorrowingJob() {
    job_->abandon();
    loan_->end();
  }
  BorrowingJob(const BorrowingJob&) = delete;
  BorrowingJob& operator=(const BorrowingJob&) = delete;

  /// As Job's.
  [[nodiscard]] bool await(std::chrono::milliseconds timeout) noexcept { return job_->await(timeout); }
  void rethrow() { job_->rethrow(); }

 private:
  std::shared_ptr<Loan> loan_;
  std::shared_ptr<Job> job_;
};

}  // namespace sluice::runtime
