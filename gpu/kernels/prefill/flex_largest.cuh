#pragma once

#include "gpu/kernels/prefill/flex.hpp"
#include "gpu/kernels/prefill/flex_block.cuh"
#include "sluice/step/prefill_choice.hpp"

/// What the verdicts on heads have in common: blocks with the largest sums, and StreamingLLM's.
namespace sluice::gpu::detail {

inline constexpr int kVerdictThreads = 1024;
inline constexpr std::uint32_t kHeld = kFlexMaxBlocks / kVerdictThreads;  ///< blocks of a thread
inline constexpr int kVerdictBits = 13;
static_assert(kFlexMaxBlocks == 1u << kVerdictBits);

using VerdictReduce = BlockReduce<kVerdictThreads>;

/// Writes 1 for the `wanted` blocks with the largest sums, those that are forced before all, and 0 for the others.
/// Equal sums: the lower index first. Forced ones may be more than `wanted`: then all of them are chosen, or if they
/// are more than `most`, as many with the largest sums, block 0 before all. Returns how many.
template <class Forced>
__device__ std::uint32_t choose_largest(std::uint8_t* chosen, const float* sums, std::uint32_t blocks,
                                        std::uint32_t wanted, std::uint32_t most, const Forced& forced,
                                        VerdictReduce& reduce) {
  std::uint32_t keys[kHeld];  // Sums have no sign, so that their bits are in their order. 0 behind the last block.
  std::uint32_t forced_here = 0;
#pragma unroll
  for (std::uint32_t i = 0; i < kHeld; ++i) {
    const std::uint32_t block = threadIdx.x + i * kVerdictThreads;
    keys[i] = block < blocks ? __float_as_uint(sums[block]) : 0;
    if (block < blocks && forced(block)) {
      keys[i] = 0xffff'ffffu;
      ++forced_here;
    }
  }
  const std::uint32_t all_forced = reduce.sum(forced_here);
  wanted = min(max(wanted, all_forced), most);
  if (all_forced > most) {
#pragma unroll
    for (std::uint32_t i = 0; i < kHeld; ++i) {
      const std::uint32_t block = threadIdx.x + i * kVerdictThreads;
      if (block == 0) continue;
      keys[i] = keys[i] == 0xffff'ffffu ? __float_as_uint(sums[block]) + 1 : 0;  // Others are below all of them.
    }
  }
  const auto count = [&](const auto& counts) {
    std::uint32_t here = 0;
#pragma unroll
    for (std::uint32_t i = 0; i < kHeld; ++i) {
      if (i * kVerdictThreads < blocks && counts(keys[i], threadIdx.x + i * kVerdictThreads)) ++here;
    }
    return reduce.sum(here);
  };
  std::uint32_t least = 0;  // The largest key that so many reach, two bits at a time.
  for (int shift = 30; shift >= 0; shift -= 2) {
    std::uint32_t reach = 0;  // Of the first two steps up: counts fit into 16 bits.
    std::uint32_t reach_third = 0;
#pragma unroll
    for (std::uint32_t i = 0; i < kHeld; ++i) {
      if (i * kVerdictThreads >= blocks) break;
      reach += (keys[i] >= (least | 1u << shift) ? 1u : 0u) + (keys[i] >= (least | 2u << shift) ? 1u << 16 : 0u);
      reach_third += keys[i] >= (least | 3u << shift) ? 1u : 0u;
    }
    const uint2 all = reduce.sum(make_uint2(reach, reach_third));
    const std::uint32_t up = all.y >= wanted ? 3 : all.x >> 16 >= wanted ? 2 : (all.x & 0xffffu) >= wanted ? 1 : 0;
    least |= up << shift;
  }
  const std::uint32_t ties = wanted - count([&](std::uint32_t other, std::uint32_t) { return other > least; });
  const std::uint32_t equal = count([&](std::uint32_t other, std::uint32_t) { return other == least; });
  std::uint32_t last_tie = kFlexMaxBlocks;
  if (equal > ties) {
    last_tie = largest_that<kVerdictBits>([&](std::uint32_t end) {
      return count([&](std::uint32_t other, std::uint32_t block) { return other == least && block < end; }) < ties;
    });
  }
#pragma unroll
  for (std::uint32_t i = 0; i < kHeld; ++i) {
    const std::uint32_t block = threadIdx.x + i * kVerdictThreads;
    if (block < blocks) chosen[block] = keys[i] > least || (keys[i] == least && block <= last_tie) ? 1 : 0;
  }
  return wanted;
}

/// Whether the mask of sinks and a window has this block of columns, and this block offset.
struct WindowBlocks {
  std::uint32_t columns;
  std::uint32_t offsets;
};
__device__ __forceinline__ WindowBlocks window_blocks(const StreamingPrefillSpec& spec, std::uint32_t blocks) {
  return {.columns = max(1u, min(prefill_blocks_of(spec.sinks), blocks)),
          .offsets = min(window_offsets(spec.window), blocks)};
}

/// By all threads: chosen [2, blocks] becomes those of the mask.
__device__ __forceinline__ void choose_window(std::uint8_t* chosen, const WindowBlocks& window, std::uint32_t blocks) {
  for (std::uint32_t i = threadIdx.x; i < blocks; i += blockDim.x) {
    chosen[i] = i < window.columns ? 1 : 0;
    chosen[blocks + i] = i < window.offsets ? 1 : 0;
  }
}

}  // namespace sluice::gpu::detail
