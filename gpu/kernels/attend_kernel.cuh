#pragma once

#include "gpu/kernels/attend.cuh"

/// The decode kernel around the units: a block's warps are merged in shared memory, the slices of a task in scratch
/// memory, by the block that comes last. Both go in a fixed order, so the same slices give the same bits.
namespace sluice::gpu::detail {

/// Four results; the caller's memory need not be aligned.
__device__ inline void store4(float* to, float4 value) {
  if (reinterpret_cast<std::uintptr_t>(to) % 16 == 0) {
    *reinterpret_cast<float4*>(to) = value;
  } else {
    to[0] = value.x;
    to[1] = value.y;
    to[2] = value.z;
    to[3] = value.w;
  }
}

__device__ inline void add_scaled(float4& sum, float weight, const float4& value) {
  sum.x += weight * value.x;
  sum.y += weight * value.y;
  sum.z += weight * value.z;
  sum.w += weight * value.w;
}

/// The top and the mass of each warp's heads.
template <int kTiles>
struct WarpSums {
  float top[kAttend.warps][8 * kTiles];
  float mass[kAttend.warps][8 * kTiles];
};

template <int kDim, int kTiles>
__device__ void clear(Accumulator<kDim, kTiles>& sum) {
#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
    for (int column = 0; column < 2; ++column) {
      sum.top[tile][column] = -INFINITY;
      sum.mass[tile][column] = 0.f;
    }
#pragma unroll
    for (int m = 0; m < RowShape<kDim>::kOutTiles; ++m) {
#pragma unroll
      for (int e = 0; e < 4; ++e) sum.out[tile][m][e] = 0.f;
    }
  }
}

/// Writes the warp's tops and masses. A mass is summed over the tokens, which are spread over g.
template <int kDim, int kTiles>
__device__ void put_sums(WarpSums<kTiles>& to, const Accumulator<kDim, kTiles>& sum) {
  const std::uint32_t warp = threadIdx.x / 32;
  const std::uint32_t lane = threadIdx.x % 32;
#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
    for (int column = 0; column < 2; ++column) {
      float mass = sum.mass[tile][column];
#pragma unroll
      for (int step = 4; step < 32; step *= 2) mass += __shfl_xor_sync(kAllLanes, mass, step);
      if (lane < 4) {
        to.top[warp][8 * tile + 2 * lane + column] = sum.top[tile][column];
        to.mass[warp][8 * tile + 2 * lane + column] = mass;
      }
    }
  }
}

/// Writes the warp's products of one head tile: [head][dim].
template <int kDim, int kTiles, int kPitch>
__device__ void put_out(float (&to)[8][kPitch], const Accumulator<kDim, kTiles>& sum, int tile) {
  const std::uint32_t g = threadIdx.x % 32 / 4;
  const std::uint32_t t = threadIdx.x % 4;
#pragma unroll
  for (int each = 0; each < kTiles; ++each) {  // The accumulator is in registers: its indices have to be constants.
    if (each != tile) continue;
#pragma unroll
    for (int c = 0; c < RowShape<kDim>::kValuePieces; ++c) {
#pragma unroll
      for (int column = 0; column < 2; ++column) {
        const auto& out = sum.out[each];
        float* dims = &to[2 * t + column][(8 * c + g) * 8];
        store4(dims, make_float4(out[4 * c][column], out[4 * c][2 + column], out[4 * c + 1][column],
                                 out[4 * c + 1][2 + column]));
        store4(dims + 4, make_float4(out[4 * c + 2][column], out[4 * c + 2][2 + column], out[4 * c + 3][column],
                                     out[4 * c + 3][2 + column]));
      }
    }
  }
}

/// Where a slice's result goes: to its task, or to scratch memory if the task has more slices.
template <int kDim, int kHeads>
struct Place {
  float* out;
  float* lse;
  float lse_scale;  ///< of the lse to base 2

  __device__ Place(const AttendArgs& args, const AttendSlice& slice) {
    if (slice.slices == 1) {
      out = slice.out;
      lse = slice.lse;
      lse_scale = kLn2;
    } else {
      const std::uint64_t row = (std::uint64_t{slice.first_partial} + slice.index) * kHeads;
      out = args.partials + row * kDim;
      lse = args.partials + std::uint64_t{args.partial_count} * kHeads * kDim + row;
      lse_scale = 1.f;
    }
  }
};

/// Merges the warps' results of one head tile.
template <int kDim, int kTiles, int kPitch>
__device__ void merge_warps(const Place<kDim, 8 * kTiles>& to, const WarpSums<kTiles>& sums,
                            const float (&out)[kAttend.warps][8][kPitch], int tile, int heads) {
  for (int i = static_cast<int>(threadIdx.x); i < heads * kDim / 4; i += kThreads) {
    const int row = i / (kDim / 4);
    const int column = i % (kDim / 4) * 4;
    const int head = 8 * tile + row;
    float top = -INFINITY;
#pragma unroll
    for (std::uint32_t w = 0; w < kAttend.warps; ++w) top = fmaxf(top, sums.top[w][head]);
    float mass = 0.f;
    float4 sum = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll
    for (std::uint32_t w = 0; w < kAttend.warps; ++w) {
      const float weight = sums.top[w][head] == -INFINITY ? 0.f : exp2_fast(sums.top[w][head] - top);
      mass += weight * sums.mass[w][head];
      add_scaled(sum, weight, *reinterpret_cast<const float4*>(&out[w][row][column]));
    }
    const float scale = mass > 0.f ? 1.f / mass : 0.f;
    store4(to.out + head * kDim + column, make_float4(sum.x * scale, sum.y * scale, sum.z * scale, sum.w * scale));
    if (column == 0) to.lse[head] = mass > 0.f ? (top + log2f(mass)) * to.lse_scale : -INFINITY;
  }
}

/// True in the block that is the last of its task's slices to get here; it sees what the others wrote.
__device__ inline bool is_last(const AttendArgs& args, const AttendSlice& slice) {
  __shared__ bool last;
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) {
    std::uint32_t* counter = args.counters + slice.counter;
    last = atomicAdd(counter, 1u) == slice.slices - 1;
    if (last) *counter = 0;
  }
  __syncthreads();
  __threadfence();
  return last;
}

/// Weights of the slices in the task's result, by a warp per head; writes the task's lse.
template <int kDim, int kTiles>
__device__ void weigh_slices(const AttendSlice& slice, const float* lse, AttendMemory<kDim, kTiles>& memory) {
  constexpr std::uint32_t kHeads = 8 * kTiles;
  const std::uint32_t lane = threadIdx.x % 32;
  for (std::uint32_t head = threadIdx.x / 32; head < slice.heads; head += kAttend.warps) {
    float top = -INFINITY;
    for (std::uint32_t i = lane; i < slice.slices; i += 32) top = fmaxf(top, __ldcg(lse + i * kHeads + head));
#pragma unroll
    for (int step = 1; step < 32; step *= 2) top = fmaxf(top, __shfl_xor_sync(kAllLanes, top, step));
    float mass = 0.f;
    for (std::uint32_t i = lane; i < slice.slices; i += 32) {
      const float each = __ldcg(lse + i * kHeads + head);
      const float weight = each == -INFINITY ? 0.f : exp2_fast(each - top);
      memory.weight[head][i] = weight;
      mass += weight;
    }
#pragma unroll
    for (int step = 1; step < 32; step *= 2) mass += __shfl_xor_sync(kAllLanes, mass, step);
    const float scale = mass > 0.f ? 1.f / mass : 0.f;
    for (std::uint32_t i = lane; i < slice.slices; i += 32) memory.weight[head][i] *= scale;
    if (lane == 0) slice.lse[head] = mass > 0.f ? (top + log2f(mass)) * kLn2 : -INFINITY;
  }
}

/// Merges the results of all slices of a task.
template <int kDim, int kTiles>
__device__ void merge_slices(const AttendArgs& args, const AttendSlice& slice, AttendMemory<kDim, kTiles>& memory) {
  constexpr std::uint32_t kHeads = 8 * kTiles;
  const std::uint64_t row = std::uint64_t{slice.first_partial} * kHeads;
  weigh_slices<kDim, kTiles>(slice, args.partials + std::uint64_t{args.partial_count} * kHeads * kDim + row, memory);
  __syncthreads();
  const auto* partials = reinterpret_cast<const float4*>(args.partials + row * kDim);
  for (std::uint32_t i = threadIdx.x; i < slice.heads * (kDim / 4); i += kThreads) {
    const std::uint32_t head = i / (kDim / 4);
    float4 sum = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll 16
    for (std::uint32_t s = 0; s < slice.slices; ++s) {
      add_scaled(sum, memory.weight[head][s], __ldcg(partials + s * (kHeads * kDim / 4) + i));
    }
    store4(slice.out + 4 * i, sum);
  }
}

template <class T, int kDim, int kTiles, bool kScored>
__global__ void __launch_bounds__(kThreads, kTiles == 1 && !kScored ? kAttend.blocks_per_sm : 1)
    attend_kernel(const __grid_constant__ AttendArgs args) {
  __shared__ AttendSlice slice;
  __shared__ AttendMemory<kDim, kTiles> memory;
  __shared__ WarpSums<kTiles> sums;
  stage(args.slices + std::uint64_t{args.offsets[blockIdx.x]} * 16, slice, memory.input.words);

  // The first rows are on their way before the queries are looked at.
  const std::uint32_t units = slice.units();
  const std::uint32_t warp = threadIdx.x / 32;
  const std::uint32_t begin = units * warp / kAttend.warps;
  const std::uint32_t end = units * (warp + 1) / kAttend.warps;
  const UnitRows rows = begin < end ? rows_of(slice, memory.input.words, begin) : UnitRows{};
  std::uint32_t keys[2][RowShape<kDim>::kKeyPieces][4];
  std::uint32_t values[4][RowShape<kDim>::kValuePieces][4];
  if (scored<kScored>(slice, begin)) {
    load_scores<kDim, kTiles>(keys, slice, begin);
  } else {
    load_keys<kDim>(keys, slice.base, rows.row);
  }
  load_values<kDim>(values, slice, rows.row);
  stage_queries<T, kDim, kTiles>(slice, args.score_scale * kLog2e, memory.input);
  __syncthreads();

  Accumulator<kDim, kTiles> sum;
  clear(sum);
  attend_units<T, kDim, kTiles, kScored>(sum, slice, memory.input, begin, end, rows, keys, values);

  put_sums(sums, sum);
  const Place<kDim, 8 * kTiles> place(args, slice);
#pragma unroll 1
  for (int tile = 0; tile < kTiles; ++tile) {
    const int heads = min(8, static_cast<int>(slice.heads) - 8 * tile);
    __syncthreads();  // All warps are done with what `out` lies over.
    put_out<kDim, kTiles>(memory.out[warp], sum, tile);
    __syncthreads();
    if (heads > 0) merge_warps<kDim, kTiles>(place, sums, memory.out, tile, heads);
  }
  if (slice.slices > 1 && is_last(args, slice)) merge_slices<kDim, kTiles>(args, slice, memory);
}

/// Calls `use` with the kernel of one dtype and head_dim.
template <class T, int kDim, class Use>
void with_attend_kernel(const AttendVariant& variant, const Use& use) {
  if (variant.head_tiles == 1) {
    variant.scored ? use(attend_kernel<T, kDim, 1, true>) : use(attend_kernel<T, kDim, 1, false>);
  } else {
    variant.scored ? use(attend_kernel<T, kDim, 2, true>) : use(attend_kernel<T, kDim, 2, false>);
  }
}

}  // namespace sluice::gpu::detail
