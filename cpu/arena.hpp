#pragma once

#include <cstdint>
#include <functional>
#include <memory>

namespace sluice::cpu {

/// A oneTBB arena, and the only translation unit that sees oneTBB. Half of oneTBB's scheduler lives in its
/// headers; a thread sanitizer that saw that half and not the other, which is in libtbb, would report every
/// hand-over between them. So this file is compiled without it, and who runs work here states the order of
/// memory in atomics of its own: see Workers.
class Arena {
 public:
  /// `on_enter` runs on each thread of oneTBB's (not on callers of `run`) that enters the arena, with its
  /// slot in [0, threads); it must not throw and must outlive the arena. `threads` counts one caller and is
  /// at least 2.
  Arena(std::uint32_t threads, const std::function<void(std::uint32_t)>& on_enter);
  ~Arena();
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  /// Calls `help` `helpers` times, in parallel as far as threads are free, and returns when all have
  /// returned. `help` must not throw. May be called from several threads at once and from inside `help`.
  void run(std::uint32_t helpers, const std::function<void()>& help);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace sluice::cpu
