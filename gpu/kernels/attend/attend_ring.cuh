#pragma once

#include "gpu/kernels/attend/attend.cuh"

/// Decode attention with K and V on their way through shared memory. Each warp has slots of its own, K and V of a unit
/// in turns, so that warps wait for nobody: while it works on one slot, the others are being filled. What is in flight
/// takes no registers, and lines are asked for as a whole, which registers cannot: there a lane loads what it
/// multiplies.
namespace sluice::gpu::detail {

/// A warp's slots of 16 rows. Which 16-byte chunk of a row lies where depends on the row, so that lanes read chunks of
/// K and V as the products need them without meeting in a bank.
template <int kDim>
struct RowRing {
  static constexpr std::uint32_t kChunks = kDim / 8;
  static constexpr std::uint32_t kPitch = (kChunks + 7) / 8 * 128;  ///< bytes
  static constexpr std::uint32_t kSlotBytes = 16 * kPitch;

  std::uint32_t base;  ///< address in shared memory

  /// Rows 2 i and 2 i + 1 differ in bit 2, for K; even rows, and odd ones, differ in bits 1 and 2, for V.
  [[nodiscard]] __device__ static std::uint32_t place(std::uint32_t row, std::uint32_t chunk) {
    return row * kPitch + (chunk ^ (row / 2 % 4 * 2) ^ (row % 2 * 4)) * 16;
  }

  /// Starts filling a slot with a unit's rows, counted from `from`; zeros for those that are none.
  __device__ void fill(std::uint32_t slot, const std::byte* from, std::uint32_t row) const {
#pragma unroll
    for (std::uint32_t k = 0; k < 16 * kChunks / 32; ++k) {
      const std::uint32_t i = 32 * k + threadIdx.x % 32;
      const std::uint32_t mine = __shfl_sync(kAllLanes, row, static_cast<int>(i / kChunks));
      copy_async_once(base + slot * kSlotBytes + place(i / kChunks, i % kChunks),
                      from + std::uint64_t{mine} * RowShape<kDim>::kRowBytes + i % kChunks * 16, mine != kNoRow);
    }
  }

  /// As load_keys gives them.
  __device__ void read_keys(std::uint32_t (&keys)[2][RowShape<kDim>::kKeyPieces][4], std::uint32_t slot) const {
    const std::uint32_t g = threadIdx.x % 32 / 4;
    const std::uint32_t t = threadIdx.x % 4;
#pragma unroll
    for (std::uint32_t half = 0; half < 2; ++half) {
#pragma unroll
      for (std::uint32_t j = 0; j < RowShape<kDim>::kKeyPieces; ++j)
        load_shared4(keys[half][j], base + slot * kSlotBytes + place(g + 8 * half, 4 * j + t));
    }
  }

  /// As load_values gives them.
  __device__ void read_values(std::uint32_t (&values)[4][RowShape<kDim>::kValuePieces][4], std::uint32_t slot) const {
    const std::uint32_t g = threadIdx.x % 32 / 4;
    const std::uint32_t t = threadIdx.x % 4;
#pragma unroll
    for (std::uint32_t n = 0; n < 4; ++n) {
      const std::uint32_t row = 2 * t + n % 2 + n / 2 * 8;
      const std::uint32_t at = base + slot * kSlotBytes;
#pragma unroll
      for (std::uint32_t c = 0; c < RowShape<kDim>::kValuePieces; ++c) {
        if (RowShape<kDim>::whole(static_cast<int>(c))) {
          load_shared4(values[n][c], at + place(row, 8 * c + g));
        } else {
          load_shared2(values[n][c], at + place(row, 8 * c + g / 2) + g % 2 * 8);
        }
      }
    }
  }
};

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
