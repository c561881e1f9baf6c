#pragma once

#include <cstdint>
#include <thread>
#include <vector>

#include "cpu/machine/topology.hpp"

namespace sluice::runtime {

/// Threads that drive an engine and want a core for themselves: where they run, and could run before.
class CallerPins {
 public:
  /// Binds the calling thread to this PU; kNone: there is none for it. Again, as the PU may be another one now.
  /// @throws Error{Errc::unsupported} if that cannot be
  void pin(const cpu::Topology& topology, std::uint32_t pu);
  /// The calling thread may run where it could before.
  void unpin(const cpu::Topology& topology) noexcept;

 private:
  struct Pin {
    std::thread::id thread;
    std::vector<std::uint32_t> before;  ///< PUs that it could run on
    std::uint32_t pu = 0;               ///< that it runs on
  };
  std::vector<Pin> pins_;
};

}  // namespace sluice::runtime
