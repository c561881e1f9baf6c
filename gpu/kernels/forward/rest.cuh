#pragma once

#include "gpu/kernels/attend/attend_input.cuh"
#include "gpu/kernels/elements.cuh"
#include "gpu/kernels/forward/marks.cuh"
#include "gpu/kernels/mma.cuh"
#include "sluice/partial.hpp"

/// What a row leaves, see ForwardRow::rest: every block of a cluster weighs its part of it, and `merge` adds up. By the
/// scores of all tokens, which have just been written, while the CPU is asked for what is far.
namespace sluice::gpu::forward {

/// The sum of some powers of 2, divided by that of `top`.
struct PowerSum {
  float top = -INFINITY;
  float mass = 0.f;

  /// Adds those of `x`, -infinity for none.
  template <std::uint32_t kCount>
  __device__ void add(const float (&x)[kCount]) {
    float most = top;
#pragma unroll
    for (std::uint32_t i = 0; i < kCount; ++i) most = fmaxf(most, x[i]);
    if (most == -INFINITY) return;
    mass *= detail::exp2_fast(top - most);
#pragma unroll
    for (std::uint32_t i = 0; i < kCount; ++i) mass += detail::exp2_fast(x[i] - most);
    top = most;
  }
  /// Of all lanes of a warp, in each of them.
  __device__ void add_lanes() {
#pragma unroll
    for (std::uint32_t step = 1; step < kWarp; step *= 2) {
      const float other = __shfl_xor_sync(kAll, top, step);
      const float theirs = __shfl_xor_sync(kAll, mass, step);
      const float most = fmaxf(top, other);
      if (most != -INFINITY) mass = mass * detail::exp2_fast(top - most) + theirs * detail::exp2_fast(other - most);
      top = most;
    }
  }
  [[nodiscard]] __device__ float lse() const {
    return top == -INFINITY ? kEmptyLse : (top + log2f(mass)) * detail::kLn2;
  }
};

inline constexpr std::uint32_t kRestHeads = 4;  ///< that are weighed at once
struct RestShared {
  float tops[kWarps][kRestHeads];
  float masses[kWarps][kRestHeads];
};

/// A block's part of the tokens that no head of the group attends.
class Left {
 public:
  static constexpr std::uint32_t kAtOnce = 4;  ///< of a lane, in two chunks

  __device__ Left(const Marks& marks, std::uint32_t tokens) : marks_(marks), tokens_(tokens) {}
  /// tokens[i], unless it is attended: kNone. `number`: of the first chunk, whose neighbour is the one that comes as
  /// many chunks behind as there are warps.
  __device__ void read(std::uint32_t number, std::uint32_t (&tokens)[kAtOnce]) const {
    const std::uint32_t lane = threadIdx.x % kWarp;
#pragma unroll
    for (std::uint32_t i = 0; i < kAtOnce; ++i) {
      const std::uint32_t word = number + i / 2 * kWarps * kChunk + i % 2 * kWord;
      const bool there = word < marks_.part().count();
      const std::uint32_t token = marks_.part().token_of(word) + lane;
      const bool attended = !there || (marks_.word(word) >> lane & 1) != 0;
      tokens[i] = attended || token >= tokens_ ? kNone : token;
    }
  }
  static constexpr std::uint32_t kStep = kAtOnce / 2 * kWarps * kChunk;  ///< numbers that all warps read at once

 private:
  const Marks& marks_;
  std::uint32_t tokens_;
};

/// Scores as they weigh: soft-capped, and by powers of 2. NaN becomes -infinity, and is no part of a sum.
template <std::uint32_t kCount>
__device__ __forceinline__ void prepare(float (&scores)[kCount], float softcap) {
  if (softcap > 0.f) {
    const float inverse = 1.f / softcap;
#pragma unroll
    for (std::uint32_t i = 0; i < kCount; ++i) scores[i] = softcap * detail::tanh_fast(scores[i] * inverse);
  }
#pragma unroll
  for (std::uint32_t i = 0; i < kCount; ++i) scores[i] = scores[i] == scores[i] ? scores[i] * detail::kLog2E : -INFINITY;
}

/// Of the block's part, for heads [first, first + kRestHeads) of the group.
__device__ __forceinline__ void weigh_left(const ForwardMemory& m, const Work& work, const Marks& marks,
                                           std::uint32_t first, PowerSum (&sums)[kRestHeads]) {
  const std::uint32_t stride = work.row.tokens;
  const std::uint32_t heads = min(kRestHeads, m.shape.group() - first);
  const float softcap = m.shape.softcap;
  const float* scores[kRestHeads];  // Of heads that are not there the last one's.
#pragma unroll
  for (std::uint32_t h = 0; h < kRestHeads; ++h)
    scores[h] = m.scores + std::uint64_t{work.index} * m.shape.group() * m.score_room() +
                std::uint64_t{first + min(h, heads - 1)} * stride;
  const Left left(marks, work.row.tokens);
#pragma unroll 1
  for (std::uint32_t number = threadIdx.x / kWarp * kChunk; number < marks.part().count(); number += Left::kStep) {
    std::uint32_t tokens[Left::kAtOnce];
    left.read(number, tokens);
    float x[kRestHeads][Left::kAtOnce];
#pragma unroll
    for (std::uint32_t h = 0; h < kRestHeads; ++h) {
#pragma unroll
      for (std::uint32_t i = 0; i < Left::kAtOnce; ++i)
        x[h][i] = tokens[i] != kNone ? __ldcg(scores[h] + tokens[i]) : __int_as_float(0x7fc0'0000);
    }
#pragma unroll
    for (std::uint32_t h = 0; h < kRestHeads; ++h) {
      prepare(x[h], softcap);
      sums[h].add(x[h]);
    }
  }
}

/// The means of a block's share of the pages that stand for the rest, added up: eight channels of a thread.
__device__ inline void add_means(const ForwardMemory& m, const Work& work, const Part& part,
                                 float (&sum)[detail::kUnit]) {
  const std::uint32_t units = m.shape.head_dim / detail::kUnit;
  const std::uint32_t at_once = kThreads / units;
  const std::uint32_t own = threadIdx.x / units;
  if (own >= at_once) return;
  const std::uint32_t* const blocks = m.list_of(work.row.list);
#pragma unroll 4
  for (std::uint32_t i = part.rank() + own * part.blocks(); i < work.row.rest; i += at_once * part.blocks()) {
    const std::uint32_t block = blocks[work.row.rest_page(i, m.layout.page_tokens)];
    const std::byte* const mean = m.value_mean_of(work.plane, block) + threadIdx.x % units * 16;
    float values[detail::kUnit];
    m.layout.dtype == DType::f16 ? detail::load_unit<DType::f16>(mean, values)
                                 : detail::load_unit<DType::bf16>(mean, values);
#pragma unroll
    for (std::uint32_t c = 0; c < detail::kUnit; ++c) sum[c] += values[c];
  }
}

/// What the threads of a block have added up, of `at_once` rows each, as a share of all that stands for the rest.
__device__ inline void put_means(const ForwardMemory& m, const Work& work, const Part& part, float* rows,
                                 const float (&sum)[detail::kUnit]) {
  const std::uint32_t head_dim = m.shape.head_dim;
  const std::uint32_t at_once = kThreads / (head_dim / detail::kUnit);
  if (threadIdx.x < at_once * (head_dim / detail::kUnit)) {
#pragma unroll
    for (std::uint32_t c = 0; c < detail::kUnit; ++c) rows[threadIdx.x * detail::kUnit + c] = sum[c];
  }
  __syncthreads();
  if (threadIdx.x >= head_dim) return;
  float all = 0.f;
#pragma unroll 8
  for (std::uint32_t r = 0; r < at_once; ++r) all += rows[r * head_dim + threadIdx.x];
  m.rest_out_of(work.index)[part.rank() * head_dim + threadIdx.x] = all / static_cast<float>(work.row.rest);
}
/// Bytes of shared memory that it takes.
inline constexpr std::uint32_t kRestBytes = kThreads * detail::kUnit * sizeof(float);

/// The block's part of what a row leaves, which has a rest. `rows`: kRestBytes that nobody uses any more once all are
/// here. All threads.
__device__ __noinline__ inline void weigh_rest(const ForwardMemory& m, const Work& work, const Marks& marks,
                                               RestShared& s, float* rows) {
  const std::uint32_t group = m.shape.group();
  const std::uint32_t lane = threadIdx.x % kWarp;
  const std::uint32_t warp = threadIdx.x / kWarp;
  const Part& part = marks.part();
  float* const lse = m.rest_lse_of(work.index) + part.rank() * group;
  float means[detail::kUnit] = {};
  add_means(m, work, part, means);  // Requested before what takes longer.
#pragma unroll 1
  for (std::uint32_t first = 0; first < group; first += kRestHeads) {
    PowerSum sums[kRestHeads];
    weigh_left(m, work, marks, first, sums);
    __syncthreads();  // The sums of the heads before these have been read.
#pragma unroll
    for (std::uint32_t h = 0; h < kRestHeads; ++h) {
      sums[h].add_lanes();
      if (lane != h) continue;
      s.tops[warp][h] = sums[h].top;
      s.masses[warp][h] = sums[h].mass;
    }
    __syncthreads();
    if (warp >= kRestHeads || first + warp >= group) continue;
    PowerSum sum;
    if (lane < kWarps) sum = {.top = s.tops[lane][warp], .mass = s.masses[lane][warp]};
    sum.add_lanes();
    if (lane == 0) lse[first + warp] = sum.lse();
  }
  put_means(m, work, part, rows, means);
}

}  // namespace sluice::gpu::forward
