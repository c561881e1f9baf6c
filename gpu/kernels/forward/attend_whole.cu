// Rows that attend everything: what a layer takes where nothing is chosen. Thread blocks find their rows themselves,
// and the last one of a KV head writes the output, so that nothing comes before or behind.

#include "gpu/kernels/attend/attend_kernel.cuh"
#include "gpu/kernels/forward/forward.hpp"
#include "gpu/kernels/load.hpp"
#include "gpu/kernels/overlap.hpp"
#include "gpu/kernels/prefill/prefill_output.cuh"
#include "sluice/step/partial.hpp"

namespace sluice::gpu {
namespace {

using namespace detail;

/// What a launch is given beside the forward.
struct WholeArgs {
  float* partials = nullptr;  ///< as in AttendArgs
  std::uint32_t* counters = nullptr;
  std::uint32_t partial_count = 0;
  float score_scale = 0.f;        ///< AttentionShape::score_scale
  std::uint32_t first_job = 0;    ///< the launch's; its blocks are (slice, job)
  std::uint32_t head_blocks = 1;  ///< as in ForwardScratch
  std::uint32_t block_heads = 8;
};

/// One row and KV head, and the query heads that this thread block is for.
struct WholeJob {
  std::uint32_t row, kv_head, first_head, list, at, plane;
};

/// The rows of a sequence's tokens in a plane.
class Rows {
 public:
  __device__ Rows(const ForwardMemory& m, const WholeJob& job, const AttendSlice& slice)
      : blocks_(m.list_of(job.list)),
        near_of_(m.near_of + m.far_row(job.plane, 0)),
        first_(slice.first_token),
        shift_(m.page_shift),
        near_(m.near_pages != 0 ? m.near_entry(job.plane, 0) : kNone) {}

  /// Of the slice's token `i`: a near row, or a far one and kFarRow.
  [[nodiscard]] __device__ std::uint32_t at(std::uint32_t i) const {
    const std::uint32_t token = first_ + i;
    const std::uint32_t in_page = token & ((1u << shift_) - 1);
    const std::uint32_t row = (blocks_[token >> shift_] << shift_) | in_page;
    const std::uint32_t entry = near_ != kNone ? near_of_[row] : 0;
    const bool near = (entry & kNearBit) != 0;
    const std::uint32_t place = near ? entry & ~kNearBit : row;
    // Pages have K rows, then V rows.
    const std::uint32_t k_row = ((place >> shift_) << (shift_ + 1)) | (place & ((1u << shift_) - 1));
    return near ? near_ + k_row : k_row | kFarRow;
  }

 private:
  const std::uint32_t* blocks_;
  const std::uint32_t* near_of_;
  std::uint32_t first_;
  std::uint32_t shift_;
  std::uint32_t near_;  ///< the plane's first near row
};

/// By one thread. A slice of no slices if the forward does not run, or there is no such row.
__device__ AttendSlice slice_of(const ForwardMemory& m, const ForwardLayer& layer, const WholeArgs& args,
                                WholeJob& job) {
  const std::uint32_t index = args.first_job + blockIdx.y;
  const std::uint32_t list_index = index / args.head_blocks;
  const ForwardStatus status = m.state->status;
  job.row = list_index / m.shape.kv_heads;
  job.kv_head = list_index % m.shape.kv_heads;
  job.first_head = index % args.head_blocks * args.block_heads;
  job.plane = m.plane(layer.layer, job.kv_head);
  const ForwardRow& row = m.rows[job.row];
  job.list = row.list;
  job.at = row.at;
  const std::uint32_t tokens = row.tokens;
  AttendSlice slice;
  if (status != ForwardStatus::running || job.list == kNone) {
    slice.slices = 0;
    return slice;
  }
  constexpr std::uint32_t kUnit = 16;
  const std::uint32_t units = (tokens + kUnit - 1) / kUnit;
  const std::uint32_t useful = (units + kAttend.min_slice_units - 1) / kAttend.min_slice_units;
  const std::uint64_t first = std::uint64_t{list_index} * m.shape.group() + job.first_head;
  slice = cut({.q = m.q + first * m.shape.head_dim,
               .base = m.near,
               .out = m.near_out + first * m.shape.head_dim,
               .lse = m.near_lse + first,
               .heads = min(args.block_heads, m.shape.group() - job.first_head),
               .group = m.shape.group(),
               .first_head = job.first_head,
               .page_tokens = m.layout.page_tokens,
               .tokens = tokens,
               .slices = units <= kAttend.whole_units ? 1 : min(useful, gridDim.x),
               .first_slice = 0,
               .first_partial = blockIdx.y * gridDim.x,
               .counter = index},
              blockIdx.x);
  slice.far_base = m.far_plane(job.plane);
  return slice;
}

/// The task's result as the caller wants it, by the block that has written it. Keys were attended.
__device__ void put_result(const ForwardMemory& m, const ForwardLayer& layer, const WholeJob& job,
                           const AttendSlice& slice) {
  const float nan = __int_as_float(0x7fc0'0000);
  const std::uint32_t head_dim = m.shape.head_dim;
  const std::uint32_t first = job.kv_head * m.shape.group() + job.first_head;
  for (std::uint32_t i = 4 * threadIdx.x; i < slice.heads * head_dim; i += 4 * kThreads) {
    const std::uint32_t head = i / head_dim;
    const float lse = slice.lse[head];
    const bool number = lse > kEmptyLse;
    const float4 four = *reinterpret_cast<const float4*>(slice.out + i);
    const float values[4] = {four.x, four.y, four.z, four.w};
    std::byte* const out = layer.out.row(job.at, first + head);
    for (std::uint32_t c = 0; c < 4; ++c)
      store_number(out, layer.out.dtype, i % head_dim + c, number ? values[c] : nan);
    if (i % head_dim == 0 && layer.lse != nullptr)
      layer.lse[std::uint64_t{job.at} * m.shape.q_heads + first + head] = number ? lse : nan;
  }
}

/// Tokens of the job, of which `far` ones were read over the link, by the blocks of a KV head's first query heads.
__device__ void count(ForwardState& state, const WholeJob& job, std::uint32_t tokens, std::uint32_t far) {
  if (job.first_head != 0) return;
  const auto add = [](std::uint64_t& to, std::uint64_t number) {
    if (number != 0) atomicAdd(reinterpret_cast<unsigned long long*>(&to), static_cast<unsigned long long>(number));
  };
  add(state.near_tokens, tokens - far);
  add(state.fetched_tokens, far);
}

template <class T, int kDim, int kTiles, bool kCapped>
__global__ void __launch_bounds__(kThreads, kTiles == 1 && kDim <= 128 ? kAttend.blocks_per_sm : 1)
    attend_whole_kernel(const __grid_constant__ ForwardMemory m, const __grid_constant__ ForwardLayer layer,
                        const __grid_constant__ WholeArgs args) {
  __shared__ AttendSlice slice;
  __shared__ WholeJob job;
  __shared__ std::uint32_t far_tokens;
  __shared__ AttendMemory<kDim, kTiles> memory;
  __shared__ WarpSums<kTiles> sums;
  wait_for_kernel_before();
  if (threadIdx.x == 0) {
    slice = slice_of(m, layer, args, job);
    far_tokens = 0;
  }
  __syncthreads();
  if (slice.index >= slice.slices) return;

  QueryPiece<kDim, kTiles> query;
  query.load(slice);
  const std::uint32_t warp = threadIdx.x / 32;
  const std::uint32_t own = 16 * warp + threadIdx.x % 16;
  const Rows rows(m, job, slice);
  UnitRows unit;
  if (own < slice.tokens) unit = {rows.at(own), kAllLanes};
  std::uint32_t keys[2][RowShape<kDim>::kKeyPieces][4];
  std::uint32_t values[4][RowShape<kDim>::kValuePieces][4];
  UnitScales<false> scales;
  load_key_rows<kDim, false, true>(keys, scales, slice, unit.row);
  load_value_rows<kDim, false, true>(values, slice, unit.row);
  // The other rows are found while those are on their way.
  std::uint32_t far = 0;
#pragma unroll 1
  for (std::uint32_t i = threadIdx.x; i < slice.tokens; i += kThreads) {
    const std::uint32_t row = rows.at(i);
    memory.input.words[i] = row;
    far += row >> 31;
  }
  if (far != 0) atomicAdd(&far_tokens, far);
  query.template store<T>(memory.input.q, args.score_scale * kLog2E);
  __syncthreads();

  Accumulator<kDim, kTiles> sum;
  clear(sum);
  // Its lists begin with the slice's own tokens.
  attend_units<T, kDim, kTiles, false, kCapped, false, true>(
      sum, slice, memory.input.q, StagedRows{slice, memory.input.words}, warp, slice.units(), unit, keys, values, scales,
      kCapped ? m.shape.softcap * kLog2E : 0.f);
  if (threadIdx.x == 0) count(*m.state, job, slice.tokens, far_tokens);
  if (!conclude<kDim, kTiles>(args, slice, memory, sums, sum)) return;
  __syncthreads();
  put_result(m, layer, job, slice);
}

/// use(kernel)
template <class Use>
void with_kernel(const AttendVariant& variant, const Use& use) {
  with_row_types(variant, [&]<class T, int kDim, int kTiles>() {
    variant.capped ? use(attend_whole_kernel<T, kDim, kTiles, true>) : use(attend_whole_kernel<T, kDim, kTiles, false>);
  });
}

}  // namespace

void launch_forward_attend_whole(const ForwardMemory& memory, const ForwardScratch& scratch, const ForwardLayer& layer,
                                 const AttendVariant& variant, std::uint32_t slices) {
  const std::uint32_t at_once = std::max(1u, kAttend.max_slices / variant.head_tiles / slices);
  WholeArgs args{.partials = scratch.partials,
                 .counters = scratch.counters,
                 .score_scale = memory.shape.score_scale(),
                 .head_blocks = scratch.head_blocks,
                 .block_heads = scratch.block_heads};
  for (; args.first_job < scratch.job_count; args.first_job += at_once) {
    const std::uint32_t jobs = std::min(at_once, scratch.job_count - args.first_job);
    args.partial_count = jobs * slices;
    const OverlappingLaunch launch(dim3(slices, jobs), detail::kThreads, 0, static_cast<cudaStream_t>(layer.stream));
    with_kernel(variant, [&](auto* kernel) { launch.run(kernel, "launch attend of whole rows", memory, layer, args); });
  }
}

namespace detail {
void load_forward_attend_whole_kernels() {
  each_plain_variant([](const AttendVariant& variant) {
    with_kernel(variant, [](auto* kernel) { load_kernel(kernel, "load the attend kernels of whole rows"); });
  });
}
}  // namespace detail

}  // namespace sluice::gpu
