// Decode attention of many rows: what takes as long as reading them from the device's memory.

#include "gpu/kernels/attend/attend_kernel.cuh"
#include "gpu/kernels/attend/attend_ring.cuh"
#include "gpu/kernels/load.hpp"
#include "gpu/kernels/overlap.hpp"

namespace sluice::gpu {
namespace {

using namespace detail;

/// A thread block attends one slice, or a share of all jobs' units: of each job that it has units of a slice, one after
/// another. The last block of a job merges its slices.
template <class T, int kDim, int kTiles>
__global__ void __launch_bounds__(kThreads, (RingMemory<kDim, kTiles>::kBlocks))
    attend_ring_kernel(const __grid_constant__ AttendArgs args) {
  using Memory = RingMemory<kDim, kTiles>;
  extern __shared__ __align__(128) std::byte dynamic[];
  __shared__ AttendSlice slice;
  __shared__ bool goes_on;
  __shared__ WarpSums<kTiles> sums;
  // Results lie where the input and the rings were.
  auto& input = *reinterpret_cast<typename Memory::Input*>(dynamic);
  auto& memory = *reinterpret_cast<AttendMemory<kDim, kTiles>*>(dynamic);
  const RowRing<kDim> ring{
      static_cast<std::uint32_t>(__cvta_generic_to_shared(dynamic + sizeof(typename Memory::Input))) +
      threadIdx.x / 32 * (Memory::kAhead + 1) * RowRing<kDim>::kSlotBytes};
  for (std::uint32_t at = args.job_of[blockIdx.x];; ++at) {
    if (threadIdx.x == 0) {
      const AttendJob job = args.jobs != nullptr ? args.jobs[at] : args.inline_jobs[at];
      slice = args.share == 0 ? cut(job, blockIdx.x - job.first_slice) : cut_share(job, blockIdx.x, args.share);
      goes_on = args.share != 0 && job.next_unit() < min((blockIdx.x + 1) * args.share, args.units);
    }
    __syncthreads();
    Accumulator<kDim, kTiles> sum;
    attend_through_ring<T, kDim, kTiles>(sum, slice, input, ring, args.score_scale, args.softcap * kLog2E);
    (void)conclude<kDim, kTiles>(args, slice, memory, sums, sum);
    if (!goes_on) return;
    __syncthreads();
  }
}

/// use(kernel, bytes of dynamic shared memory)
template <class Use>
void with_kernel(const AttendVariant& variant, const Use& use) {
  with_row_types(variant, [&]<class T, int kDim, int kTiles>() {
    use(attend_ring_kernel<T, kDim, kTiles>, RingMemory<kDim, kTiles>::kBytes);
  });
}

}  // namespace

void launch_attend_ring(const AttendVariant& variant, const AttendArgs& args, std::uint32_t blocks,
                        cudaStream_t stream) {
  with_kernel(variant, [&](auto* kernel, std::uint32_t bytes) {
    OverlappingLaunch(blocks, kThreads, bytes, stream).run(kernel, "launch attend", args);
  });
}

bool load_attend_ring_kernels() {
  int ordinal = 0;
  int shared_bytes = 0;
  check(cudaGetDevice(&ordinal), "ask for the current device");
  check(cudaDeviceGetAttribute(&shared_bytes, cudaDevAttrMaxSharedMemoryPerMultiprocessor, ordinal),
        "ask for the size of shared memory");
  if (static_cast<std::uint32_t>(shared_bytes) < kRingSharedBytes) return false;
  each_plain_variant([](const AttendVariant& variant) {
    if (variant.capped) return;  // Capped or not is one kernel.
    with_kernel(variant, [](auto* kernel, std::uint32_t bytes) {
      load_kernel(kernel, "load the attend kernels of many rows", bytes);
    });
  });
  return true;
}

}  // namespace sluice::gpu
