#pragma once

#include "gpu/kernels/forward/list.cuh"
#include "gpu/kernels/forward/rest_mean.cuh"
#include "gpu/kernels/select/power_sum.cuh"

/// What a row leaves, see ForwardRow::rest: all that its scores weigh, which `score` has added up, less what those
/// weigh that are attended. Every block of a cluster says so of its part, and `merge` adds up.
namespace sluice::gpu::forward {

inline constexpr std::uint32_t kRestHeads = 8;  ///< that are weighed at once
struct RestShared {
  float2 warps[kRestHeads][kWarps];  ///< PowerSum of each
};

/// What attended tokens weigh to heads [first, first + kRestHeads) of a group.
class Attended {
 public:
  /// Of nothing yet. All threads; each warp sees its own sums.
  __device__ Attended(const ForwardMemory& m, const Work& work, std::uint32_t first, RestShared& s)
      : m_(m), work_(work), first_(first), heads_(min(kRestHeads, m.shape.group() - first)), s_(s) {
    if (lane() < kRestHeads) s_.warps[lane()][warp()] = {-INFINITY, 0.f};
    __syncwarp();
  }

  /// Adds some tokens, one for each of `threads` threads, the last ones first: those of warps that attend nothing.
  /// `kCapped`: scores may be soft-capped.
  template <bool kCapped>
  __device__ __forceinline__ void add(const std::uint32_t* tokens, std::uint32_t count, std::uint32_t threads) const {
    constexpr std::uint32_t kAtOnce = 4;
    if (threads - kWarp * (warp() + 1) >= count) return;
    const std::uint32_t stride = work_.row.tokens;
    const float softcap = kCapped ? m_.shape.softcap : 0.f;
    const float* const scores =
        m_.scores + std::uint64_t{work_.index} * m_.shape.group() * m_.score_room() + std::uint64_t{first_} * stride;
#pragma unroll 1
    for (std::uint32_t h = 0; h < heads_; h += kAtOnce) {
      detail::PowerSum sums[kAtOnce];
#pragma unroll 1
      for (std::uint32_t i = threads - 1 - threadIdx.x; i < count; i += threads) {
        float x[kAtOnce];  // Of heads that are not there the last one's.
#pragma unroll
        for (std::uint32_t k = 0; k < kAtOnce; ++k)
          x[k] = __ldcg(scores + std::uint64_t{min(h + k, heads_ - 1)} * stride + tokens[i]);
#pragma unroll
        for (std::uint32_t k = 0; k < kAtOnce; ++k) {
          const float one[1] = {detail::exponent_of(x[k], softcap)};
          sums[k].add(one);
        }
      }
      detail::add_lanes(sums);
      detail::PowerSum own = sums[0];
#pragma unroll
      for (std::uint32_t k = 1; k < kAtOnce; ++k) own = lane() == k ? sums[k] : own;
      if (lane() >= min(kAtOnce, heads_ - h)) continue;
      float2& before = s_.warps[h + lane()][warp()];
      own.add_sum({before.x, before.y});
      before = {own.top, own.mass};
    }
  }

  /// The block's part of all that was added, of head `first` + h. One warp, behind a barrier.
  __device__ void put(std::uint32_t part, std::uint32_t h) const {
    if (h >= heads_) return;
    detail::PowerSum sum;
    if (lane() < kWarps) sum = {.top = s_.warps[h][lane()].x, .mass = s_.warps[h][lane()].y};
    sum.add_lanes();
    auto* const out = reinterpret_cast<float2*>(m_.rest_mass_of(work_.index)) + part * m_.shape.group();
    if (lane() == 0) out[first_ + h] = {sum.top, sum.mass};
  }

 private:
  [[nodiscard]] __device__ static std::uint32_t lane() { return threadIdx.x % kWarp; }
  [[nodiscard]] __device__ static std::uint32_t warp() { return threadIdx.x / kWarp; }

  const ForwardMemory& m_;
  const Work& work_;
  std::uint32_t first_, heads_;
  RestShared& s_;
};

/// The block's part of what is attended of a row with a rest. `found`: once nobody needs what it has. All threads.
__device__ __noinline__ inline void weigh_rest(const ForwardMemory& m, const Work& work, Found& found, const Part& part,
                                               RestShared& s) {
  const std::uint32_t warp = threadIdx.x / kWarp;
#pragma unroll 1
  for (std::uint32_t first = 0; first < m.shape.group(); first += kRestHeads) {
    const Attended attended(m, work, first, s);
#pragma unroll 1
    for (std::uint32_t base = 0; base < part.count(); base += found.turn()) {
      if (first == 0 || part.count() > found.turn()) found.gather(base);  // Else it is there still.
      attended.add<true>(found.tokens(), found.count(), kThreads);
    }
    __syncthreads();
    if (warp < kRestHeads) attended.put(part.rank(), warp);
    __syncthreads();
  }
}

/// And of its value, in shared memory that nobody uses any more.
__device__ inline void put_rest_mean(const ForwardMemory& m, const Work& work, const Part& part, void* memory) {
  put_rest_mean<kThreads>(m, work.row, work.index, work.plane, part.rank(), part.blocks(),
                          *static_cast<RestMeanShared<kThreads>*>(memory));
}

}  // namespace sluice::gpu::forward
