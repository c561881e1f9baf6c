// Near rows of what a plan brings and takes, and of what was attended far before it.

#include "gpu/device/cuda_error.hpp"
#include "gpu/kernels/forward/arrive.cuh"
#include "gpu/kernels/forward/near_load.cuh"
#include "gpu/kernels/forward/promote.cuh"
#include "gpu/kernels/load.hpp"
#include "gpu/kernels/overlap.cuh"
#include "gpu/kernels/overlap.hpp"

namespace sluice::gpu {
namespace {

using namespace near;

/// Near rows for tokens that come, of prompts or decoded ones, but for the first `skip` of these. Those that have one
/// count as used in that forward. All threads.
template <class... Patience>
__device__ void acquire_coming(const ForwardMemory& m, std::uint32_t stack, const Plane& plane, bool decoded,
                               std::uint32_t skip, std::uint32_t used, Wanted& wanted, std::uint32_t (&ballots)[kWarps],
                               AcquireShared& shared, Patience... patiences) {
  static_assert(kThreads <= kMostPromotions);
  const std::uint32_t tokens = m.state->bucket.rows();
  const auto forward = static_cast<std::uint32_t>(m.state->planned);
  std::uint32_t passed = 0;
  for (std::uint32_t base = 0; base < tokens; base += kThreads) {
    const ForwardToken token = base + threadIdx.x < tokens ? m.tokens[base + threadIdx.x] : ForwardToken{};
    const bool comes = token.list != kNone && (token.decoded != 0) == decoded;
    const Places turn = places_of(comes, ballots);
    const bool mine = comes && passed + turn.before >= skip;
    passed += turn.all;
    const std::uint32_t row = mine ? m.row_of(stack * m.list_count + token.list, token.position) : kNone;
    const std::uint32_t entry = mine ? plane.near_of[row] : 0;
    if ((entry & kNearBit) != 0) plane.rows[entry & ~kNearBit].used = used;
    if (threadIdx.x == 0) wanted.count = 0;
    __syncthreads();
    add(wanted, mine && (entry & kNearBit) == 0, row, kThreads, ballots);
    const std::uint32_t count = wanted.count;
    const auto at = [&](std::uint32_t i) { return wanted.rows[i]; };
    std::uint32_t acquired = 0;
    ((acquired = acquire(m, plane, acquired, count, forward, used, patiences, at, shared)), ...);
    if (acquired < count) return;
  }
}

/// Tokens that come and found no near row are not as they were listed, if they were: before the sequence was cut. All
/// threads.
__device__ void forget_coming(const ForwardMemory& m, std::uint32_t stack, const Plane& plane) {
  const std::uint32_t tokens = m.state->bucket.rows();
  for (std::uint32_t i = threadIdx.x; i < tokens; i += kThreads) {
    const ForwardToken token = m.tokens[i];
    if (token.list == kNone) continue;
    std::uint32_t& entry = plane.near_of[m.row_of(stack * m.list_count + token.list, token.position)];
    if ((entry & kNearBit) == 0) entry = 0;
  }
  __syncthreads();
}

/// All tokens of rows that are whole, but for the new one, see ForwardVerbs::apply. All threads.
__device__ void keep_whole(const ForwardMemory& m, const Plane& plane, Wanted& wanted, std::uint32_t (&ballots)[kWarps],
                           AcquireShared& shared) {
  const auto forward = static_cast<std::uint32_t>(m.state->planned);
  std::uint32_t left = m.promotions;
  for (std::uint32_t r = 0; r < m.state->bucket.decode_rows; ++r) {
    const ForwardRow row = m.rows[r];
    if (row.list == kNone || !m.keeps_near(row)) continue;
    if (threadIdx.x == 0) wanted.count = 0;
    __syncthreads();
    for (std::uint32_t base = 0; base + 1 < row.tokens; base += kThreads) {
      const std::uint32_t token = base + threadIdx.x;
      const std::uint32_t at = token + 1 < row.tokens ? m.row_of(row.list, token) : kNone;
      const std::uint32_t entry = at != kNone ? plane.near_of[at] : kNearBit;
      const bool far = (entry & kNearBit) == 0;
      if (at != kNone && !far) plane.rows[entry & ~kNearBit].used = forward;
      if (__syncthreads_or(far) != 0) add(wanted, far, at, left, ballots);
    }
    std::uint32_t acquired = 0;
    for (const std::uint32_t patience : {kNearPatience, kNearAgain})
      acquired = acquire(
          m, plane, acquired, wanted.count, forward, forward, patience, [&](std::uint32_t i) { return wanted.rows[i]; },
          shared);
    load<8>(m, plane, acquired, [&](std::uint32_t i) { return wanted.rows[i]; });
    left -= acquired;
    if (threadIdx.x == 0 && acquired != 0)
      atomicAdd(reinterpret_cast<unsigned long long*>(&m.state->promoted), acquired);
    __syncthreads();
  }
}

/// Thread block i: plane i. When a slip's lists and tokens have been taken.
__global__ void __launch_bounds__(kThreads) acquire_kernel(const __grid_constant__ ForwardMemory m) {
  __shared__ std::uint32_t ballots[kWarps];
  __shared__ std::uint32_t blocks[kThreads];
  __shared__ Wanted wanted;
  __shared__ AcquireShared shared;
  const Plane plane = plane_of(m, blockIdx.x);
  const std::uint32_t page_tokens = m.layout.page_tokens;
  for (std::uint32_t stack = 0; stack < m.stacks && m.has_layer(stack, blockIdx.x); ++stack)
    settle(m, plane, Arrivals(m, stack, plane.index));
  const std::uint32_t all = m.slip->freed_blocks;
  std::uint32_t freed = 0;
  for (std::uint32_t base = 0; base < all; base += kThreads) {
    const std::uint32_t some = min(all - base, kThreads);
    __syncthreads();
    if (threadIdx.x < some) blocks[threadIdx.x] = m.slip_freed[base + threadIdx.x];  // Many at once over the link.
    __syncthreads();
    for (std::uint32_t i = threadIdx.x; i < some * page_tokens; i += kThreads) {
      const std::uint32_t row = blocks[i / page_tokens] * page_tokens + i % page_tokens;
      const std::uint32_t entry = plane.near_of[row];
      plane.near_of[row] = 0;
      if ((entry & kNearBit) == 0) continue;
      plane.rows[entry & ~kNearBit] = {};
      atomicSub(&m.near_held[row >> m.page_shift], 1);
      ++freed;
    }
  }
  if (freed != 0) atomicSub(&m.state->near_rows, freed);
  __syncthreads();
  const auto forward = static_cast<std::uint32_t>(m.state->planned);
  for (std::uint32_t stack = 0; stack < m.stacks && m.has_layer(stack, blockIdx.x); ++stack)
    acquire_coming(m, stack, plane, true, 0, forward, wanted, ballots, shared, kNearPatience, kNearAgain, kNoPatience);
  if (m.state->kept == m.state->planned) keep_whole(m, plane, wanted, ballots, shared);
  std::uint32_t prompts = 0;
  for (std::uint32_t i = threadIdx.x; i - threadIdx.x < m.state->bucket.rows(); i += kThreads) {
    const ForwardToken token = i < m.state->bucket.rows() ? m.tokens[i] : ForwardToken{};
    prompts += static_cast<std::uint32_t>(__syncthreads_count(token.list != kNone && token.decoded == 0));
  }
  // The newest of prompts, and in their order, so that the oldest give way first later on.
  const std::uint32_t most = min(prompts, plane.count);
  for (std::uint32_t stack = 0; stack < m.stacks && m.has_layer(stack, blockIdx.x); ++stack)
    acquire_coming(m, stack, plane, false, prompts - most, forward - kNearPatience, wanted, ballots, shared,
                   kNearPatience);
  for (std::uint32_t stack = 0; stack < m.stacks && m.has_layer(stack, blockIdx.x); ++stack) {
    const Arrivals arrivals(m, stack, plane.index);
    if (arrivals.now().state != ForwardArrivals::State::listed) continue;
    forget_coming(m, stack, plane);
    place(m, plane, arrivals, forward, ballots, shared);
  }
}

/// Thread block i: KV head i.
template <bool kChosen>
__global__ void __launch_bounds__(kThreads)
    promote_kernel(const __grid_constant__ ForwardMemory m, const __grid_constant__ ForwardScratch scratch,
                   std::uint32_t layer) {
  detail::wait_for_kernel_before();
  promote<kChosen>(m, scratch, layer, blockIdx.x);
}

}  // namespace

void launch_forward_acquire(const ForwardMemory& memory, cudaStream_t stream) {
  acquire_kernel<<<memory.planes(), kThreads, 0, stream>>>(memory);
  check(cudaGetLastError(), "launch the kernel that finds near rows for tokens");
}

void launch_forward_promote(const ForwardMemory& memory, const ForwardScratch& scratch, const ForwardLayer& layer) {
  OverlappingLaunch(memory.shape.kv_heads, kThreads, 0, static_cast<cudaStream_t>(layer.stream))
      .run(memory.keeps_chosen() ? promote_kernel<true> : promote_kernel<false>,
           "launch the kernel that lists rows to come near", memory, scratch, layer.layer);
}

namespace detail {
void load_forward_near_kernels() {
  const auto load = [](auto*... kernels) { (load_kernel(kernels, "load the kernels of near rows"), ...); };
  load(acquire_kernel, promote_kernel<false>, promote_kernel<true>);
}
}  // namespace detail

}  // namespace sluice::gpu
