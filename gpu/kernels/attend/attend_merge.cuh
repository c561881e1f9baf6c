#pragma once

#include <cuda/atomic>

#include "gpu/kernels/attend/attend.cuh"
#include "gpu/kernels/four.cuh"

/// How results of decode attention become one: those of a block's warps in shared memory, those of a job's slices in
/// scratch memory, by the block that comes last. Both go in a fixed order, so the same slices give the same bits.
namespace sluice::gpu::detail {

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
template <int kDim, int kTiles, class Sums>
__device__ void put_sums(Sums& to, const Accumulator<kDim, kTiles>& sum) {
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

/// Writes the warp's products of one head tile and the dims of a slab, from kBegin on: [head][dim].
template <int kDim, int kTiles, int kBegin, int kPitch>
__device__ void put_out(float (&to)[8][kPitch], const Accumulator<kDim, kTiles>& sum, int tile) {
  const std::uint32_t g = threadIdx.x % 32 / 4;
  const std::uint32_t t = threadIdx.x % 4;
#pragma unroll
  for (int each = 0; each < kTiles; ++each) {  // The accumulator is in registers: its indices have to be constants.
    if (each != tile) continue;
#pragma unroll
    for (int c = 0; c < RowShape<kDim>::kValuePieces; ++c) {
      if (64 * c < kBegin || 64 * c >= kBegin + RowShape<kDim>::kSlab) continue;
#pragma unroll
      for (int column = 0; column < 2; ++column) {
        const auto& out = sum.out[each];
        float* dims = &to[2 * t + column][64 * c + (RowShape<kDim>::whole(c) ? 8 : 4) * g - kBegin];
        store4(dims, make_float4(out[4 * c][column], out[4 * c][2 + column], out[4 * c + 1][column],
                                 out[4 * c + 1][2 + column]));
        if (!RowShape<kDim>::whole(c)) continue;
        store4(dims + 4, make_float4(out[4 * c + 2][column], out[4 * c + 2][2 + column], out[4 * c + 3][column],
                                     out[4 * c + 3][2 + column]));
      }
    }
  }
}

/// Where a slice's result goes: to its task, or to scratch memory if its job has more slices.
template <int kDim, int kHeads>
struct Place {
  float* out;
  float* lse;
  float lse_scale;  ///< of the lse to base 2

  /// @param args  partials, their number and counters, as AttendArgs has them
  template <class Args>
  __device__ Place(const Args& args, const AttendSlice& slice) {
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

/// Merges the warps' results of one head tile and the dims of a slab, from kBegin on.
template <int kDim, int kTiles, int kBegin, int kPitch>
__device__ void merge_warps(const Place<kDim, 8 * kTiles>& to, const WarpSums<kTiles>& sums,
                            const float (&out)[kAttend.warps][8][kPitch], int tile, int heads) {
  constexpr int kSlab = kDim - kBegin < RowShape<kDim>::kSlab ? kDim - kBegin : RowShape<kDim>::kSlab;
  for (int i = static_cast<int>(threadIdx.x); i < heads * kSlab / 4; i += kThreads) {
    const int row = i / (kSlab / 4);
    const int column = i % (kSlab / 4) * 4;
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
    store4(to.out + head * kDim + kBegin + column,
           make_float4(sum.x * scale, sum.y * scale, sum.z * scale, sum.w * scale));
    if (kBegin + column == 0) to.lse[head] = mass > 0.f ? (top + log2f(mass)) * to.lse_scale : -INFINITY;
  }
}

/// True in the block that is the last of its job's slices to get here; it sees what the others wrote.
template <class Args>
__device__ bool is_last(const Args& args, const AttendSlice& slice) {
  __shared__ bool last;
  __syncthreads();
  if (threadIdx.x == 0) {  // What the barriers order before and after it, one thread releases and acquires for all.
    std::uint32_t* const counter = args.counters + slice.counter;
    cuda::atomic_ref<std::uint32_t, cuda::thread_scope_device> arrived(*counter);
    last = arrived.fetch_add(1u, cuda::memory_order_acq_rel) == slice.slices - 1;
    if (last) *counter = 0;
  }
  __syncthreads();
  return last;
}

/// Weights of the slices in the job's result, by a warp per head; writes the task's lse.
template <int kDim, int kTiles>
__device__ void weigh_slices(const AttendSlice& slice, const float* lse, AttendMemory<kDim, kTiles>& memory) {
  constexpr std::uint32_t kHeads = 8 * kTiles;
  constexpr std::uint32_t kAtOnce = 4;  // loads of a lane
  const std::uint32_t lane = threadIdx.x % 32;
  for (std::uint32_t head = threadIdx.x / 32; head < slice.heads; head += kAttend.warps) {
    float* const weight = memory.weight[head];
    float top = -INFINITY;
    for (std::uint32_t first = lane; first < slice.slices; first += 32 * kAtOnce) {
      float each[kAtOnce];
#pragma unroll
      for (std::uint32_t j = 0; j < kAtOnce; ++j) {
        const std::uint32_t i = first + 32 * j;
        each[j] = load_partial(lse + i * kHeads + head, i < slice.slices, -INFINITY);
      }
#pragma unroll
      for (std::uint32_t j = 0; j < kAtOnce; ++j) {
        top = fmaxf(top, each[j]);
        if (first + 32 * j < slice.slices) weight[first + 32 * j] = each[j];
      }
    }
#pragma unroll
    for (int step = 1; step < 32; step *= 2) top = fmaxf(top, __shfl_xor_sync(kAllLanes, top, step));
    float mass = 0.f;
#pragma unroll 1
    for (std::uint32_t i = lane; i < slice.slices; i += 32) {
      const float each = weight[i] == -INFINITY ? 0.f : exp2_fast(weight[i] - top);
      weight[i] = each;
      mass += each;
    }
#pragma unroll
    for (int step = 1; step < 32; step *= 2) mass += __shfl_xor_sync(kAllLanes, mass, step);
    const float scale = mass > 0.f ? 1.f / mass : 0.f;
#pragma unroll 1
    for (std::uint32_t i = lane; i < slice.slices; i += 32) weight[i] *= scale;
    if (lane == 0) slice.lse[head] = mass > 0.f ? (top + log2f(mass)) * kLn2 : -INFINITY;
  }
}

/// Partial results of every `step`th slice that a thread loads at once: half of those that a job has if eight jobs
/// share a machine of 132 multiprocessors.
template <int kDim, int kTiles>
struct PartialBatch {
  static constexpr std::uint32_t kCount = 18;
  static constexpr std::uint32_t kPitch = 8 * kTiles * kDim / 4;  ///< of a slice
  float4 value[kCount];

  __device__ void load(const float4* column, std::uint32_t first, std::uint32_t step, std::uint32_t slices) {
#pragma unroll
    for (std::uint32_t j = 0; j < kCount; ++j) {
      const std::uint32_t i = first + j * step;
      value[j] = load_partial4(column + std::uint64_t{i} * kPitch, i < slices);
    }
  }
  __device__ void add_to(float4& sum, const float* weight, std::uint32_t first, std::uint32_t step,
                         std::uint32_t slices) const {
#pragma unroll
    for (std::uint32_t j = 0; j < kCount; ++j) {
      const std::uint32_t i = first + j * step;
      if (i < slices) add_scaled(sum, weight[i], value[j]);
    }
  }
};

/// Merges the results of all slices of a job; `results` and `count` are AttendArgs::partials and partial_count. A
/// column is four dims of a head; if there are fewer than threads, several threads share the slices of one. Not
/// inlined, so that the registers it takes are not missing in the loop over units.
template <int kDim, int kTiles>
__device__ __noinline__ void merge_slices(const float* results, std::uint32_t count, const AttendSlice& slice,
                                          AttendMemory<kDim, kTiles>& memory) {
  constexpr std::uint32_t kHeads = 8 * kTiles;
  const std::uint64_t row = std::uint64_t{slice.first_partial} * kHeads;
  const float* const lse = results + std::uint64_t{count} * kHeads * kDim + row;
  const auto* const partials = reinterpret_cast<const float4*>(results + row * kDim);
  const std::uint32_t columns = slice.heads * (kDim / 4);
  const std::uint32_t shares = columns < kThreads ? kThreads / columns : 1;
  const std::uint32_t share = shares > 1 ? threadIdx.x / columns : 0;
  const std::uint32_t slices = share < shares ? slice.slices : 0;  // Threads left over have none.
  bool weighed = false;
  for (std::uint32_t begin = 0; begin < columns; begin += kThreads) {  // once, but for more than 8 heads
    const std::uint32_t column = begin + threadIdx.x - share * columns;
    const bool mine = column < columns;
    const float* const weight = memory.weight[mine ? column / (kDim / 4) : 0];
    float4 sum = make_float4(0.f, 0.f, 0.f, 0.f);
    std::uint32_t first = share;
    do {  // The first partials come while the weights are computed.
      PartialBatch<kDim, kTiles> batch;
      batch.load(partials + column, first, shares, mine ? slices : 0);
      if (!weighed) {
        weigh_slices<kDim, kTiles>(slice, lse, memory);
        __syncthreads();
        weighed = true;
      }
      batch.add_to(sum, weight, first, shares, mine ? slices : 0);
      first += batch.kCount * shares;
    } while (first < slices);
    if (shares > 1) {
      __syncthreads();  // All are done with the weights, over which the shares lie.
      memory.share[threadIdx.x] = sum;
      __syncthreads();
#pragma unroll 1
      for (std::uint32_t other = 1; share == 0 && other < shares; ++other) {
        add_scaled(sum, 1.f, memory.share[other * columns + column]);
      }
    }
    if (mine && share == 0) store4(slice.out + 4 * column, sum);
  }
}

}  // namespace sluice::gpu::detail
