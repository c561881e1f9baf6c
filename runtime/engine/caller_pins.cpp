#include "runtime/engine/caller_pins.hpp"

#include <algorithm>
#include <span>
#include <string>

#include "sluice/error.hpp"
#include "sluice/units.hpp"

namespace sluice::runtime {

void CallerPins::pin(const cpu::Topology& topology, std::uint32_t pu) {
  if (pu == kNone)
    throw Error(Errc::unsupported,
                "pin_caller: the engine has one core, on which its threads compute, and none for the caller; give it "
                "more (EngineOptions::cores, taskset, a larger share of the machine)");
  const std::thread::id self = std::this_thread::get_id();
  std::vector<std::uint32_t> now = topology.binding_of_this_thread();
  pins_.reserve(pins_.size() + 1);
  if (now.empty() || !topology.bind_this_thread(pu))
    throw Error(Errc::unsupported, "pin_caller: the system does not let this thread be bound to PU " +
                                       std::to_string(pu) +
                                       "; a sandbox may forbid sched_setaffinity. Go on without, or start the program "
                                       "under taskset");
  const auto known = std::ranges::find(pins_, self, &Pin::thread);
  if (known == pins_.end()) {
    pins_.push_back({.thread = self, .before = std::move(now), .pu = pu});
    return;
  }
  // Once more, as the engine's cores may be others now. What it could run on before, unless that was another thread.
  if (now != std::vector{known->pu}) known->before = std::move(now);
  known->pu = pu;
}

void CallerPins::unpin(const cpu::Topology& topology) noexcept {
  const auto known = std::ranges::find(pins_, std::this_thread::get_id(), &Pin::thread);
  if (known == pins_.end()) return;
  (void)topology.bind_this_thread(std::span<const std::uint32_t>(known->before));
  pins_.erase(known);
}

}  // namespace sluice::runtime
