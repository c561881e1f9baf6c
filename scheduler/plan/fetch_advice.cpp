#include "scheduler/plan/fetch_advice.hpp"

#include <algorithm>

namespace sluice::scheduler {

float advised_fetch_share(double link_gbps, double cpu_gbps) noexcept {
  // Single rows, on an H200 with PCIe 5 and 15 threads, 64 sequences of 8K tokens without any pattern: they crossed the
  // link with 39 of 46 GB/s, and the threads attended them with 57 of 160.
  constexpr double kOfLink = 0.85;
  constexpr double kOfMemory = 0.36;
  const double link = kOfLink * link_gbps;
  const double cpu = kOfMemory * cpu_gbps;
  if (!(link > 0.0) || !(cpu > 0.0)) return 0.f;
  return static_cast<float>(link / (link + cpu));
}

double gbps_of_threads(std::uint32_t threads) noexcept {
  constexpr double kOfThread = 10.6;  // Of that machine.
  constexpr double kMost = 280.0;     // More threads share the same memory.
  return std::min(kOfThread * threads, kMost);
}

}  // namespace sluice::scheduler
