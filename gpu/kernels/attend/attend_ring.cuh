#pragma once

#include "gpu/kernels/attend/row_ring.cuh"

/// Decode attention with K and V on their way through shared memory. Each warp has slots of its own, K and V of a unit
/// in turns, so that warps wait for nobody: while it works on one slot, the others are being filled. What is in flight
/// takes no registers, and lines are asked for as a whole, which registers cannot: there a lane loads what it
/// multiplies.
namespace sluice::gpu::detail {

/// How many slots are being filled while one is read, an even number, and what thread blocks have in shared memory.
template <int kDim, int kTiles>
struct RingMemory {
  static constexpr std::uint32_t kBlocks = kTiles == 1 && kDim <= 128 ? kAttend.blocks_per_sm : 1;
  struct alignas(16) Input {
    std::uint32_t words[kAttend.ring_words];
    typename QueryPiece<kDim, kTiles>::Fragments q;
  };
  [[nodiscard]] static constexpr std::uint32_t bytes(std::uint32_t ahead) {
    return sizeof(Input) + kAttend.warps * (ahead + 1) * RowRing<kDim>::kSlotBytes;
  }
  /// A block's part of a multiprocessor's, less what the system and variables take.
  static constexpr std::uint32_t kRoom = kRingSharedBytes / kBlocks - 3072;
  static constexpr std::uint32_t kAhead = bytes(4) <= kRoom ? 4 : 2;
  static constexpr std::uint32_t kBytes = bytes(kAhead);
  static_assert(kBytes <= kRoom && sizeof(AttendMemory<kDim, kTiles>) <= kBytes);
  static_assert(kAttend.ring_words % 4 == 0);
};

/// Attends a slice. The lists of its rows are in pinned memory and were there before the launch: they are read before
/// the kernel before has ended. `cap` as in attend_units. All threads; what lies in `input` and in the rings is done
/// with when all are back.
template <class T, int kDim, int kTiles>
__device__ void attend_through_ring(Accumulator<kDim, kTiles>& sum, const AttendSlice& slice,
                                    typename RingMemory<kDim, kTiles>::Input& input, const RowRing<kDim>& ring,
                                    float score_scale, float cap) {
  constexpr std::uint32_t kAhead = RingMemory<kDim, kTiles>::kAhead;
  constexpr std::uint32_t kUnits = kAhead / 2;  // whose rows are on their way
  constexpr std::uint32_t kStride = kAttend.warps;
  const std::uint32_t warp = threadIdx.x / 32;
  const std::uint32_t units = slice.units();
  stage_lists(slice, input.words);
  UnitRows rows[kUnits + 1];
#pragma unroll
  for (std::uint32_t i = 0; i < kUnits; ++i) {
    const std::uint32_t unit = warp + i * kStride;
    if (unit < units) rows[i] = rows_of(slice, pinned_lists(slice), unit);
  }
  wait_for_kernel_before();
  const std::byte* const keys_from = slice.base;
  const std::byte* const values_from = keys_from + std::uint64_t{slice.page_tokens} * RowShape<kDim>::kRowBytes;
  // Groups of copies are counted, so there is one for each slot, with copies or without.
#pragma unroll
  for (std::uint32_t i = 0; i < kUnits; ++i) {
    const bool there = warp + i * kStride < units;
    if (there) ring.fill(2 * i, keys_from, rows[i].row);
    commit_copies();
    if (there) ring.fill(2 * i + 1, values_from, rows[i].row);
    commit_copies();
  }
  QueryPiece<kDim, kTiles> query;
  query.load(slice);
  query.template store<T>(input.q, score_scale * kLog2E);
  wait_copies<kAhead>();  // The lists have come.
  __syncthreads();

  clear(sum);
  const StagedRows rows_at{slice, input.words};
  const auto after = [](std::uint32_t slot) { return slot == kAhead ? 0 : slot + 1; };
  const auto before = [](std::uint32_t slot) { return slot == 0 ? kAhead : slot - 1; };
  std::uint32_t slot = 0;
#pragma unroll 1
  for (std::uint32_t unit = warp; unit < units; unit += kStride) {
    const std::uint32_t next = unit + kUnits * kStride;
    rows[kUnits] = next < units ? rows_at(next) : UnitRows{};
    __syncwarp();  // All lanes have read the slot before, V of the last unit.
    if (next < units) ring.fill(before(slot), keys_from, rows[kUnits].row);
    commit_copies();
    wait_copies<kAhead>();
    __syncwarp();
    float scores[kTiles][4];
    {
      std::uint32_t keys[2][RowShape<kDim>::kKeyPieces][4];
      ring.read_keys(keys, slot);
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) {
        score<T, kDim>(scores[tile], keys, input.q[tile]);
        if (cap != 0.f) cap_scores(scores[tile], cap);
      }
    }
    __syncwarp();  // Likewise K of this one.
    if (next < units) ring.fill(slot, values_from, rows[kUnits].row);
    commit_copies();
    slot = after(slot);
    leave_out(scores, rows[0].members);
    raise_tops(sum, scores);
    Weights weights[kTiles];
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile)
      weights[tile] = weigh<T>(scores[tile], sum.top[tile], sum.mass[tile], UnitScales<false>{});
    wait_copies<kAhead>();
    __syncwarp();
    std::uint32_t values[4][RowShape<kDim>::kValuePieces][4];
    ring.read_values(values, slot);
    add_values<T>(sum, weights, values);
    slot = after(slot);
#pragma unroll
    for (std::uint32_t i = 0; i < kUnits; ++i) rows[i] = rows[i + 1];
  }
}

}  // namespace sluice::gpu::detail
