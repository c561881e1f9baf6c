#include "scheduler/plan/fetch_advice.hpp"

#include <algorithm>

namespace sluice::scheduler {

float fetch_share_of_device(double link_gbps, std::uint32_t threads) noexcept {
  // Measured on an H200 with PCIe 5 and 16 cores, 64 sequences of 8K tokens without any pattern: of 46 GB/s for whole
  // pages, lists of single rows come with 39, and 15 threads attend them with 57.
  constexpr double kOfLink = 0.85;
  constexpr double kOfThreadGbps = 3.8;
  constexpr double kMostGbps = 100.0;  // More threads share the same memory.
  const double link = kOfLink * link_gbps;
  if (!(link > 0.0) || threads == 0) return 0.f;
  return static_cast<float>(link / (link + std::min(kOfThreadGbps * threads, kMostGbps)));
}

}  // namespace sluice::scheduler
