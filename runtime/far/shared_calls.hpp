#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <thread>
#include <vector>

#include "cpu/threads/spin.hpp"
#include "runtime/far/far_question.hpp"

namespace sluice::runtime {

/// Calls of threads that choose, cut into pieces that others may do, too: who has nothing to choose for helps those
/// that have. Pieces are numbered by their place, not by who does them, so that what comes out depends on no thread.
/// Thread safety: any thread may look for a piece; each caller has one call at a time.
class SharedCalls {
  /// In lines of its own: threads that work for different calls do not wait for each other.
  struct alignas(64) Call {
    std::atomic<std::uint64_t> claims{0};  ///< number of the call, then its pieces, then the next of them
    std::atomic<std::uint32_t> done{0};    ///< of the pieces
    std::atomic_flag failed;
    FarQuestion question;
    const void* what = nullptr;
    void (*invoke)(const void* what, std::uint32_t piece) = nullptr;
    std::exception_ptr failure;  ///< of the piece that failed first
  };
  static constexpr int kBits = 20;

 public:
  static constexpr std::uint32_t kMostPieces = (1u << kBits) - 1;

  explicit SharedCalls(std::size_t callers) : calls_(callers) {}

  /// Calls piece(i) for each i < `pieces` <= kMostPieces, once, on this thread and on those that help, and returns when
  /// all are done. For what others have claimed there is no time limit, as they read and write what is the caller's:
  /// whoever waits for the caller has one.
  /// @throws what a piece has thrown
  template <class Piece>
  void run(std::size_t caller, const FarQuestion& question, std::uint32_t pieces, const Piece& piece) {
    Call& call = calls_[caller];
    call.done.store(0, std::memory_order_relaxed);
    call.failed.clear(std::memory_order_relaxed);
    call.question = question;
    call.what = &piece;
    call.invoke = [](const void* what, std::uint32_t i) { (*static_cast<const Piece*>(what))(i); };
    call.failure = nullptr;
    const std::uint64_t number = (call.claims.load(std::memory_order_relaxed) >> 2 * kBits) + 1;
    call.claims.store(number << 2 * kBits | std::uint64_t{pieces} << kBits, std::memory_order_release);
    shared_.fetch_add(1, std::memory_order_release);
    while (const Claim claim = this->claim(caller)) {
      claim.run();
      claim.finish();
    }
    await(call, pieces);
    if (call.failure) std::rethrow_exception(call.failure);
  }

  /// A piece that is the claimer's: `run`, then `finish`. Until then the call stands, and its question.
  class Claim {
   public:
    Claim() = default;
    [[nodiscard]] explicit operator bool() const noexcept { return call_ != nullptr; }
    [[nodiscard]] const FarQuestion& question() const noexcept { return call_->question; }
    void run() const noexcept {
      try {
        call_->invoke(call_->what, piece_);
      } catch (...) {
        if (!call_->failed.test_and_set(std::memory_order_relaxed)) call_->failure = std::current_exception();
      }
    }
    void finish() const noexcept { call_->done.fetch_add(1, std::memory_order_acq_rel); }

   private:
    friend class SharedCalls;
    Claim(Call& call, std::uint32_t piece) noexcept : call_(&call), piece_(piece) {}
    Call* call_ = nullptr;
    std::uint32_t piece_ = 0;
  };
  /// The next piece of a caller's call, if there is one.
  [[nodiscard]] Claim claim(std::size_t caller) noexcept {
    Call& call = calls_[caller];
    std::uint64_t claims = call.claims.load(std::memory_order_acquire);
    while (true) {
      const auto piece = static_cast<std::uint32_t>(claims) & kMostPieces;
      if (piece >= (claims >> kBits & kMostPieces)) return {};
      if (call.claims.compare_exchange_weak(claims, claims + 1, std::memory_order_acq_rel, std::memory_order_acquire))
        return {call, piece};
    }
  }

  /// Calls so far: another number whenever there may be more to claim.
  [[nodiscard]] std::uint64_t shared() const noexcept { return shared_.load(std::memory_order_acquire); }

 private:
  static void await(const Call& call, std::uint32_t pieces) {
    constexpr std::chrono::microseconds kNap{20};
    const auto done = [&] { return call.done.load(std::memory_order_acquire) == pieces; };
    while (!cpu::spin_until(done)) std::this_thread::sleep_for(kNap);
  }

  std::vector<Call> calls_;
  alignas(64) std::atomic<std::uint64_t> shared_{0};
};

/// One of its callers while a question stands.
struct SharedCaller {
  SharedCalls* calls = nullptr;  ///< null: nobody helps
  std::size_t caller = 0;
  FarQuestion question{};
};

}  // namespace sluice::runtime
