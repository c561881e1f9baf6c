// Who attends what of a layer: what the heads of a group choose is found and told apart, near rows are listed for the
// device, far rows for the workers, who are asked for them. Clusters of thread blocks share long sequences.

#include <algorithm>
#include <bit>

#include "gpu/device/cuda_error.hpp"
#include "gpu/kernels/cluster_launch.hpp"
#include "gpu/kernels/compiled.hpp"
#include "gpu/kernels/forward/forward.hpp"
#include "gpu/kernels/forward/list_all.cuh"
#include "gpu/kernels/forward/near_part.cuh"
#include "gpu/kernels/forward/split.cuh"
#include "gpu/kernels/forward/split.hpp"
#include "gpu/kernels/overlap.cuh"
#include "gpu/kernels/overlap.hpp"

namespace sluice::gpu {
namespace {

using namespace forward;

/// Thread blocks for a job of so many near rows, of those that are launched: with less than a unit for each warp they
/// would only wait for one another.
__device__ std::uint32_t slices_of(std::uint32_t rows, std::uint32_t launched) {
  constexpr std::uint32_t kUnit = 16;
  const std::uint32_t units = (rows + kUnit - 1) / kUnit;
  if (units <= kAttend.whole_units) return 1;
  return min((units + kAttend.min_slice_units - 1) / kAttend.min_slice_units, launched);
}

/// A list's jobs: of near rows, and of far ones that are fetched.
__device__ void write_jobs(const ForwardMemory& m, const ForwardScratch& scratch, const Work& work,
                           const Listed& listed) {
  const std::uint32_t group = m.shape.group();
  const std::uint64_t first = std::uint64_t{work.index} * group;
#pragma unroll 1
  for (std::uint32_t b = 0; b < scratch.head_blocks; ++b) {
    const std::uint32_t at = work.index * scratch.head_blocks + b;
    const std::uint32_t begin = b * scratch.block_heads;
    const std::uint64_t out = (first + begin) * m.shape.head_dim;
    AttendJob job{.q = m.q + out,
                  .base = m.near,
                  .scores = work.near_corrections,
                  .out = m.near_out + out,
                  .lse = m.near_lse + first + begin,
                  .lists = work.near_rows,
                  .heads = min(scratch.block_heads, group - begin),
                  .group = group,
                  .first_head = begin,
                  .page_tokens = m.layout.page_tokens,
                  .tokens = listed.near,
                  .slices = slices_of(listed.near, scratch.slices),
                  .first_slice = at % scratch.jobs_at_once * scratch.slices,
                  .first_partial = at % scratch.jobs_at_once * scratch.slices,
                  .counter = at,
                  .corrected = work.near_corrections != nullptr ? 1u : 0u};
    scratch.jobs[at] = job;
    if (!m.fetches()) continue;
    job.base = m.far_plane(work.plane);
    if (job.corrected != 0) job.scores = work.far_corrections + (listed.far - fetched_of(m, work, listed.far));
    job.out = m.fetched_out + out;
    job.lse = m.fetched_lse + first + begin;
    job.lists = work.fetched;
    job.tokens = fetched_of(m, work, listed.far);  // Of those that the CPU chooses it will say.
    job.slices = scratch.fetch_slices;
    job.first_slice = job.first_partial =
        scratch.first_fetch_slice + at % scratch.fetches_at_once * scratch.fetch_slices;
    job.counter = scratch.job_count + at;
    scratch.jobs[scratch.job_count + at] = job;
  }
}

/// Cluster (y, z): row z, KV head y. Of its thread blocks kAtOnce share a multiprocessor. kProposes: see ChoiceOf.
template <int kAtOnce, bool kProposes>
__global__ void __launch_bounds__(kThreads, kAtOnce)
    split_kernel(const __grid_constant__ ForwardMemory m, const __grid_constant__ ForwardScratch scratch,
                 const __grid_constant__ Foresight foresight, std::uint32_t layer, std::uint32_t room,
                 std::uint32_t list_room) {
  extern __shared__ Candidate memory[];  // Of a choice, then of what is found; and marks.
  __shared__ SplitShared s;
  detail::wait_for_kernel_before();
  // Both are requested before either is used: a load takes most of what this kernel does before it chooses.
  const ForwardStatus status = m.state->status;
  const ForwardRow row = m.rows[blockIdx.z].in(layer, m.window);
  const Work work = work_of(m, scratch, row, layer, list_room);
  const bool first = detail::cluster_rank() == 0 && threadIdx.x == 0;
  if (status != ForwardStatus::running) {
    // `attend` runs all the same: on nothing, not on jobs that another bucket has left.
    if (first) write_jobs(m, scratch, work, {});
    return;
  }
  Listed listed;
  bool foreseen = false;
  const Marks marks(reinterpret_cast<std::uint32_t*>(memory + Choice::memory(room)), Part(work.row.tokens));
  if (work.row.list != kNone) {
    if (first) m.far_windows[work.index] = 0;
    if (work.row.whole()) {
      listed = list_all(m, work, s.list, marks.part());
    } else {
      foreseen = mark<kProposes>(m, work, foresight, s.choice, s.drawn, memory, room, marks);
      auto* const words = reinterpret_cast<std::uint32_t*>(memory);
      const std::uint32_t half = Choice::memory(room);
      const Drawn drawn(m, work, s.drawn);
      const bool draws = drawn.any();
      Found found(s.list, words, draws ? half : 2 * half, marks, draws ? words + half : nullptr,
                  draws ? &drawn : nullptr);
      if (draws && first) put_thresholds(m, work, s.drawn);
      listed = list_rows(m, work, s.list, found, marks.part());
    }
  }
  if (foreseen && threadIdx.x / kWarp == 1) learn_foreseen(m, work, foresight, s.choice.foreseen);
  if (first) write_jobs(m, scratch, work, listed);
  if (threadIdx.x == 0) tell(m, layer, work, listed);
}

constexpr auto* kernel_for(bool two, bool proposes) {
  return two ? (proposes ? split_kernel<2, true> : split_kernel<2, false>)
             : (proposes ? split_kernel<1, true> : split_kernel<1, false>);
}

/// Candidates of a head that a block lists: as many as there is shared memory for beside the marks.
constexpr std::uint32_t kMostRoom = 2048;
constexpr std::uint32_t kLeastRoom = 512;
constexpr std::uint32_t kLeastRoomOfTwo = 1024;  ///< with less, what a second block gains is lost to heads that miss
constexpr std::uint32_t kLeastRoomAttended = 1024;  ///< the results of warps that attend lie there, too
static_assert(Choice::memory(kLeastRoom) * sizeof(Candidate) >= Choice::kLeastBytes);
static_assert(Choice::memory(kLeastRoomAttended) * sizeof(Candidate) >= NearPart<__nv_bfloat16, 128>::kBytes);

constexpr std::uint64_t room_bytes(std::uint32_t room) { return Choice::memory(room) * sizeof(Candidate); }
std::uint64_t marks_bytes(std::uint32_t tokens, std::uint32_t blocks) {
  return div_up(div_up(tokens, kChunk), blocks) * (kChunk / 8);
}

/// Blocks of a cluster: enough to fill the device about twice, of at least as many tokens each as one reads at once;
/// more if their marks take too much memory.
std::uint32_t blocks_of(const ForwardMemory& memory, const ForwardScratch& scratch) {
  const ForwardSplitLimits& limits = scratch.split;
  const std::uint32_t lists = memory.bucket.decode_rows * memory.shape.kv_heads;
  std::uint32_t blocks = split_blocks_wanted(lists, memory.bucket.max_tokens, scratch.multiprocessors, limits.blocks);
  while (blocks < limits.blocks &&
         room_bytes(kLeastRoom) + marks_bytes(memory.bucket.max_tokens, blocks) > limits.most_shared)
    blocks *= 2;
  return blocks;
}

/// What is given to a split kernel whose blocks may have so much shared memory in all.
SplitLaunch launch_of(const ForwardMemory& memory, std::uint32_t blocks, std::uint64_t shared) {
  const std::uint64_t marks = marks_bytes(memory.bucket.max_tokens, blocks);
  const auto room = static_cast<std::uint32_t>(std::min<std::uint64_t>(kMostRoom, (shared - marks) / room_bytes(1)));
  return {.grid = dim3(blocks, memory.shape.kv_heads, memory.bucket.decode_rows),
          .bytes = static_cast<std::uint32_t>(room_bytes(room) + marks),
          .room = room};
}

/// Blocks of a cluster that attends what it finds near, one on a multiprocessor; 0: `attend` does that.
std::uint32_t attending_blocks(const ForwardMemory& memory, const ForwardScratch& scratch) {
  const ForwardSplitLimits& limits = scratch.split;
  const AttendVariant variant = attend_variant(memory.shape, memory.layout, false);
  if (limits.attend_shared == 0 || memory.bucket.whole || memory.drafts != 1 || memory.fetches() || variant.capped ||
      variant.head_tiles != 1 || memory.shape.group() > kMostHeads || !TunedHeadDims::has(variant.head_dim))
    return 0;
  // Of choices by score alone: pages may leave layers that attend everything, which more blocks do faster.
  if (!memory.bucket.top_k || memory.bucket.pages || memory.bucket.unbounded || memory.proposes()) return 0;
  const std::uint32_t lists = memory.bucket.decode_rows * memory.shape.kv_heads;
  const std::uint32_t blocks =
      split_blocks_attending(blocks_of(memory, scratch), lists, memory.bucket.max_tokens, scratch.multiprocessors);
  if (blocks == 0) return 0;
  const std::uint64_t least = room_bytes(kLeastRoomAttended) + marks_bytes(memory.bucket.max_tokens, blocks);
  return least <= limits.attend_shared ? blocks : 0;
}

}  // namespace

bool attends_in_split(const ForwardMemory& memory, const ForwardScratch& scratch) {
  return attending_blocks(memory, scratch) != 0;
}

std::uint32_t link_rows_of(const ForwardMemory& memory, const ForwardScratch& scratch) {
  if (!attends_in_split(memory, scratch)) return 0;
  return list_link_rows(scratch.link_rows, memory.bucket.decode_rows * memory.shape.kv_heads);
}

void launch_forward_split(const ForwardMemory& memory, const ForwardScratch& scratch, const ForwardLayer& layer) {
  if (const std::uint32_t attending = attending_blocks(memory, scratch); attending != 0) {
    launch_split_attend(attend_variant(memory.shape, memory.layout, false),
                        launch_of(memory, attending, scratch.split.attend_shared), memory, scratch, layer);
    return;
  }
  const std::uint32_t blocks = blocks_of(memory, scratch);
  const std::uint64_t marks = marks_bytes(memory.bucket.max_tokens, blocks);
  const std::uint32_t lists = memory.bucket.decode_rows * memory.shape.kv_heads;
  // One block alone leaves a multiprocessor idle while it waits, which shows where there are several for each.
  const bool two =
      lists * blocks > scratch.multiprocessors && scratch.split.shared_of_two >= room_bytes(kLeastRoomOfTwo) + marks;
  const SplitLaunch launch = launch_of(memory, blocks, two ? scratch.split.shared_of_two : scratch.split.most_shared);
  OverlappingLaunch(launch.grid, kThreads, launch.bytes, static_cast<cudaStream_t>(layer.stream), blocks)
      .run(kernel_for(two, memory.proposes()), "launch the split kernel of a forward", memory, scratch,
           foresight_of(memory, scratch, layer.layer), layer.layer, launch.room, memory.list_room());
}

namespace {

int attribute_of(cudaDeviceAttr attribute) {
  int device = 0;
  int value = 0;
  check(cudaGetDevice(&device), "ask for the current device");
  check(cudaDeviceGetAttribute(&value, attribute, device), "ask for shared memory");
  return value;
}

/// Loads a kernel whose blocks have so much shared memory in all; returns how much of it a launch may give.
template <class Kernel>
std::uint32_t give_shared(Kernel* kernel, int bytes, cudaFuncAttributes& attributes) {
  check(cudaFuncGetAttributes(&attributes, kernel), "load the split kernel of a forward");
  const int dynamic = std::max(0, bytes - static_cast<int>(attributes.sharedSizeBytes));
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, dynamic),
        "give the split kernel shared memory");
  return static_cast<std::uint32_t>(dynamic);
}

}  // namespace

ForwardSplitLimits load_forward_split_kernels() {
  const int most = attribute_of(cudaDevAttrMaxSharedMemoryPerBlockOptin);
  const int half = attribute_of(cudaDevAttrMaxSharedMemoryPerMultiprocessor) / 2 -
                   attribute_of(cudaDevAttrReservedSharedMemoryPerBlock);
  cudaFuncAttributes attributes;
  const auto give = [&](bool two, int bytes) {  // As both variants have room for.
    return std::min(give_shared(kernel_for(two, true), bytes, attributes),
                    give_shared(kernel_for(two, false), bytes, attributes));
  };
  ForwardSplitLimits limits{.blocks = kMostBlocks, .shared_of_two = give(true, std::min(most, half))};
  limits.most_shared = give(false, most);
  const auto fits = [&] {
    const ClusterLaunch launch(1, limits.blocks, kThreads, limits.most_shared);
    return launch.at_once(kernel_for(false, true)) != 0 && launch.at_once(kernel_for(false, false)) != 0;
  };
  // Compiled for a device without clusters, it knows of none.
  if (compiled_for() < Compiled::clusters) limits.blocks = 1;
  while (limits.blocks > 1 && !fits()) limits.blocks /= 2;
  limits.attend_shared = load_split_attend_kernels(static_cast<std::uint32_t>(most), limits.blocks);
  limits.max_tokens =
      static_cast<std::uint32_t>((limits.most_shared - room_bytes(kLeastRoom)) / (kChunk / 8) * kChunk * limits.blocks);
  return limits;
}

}  // namespace sluice::gpu
