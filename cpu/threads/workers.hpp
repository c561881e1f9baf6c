#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>

#include "cpu/machine/topology.hpp"
#include "cpu/threads/kept.hpp"

namespace sluice::cpu {

struct WorkersOptions {
  std::uint32_t threads = 0;  ///< the caller's included, at most 4096; 0 = topology.cores()
  bool pin = true;              ///< bind each worker (not the caller) to a core
  std::uint32_t numa_node = 0;  ///< cores of this node are used first
  /// How long an idle worker spins before it sleeps. Waking a sleeper costs tens of microseconds, spinning burns
  /// its core. Negative: 1 ms with more than four cores, 20 us with four or fewer, 0 with more threads than cores.
  std::chrono::microseconds spin{-1};
  /// How long a caller of parallel_for whose own share is done waits for the others. At least 1 ms.
  std::chrono::milliseconds timeout{30'000};
  /// Called before each body of a parallel_for that is shared, on the thread that runs it: 0 the caller, 1 and up the
  /// workers. For tests that stall threads; may be empty.
  std::function<void(std::uint32_t thread)> before_body{};
};

/// Threads for host work, bound through hwloc. The caller of parallel_for works too. Nested and concurrent calls are
/// allowed and share the same threads.
class Workers {
 public:
  Workers(const Topology& topology, const WorkersOptions& options);
  ~Workers();
  Workers(const Workers&) = delete;
  Workers& operator=(const Workers&) = delete;

  [[nodiscard]] std::uint32_t threads() const noexcept;
  /// Runs body(i) for 0 <= i < count, each exactly once, and returns when all are done. With one thread or
  /// one item, inline. The first exception of a body is rethrown after all running bodies have returned.
  /// @throws Error{Errc::timeout} naming the worker whose body did not return in time. The workers are lost then: later
  /// calls throw at once, and destroying them leaves the stuck thread behind. If its body goes on after all, it still
  /// uses what it refers to. The body itself is the workers' own; what it points to must be Lent (cpu/threads/lent.hpp), or
  /// stay as long as the process. What the caller's own share does is not watched.
  void parallel_for(std::uint32_t count, std::function<void(std::uint32_t)> body) const;
  /// A call timed out; see parallel_for.
  [[nodiscard]] bool lost() const noexcept;
  /// Destroys `memory` once no worker is in a call that timed out: at once, or on the last such worker's thread, or
  /// never. It may own these workers.
  void keep(std::unique_ptr<Kept> memory) const noexcept;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace sluice::cpu
