// The choice of pages by a progressive share (PSA, algorithm 1): what every page weighs to every query head, which many
// thread blocks find out; then for each KV head one that puts its pages in order and looks at all microbatches at once
// for the first behind which every head has enough.

#include <algorithm>

#include "gpu/kernels/load.hpp"
#include "gpu/kernels/overlap.cuh"
#include "gpu/kernels/overlap.hpp"
#include "gpu/kernels/select/walk_pages.cuh"

namespace sluice::gpu {
namespace {

using namespace choose_pages;

constexpr std::uint32_t kMassThreads = 256;
constexpr std::uint32_t kLanes = 8;     ///< of a page
constexpr std::uint32_t kInFlight = 4;  ///< loads of each
constexpr std::uint32_t kMassPages = kMassThreads / kLanes;

/// blockIdx.x is the task, blockIdx.y the query head; kLanes lanes have a page.
__global__ void __launch_bounds__(kMassThreads)
    page_masses_kernel(const __grid_constant__ TaskArray<ChoosePagesTask> tasks, std::uint32_t page_tokens,
                       float softcap) {
  detail::wait_for_kernel_before();
  const ChoosePagesTask task = tasks[blockIdx.x];
  const float* const scores = task.scores + std::uint64_t{blockIdx.y} * task.tokens;
  float* const masses = reinterpret_cast<float*>(task.scratch) + std::uint64_t{blockIdx.y} * task.pages;
  const std::uint32_t lane = threadIdx.x % kLanes;
  // All lanes of a warp take part in every turn, because they add up.
  for (std::uint32_t first = blockIdx.z * kMassPages; first < task.pages; first += gridDim.z * kMassPages) {
    const std::uint32_t page = min(first + threadIdx.x / kLanes, task.pages - 1);
    const Far far(task, page, page_tokens);
    detail::PowerSum sum;
    for (std::uint32_t i = 0; i < page_tokens; i += kInFlight * kLanes) {
      float x[kInFlight];
#pragma unroll
      for (std::uint32_t n = 0; n < kInFlight; ++n) {
        const std::uint32_t token = page * page_tokens + i + n * kLanes + lane;
        x[n] = token >= far.begin && token < far.end ? __ldg(scores + token) : -INFINITY;
      }
#pragma unroll
      for (std::uint32_t n = 0; n < kInFlight; ++n) x[n] = detail::exponent_of(x[n], softcap);
      sum.add(x);
    }
#pragma unroll
    for (std::uint32_t bit = 1; bit < kLanes; bit *= 2) sum.add_lane(bit);
    if (lane == 0) masses[page] = log_of(sum);
  }
}

/// blockIdx.x is the task.
__global__ void __launch_bounds__(kThreads)
    walk_pages_kernel(const __grid_constant__ TaskArray<ChoosePagesTask> tasks, std::uint32_t group,
                      std::uint32_t page_tokens, float softcap) {
  extern __shared__ __align__(16) std::byte dynamic[];
  __shared__ WalkShared s;
  detail::wait_for_kernel_before();
  if (threadIdx.x == 0) s.task = tasks[blockIdx.x];
  __syncthreads();
  if (s.task.pages == 0) return;
  Walk walk(s, group, page_tokens);
  walk.rank(*reinterpret_cast<SortStorage*>(dynamic));
  const std::uint32_t taken = walk.taken(softcap);
  if (s.task.count != nullptr && threadIdx.x == 0) *s.task.count = taken;
  walk.mark(taken);
}

}  // namespace

void launch_choose_pages(const TaskArray<ChoosePagesTask>& tasks, std::uint32_t most_pages,
                         const ChoosePagesShape& shape, cudaStream_t stream) {
  if (tasks.count == 0 || most_pages == 0) return;
  const std::uint32_t useful = (most_pages + kMassPages - 1) / kMassPages;
  const std::uint32_t wanted = 8 * shape.multiprocessors / (shape.group * tasks.count);
  OverlappingLaunch(dim3(tasks.count, shape.group, std::max(1u, std::min(useful, wanted))), kMassThreads, 0, stream)
      .run(page_masses_kernel, "launch the kernel that weighs pages", tasks, shape.page_tokens, shape.softcap);
  OverlappingLaunch(tasks.count, kThreads, sizeof(SortStorage), stream)
      .run(walk_pages_kernel, "launch the kernel that takes pages", tasks, shape.group, shape.page_tokens,
           shape.softcap);
}

void load_choose_pages_kernels() {
  load_kernel(page_masses_kernel, "load the kernel that weighs pages");
  load_kernel(walk_pages_kernel, "load the kernel that takes pages", sizeof(SortStorage));
}

}  // namespace sluice::gpu
