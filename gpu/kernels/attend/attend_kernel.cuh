#pragma once

#include "gpu/kernels/attend/attend_merge.cuh"
#include "gpu/kernels/overlap.cuh"

namespace sluice::gpu::detail {

/// What a block's warps have attended becomes the slice's result, and by the last of a job's blocks the task's; whether
/// this block has written that. All threads.
template <int kDim, int kTiles, class Args>
__device__ bool conclude(const Args& args, const AttendSlice& slice, AttendMemory<kDim, kTiles>& memory,
                         WarpSums<kTiles>& sums, const Accumulator<kDim, kTiles>& sum) {
  put_sums(sums, sum);
  const std::uint32_t warp = threadIdx.x / 32;
  const Place<kDim, 8 * kTiles> place(args, slice);
#pragma unroll 1
  for (int tile = 0; tile < kTiles; ++tile) {
    const int heads = min(8, static_cast<int>(slice.heads) - 8 * tile);
    __syncthreads();  // All warps are done with what `out` lies over.
    put_out<kDim, kTiles, 0>(memory.out[warp], sum, tile);
    __syncthreads();
    if (heads > 0) merge_warps<kDim, kTiles, 0>(place, sums, memory.out, tile, heads);
    if constexpr (kDim > RowShape<kDim>::kSlab) {
      __syncthreads();
      put_out<kDim, kTiles, RowShape<kDim>::kSlab>(memory.out[warp], sum, tile);
      __syncthreads();
      if (heads > 0) merge_warps<kDim, kTiles, RowShape<kDim>::kSlab>(place, sums, memory.out, tile, heads);
    }
  }
  if (slice.slices == 1) return true;
  if (!is_last(args, slice)) return false;
  merge_slices<kDim, kTiles>(args.partials, args.partial_count, slice, memory);
  return true;
}

/// The decode kernel: a thread block attends one slice, and the last of a job's merges them.
template <class T, int kDim, int kTiles, bool kScored, bool kCapped, bool kHasScales>
__global__ void __launch_bounds__(kThreads, kTiles == 1 && !kScored && kDim <= 128 ? kAttend.blocks_per_sm : 1)
    attend_kernel(const __grid_constant__ AttendArgs args) {
  __shared__ AttendSlice slice;
  __shared__ AttendMemory<kDim, kTiles> memory;
  __shared__ WarpSums<kTiles> sums;
  wait_for_kernel_before();
  if (threadIdx.x == 0) slice = slice_of_block(args);
  __syncthreads();
  if (slice.index >= slice.slices) return;  // Launched for a longer list.

  QueryPiece<kDim, kTiles> query;
  query.load(slice);
  const std::uint32_t warp = threadIdx.x / 32;
  const UnitRows rows = warp < slice.units() ? rows_of(slice, pinned_lists(slice), warp) : UnitRows{};
  std::uint32_t keys[2][RowShape<kDim>::kKeyPieces][4];
  std::uint32_t values[4][RowShape<kDim>::kValuePieces][4];
  UnitScales<kHasScales> scales;
  if (scored<kScored>(slice, warp)) {
    load_scores<kDim, kTiles>(keys, slice, warp);
  } else {
    load_key_rows<kDim>(keys, scales, slice, rows.row);
  }
  load_value_rows<kDim, kHasScales>(values, slice, rows.row);
  if (slice.units() > kAttend.warps) stage_lists(slice, memory.input.words);
  query.template store<T>(memory.input.q, args.score_scale * kLog2E);
  wait_copies<0>();
  __syncthreads();

  Accumulator<kDim, kTiles> sum;
  clear(sum);
  attend_units<T, kDim, kTiles, kScored, kCapped, kHasScales>(
      sum, slice, memory.input.q, StagedRows{slice, memory.input.words}, warp, slice.units(), rows, keys, values, scales,
      kCapped ? args.softcap * kLog2E : 0.f);

  (void)conclude<kDim, kTiles>(args, slice, memory, sums, sum);
}

/// Calls `use` with the kernel of one dtype, head_dim and number of head tiles.
template <class T, int kDim, int kTiles, class Use>
void with_tiled_kernel(const AttendVariant& variant, const Use& use) {
  if (variant.scored) return use(attend_kernel<T, kDim, kTiles, true, true, false>);
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    if (variant.scaled)
      return variant.capped ? use(attend_kernel<T, kDim, kTiles, false, true, true>)
                            : use(attend_kernel<T, kDim, kTiles, false, false, true>);
  }
  variant.capped ? use(attend_kernel<T, kDim, kTiles, false, true, false>)
                 : use(attend_kernel<T, kDim, kTiles, false, false, false>);
}

/// Calls `use` with the kernel of one dtype and head_dim.
template <class T, int kDim, class Use>
void with_attend_kernel(const AttendVariant& variant, const Use& use) {
  if constexpr (kDim <= 128) {
    if (variant.head_tiles == 2) return with_tiled_kernel<T, kDim, 2>(variant, use);
  }
  with_tiled_kernel<T, kDim, 1>(variant, use);
}

/// use.template operator()<T, kDim, kTiles>() of a variant, for kernels that are there for all of them.
template <class Use>
void with_row_types(const AttendVariant& variant, const Use& use) {
  const auto with_tiles = [&]<class T, int kDim>() {
    if constexpr (kDim <= 128) {
      if (variant.head_tiles == 2) return use.template operator()<T, kDim, 2>();
    }
    use.template operator()<T, kDim, 1>();
  };
  KernelHeadDims::with(variant.head_dim, [&](auto dim) {
    variant.dtype == DType::f16 ? with_tiles.template operator()<__half, dim()>()
                                : with_tiles.template operator()<__nv_bfloat16, dim()>();
  });
}

/// use(variant) of every dtype, head_dim and number of head tiles, soft-capped and not.
template <class Use>
void each_plain_variant(const Use& use) {
  for (const DType dtype : {DType::f16, DType::bf16}) {
    KernelHeadDims::each([&](std::uint32_t head_dim) {
      for (const std::uint32_t tiles : {1u, 2u}) {
        for (const bool capped : {false, true})
          use(AttendVariant{.dtype = dtype, .head_dim = head_dim, .head_tiles = tiles, .capped = capped});
      }
    });
  }
}

}  // namespace sluice::gpu::detail
