#include "runtime/far/presence.hpp"

#include <sys/resource.h>

#include "cpu/threads/spin.hpp"

namespace sluice::runtime {

std::uint64_t times_taken() noexcept {
  rusage usage{};
  return getrusage(RUSAGE_THREAD, &usage) == 0 ? static_cast<std::uint64_t>(usage.ru_nivcsw) : 0;
}

bool keeps_core(Presence& presence, const std::function<std::uint64_t()>& taken, const std::stop_token& stop) {
  Clock::time_point now = Clock::now();
  presence.begin_probation(taken(), now);
  for (const auto end = now + Presence::kProbation; now < end && !stop.stop_requested(); now = Clock::now()) {
    presence.look(now, true);
    if (presence.was_missed()) return false;
    cpu::relax();
  }
  presence.taken(taken(), now);
  return !presence.was_missed();
}

}  // namespace sluice::runtime
