#pragma once

#include <atomic>
#include <chrono>
#include <memory>
#include <string>
#include <thread>
#include <utility>

#include "cpu/threads/spin.hpp"
#include "sluice/error.hpp"
#include "sluice/run_clock.hpp"

namespace sluice::runtime {

/// Whether another thread gets there, by the clock of a process that runs.
template <class Ready>
[[nodiscard]] bool comes(const Ready& ready, std::chrono::milliseconds timeout) {
  constexpr std::chrono::microseconds kNap{20};
  const Deadline deadline = deadline_after(timeout);
  while (!cpu::spin_until(ready)) {
    if (RunClock::now() >= deadline) return false;
    std::this_thread::sleep_for(kNap);
  }
  return true;
}

/// What threads work at when they have time, until a Rest wants them gone. Thread safety: any; one Rest at a time.
class Workplace {
 public:
  /// A thread's, which works there if `begun`. Sequentially consistent with Rest: either that finds the thread, or the
  /// thread finds that.
  class Visit {
   public:
    explicit Visit(Workplace& place) noexcept : place_(place) {
      if (place_.rests()) return;  // Else those who come and go would never all be gone at once.
      ++place_.visits_;
      begun_ = !place_.rests();
      if (!begun_) --place_.visits_;
    }
    ~Visit() {
      if (begun_) --place_.visits_;
    }
    Visit(const Visit&) = delete;
    Visit& operator=(const Visit&) = delete;
    /// Whether it has begun, and nobody wants it to end yet.
    [[nodiscard]] bool goes_on() const noexcept { return begun_ && !place_.rests(); }

   private:
    Workplace& place_;
    bool begun_ = false;
  };
  [[nodiscard]] bool rests() const noexcept { return resting_.load(); }

 private:
  friend class Rest;
  std::atomic<std::uint32_t> visits_{0};
  std::atomic<bool> resting_{false};
};

/// No thread works there while this lives.
class [[nodiscard]] Rest {
 public:
  /// Waits for those that do; the place lives as long.
  /// @throws Error{Errc::timeout} if one does not come back, and nothing was changed
  Rest(std::shared_ptr<Workplace> place, std::chrono::milliseconds timeout) {
    place->resting_.store(true);
    place_.reset(place.get());
    owner_ = std::move(place);
    if (comes([&] { return place_->visits_.load() == 0; }, timeout)) return;
    throw Error(Errc::timeout, "a thread in which a policy learns from an earlier token has not come back within " +
                                   std::to_string(timeout.count()) +
                                   " ms; repeat the call when it may have, or destroy the engine");
  }

 private:
  struct Resume {
    void operator()(Workplace* place) const noexcept { place->resting_.store(false); }
  };
  std::shared_ptr<Workplace> owner_;
  std::unique_ptr<Workplace, Resume> place_;  ///< goes first
};

}  // namespace sluice::runtime
