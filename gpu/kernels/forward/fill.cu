// Near rows of what was attended far are filled, beside a forward.

#include "gpu/device/cuda_error.hpp"
#include "gpu/kernels/forward/arrive.cuh"
#include "gpu/kernels/forward/forward.hpp"
#include "gpu/kernels/forward/near_load.cuh"
#include "gpu/kernels/load.hpp"

namespace sluice::gpu {
namespace {

using namespace near;

/// They stay out of the forward's way: on two multiprocessors, whose other half they leave to it, with what keeps the
/// link busy for rows of 256 bytes and lets questions and answers through.
constexpr std::uint32_t kFillBlocks = 2;
constexpr std::uint32_t kFillThreads = 1024;
constexpr std::uint32_t kFillWords = 2;

/// Rows to fill of the planes of all stacks from `base` on, one for each thread: those that have some, in their order;
/// how many these are. What another block has filled counts, so that all blocks find the same. All threads.
__device__ std::uint32_t list_due(const ForwardMemory& m, std::uint32_t base, std::uint32_t (&due)[kFillThreads]) {
  __shared__ std::uint32_t ballots[kFillThreads / kWarp];
  const std::uint32_t warp = threadIdx.x / kWarp;
  const std::uint32_t lane = threadIdx.x % kWarp;
  const std::uint32_t i = base + threadIdx.x;
  const bool mine = i < m.stacks * m.planes() && under_way(m.arrivals[i]);
  const std::uint32_t ballot = __ballot_sync(kAll, mine);
  if (lane == 0) ballots[warp] = ballot;
  __syncthreads();
  const auto some = static_cast<std::uint32_t>(__popc(static_cast<int>(ballots[lane])));
  const std::uint32_t before = __reduce_add_sync(kAll, lane < warp ? some : 0);
  if (mine) due[before + __popc(static_cast<int>(ballot & ((1u << lane) - 1)))] = i;
  const std::uint32_t count = __reduce_add_sync(kAll, some);
  __syncthreads();
  return count;
}
static_assert(kFillThreads / kWarp == kWarp, "a lane looks at each warp");

__device__ void fill(const ForwardMemory& m, std::uint32_t index) {
  const Plane plane = plane_of(m, index % m.planes());
  const Arrivals arrivals(m, index / m.planes(), plane.index);
  const auto row_at = [&](std::uint32_t i) { return arrivals.row(i); };
  if (m.far_layout.scaled()) {
    load_scaled<kFillWords>(m, plane, arrivals.count(), row_at);
  } else {
    load<kFillWords>(m, plane, arrivals.count(), row_at);
  }
  __syncthreads();
  ForwardArrivals filled = arrivals.now();
  filled.state = ForwardArrivals::State::filled;
  if (threadIdx.x == 0) arrivals.set(filled);
}

/// Thread blocks take turns.
__global__ void __launch_bounds__(kFillThreads, 2) fill_kernel(const __grid_constant__ ForwardMemory m) {
  __shared__ std::uint32_t due[kFillThreads];
  for (std::uint32_t base = 0; base < m.stacks * m.planes(); base += kFillThreads) {
    const std::uint32_t count = list_due(m, base, due);
    for (std::uint32_t i = blockIdx.x; i < count; i += gridDim.x) fill(m, due[i]);
    __syncthreads();  // All have read what is due.
  }
}

}  // namespace

void launch_forward_fill(const ForwardMemory& memory, cudaStream_t stream) {
  fill_kernel<<<kFillBlocks, kFillThreads, 0, stream>>>(memory);
  check(cudaGetLastError(), "launch the kernel that fills near rows");
}

namespace detail {
void load_forward_fill_kernel() { load_kernel(fill_kernel, "load the kernel that fills near rows"); }
}  // namespace detail

}  // namespace sluice::gpu
