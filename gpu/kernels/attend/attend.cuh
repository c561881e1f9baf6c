#pragma once

#include "gpu/kernels/attend/attend_input.cuh"
#include "gpu/kernels/attend/attend_scaled.cuh"

/// Decode attention. The warps of a block take the slice's units in turns, so that together they read what lies
/// together. A warp takes 16 rows at a time: S^T = K Q^T and O^T += V^T P^T with tokens, then dims, as the rows
/// of the products and 8 query heads as their columns. K and V go from global memory straight to registers, as the
/// order of dims in a product is free: a lane loads 16-byte pieces, and whatever dims these are, Q's fragments and O's
/// rows follow. The next unit's K is loaded while this one's V is used, and the other way round.
///
/// Queries and weights are split into two terms of the KV dtype, so only K and V themselves are rounded to it.
namespace sluice::gpu::detail {

/// Bytes of one lane's row pieces and sizes that follow from head_dim.
template <int kDim>
struct RowShape {
  static constexpr int kRowBytes = 2 * kDim;
  static constexpr int kKeyPieces = kDim / 32;    ///< of a K row per lane: dims (4 j + t) * 8 .. + 7
  static constexpr int kValuePieces = (kDim + 63) / 64;  ///< of a V row per lane: dims (8 c + g) * 8 .. + 7
  static constexpr int kOutTiles = kDim / 16;     ///< tile 4 c + i holds a lane's dims (8 c + g) * 8 + 2 i, + 1
  static constexpr int kSlab = kDim < 128 ? kDim : 128;  ///< dims whose results lie in shared memory at once
  /// The last piece of V is half as long if 64 does not divide head_dim: dims 64 c + 4 g .. + 3, in two tiles.
  [[nodiscard]] static constexpr __device__ bool whole(int c) { return 64 * (c + 1) <= kDim; }
  static_assert(kDim % 32 == 0);
};

/// Shared memory: first row lists and queries, then, when these are done with, the warps' results.
template <int kDim, int kTiles>
struct alignas(16) AttendMemory {
  static constexpr int kOutPitch = RowShape<kDim>::kSlab + 4;
  struct Input {
    std::uint32_t words[kAttend.stage_words];
    typename QueryPiece<kDim, kTiles>::Fragments q;
  };
  union {
    Input input;
    float out[kAttend.warps][8][kOutPitch];  ///< one head tile at a time
    float weight[8 * kTiles][kAttend.max_slices / kTiles];
    float4 share[kThreads];
  };
};
static_assert(kAttend.stage_words % 4 == 0);

/// What a warp has attended so far; columns are heads 8 * tile + 2t and + 1.
template <int kDim, int kTiles>
struct Accumulator {
  float top[kTiles][2];   ///< largest score, to base 2; the same in all lanes with the same t
  float mass[kTiles][2];  ///< of this lane's tokens
  float out[kTiles][RowShape<kDim>::kOutTiles][4];
};

template <int kDim, bool kWhole>
__device__ void load_keys(std::uint32_t (&keys)[2][RowShape<kDim>::kKeyPieces][4], const AttendSlice& slice,
                          std::uint32_t row) {
  const std::uint32_t g = threadIdx.x % 32 / 4;
  const std::uint32_t t = threadIdx.x % 4;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const std::uint32_t mine = __shfl_sync(kAllLanes, row, static_cast<int>(g + 8 * half));
    const PlacedRow at = placed<kWhole>(slice, mine);
    const std::byte* from = at.base + std::uint64_t{at.row} * RowShape<kDim>::kRowBytes + t * 16;
#pragma unroll
    for (int j = 0; j < RowShape<kDim>::kKeyPieces; ++j) load_once(keys[half][j], from + j * 64, mine != kNoRow);
  }
}

/// The rows of tokens 2t, 2t + 1, 2t + 8, 2t + 9.
template <int kDim, bool kWhole>
__device__ void load_values(std::uint32_t (&values)[4][RowShape<kDim>::kValuePieces][4], const AttendSlice& slice,
                            std::uint32_t row) {
  const std::uint32_t g = threadIdx.x % 32 / 4;
  const std::uint32_t t = threadIdx.x % 4;
#pragma unroll
  for (int n = 0; n < 4; ++n) {
    const std::uint32_t mine = __shfl_sync(kAllLanes, row, static_cast<int>(2 * t + n % 2 + n / 2 * 8));
    const PlacedRow key = placed<kWhole>(slice, mine);
    const std::uint64_t at = std::uint64_t{key.row} + slice.page_tokens;
    const std::byte* from = key.base + at * RowShape<kDim>::kRowBytes + g * 16;
#pragma unroll
    for (int c = 0; c < RowShape<kDim>::kValuePieces; ++c) {
      if (RowShape<kDim>::whole(c)) {
        load_once(values[n][c], from + c * 128, mine != kNoRow);
      } else {
        load_half_once(values[n][c], from + c * 128 - g * 8, mine != kNoRow);
      }
    }
  }
}

/// Given scores instead of keys; they travel in the registers of the first keys, four per head tile.
template <int kDim, int kTiles>
__device__ void load_scores(std::uint32_t (&keys)[2][RowShape<kDim>::kKeyPieces][4], const AttendSlice& slice,
                            std::uint32_t unit) {
  const std::uint32_t g = threadIdx.x % 32 / 4;
  const std::uint32_t t = threadIdx.x % 4;
#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const std::uint32_t token = (unit - slice.octet_units()) * 16 + g + e / 2 * 8;
      const std::uint32_t head = 8 * tile + 2 * t + e % 2;
      const bool valid = token < slice.tokens && head < slice.heads;
      const float score = valid ? __ldg(slice.scores + std::uint64_t{token} * slice.group + head) : 0.f;
      keys[tile][0][e] = __float_as_uint(score * kLog2E);
    }
  }
}

/// c = K Q^T for the tokens g and g + 8 and the heads 2t and 2t + 1 of a tile.
template <class T, int kDim>
__device__ void score(float (&c)[4], const std::uint32_t (&keys)[2][RowShape<kDim>::kKeyPieces][4],
                      const uint4 (&q)[kDim / 32][2][32]) {
  const std::uint32_t lane = threadIdx.x % 32;
#pragma unroll
  for (int e = 0; e < 4; ++e) c[e] = 0.f;
#pragma unroll
  for (int j = 0; j < RowShape<kDim>::kKeyPieces; ++j) {
    const std::uint32_t first[4] = {keys[0][j][0], keys[1][j][0], keys[0][j][1], keys[1][j][1]};
    const std::uint32_t second[4] = {keys[0][j][2], keys[1][j][2], keys[0][j][3], keys[1][j][3]};
#pragma unroll
    for (int term = 1; term >= 0; --term) {
      const uint4 b = q[j][term][lane];
      mma<T>(c, first, b.x, b.y);
      mma<T>(c, second, b.z, b.w);
    }
  }
}

/// Soft-caps scores to base 2: the cap is to base 2, too.
__device__ inline void cap_scores(float (&scores)[4], float cap) {
#pragma unroll
  for (int e = 0; e < 4; ++e) scores[e] = cap * tanh_fast(scores[e] * (1.f / cap));
}

/// Heads attend a token if they are among its members, of which lane i and lane i + 16 know those of token i.
template <int kTiles>
__device__ void leave_out(float (&scores)[kTiles][4], std::uint32_t members) {
  const std::uint32_t g = threadIdx.x % 32 / 4;
  const std::uint32_t t = threadIdx.x % 4;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const std::uint32_t bits = __shfl_sync(kAllLanes, members, static_cast<int>(g + 8 * half));
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
      for (int column = 0; column < 2; ++column) {
        if ((bits >> (8 * tile + 2 * t + column) & 1u) == 0) scores[tile][2 * half + column] = -INFINITY;
      }
    }
  }
}

/// Adds to the scores of each token what lane i and lane i + 16 have for token i, as UnitRows::members.
template <int kTiles>
__device__ void correct(float (&scores)[kTiles][4], std::uint32_t corrections) {
  const std::uint32_t g = threadIdx.x % 32 / 4;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float more =
        kLog2E * __uint_as_float(__shfl_sync(kAllLanes, corrections, static_cast<int>(g + 8 * half)));
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      scores[tile][2 * half] += more;
      scores[tile][2 * half + 1] += more;
    }
  }
}

/// One or the other.
template <int kTiles>
__device__ void admit(float (&scores)[kTiles][4], std::uint32_t members, bool corrected) {
  if (corrected) {
    correct(scores, members);
  } else {
    leave_out(scores, members);
  }
}

/// Raises the tops to include this unit's scores and scales what there is down to them.
template <int kDim, int kTiles>
__device__ void raise_tops(Accumulator<kDim, kTiles>& sum, const float (&scores)[kTiles][4]) {
#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile) {
    float top[2];
#pragma unroll
    for (int column = 0; column < 2; ++column) {
      top[column] = fmaxf(scores[tile][column], scores[tile][2 + column]);
#pragma unroll
      for (int step = 4; step < 32; step *= 2) {
        top[column] = fmaxf(top[column], __shfl_xor_sync(kAllLanes, top[column], step));
      }
      top[column] = fmaxf(top[column], sum.top[tile][column]);
    }
    const bool raised = top[0] > sum.top[tile][0] || top[1] > sum.top[tile][1];
    if (!__any_sync(kAllLanes, raised)) continue;
    // Nothing attended yet: the top is -inf and so is what it is compared with, and inf - inf is not a number.
    const float scale[2] = {top[0] == -INFINITY ? 1.f : exp2_fast(sum.top[tile][0] - top[0]),
                            top[1] == -INFINITY ? 1.f : exp2_fast(sum.top[tile][1] - top[1])};
#pragma unroll
    for (int column = 0; column < 2; ++column) {
      sum.top[tile][column] = top[column];
      sum.mass[tile][column] *= scale[column];
    }
#pragma unroll
    for (int m = 0; m < RowShape<kDim>::kOutTiles; ++m) {
#pragma unroll
      for (int e = 0; e < 4; ++e) sum.out[tile][m][e] *= scale[e % 2];
    }
  }
}

/// Weights of one unit as B fragments, in two terms; adds their sum to the mass.
struct Weights {
  std::uint32_t high[2];
  std::uint32_t low[2];
};
template <class T, bool kHasScales>
__device__ Weights weigh(const float (&scores)[4], const float (&top)[2], float (&mass)[2],
                         [[maybe_unused]] const UnitScales<kHasScales>& scales) {
  float p[4];
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    // A maximum leaves out what is not a number; the weight must not.
    p[e] = scores[e] == -INFINITY ? 0.f : exp2_fast(scores[e] - top[e % 2]);
    mass[e % 2] += p[e];
    if constexpr (kHasScales) p[e] *= scales.of[e / 2].y;
  }
  Weights weights;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const Terms terms = split<T>(p[2 * half], p[2 * half + 1]);
    weights.high[half] = transpose(terms.high);
    weights.low[half] = transpose(terms.low);
  }
  return weights;
}

/// O^T += V^T P^T
template <class T, int kDim, int kTiles>
__device__ void add_values(Accumulator<kDim, kTiles>& sum, const Weights (&weights)[kTiles],
                           const std::uint32_t (&values)[4][RowShape<kDim>::kValuePieces][4]) {
#pragma unroll
  for (int c = 0; c < RowShape<kDim>::kValuePieces; ++c) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (4 * c + i >= RowShape<kDim>::kOutTiles) break;
      const std::uint32_t a[4] = {
          lower_halves(values[0][c][i], values[1][c][i]), upper_halves(values[0][c][i], values[1][c][i]),
          lower_halves(values[2][c][i], values[3][c][i]), upper_halves(values[2][c][i], values[3][c][i])};
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) {
        mma<T>(sum.out[tile][4 * c + i], a, weights[tile].low[0], weights[tile].low[1]);
        mma<T>(sum.out[tile][4 * c + i], a, weights[tile].high[0], weights[tile].high[1]);
      }
    }
  }
}

/// Whether the unit's tokens come with their scores.
template <bool kScored>
__device__ bool scored(const AttendSlice& slice, std::uint32_t unit) {
  return kScored && slice.corrected == 0 && slice.scores != nullptr && unit >= slice.octet_units();
}

/// Rows of K and V of a unit.
template <int kDim, bool kHasScales, bool kWhole = false>
__device__ void load_key_rows(std::uint32_t (&keys)[2][RowShape<kDim>::kKeyPieces][4], UnitScales<kHasScales>& scales,
                              const AttendSlice& slice, std::uint32_t row) {
  if constexpr (kHasScales) {
    load_scaled_keys<kDim>(keys, scales, slice, row);
  } else {
    load_keys<kDim, kWhole>(keys, slice, row);
  }
}
template <int kDim, bool kHasScales, bool kWhole = false>
__device__ void load_value_rows(std::uint32_t (&values)[4][RowShape<kDim>::kValuePieces][4], const AttendSlice& slice,
                                std::uint32_t row) {
  if constexpr (kHasScales) {
    load_scaled_values<kDim>(values, slice, row, [](int c) { return RowShape<kDim>::whole(c); });
  } else {
    load_values<kDim, kWhole>(values, slice, row);
  }
}

/// The rows of a unit, as lists in shared memory say.
struct StagedRows {
  const AttendSlice& slice;
  const std::uint32_t* words;  ///< see staged_lists
  __device__ UnitRows operator()(std::uint32_t unit) const { return rows_of(slice, staged_lists(slice, words), unit); }
};

/// Attends units of the slice, from the warp's first, `unit`, on, every `kStride`th of `units`. rows_at(unit) are a
/// unit's rows; the first one's are being loaded already. `cap`: of scores that are computed, to base 2; 0: none.
/// Kernels that are not `kCapped` know of none.
template <class T, int kDim, int kTiles, bool kScored, bool kCapped, bool kHasScales, bool kWhole = false,
          std::uint32_t kStride = kAttend.warps, class RowsAt>
__device__ void attend_units(Accumulator<kDim, kTiles>& sum, const AttendSlice& slice,
                             const typename QueryPiece<kDim, kTiles>::Fragments& q, const RowsAt& rows_at,
                             std::uint32_t unit, std::uint32_t units, UnitRows rows,
                             std::uint32_t (&keys)[2][RowShape<kDim>::kKeyPieces][4],
                             std::uint32_t (&values)[4][RowShape<kDim>::kValuePieces][4],
                             UnitScales<kHasScales>& scales, float cap) {
  for (; unit < units; unit += kStride) {
    float scores[kTiles][4];
    if constexpr (kHasScales) unfold(keys);
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      if (scored<kScored>(slice, unit)) {
#pragma unroll
        for (int e = 0; e < 4; ++e) scores[tile][e] = __uint_as_float(keys[tile][0][e]);
      } else {
        score<T, kDim>(scores[tile], keys, q[tile]);
        if constexpr (kHasScales) {
#pragma unroll
          for (int e = 0; e < 4; ++e) scores[tile][e] *= scales.of[e / 2].x;
        }
        if (kCapped && cap != 0.f) cap_scores(scores[tile], cap);
      }
    }
    const UnitScales<kHasScales> mine = scales;  // The next unit's come with its keys.
    const std::uint32_t next_unit = unit + kStride;
    const UnitRows next = next_unit < units ? rows_at(next_unit) : UnitRows{};
    if (scored<kScored>(slice, next_unit)) {
      load_scores<kDim, kTiles>(keys, slice, next_unit);
    } else {
      load_key_rows<kDim, kHasScales, kWhole>(keys, scales, slice, next.row);
    }
    admit(scores, rows.members, slice.corrected != 0);
    raise_tops(sum, scores);
    Weights weights[kTiles];
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile)
      weights[tile] = weigh<T>(scores[tile], sum.top[tile], sum.mass[tile], mine);
    if constexpr (kHasScales) unfold(values);
    add_values<T>(sum, weights, values);
    load_value_rows<kDim, kHasScales, kWhole>(values, slice, next.row);
    rows = next;
  }
}

}  // namespace sluice::gpu::detail
