#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

namespace sluice::cpu {

/// Threads that wait for work by spinning, then by sleeping. A layer of a decode step gives its workers some
/// 50 us of work every 100 us or so: a sleeping thread would take that long to wake.
///
/// A body that does not return costs the team, not the process. Once the caller has waited `timeout` for it, `run`
/// throws and the team is lost for good: every later `run` throws at once, and the destructor leaves the stuck thread
/// behind with what it needs of the team. Should its body go on after all, it still refers to what it captured, most
/// of which has gone with its caller by then; nothing here can help that.
/// Thread safety: `run` may be called from several threads at once, and from inside a body.
class Team {
 public:
  struct Options {
    std::uint32_t helpers = 1;                           ///< threads beside the callers
    std::chrono::microseconds spin{0};                   ///< how long a helper looks for work before it sleeps
    std::chrono::milliseconds timeout{30'000};           ///< how long a caller that is through waits for helpers
    std::vector<std::uint32_t> cores;                    ///< [helpers] where they are bound, for messages; may be empty
    std::function<void(std::uint32_t helper)> on_start;  ///< on each helper, first; must not throw; may be empty
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
  void run(std::uint32_t count, const std::function<void(std::uint32_t)>& body);

  /// A body has not returned in time.
  [[nodiscard]] bool lost() const noexcept;

 private:
  struct State;

  std::shared_ptr<State> state_;       ///< also of every thread, so that one left behind finds it
  std::vector<std::jthread> threads_;  ///< last: they stop before anything above goes
};

}  // namespace sluice::cpu
