// What histories propose, which threads of the host have written to pinned memory ahead of time: it is waited for, and
// nothing else keeps a score.

#include "gpu/kernels/forward/forward.hpp"
#include "gpu/kernels/forward/wait.cuh"
#include "gpu/kernels/load.hpp"
#include "gpu/kernels/overlap.cuh"
#include "gpu/kernels/overlap.hpp"

namespace sluice::gpu {
namespace {

constexpr std::uint32_t kThreads = 256;
constexpr std::uint32_t kWarp = 32;
constexpr std::uint32_t kWord = 32;             ///< tokens
constexpr std::uint32_t kSpan = kWarp * kWord;  ///< tokens that a warp looks at together
constexpr std::uint32_t kAtOnce = 4;            ///< query heads whose words a warp has on their way together

/// Queries of a row, for its history to learn from.
__device__ void send_queries(const ForwardMemory& m, std::uint32_t r, std::uint32_t slot, std::uint32_t layer) {
  const std::uint32_t fours = m.shape.q_heads * m.shape.head_dim / 4;
  const auto* const from = reinterpret_cast<const float4*>(m.q) + std::uint64_t{r} * fours;
  auto* const to = reinterpret_cast<float4*>(m.proposed_q_of(slot, layer, 0));
  for (std::uint32_t i = threadIdx.x; i < fours; i += kThreads) to[i] = from[i];
}

/// One thread block: the only one that looks over the link.
__global__ void __launch_bounds__(kThreads)
    await_proposals_kernel(const __grid_constant__ ForwardMemory m, std::uint32_t layer) {
  detail::wait_for_kernel_before();
  if (m.state->status != ForwardStatus::running) return;
  const std::uint64_t since = forward::now_ns();
  const std::uint32_t lists = m.bucket.decode_rows * m.shape.kv_heads;
  for (std::uint32_t r = threadIdx.x; r < m.bucket.decode_rows; r += kThreads)
    if (m.rows[r].list != kNone && m.rows[r].proposed != 0) m.rows[r].asks = 0;
  __syncthreads();
  bool late = false;
  bool there = true;
  for (std::uint32_t i = threadIdx.x; i < lists && there; i += kThreads) {
    ForwardRow& all = m.rows[i / m.shape.kv_heads];
    if (all.list == kNone || all.in(layer, m.window).proposed == 0) continue;
    ForwardProposal& proposal = m.proposal_of(all.proposed - 1, layer, i % m.shape.kv_heads);
    const forward::Came came =
        forward::await_word(m, proposal.forward, m.state->forward, since, forward::nap_of(lists));
    late |= came != forward::Came::at_once;
    there = came != forward::Came::never;
    if (there && __ldcv(&proposal.asks) != 0) atomicOr(&all.asks, 1u);
  }
  if (__syncthreads_or(late) && threadIdx.x == 0) {
    m.state->waited_ns += forward::now_ns() - since;
    ++m.state->awaited;
  }
  if (__syncthreads_or(!there)) return;
  for (std::uint32_t r = 0; r < m.bucket.decode_rows; ++r) {
    const ForwardRow row = m.rows[r].in(layer, m.window);
    if (row.list != kNone && row.proposed != 0 && row.asks == 0) send_queries(m, r, row.proposed - 1, layer);
  }
}

/// Thread block (x, y, z): every gridDim.x-th part of row z for KV head y.
__global__ void __launch_bounds__(kThreads)
    keep_proposed_kernel(const __grid_constant__ ForwardMemory m, std::uint32_t layer) {
  detail::wait_for_kernel_before();
  if (m.state->status != ForwardStatus::running) return;
  const ForwardRow row = m.rows[blockIdx.z].in(layer, m.window);
  if (row.list == kNone || row.proposed == 0 || row.asks != 0) return;
  const std::uint32_t group = m.shape.group();
  const bool together = __ldcv(&m.proposal_of(row.proposed - 1, layer, blockIdx.y).shared) != 0;
  const std::uint32_t* const words = m.proposed_of(row.proposed - 1, layer, blockIdx.y);
  const std::uint64_t first = (std::uint64_t{blockIdx.z} * m.shape.kv_heads + blockIdx.y) * group;
  float* const scores = m.scores + first * m.score_room();
  const std::uint32_t lane = threadIdx.x % kWarp;
  const std::uint32_t warp = blockIdx.x * (kThreads / kWarp) + threadIdx.x / kWarp;
  const std::uint32_t warps = gridDim.x * (kThreads / kWarp);
#pragma unroll 1
  for (std::uint32_t base = warp * kSpan; base < row.recent_begin; base += warps * kSpan) {
    const std::uint32_t at = base / kWord + lane;
    const bool within = at < m.proposed_words();
#pragma unroll 1
    for (std::uint32_t begin = 0; begin < group; begin += kAtOnce) {
      std::uint32_t mine[kAtOnce];
#pragma unroll
      for (std::uint32_t i = 0; i < kAtOnce; ++i) {
        const std::uint32_t head = together ? 0 : begin + i;
        mine[i] = within && begin + i < group ? __ldcv(words + std::uint64_t{head} * m.proposed_words() + at) : 0;
      }
#pragma unroll
      for (std::uint32_t i = 0; i < kAtOnce; ++i) {
        if (begin + i >= group) break;
        float* const to = scores + std::uint64_t{begin + i} * row.tokens;
#pragma unroll 4
        for (std::uint32_t w = 0; w < kWarp; ++w) {
          const std::uint32_t token = base + w * kWord + lane;
          const bool proposed = (__shfl_sync(~0u, mine[i], static_cast<int>(w)) >> lane & 1) != 0;
          if (!proposed && token >= row.sink_end && token < row.recent_begin) to[token] = __int_as_float(0x7fc0'0000);
        }
      }
    }
  }
}

}  // namespace

void launch_forward_propose(const ForwardMemory& memory, const ForwardLayer& layer) {
  const auto stream = static_cast<cudaStream_t>(layer.stream);
  OverlappingLaunch(1, kThreads, 0, stream)
      .run(await_proposals_kernel, "launch the kernel that waits for what histories propose", memory, layer.layer);
  const auto parts = static_cast<std::uint32_t>(div_up(memory.bucket.max_tokens, kThreads * kWord));
  OverlappingLaunch(dim3(parts, memory.shape.kv_heads, memory.bucket.decode_rows), kThreads, 0, stream)
      .run(keep_proposed_kernel, "launch the kernel that keeps what histories propose", memory, layer.layer);
}

namespace detail {
void load_forward_propose_kernels() {
  load_kernel(await_proposals_kernel, "load the kernels of what histories propose");
  load_kernel(keep_proposed_kernel, "load the kernels of what histories propose");
}
}  // namespace detail

}  // namespace sluice::gpu
