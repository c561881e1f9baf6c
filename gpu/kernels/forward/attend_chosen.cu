// Rows that the CPU has chosen for the device: thread blocks look up which of them lie near, and attend these there and
// the others over the link, in the order in which they were chosen. So what comes out depends on no cache.

#include "gpu/kernels/attend/attend_kernel.cuh"
#include "gpu/kernels/forward/forward.hpp"
#include "gpu/kernels/load.hpp"
#include "gpu/kernels/overlap.hpp"

namespace sluice::gpu {
namespace {

using namespace detail;

/// What a launch is given beside the forward.
struct ChosenArgs {
  const AttendJob* jobs = nullptr;  ///< the launch's; its blocks are (slice, job)
  float* partials = nullptr;        ///< as in AttendArgs
  std::uint32_t* counters = nullptr;
  std::uint32_t partial_count = 0;
  float score_scale = 0.f;        ///< AttentionShape::score_scale
  std::uint32_t layer = 0;
  std::uint32_t first_job = 0;    ///< number of `jobs` among those of the forward
  std::uint32_t head_blocks = 1;  ///< as in ForwardScratch
};

/// Where rows of a plane lie, which a list names as ForwardMemory::far_entry has them.
class ChosenRows {
 public:
  __device__ ChosenRows(const ForwardMemory& m, std::uint32_t plane)
      : near_of_(m.near_of + m.far_row(plane, 0)),
        near_rows_(m.near_rows + m.near_row(plane, 0)),
        shift_(m.page_shift),
        near_(m.near_entry(plane, 0)) {}

  /// Near row of the plane | kNearBit, or something else.
  [[nodiscard]] __device__ std::uint32_t look_up(std::uint32_t entry) const {
    return near_of_[(entry >> (shift_ + 1) << shift_) | (entry & ((1u << shift_) - 1))];
  }
  /// As attention wants it: a near row, or a far one and kFarRow.
  [[nodiscard]] __device__ std::uint32_t placed(std::uint32_t entry, std::uint32_t looked_up) const {
    if ((looked_up & kNearBit) == 0) return entry | kFarRow;
    const std::uint32_t place = looked_up & ~kNearBit;
    // Pages have K rows, then V rows.
    return near_ + (((place >> shift_) << (shift_ + 1)) | (place & ((1u << shift_) - 1)));
  }
  __device__ void refresh(std::uint32_t looked_up, std::uint32_t forward) const {
    near_rows_[looked_up & ~kNearBit].used = forward;
  }

 private:
  const std::uint32_t* near_of_;
  ForwardNearRow* near_rows_;
  std::uint32_t shift_;
  std::uint32_t near_;  ///< the plane's first near row
};

/// Looks all tokens of a slice up, for `words`, with their members behind them; near ones count as attended in
/// `forward`. Returns how many of this thread's these are.
__device__ std::uint32_t place_all(const AttendSlice& slice, const ChosenRows& rows, std::uint32_t forward,
                                   std::uint32_t* words) {
  constexpr std::uint32_t kAtOnce = 4;  // The way over the link is long, and that to the table not short.
  const RowLists lists = pinned_lists(slice);
  if (slice.has_members != 0) stage_list(words + slice.tokens, lists.members, slice.tokens);
  commit_copies();
  std::uint32_t near = 0;
#pragma unroll 1
  for (std::uint32_t base = threadIdx.x; base < slice.tokens; base += kAtOnce * kThreads) {
    std::uint32_t entries[kAtOnce];
    std::uint32_t looked_up[kAtOnce];
#pragma unroll
    for (std::uint32_t k = 0; k < kAtOnce; ++k)
      entries[k] = base + k * kThreads < slice.tokens ? lists.tokens[base + k * kThreads] : kNoRow;
#pragma unroll
    for (std::uint32_t k = 0; k < kAtOnce; ++k)
      looked_up[k] = base + k * kThreads < slice.tokens ? rows.look_up(entries[k]) : 0;
#pragma unroll
    for (std::uint32_t k = 0; k < kAtOnce; ++k) {
      if (base + k * kThreads >= slice.tokens) continue;
      words[base + k * kThreads] = rows.placed(entries[k], looked_up[k]);
      if ((looked_up[k] & kNearBit) == 0) continue;
      ++near;
      rows.refresh(looked_up[k], forward);
    }
  }
  return near;
}

template <class T, int kDim, int kTiles, bool kCapped>
__global__ void __launch_bounds__(kThreads, kTiles == 1 && kDim <= 128 ? kAttend.blocks_per_sm : 1)
    attend_chosen_kernel(const __grid_constant__ ForwardMemory m, const __grid_constant__ ChosenArgs args) {
  __shared__ AttendSlice slice;
  __shared__ std::uint32_t near_tokens;
  __shared__ AttendMemory<kDim, kTiles> memory;
  __shared__ WarpSums<kTiles> sums;
  wait_for_kernel_before();
  if (threadIdx.x == 0) {
    const AttendJob job = args.jobs[blockIdx.y];
    slice = cut(job, blockIdx.x);
    slice.far_base = job.base;
    slice.base = m.near;
    near_tokens = 0;
  }
  __syncthreads();
  if (slice.index >= slice.slices) return;

  QueryPiece<kDim, kTiles> query;
  query.load(slice);
  const std::uint32_t list = (args.first_job + blockIdx.y) / args.head_blocks;
  const ChosenRows rows(m, m.plane(args.layer, list % m.shape.kv_heads));
  const std::uint32_t warp = threadIdx.x / 32;
  UnitRows unit = rows_of(slice, pinned_lists(slice), warp);
  if (unit.row != kNoRow) unit.row = rows.placed(unit.row, rows.look_up(unit.row));
  std::uint32_t keys[2][RowShape<kDim>::kKeyPieces][4];
  std::uint32_t values[4][RowShape<kDim>::kValuePieces][4];
  UnitScales<false> scales;
  load_key_rows<kDim, false, true>(keys, scales, slice, unit.row);
  load_value_rows<kDim, false, true>(values, slice, unit.row);
  // The other rows are found while those are on their way.
  const auto forward = static_cast<std::uint32_t>(m.state->forward);
  const std::uint32_t near = place_all(slice, rows, forward, memory.input.words);
  if (near != 0) atomicAdd(&near_tokens, near);
  query.template store<T>(memory.input.q, args.score_scale * kLog2E);
  wait_copies<0>();
  __syncthreads();

  Accumulator<kDim, kTiles> sum;
  clear(sum);
  attend_units<T, kDim, kTiles, false, kCapped, false, true>(
      sum, slice, memory.input.q, StagedRows{slice, memory.input.words}, warp, slice.units(), unit, keys, values, scales,
      kCapped ? m.shape.softcap * kLog2E : 0.f);
  // Once for all query heads of a KV head. `await` has counted them as fetched.
  if (threadIdx.x == 0 && near_tokens != 0 && slice.first_head == 0) {
    const unsigned long long more = near_tokens;
    atomicAdd(reinterpret_cast<unsigned long long*>(&m.state->near_tokens), more);
    atomicAdd(reinterpret_cast<unsigned long long*>(&m.state->fetched_tokens), 0 - more);
  }
  (void)conclude<kDim, kTiles>(args, slice, memory, sums, sum);
}

/// use(kernel)
template <class Use>
void with_kernel(const AttendVariant& variant, const Use& use) {
  with_row_types(variant, [&]<class T, int kDim, int kTiles>() {
    variant.capped ? use(attend_chosen_kernel<T, kDim, kTiles, true>)
                   : use(attend_chosen_kernel<T, kDim, kTiles, false>);
  });
}

}  // namespace

void launch_forward_attend_chosen(const ForwardMemory& memory, const ForwardScratch& scratch, const ForwardLayer& layer,
                                  const AttendVariant& variant, std::uint32_t first, std::uint32_t last) {
  const ChosenArgs args{.jobs = scratch.jobs + scratch.job_count + first,
                        .partials = scratch.partials,
                        .counters = scratch.counters,
                        .partial_count = (last - first) * scratch.fetch_slices,
                        .score_scale = memory.shape.score_scale(),
                        .layer = layer.layer,
                        .first_job = first,
                        .head_blocks = scratch.head_blocks};
  const OverlappingLaunch launch(dim3(scratch.fetch_slices, last - first), detail::kThreads, 0,
                                 static_cast<cudaStream_t>(layer.stream));
  with_kernel(variant, [&](auto* kernel) { launch.run(kernel, "launch attend of chosen rows", memory, args); });
}

namespace detail {
void load_forward_attend_chosen_kernels() {
  each_plain_variant([](const AttendVariant& variant) {
    with_kernel(variant, [](auto* kernel) { load_kernel(kernel, "load the attend kernels of chosen rows"); });
  });
}
}  // namespace detail

}  // namespace sluice::gpu
