#include <algorithm>

#include "gpu/device/cuda_error.hpp"
#include "gpu/kernels/clock.cuh"
#include "gpu/kernels/load.hpp"
#include "gpu/kernels/transfer/signal.hpp"

namespace sluice::gpu {
namespace {

constexpr std::uint32_t kLongestDelayUs = 1'000'000;
constexpr std::uint32_t kNapNs = 500;

__global__ void delay_kernel(std::uint32_t microseconds) {
  const std::uint64_t begin = detail::now_ns();
  while (detail::now_ns() - begin < std::uint64_t{microseconds} * 1000) __nanosleep(kNapNs);
}

__global__ void signal_kernel(std::uint64_t* word, std::uint64_t value) {
  __threadfence_system();
  asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(word), "l"(value) : "memory");
}

}  // namespace

void launch_delay(std::uint32_t microseconds, cudaStream_t stream) {
  delay_kernel<<<1, 1, 0, stream>>>(std::min(microseconds, kLongestDelayUs));
  check(cudaGetLastError(), "launch the delay kernel");
}

void launch_signal(std::uint64_t* word, std::uint64_t value, cudaStream_t stream) {
  signal_kernel<<<1, 1, 0, stream>>>(word, value);
  check(cudaGetLastError(), "launch the signal kernel");
}

void load_signal_kernels() {
  load_kernel(delay_kernel, "load the delay kernel");
  load_kernel(signal_kernel, "load the signal kernel");
}

}  // namespace sluice::gpu
