#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

#include "cpu/threads/kept.hpp"

namespace sluice::cpu {

/// Threads that wait for work by spinning, then by sleeping. A layer of a decode step gives its workers some
/// 50 us of work every 100 us or so: a sleeping thread would take that long to wake.
///
/// A body that does not return costs the team, not the process. Once the caller has waited `timeout` for it, `run`
/// throws and the team is lost for good: every later `run` throws at once, and the destructor leaves the stuck thread
/// behind with what it needs of the team: the body, which the team owns, and what it was given to `keep`.
/// Thread safety: `run` may be called from several threads at once, and from inside a body.
class Team {
 public:
  struct Options {
    std::uint32_t helpers = 1;                           ///< threads beside the callers
    std::chrono::microseconds spin{0};                   ///< how long a helper looks for work before it sleeps
    std::chrono::milliseconds timeout{30'000};           ///< how long a caller that is through waits for helpers
    std::vector<std::uint32_t> cores;                    ///< [helpers] where they are bound, for messages; may be empty
    std::function<void(std::uint32_t helper)> on_start;  ///< on each helper, first; must not throw; may be empty
    /// Before each body, on the thread that runs it: 0 the caller, 1 + i helper i. For tests that stall threads; may be
    /// empty.
    std::function<void(std::uint32_t thread)> before_body;
  };
  explicit Team(Options options);
  /// Nothing may run any more, unless the team is lost.
  ~Team();
  Team(const Team&) = delete;
  Team& operator=(const Team&) = delete;

  /// Calls body(i) for 0 <= i < count, each once, on the caller and on whoever is free, and returns when all
  /// have returned. The first exception of a body is rethrown; indices not begun by then are left out.
  /// @throws Error{Errc::timeout} naming the helper that did not come back in time, or if the team is lost already.
  /// A body that blocks the caller itself blocks this call: the caller's own share is not watched.
  /// What the body refers to must stay until `run` returns or, once it has thrown that error, be given to `keep`.
  void run(std::uint32_t count, std::function<void(std::uint32_t)> body);

  /// A body has not returned in time.
  [[nodiscard]] bool lost() const noexcept;

  /// Destroys `memory` once no helper is in a call that has been given up: at once, or by the last helper that leaves
  /// one, or never. It may own the team.
  void keep(std::unique_ptr<Kept> memory) noexcept;

 private:
  struct State;

  std::shared_ptr<State> state_;       ///< also of every thread, so that one left behind finds it
  std::vector<std::jthread> threads_;  ///< last: they stop before anything above goes
};

}  // namespace sluice::cpu
