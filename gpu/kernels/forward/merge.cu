// The end of a layer: the far part's answer is waited for, and near and far become one.

#include "gpu/kernels/forward/center.cuh"
#include "gpu/kernels/forward/promote.cuh"
#include "gpu/kernels/forward/wait.cuh"
#include "gpu/kernels/load.hpp"
#include "gpu/kernels/overlap.cuh"
#include "gpu/kernels/overlap.hpp"
#include "gpu/kernels/prefill/prefill_output.cuh"
#include "gpu/tuning.hpp"
#include "sluice/step/partial.hpp"

namespace sluice::gpu {
namespace detail {
void load_forward_append_kernels();
void load_forward_append_score_kernels();
void load_forward_attend_chosen_kernels();
void load_forward_attend_whole_kernels();
void load_forward_await_kernel();
void load_forward_apply_kernels();
void load_forward_derive_kernels();
void load_forward_key_means_kernels();
void load_forward_audit_kernels();
void load_forward_fill_kernel();
void load_forward_near_kernels();
void load_forward_prefill_kernels();
void load_forward_propose_kernels();
void load_forward_rehearse_kernels();
void load_forward_spread_scores_kernel();
void load_forward_stamp_kernel();
void load_forward_team_kernels();
}  // namespace detail

namespace {

constexpr std::uint32_t kWarp = near::kWarp;
constexpr std::uint32_t kThreads = near::kThreads;
constexpr std::uint32_t kWaiter = kThreads / kWarp - 1;  ///< the warp that waits for the answer
constexpr std::uint32_t kCenterWarp = kWaiter - 1;       ///< and the one that moves a center meanwhile

/// What was attended near, over the link, and far weighs in a head's output.
struct Weights {
  float near = 0.f;
  float fetched = 0.f;
  float far = 0.f;
  float lse = kEmptyLse;
};
struct Mass {
  bool any = false;  ///< there are keys
  float lse = kEmptyLse;
  __device__ bool is_number() const { return !any || lse > kEmptyLse; }
  __device__ float above(float top) const { return any ? expf(lse - top) : 0.f; }
};
__device__ Weights weigh(const Mass& near, const Mass& fetched, const Mass& far) {
  // Keys were attended and weigh nothing that is a number.
  if (!near.is_number() || !fetched.is_number() || !far.is_number()) return {.lse = __int_as_float(0x7fc0'0000)};
  const float top = fmaxf(fmaxf(near.lse, fetched.lse), far.lse);
  if (top == kEmptyLse) return {};
  const float a = near.above(top);
  const float b = fetched.above(top);
  const float c = far.above(top);
  const float sum = a + b + c;
  return {.near = a / sum, .fetched = b / sum, .far = c / sum, .lse = top + logf(sum)};
}

__device__ float part(float weight, float value) { return weight > 0.f ? weight * value : 0.f; }

/// Four channels of a head. All but `fetched` was read already.
__device__ void put_out(const ForwardLayer& layer, std::byte* row, std::uint32_t channel, const Weights& weights,
                        const float4& near, const float* fetched, const float4& far) {
  const float nears[4] = {near.x, near.y, near.z, near.w};
  const float fars[4] = {far.x, far.y, far.z, far.w};
  for (std::uint32_t c = 0; c < 4; ++c) {
    float value = part(weights.near, nears[c]) + part(weights.far, fars[c]);
    if (weights.fetched > 0.f) value += weights.fetched * fetched[c];
    detail::store_number(row, layer.out.dtype, channel + c, weights.lse == weights.lse ? value : weights.lse);
  }
}

/// A query head's error bar, see EngineStats.
__device__ void count_error(ForwardState& state, const DrawThresholds& thresholds, float lse) {
  const float bar = sqrtf(static_cast<float>(thresholds.drawn)) * __expf(thresholds.largest_left - lse);
  const auto millionths = static_cast<unsigned long long>(1e6f * fminf(bar, ErrorBar::kMost));
  atomicAdd(reinterpret_cast<unsigned long long*>(&state.drawn_heads), 1ull);
  if (millionths != 0) atomicAdd(reinterpret_cast<unsigned long long*>(&state.error_bars), millionths);
  if (millionths > ErrorBar::kWide) atomicAdd(reinterpret_cast<unsigned long long*>(&state.wide_bars), 1ull);
}

/// Thread block i: row i / kv_heads, KV head i % kv_heads. `kTeams`: rows are teams. `linked`: as in ForwardScratch, null if there is none. The layer's foresight has been used: its candidates are no
/// more, and centers move.
template <bool kTeams>
__device__ void merge(const ForwardMemory& m, const ForwardScratch& scratch, const ForwardLayer& layer,
                      const std::uint32_t* linked) {
  __shared__ Weights weights[kMaxGroup];
  __shared__ ForwardStatus status;
  const std::uint32_t group = m.shape.group();
  const std::uint32_t head_dim = m.shape.head_dim;
  const std::uint32_t row = blockIdx.x / m.shape.kv_heads;
  const std::uint32_t head = blockIdx.x % m.shape.kv_heads;
  const std::uint64_t first = std::uint64_t{row} * m.shape.q_heads + head * group;
  const std::uint32_t own = kTeams ? m.own_group() : group;  // Of one packed row.
  const auto draft_of = [&](std::uint32_t h) { return kTeams ? h / own : 0; };
  const auto near_out = [&](std::uint32_t at) {
    if (at >= group * head_dim) return float4{};
    return *reinterpret_cast<const float4*>(m.near_out + first * head_dim + at);
  };
  float4 near = near_out(4 * threadIdx.x);
  const float near_lse = threadIdx.x < group ? m.near_lse[first + threadIdx.x] : kEmptyLse;
  // All that does not come from the CPU is read, by other warps than the one that waits, while its answer is awaited.
  if (threadIdx.x == kWaiter * kWarp) status = forward::await_answer(m, m.bucket.decode_rows * m.shape.kv_heads);
  const ForwardRow chooses = m.rows[row];
  const std::uint32_t list = chooses.list;
  const std::uint32_t packed = chooses.at;
  std::uint32_t near_listed = m.near_counts[blockIdx.x];
  std::uint32_t far_listed = m.far_listed[blockIdx.x];
  if (linked != nullptr && linked[blockIdx.x] != 0) {  // Few far rows were attended with near ones.
    near_listed += far_listed;
    far_listed = 0;
  }
  const Foresight foresight = foresight_of(m, scratch, layer.layer);
  if (foresight.counts != nullptr && threadIdx.x < group) foresight.counts[first + threadIdx.x] = 0;
  if (!kTeams && foresight.centers != nullptr && list != kNone && threadIdx.x / kWarp == kCenterWarp)
    forward::move_center(forward::Row(layer.k, packed, head), foresight.centers + std::uint64_t{blockIdx.x} * head_dim);
  __syncthreads();
  const bool goes_on = status == ForwardStatus::running;
  // Of a forward that did not begin the rows are not to be believed, and `append` has seen to its outputs.
  if ((!goes_on && status != ForwardStatus::abandoned) || list == kNone) return;
  // Whether there is anything in a list that the CPU has added to, the answer says. A team's rows see themselves.
  const bool asks = chooses.in(layer.layer, m.window).asks != 0;
  const bool has_near = goes_on && (kTeams || near_listed != 0);
  const bool has_far = goes_on && (asks || far_listed != m.fetched_of(far_listed));
  const std::uint32_t heads = kTeams ? chooses.drafts * own : group;
  const std::uint32_t fetches = goes_on && m.fetches() ? m.fetch_heads[blockIdx.x] : 0;
  // What the CPU has just written is read once, in wide words, and all of it at once: each way over the link is long.
  const auto far_out = [&](std::uint32_t at) {
    if (!has_far || at >= group * head_dim) return float4{};
    return __ldcv(reinterpret_cast<const float4*>(m.far_out + first * head_dim + at));
  };
  float4 far = far_out(4 * threadIdx.x);
  if (threadIdx.x < group) {
    const std::uint64_t h = first + threadIdx.x;
    const float far_lse = has_far ? __ldcv(m.far_lse + h) : kEmptyLse;
    const bool fetched = (fetches >> threadIdx.x & 1) != 0;
    const Weights mine = weigh({.any = has_near, .lse = has_near ? near_lse : kEmptyLse},
                               {.any = fetched, .lse = fetched ? m.fetched_lse[h] : kEmptyLse},
                               {.any = has_far && !(asks && far_lse == kEmptyLse), .lse = far_lse});
    weights[threadIdx.x] = goes_on ? mine : Weights{.lse = __int_as_float(0x7fc0'0000)};
    if (const ForwardRow here = chooses.in(layer.layer, m.window);
        goes_on && here.draws.any() && threadIdx.x < heads)
      count_error(*m.state, m.thresholds[h], mine.lse);
    if (layer.lse != nullptr && threadIdx.x < heads) {
      const std::uint64_t at = packed + draft_of(threadIdx.x);
      const std::uint32_t own_head = threadIdx.x - draft_of(threadIdx.x) * own;
      layer.lse[at * m.shape.kv_heads * own + head * own + own_head] = weights[threadIdx.x].lse;
    }
  }
  __syncthreads();
  for (std::uint32_t at = 4 * threadIdx.x; at < heads * head_dim; at += 4 * kThreads) {
    const std::uint32_t draft = draft_of(at / head_dim);
    std::byte* const out = layer.out.row(packed + draft, head * own + at / head_dim - draft * own);
    put_out(layer, out, at % head_dim, weights[at / head_dim], near, m.fetched_out + first * head_dim + at, far);
    near = near_out(at + 4 * kThreads);
    far = far_out(at + 4 * kThreads);
  }
}

/// Thread blocks that merge, and behind them one for each KV head that lists rows to come near, if they come with it.
template <bool kTeams>
__global__ void __launch_bounds__(kThreads)
    merge_kernel(const __grid_constant__ ForwardMemory m, const __grid_constant__ ForwardScratch scratch,
                 const __grid_constant__ ForwardLayer layer, const std::uint32_t* linked) {
  detail::wait_for_kernel_before();
  const std::uint32_t merges = m.bucket.decode_rows * m.shape.kv_heads;
  if (blockIdx.x < merges) return merge<kTeams>(m, scratch, layer, linked);
  near::promote<false>(m, scratch, layer.layer, blockIdx.x - merges);
}

}  // namespace

void launch_forward_merge(const ForwardMemory& memory, const ForwardScratch& scratch, const ForwardLayer& layer) {
  const std::uint32_t merges = memory.bucket.decode_rows * memory.shape.kv_heads;
  const std::uint32_t promotes = promotes_beside_merge(memory) ? memory.shape.kv_heads : 0;
  const Before before = memory.handover == Handover::stream ? Before::other : Before::kernel;
  OverlappingLaunch(merges + promotes, kThreads, 0, static_cast<cudaStream_t>(layer.stream), 1, before)
      .run(memory.drafts == 1 ? merge_kernel<false> : merge_kernel<true>, "launch the merge kernel of a forward",
           memory, scratch, layer, link_rows_of(memory, scratch) != 0 ? scratch.linked : nullptr);
}

void load_forward_kernels() {
  detail::load_forward_append_kernels();
  detail::load_forward_append_score_kernels();
  detail::load_forward_attend_chosen_kernels();
  detail::load_forward_attend_whole_kernels();
  detail::load_forward_await_kernel();
  detail::load_forward_apply_kernels();
  detail::load_forward_derive_kernels();
  detail::load_forward_key_means_kernels();
  detail::load_forward_audit_kernels();
  detail::load_forward_fill_kernel();
  detail::load_forward_near_kernels();
  detail::load_forward_prefill_kernels();
  detail::load_forward_propose_kernels();
  detail::load_forward_rehearse_kernels();
  detail::load_forward_spread_scores_kernel();
  detail::load_forward_stamp_kernel();
  detail::load_forward_team_kernels();
  load_kernel(merge_kernel<false>, "load the merge kernel of a forward");
  load_kernel(merge_kernel<true>, "load the merge kernel of a forward");
}

}  // namespace sluice::gpu
