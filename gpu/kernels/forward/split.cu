// Who attends what of a layer: what the heads of a group choose is found and told apart, near rows are listed for the
// device, far rows for the workers, who are asked for them when `attend` begins. Clusters of thread blocks share long sequences.

#include <algorithm>
#include <bit>
#include <cuda/atomic>

#include "gpu/device/cuda_error.hpp"
#include "gpu/kernels/cluster_launch.hpp"
#include "gpu/kernels/compiled.hpp"
#include "gpu/kernels/forward/alone.cuh"
#include "gpu/kernels/forward/forward.hpp"
#include "gpu/kernels/forward/list_all.cuh"
#include "gpu/kernels/overlap.cuh"
#include "gpu/kernels/overlap.hpp"

namespace sluice::gpu {
namespace {

using namespace forward;

struct Shared {
  ChoiceShared choice;
  AloneShared alone;
  ListShared list;
};

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
                  .counter = at};
    scratch.jobs[at] = job;
    if (!m.fetches()) continue;
    job.base = m.far_plane(work.plane);
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

/// What a row and KV head adds to the layer's question, and to what was attended so far. `listed` is without those that
/// are `fetched`.
__device__ void count(ForwardState& state, const Listed& listed, std::uint32_t fetched, std::uint32_t choices) {
  using Sum = cuda::atomic_ref<std::uint64_t, cuda::thread_scope_device>;
  if (listed.near != 0) Sum(state.near_tokens).fetch_add(listed.near, cuda::memory_order_relaxed);
  if (listed.far != 0) Sum(state.far_tokens).fetch_add(listed.far, cuda::memory_order_relaxed);
  if (fetched != 0) Sum(state.fetched_tokens).fetch_add(fetched, cuda::memory_order_relaxed);
  using Count = cuda::atomic_ref<std::uint32_t, cuda::thread_scope_device>;
  if (listed.far != 0) Count(state.layer_far_tokens).fetch_add(listed.far, cuda::memory_order_relaxed);
  if (choices != 0) Count(state.layer_choices).fetch_add(choices, cuda::memory_order_relaxed);
}

/// Whether one block has listed a row that one can choose for: `listed` then is what it has, in the first block of the
/// cluster, and nothing in the others. All threads.
__device__ bool choose_alone(const ForwardMemory& m, const Work& work, const Foresight& foresight, Shared& s,
                             Candidate* memory, Listed& listed) {
  const ForwardRow& row = work.row;
  if (row.picks == 0 || row.in_pages()) return false;
  const auto bytes = detail::dynamic_shared_bytes();
  Alone alone(s.alone, reinterpret_cast<std::byte*>(memory), bytes, learner_of(m, work, foresight, foresight.room),
              choices_of(m, work), row.tokens);
  if (!alone.can()) return false;
  if (detail::cluster_rank() != 0) return true;
  const Marks marks(alone.marks(), Part::whole(row.tokens));
  marks.fill([&](std::uint32_t first) { return window_bits(row, first); });
  alone.run([&](std::uint32_t token) { marks.set(token); });
  Found found(s.list, reinterpret_cast<std::uint32_t*>(memory), alone.room_before_marks(), marks);
  listed = list_rows(m, work, s.list, found, marks.part());
  alone.learn();
  return true;
}

/// Cluster (y, z): row z, KV head y. Of its thread blocks kAtOnce share a multiprocessor.
template <int kAtOnce>
__global__ void __launch_bounds__(kThreads, kAtOnce)
    split_kernel(const __grid_constant__ ForwardMemory m, const __grid_constant__ ForwardScratch scratch,
                 const __grid_constant__ Foresight foresight, std::uint32_t layer, std::uint32_t room,
                 std::uint32_t list_room) {
  extern __shared__ Candidate memory[];  // Of a choice, then of what is found; and marks.
  __shared__ Shared s;
  detail::wait_for_kernel_before();
  // Both are requested before either is used: a load takes most of what this kernel does before it chooses.
  const ForwardStatus status = m.state->status;
  const ForwardRow row = m.rows[blockIdx.z].in(layer, m.window);
  const std::uint32_t head = blockIdx.y;
  const std::uint32_t index = blockIdx.z * m.shape.kv_heads + head;
  const Work work{
      .row = row,
      .near_rows = m.near_lists + std::uint64_t{index} * list_room,
      .far_rows = scratch.far_rows + std::uint64_t{index} * list_room,
      .fetched = m.fetches() && row.asks == 0 ? scratch.fetched + std::uint64_t{index} * list_room : nullptr,
      .index = index,
      .plane = m.plane(layer, head)};
  const bool first = detail::cluster_rank() == 0 && threadIdx.x == 0;
  if (status != ForwardStatus::running) {
    // `attend` runs all the same: on nothing, not on jobs that another bucket has left.
    if (first) write_jobs(m, scratch, work, {});
    return;
  }
  Listed listed;
  bool foreseen = false;
  if (work.row.list != kNone) {
    if (first) m.far_windows[index] = 0;
    const Marks marks(reinterpret_cast<std::uint32_t*>(memory + Choice::memory(room)), Part(work.row.tokens));
    if (work.row.whole()) {
      listed = list_all(m, work, s.list, marks.part());
    } else if (!choose_alone(m, work, foresight, s, memory, listed)) {
      foreseen = mark(m, work, foresight, s.choice, memory, room, marks);
      Found found(s.list, reinterpret_cast<std::uint32_t*>(memory), 2 * Choice::memory(room), marks);
      listed = list_rows(m, work, s.list, found, marks.part());
    }
  }
  if (foreseen && threadIdx.x / kWarp == 1) learn_foreseen(m, work, foresight, s.choice.foreseen);
  if (!first) return;
  const std::uint32_t fetched = fetched_of(m, work, listed.far);
  m.near_counts[index] = listed.near;
  m.far_listed[index] = listed.far;
  m.far_counts[index] = listed.far - fetched;
  if (m.fetches()) m.fetch_heads[index] = fetched != 0 ? kAll : 0;
  write_jobs(m, scratch, work, listed);
  listed.far -= fetched;
  count(*m.state, listed, fetched, work.row.list != kNone ? work.row.asks : 0);
}

/// Candidates of a head that a block lists: as many as there is shared memory for beside the marks.
constexpr std::uint32_t kMostRoom = 2048;
constexpr std::uint32_t kLeastRoom = 512;
constexpr std::uint32_t kLeastRoomOfTwo = 1024;  ///< with less, what a second block gains is lost to heads that miss
static_assert(Choice::memory(kLeastRoom) * sizeof(Candidate) >= Choice::kLeastBytes);

constexpr std::uint64_t room_bytes(std::uint32_t room) { return Choice::memory(room) * sizeof(Candidate); }
std::uint64_t marks_bytes(std::uint32_t tokens, std::uint32_t blocks) {
  return div_up(div_up(tokens, kChunk), blocks) * (kChunk / 8);
}

/// Blocks of a cluster: enough to fill the device about twice, of at least as many tokens each as one reads at once;
/// more if their marks take too much memory.
std::uint32_t blocks_of(const ForwardMemory& memory, const ForwardScratch& scratch) {
  const ForwardSplitLimits& limits = scratch.split;
  const std::uint32_t lists = memory.bucket.decode_rows * memory.shape.kv_heads;
  const std::uint32_t wanted = std::min(2 * scratch.multiprocessors / lists, memory.bucket.max_tokens / 2048);
  std::uint32_t blocks = std::bit_floor(std::clamp(wanted, 1u, limits.blocks));
  while (blocks < limits.blocks &&
         room_bytes(kLeastRoom) + marks_bytes(memory.bucket.max_tokens, blocks) > limits.most_shared)
    blocks *= 2;
  return blocks;
}

}  // namespace

void launch_forward_split(const ForwardMemory& memory, const ForwardScratch& scratch, const ForwardLayer& layer) {
  const std::uint32_t blocks = blocks_of(memory, scratch);
  const std::uint64_t marks = marks_bytes(memory.bucket.max_tokens, blocks);
  const std::uint32_t lists = memory.bucket.decode_rows * memory.shape.kv_heads;
  // One block alone leaves a multiprocessor idle while it waits, which shows where there are several for each.
  const bool two =
      lists * blocks > scratch.multiprocessors && scratch.split.shared_of_two >= room_bytes(kLeastRoomOfTwo) + marks;
  const std::uint64_t shared = two ? scratch.split.shared_of_two : scratch.split.most_shared;
  const auto room = static_cast<std::uint32_t>(std::min<std::uint64_t>(kMostRoom, (shared - marks) / room_bytes(1)));
  const auto bytes = static_cast<std::uint32_t>(room_bytes(room) + marks);
  const auto stream = static_cast<cudaStream_t>(layer.stream);
  const Foresight foresight = foresight_of(memory, scratch, layer.layer);
  OverlappingLaunch(dim3(blocks, memory.shape.kv_heads, memory.bucket.decode_rows), kThreads, bytes, stream, blocks)
      .run(two ? split_kernel<2> : split_kernel<1>, "launch the split kernel of a forward", memory, scratch, foresight,
           layer.layer, room, memory.list_room());
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
  ForwardSplitLimits limits{.blocks = kMostBlocks,
                            .shared_of_two = give_shared(split_kernel<2>, std::min(most, half), attributes)};
  limits.most_shared = give_shared(split_kernel<1>, most, attributes);
  const auto fits = [&] {
    return ClusterLaunch(1, limits.blocks, kThreads, limits.most_shared).at_once(split_kernel<1>) != 0;
  };
  // Compiled for a device without clusters, it knows of none.
  if (compiled_for() < Compiled::clusters) limits.blocks = 1;
  while (limits.blocks > 1 && !fits()) limits.blocks /= 2;
  limits.max_tokens =
      static_cast<std::uint32_t>((limits.most_shared - room_bytes(kLeastRoom)) / (kChunk / 8) * kChunk * limits.blocks);
  return limits;
}

}  // namespace sluice::gpu
