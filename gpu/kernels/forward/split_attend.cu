// Few sequences: thread blocks that have found what a row attends near attend it at once, while the CPU is asked for
// what is far, or that as well if it is a few rows. Launching a kernel for that, and listing rows for it, would take
// longer than the rows.

#include "gpu/device/cuda_error.hpp"
#include "gpu/kernels/cluster_launch.hpp"
#include "gpu/kernels/compiled.hpp"
#include "gpu/kernels/forward/link_part.cuh"
#include "gpu/kernels/forward/near_part.cuh"
#include "gpu/kernels/forward/split.cuh"
#include "gpu/kernels/forward/split.hpp"
#include "gpu/kernels/load.hpp"
#include "gpu/kernels/overlap.cuh"
#include "gpu/kernels/overlap.hpp"

namespace sluice::gpu {
namespace {

using namespace forward;

/// As split_kernel, without jobs for `attend`; rows that attend everything are marked as others are.
template <class T, int kDim>
__global__ void __launch_bounds__(kThreads, 1)
    split_attend_kernel(const __grid_constant__ ForwardMemory m, const __grid_constant__ ForwardScratch scratch,
                        const __grid_constant__ Foresight foresight, std::uint32_t layer, std::uint32_t room,
                        std::uint32_t list_room, std::uint32_t link_rows, float score_scale) {
  using Near = NearPart<T, kDim>;
  using Link = LinkPart<T, kDim>;
  extern __shared__ __align__(16) Candidate memory[];  // Of a choice, then of what is found, and so on; and marks.
  __shared__ SplitShared s;
  __shared__ typename Near::Shared near_shared;
  __shared__ typename Link::Shared link_shared;
  detail::wait_for_kernel_before();
  const ForwardStatus status = m.state->status;
  const ForwardRow row = m.rows[blockIdx.z].in(layer, m.window);
  const Work work = work_of(m, scratch, row, layer, list_room);
  if (status != ForwardStatus::running) return;
  const bool asks = threadIdx.x / kWarp == kAsker;
  if (work.row.list == kNone) {
    if (asks && threadIdx.x % kWarp == 0) tell(m, layer, work, {});
    return;
  }
  if (detail::cluster_rank() == 0 && threadIdx.x == 0) m.far_windows[work.index] = 0;
  const Marks marks(reinterpret_cast<std::uint32_t*>(memory + Choice::memory(room)), Part(work.row.tokens));
  const Part& part = marks.part();
  const bool foreseen = mark<false>(m, work, foresight, s.choice, s.drawn, memory, room, marks);
  const Drawn drawn(m, work, s.drawn);
  if (drawn.any() && detail::cluster_rank() == 0) put_thresholds(m, work, s.drawn);
  Near near(m, work, near_shared, reinterpret_cast<typename Near::WarpOut*>(memory));
  auto* const words = reinterpret_cast<std::uint32_t*>(memory);
  Found found(s.list, words, Choice::memory(room), marks, words + Choice::memory(room),
              drawn.any() ? &drawn : nullptr);
  if (work.row.asks != 0) link_rows = 0;  // The CPU adds to the list.
  const Listed listed = list_far(m, work, link_rows, near_shared.listed, link_shared.far, found, part);
  const Link link(m, work, link_shared);
  if (asks) {
    if (threadIdx.x % kWarp == 0) {
      if (detail::cluster_rank() == 0) scratch.linked[work.index] = link_shared.far.taken ? 1 : 0;
      tell(m, layer, work, listed, link_shared.far.taken);
    }
    __syncwarp();
    if (foreseen) learn_foreseen(m, work, foresight, s.choice.foreseen);
    __syncwarp();
  } else {
    link.fill();
    near.load_queries(score_scale);
  }
  const bool once = part.count() <= found.turn();  // It is there still.
#pragma unroll 1
  for (std::uint32_t base = 0; base < part.count(); base += found.turn()) {
    if (!once) found.find(m, work, base);
    if (!asks) {
      near.attend(found);
      near.use(found.entries(), found.count());
    }
    if (!once) __syncthreads();
  }
  if (!asks) {
    link.attend(near);
    near.conclude();
  }
  __syncthreads();  // Also where the cluster is this block alone.
  detail::cluster_sync_own();
  near.merge(part);
  detail::cluster_sync_own();  // No block ends whose result another one reads.
}

template <class Use>
void with_kernel(const AttendVariant& variant, const Use& use) {
  TunedHeadDims::with(variant.head_dim, [&](auto dim) {
    variant.dtype == DType::f16 ? use(split_attend_kernel<__half, dim()>)
                                : use(split_attend_kernel<__nv_bfloat16, dim()>);
  });
}

}  // namespace

void launch_split_attend(const AttendVariant& variant, const SplitLaunch& launch, const ForwardMemory& memory,
                         const ForwardScratch& scratch, const ForwardLayer& layer) {
  with_kernel(variant, [&](auto* kernel) {
    OverlappingLaunch(launch.grid, kThreads, launch.bytes, static_cast<cudaStream_t>(layer.stream), launch.grid.x)
        .run(kernel, "launch the split kernel of a forward that attends", memory, scratch,
             foresight_of(memory, scratch, layer.layer), layer.layer, launch.room, memory.list_room(),
             link_rows_of(memory, scratch), memory.shape.score_scale());
  });
}

std::uint32_t load_split_attend_kernels(std::uint32_t most_shared, std::uint32_t blocks) {
  if (compiled_for() < Compiled::clusters) return 0;
  std::uint32_t least = most_shared;
  for (const DType dtype : {DType::f16, DType::bf16}) {
    TunedHeadDims::each([&](std::uint32_t head_dim) {
      with_kernel({.dtype = dtype, .head_dim = head_dim}, [&](auto* kernel) {
        cudaFuncAttributes attributes{};
        check(cudaFuncGetAttributes(&attributes, kernel), "load the split kernel of a forward that attends");
        const auto shared = most_shared - static_cast<std::uint32_t>(attributes.sharedSizeBytes);
        load_kernel(kernel, "load the split kernel of a forward that attends", shared);
        const bool fits = ClusterLaunch(1, blocks, kThreads, shared).at_once(kernel) != 0;
        least = std::min(least, fits ? shared : 0);
      });
    });
  }
  return least;
}

}  // namespace sluice::gpu
