// The thread that drives an engine, as far as it wants a core for itself.
#include <algorithm>
#include <string>

#include "runtime/engine/impl.hpp"

namespace sluice {

void Engine::Impl::pin_caller() {
  const std::uint32_t pu = far.caller_place();
  if (pu == kNone)
    throw Error(Errc::unsupported,
                "pin_caller: the engine has one core, on which its threads compute, and none for the caller; give it "
                "more (EngineOptions::cores, taskset, a larger share of the machine)");
  const std::thread::id self = std::this_thread::get_id();
  std::vector<std::uint32_t> now = topology.binding_of_this_thread();
  pinned_callers.reserve(pinned_callers.size() + 1);
  if (now.empty() || !topology.bind_this_thread(pu))
    throw Error(Errc::unsupported, "pin_caller: the system does not let this thread be bound to PU " +
                                       std::to_string(pu) +
                                       "; a sandbox may forbid sched_setaffinity. Go on without, or start the program "
                                       "under taskset");
  const auto known = std::ranges::find(pinned_callers, self, &PinnedCaller::thread);
  if (known == pinned_callers.end()) {
    pinned_callers.push_back({.thread = self, .before = std::move(now), .pu = pu});
    return;
  }
  // Once more, as the engine's cores may be others now. What it could run on before, unless that was another thread.
  if (now != std::vector{known->pu}) known->before = std::move(now);
  known->pu = pu;
}

void Engine::Impl::unpin_caller() noexcept {
  const auto known = std::ranges::find(pinned_callers, std::this_thread::get_id(), &PinnedCaller::thread);
  if (known == pinned_callers.end()) return;
  (void)topology.bind_this_thread(std::span<const std::uint32_t>(known->before));
  pinned_callers.erase(known);
}

}  // namespace sluice
