#include "gpu/kernels/overlap.hpp"

#include <array>
#include <atomic>

#include "gpu/kernels/compiled.hpp"

namespace sluice::gpu {
namespace {

constexpr int kFirstMajor = 9;

bool ask(int ordinal) {
  int major = 0;
  check(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, ordinal), "ask for a compute capability");
  // Compiled for less, kernels do not wait for the one before them.
  return major >= kFirstMajor && compiled_for() >= Compiled::clusters;
}

}  // namespace

bool kernels_overlap() {
#ifdef SLUICE_ORDERED_LAUNCHES
  return false;
#else
  enum Answer : std::uint8_t { unknown, no, yes };
  static std::array<std::atomic<std::uint8_t>, 64> answers{};
  int ordinal = 0;
  check(cudaGetDevice(&ordinal), "ask for the current device");
  if (ordinal < 0 || static_cast<std::size_t>(ordinal) >= answers.size()) return false;
  std::atomic<std::uint8_t>& answer = answers[static_cast<std::size_t>(ordinal)];
  if (answer.load(std::memory_order_relaxed) == unknown) answer.store(ask(ordinal) ? yes : no);
  return answer.load(std::memory_order_relaxed) == yes;
#endif
}

}  // namespace sluice::gpu
