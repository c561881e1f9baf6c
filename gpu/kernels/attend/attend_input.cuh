#pragma once

#include "gpu/kernels/attend/attend.hpp"
#include "gpu/kernels/attend/attend_loads.cuh"
#include "gpu/kernels/mma.cuh"

/// What a thread block of decode attention has to know before it can attend: its slice, its row lists, its queries.
/// A launch is short, and every trip counts, above all those over the link. So the jobs come with the launch, the
/// queries and each warp's first rows are asked for together, and the rest of the lists comes while the first K and V
/// are on their way.
namespace sluice::gpu::detail {

inline constexpr std::uint32_t kNoRow = 0xffff'ffffu;
/// Of a row of a launch that finds its rows itself: it is counted from AttendSlice::far_base.
inline constexpr std::uint32_t kFarRow = 0x8000'0000u;
inline constexpr float kLn2 = 0.69314718055994530942f;
inline constexpr int kThreads = 32 * kAttend.warps;

/// This thread block's slice, of one thread's making.
__device__ inline AttendSlice slice_of_block(const AttendArgs& args) {
  const std::uint32_t at = args.job_of[blockIdx.x];
  AttendJob job;
  if (args.jobs != nullptr) {
    job = args.jobs[at];
  } else {
    job = args.inline_jobs[at];
  }
  return cut(job, blockIdx.x - job.first_slice);
}

/// What a row is counted from, and its number. `kWhole`: of such a launch.
struct PlacedRow {
  const std::byte* base;
  std::uint32_t row;
};
template <bool kWhole>
__device__ PlacedRow placed(const AttendSlice& slice, std::uint32_t row) {
  if constexpr (kWhole) {
    if ((row & kFarRow) != 0) return {slice.far_base, row & ~kFarRow};
  }
  return {slice.base, row};
}

/// Where a slice's row lists are.
struct RowLists {
  const std::uint32_t* pages;
  const std::uint32_t* pieces;
  const std::uint32_t* tokens;
  const std::uint32_t* members;
};
__device__ inline RowLists pinned_lists(const AttendSlice& slice) {
  return {.pages = slice.lists + slice.first_page,
          .pieces = slice.lists + slice.first_piece,
          .tokens = slice.lists + slice.first_token,
          .members = slice.lists + slice.first_member};
}
__device__ inline RowLists staged_lists(const AttendSlice& slice, const std::uint32_t* words) {
  const std::uint32_t* const pieces = words + slice.pages;
  const std::uint32_t* const tokens = pieces + 2 * slice.pieces;
  return {.pages = words, .pieces = pieces, .tokens = tokens, .members = tokens + slice.tokens};
}

__device__ inline void stage_list(std::uint32_t* to, const std::uint32_t* from, std::uint32_t count) {
#pragma unroll 1
  for (std::uint32_t i = threadIdx.x; i < count; i += kThreads) copy_word_async(to + i, from + i);
}

/// Starts copying the slice's row lists to shared memory.
__device__ inline void stage_lists(const AttendSlice& slice, std::uint32_t* words) {
  const RowLists from = pinned_lists(slice);
  stage_list(words, from.pages, slice.pages);
  words += slice.pages;
  stage_list(words, from.pieces, 2 * slice.pieces);
  words += 2 * slice.pieces;
  stage_list(words, from.tokens, slice.tokens);
  words += slice.tokens;
  if (slice.has_members != 0) stage_list(words, from.members, slice.tokens);
  commit_copies();
}

/// A unit's rows, one per lane (lane i and lane i + 16 hold row i), and the heads that attend it. Where rows are corrected
/// all heads attend those that are there, and `members` are the bits of what is added to their scores.
struct UnitRows {
  std::uint32_t row = kNoRow;
  std::uint32_t members = 0;
};
/// Of a row that is not there: -infinity.
inline constexpr std::uint32_t kNoCorrection = 0xff80'0000u;

/// The row of unit `unit` that this lane is in charge of.
__device__ inline UnitRows rows_of(const AttendSlice& slice, const RowLists& lists, std::uint32_t unit) {
  asm volatile("" ::: "memory");  // Reads the slice anew: a dozen registers cost more than as many loads per unit.
  const std::uint32_t i = threadIdx.x % 16;
  const std::uint32_t octet_units = slice.octet_units();
  UnitRows rows;
  if (unit < octet_units) {
    const std::uint32_t octet = 2 * unit + i / 8;
    if (octet < slice.page_octets) {
      const std::uint32_t at = octet + slice.octet_skip;
      const std::uint32_t page = at >> slice.octet_shift;
      rows = {lists.pages[page] + (at - (page << slice.octet_shift)) * 8 + i % 8, kAllLanes};
    } else if (octet < slice.octets()) {
      const std::uint32_t* piece = lists.pieces + 2 * (octet - slice.page_octets);
      const std::uint32_t first = piece[0];
      if (i % 8 < piece[1]) rows = {first + i % 8, kAllLanes};
    }
    return rows;
  }
  const std::uint32_t token = (unit - octet_units) * 16 + i;
  if (slice.corrected != 0) {
    const bool there = token < slice.tokens;
    rows = {there ? lists.tokens[token] : kNoRow, there ? __float_as_uint(__ldg(slice.scores + token)) : kNoCorrection};
  } else if (token < slice.tokens) {
    const std::uint32_t row = lists.tokens[token];
    rows = {row, slice.has_members != 0 ? lists.members[token] >> slice.first_head : kAllLanes};
  }
  return rows;
}

/// Eight elements of a query, one thread's share of them all: as B fragments they match how K lies in registers.
template <int kDim, int kTiles>
struct QueryPiece {
  static constexpr int kPieces = kDim / 32;
  static constexpr int kCount = kTiles * kPieces * 32;
  static_assert(kCount <= kThreads);
  using Fragments = uint4[kTiles][kPieces][2][32];  ///< [head tile][piece][term][lane]: four registers

  float q[8];

  __device__ static int piece() { return static_cast<int>(threadIdx.x) / 32 % kPieces; }
  __device__ static int tile() { return static_cast<int>(threadIdx.x) / 32 / kPieces; }

  __device__ void load(const AttendSlice& slice) {
    const std::uint32_t lane = threadIdx.x % 32;
    const std::uint32_t head = 8 * static_cast<std::uint32_t>(tile()) + lane / 4;
    const bool valid = threadIdx.x < kCount && slice.q != nullptr && head < slice.heads;
    const float* const from = slice.q + head * kDim + (4 * piece() + lane % 4) * 8;
#pragma unroll
    for (int e = 0; e < 8; ++e) q[e] = load_float(from + e, valid);
  }

  /// Scales for exp2 and splits into two terms.
  template <class T>
  __device__ void store(Fragments& to, float scale) const {
    if (threadIdx.x >= kCount) return;
    Terms terms[4];
#pragma unroll
    for (int e = 0; e < 4; ++e) terms[e] = split<T>(q[2 * e] * scale, q[2 * e + 1] * scale);
    const int lane = static_cast<int>(threadIdx.x % 32);
    to[tile()][piece()][0][lane] = make_uint4(terms[0].high, terms[1].high, terms[2].high, terms[3].high);
    to[tile()][piece()][1][lane] = make_uint4(terms[0].low, terms[1].low, terms[2].low, terms[3].low);
  }
};

}  // namespace sluice::gpu::detail
