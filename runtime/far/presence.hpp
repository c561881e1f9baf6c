#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <functional>
#include <stop_token>

#include "sluice/units.hpp"

namespace sluice::runtime {

/// Whether a thread can be relied on. One that shares its core with another program's is off it for milliseconds at a
/// time, and with it what it has claimed: a layer waits for that as long as for dozens of layers. Such a thread is better
/// not asked, for a while that doubles as long as it goes on so. Before it comes back it has to watch for a time, with
/// nothing claimed, and not to miss a moment of it.
/// Thread safety: one thread's.
class Presence {
 public:
  using Time = Clock::time_point;

  /// Between two looks at the clock with nothing to do between them: it was off its core.
  static constexpr std::chrono::microseconds kGap{500};
  static constexpr std::uint32_t kMostAbsences = 1;  ///< in a window; more of them are no accident
  static constexpr std::chrono::milliseconds kWindow{100};
  static constexpr std::chrono::milliseconds kFirstPause{100};
  static constexpr std::chrono::milliseconds kMostPause{12'800};
  static constexpr std::chrono::seconds kForgiven{1};  ///< after so long the next pause is a first one
  /// Of a thread that watches before it comes back: some of a scheduler's slices.
  static constexpr std::chrono::milliseconds kProbation{15};

  /// @param taken  how often others have taken the thread's core so far
  explicit Presence(std::uint64_t taken) noexcept : taken_(taken) {}

  /// The thread looks at the clock, and has done nothing else since the last look if it `watches`.
  void look(Time now, bool watches) noexcept {
    if (watches && now - looked_ > kGap) missed(1, now);
    looked_ = now;
  }
  /// Others have taken its core so often since it began.
  void taken(std::uint64_t times, Time now) noexcept {
    const std::uint64_t more = times - taken_;
    taken_ = times;
    if (more != 0) missed(static_cast<std::uint32_t>(std::min<std::uint64_t>(more, kMostAbsences + 1)), now);
  }
  [[nodiscard]] bool unreliable() const noexcept { return absences_ > kMostAbsences; }

  void stand_aside(Time now) noexcept {
    pause_ = now - until_ > kForgiven ? kFirstPause : std::min(2 * pause_, kMostPause);
    until_ = now + pause_;
    absences_ = 0;
  }
  [[nodiscard]] Time until() const noexcept { return until_; }
  /// Nothing counts that was before.
  void begin_probation(std::uint64_t taken, Time now) noexcept {
    taken_ = taken;
    looked_ = window_ = now;
    absences_ = 0;
  }
  [[nodiscard]] bool was_missed() const noexcept { return absences_ != 0; }

 private:
  void missed(std::uint32_t absences, Time now) noexcept {
    if (now - window_ > kWindow) {
      window_ = now;
      absences_ = 0;
    }
    absences_ += absences;
  }

  Time looked_{};
  Time window_{};
  Time until_{};
  std::chrono::milliseconds pause_{kFirstPause};
  std::uint64_t taken_;
  std::uint32_t absences_ = 0;
};

/// How often the system has given the calling thread's core to others while it would have gone on.
[[nodiscard]] std::uint64_t times_taken() noexcept;

/// The calling thread does nothing but look at the clock until its probation is over, or `stop`. Whether it was not missed.
/// @param taken  as times_taken()
[[nodiscard]] bool keeps_core(Presence& presence, const std::function<std::uint64_t()>& taken,
                              const std::stop_token& stop);

}  // namespace sluice::runtime
