#include <cuda/atomic>

#include <algorithm>

#include "gpu/device/cuda_error.hpp"
#include "gpu/kernels/clock.cuh"
#include "tools/link/ping.hpp"

namespace sluice::tools {
namespace {

constexpr std::uint32_t kLongest_us = 10'000'000;

/// One thread.
__global__ void ping_kernel(std::uint64_t* out, std::uint64_t* in, std::uint32_t rounds, std::uint64_t timeout_ns,
                            std::uint64_t* done) {
  const cuda::atomic_ref<std::uint64_t, cuda::thread_scope_system> ping(*out);
  const cuda::atomic_ref<std::uint64_t, cuda::thread_scope_system> pong(*in);
  const std::uint64_t start = gpu::detail::now_ns();
  std::uint64_t round = 0;
  while (round < rounds) {
    ping.store(round + 1, cuda::memory_order_release);
    while (pong.load(cuda::memory_order_acquire) <= round && gpu::detail::now_ns() - start < timeout_ns) {
    }
    if (gpu::detail::now_ns() - start >= timeout_ns) break;
    ++round;
  }
  *done = round;
}

}  // namespace

void launch_ping(std::uint64_t* out, const std::uint64_t* in, std::uint32_t rounds, std::uint32_t timeout_us,
                 std::uint64_t* done, cudaStream_t stream) {
  const std::uint64_t timeout_ns = std::uint64_t{std::min(timeout_us, kLongest_us)} * 1000;
  ping_kernel<<<1, 1, 0, stream>>>(out, const_cast<std::uint64_t*>(in), rounds, timeout_ns, done);
  gpu::check(cudaGetLastError(), "launch the ping kernel");
}

}  // namespace sluice::tools
