#pragma once

#include <cstdint>
#include <type_traits>

#include "gpu/kernels/index/int4.hpp"
#include "gpu/kernels/index/rotate.cuh"
#include "gpu/kernels/mma.cuh"
#include "gpu/kernels/select/foresight.cuh"
#include "gpu/kernels/select/score_cut.hpp"

/// How rows of copies in codes are shared by thread blocks, where they lie, and how queries are staged for them.
namespace sluice::gpu::score_int4 {

inline constexpr std::uint32_t kWarp = 32;
inline constexpr std::uint32_t kThreads = 256;
inline constexpr std::uint32_t kWarps = kThreads / kWarp;
/// Keys of half a fragment, an octet: they lie in one page, as page_tokens is a multiple. A warp multiplies four octets
/// at a time, two of them by one product; a lane then has the scores of one key of each.
inline constexpr std::uint32_t kRows = 8;
inline constexpr std::uint32_t kWarpOctets = 4;
inline constexpr std::uint32_t kPairs = kWarpOctets / 2;
inline constexpr std::uint32_t kWarpTokens = kRows * kWarpOctets;
static_assert(kBlockTokens == kWarps * kWarpTokens);
inline constexpr std::uint32_t kHeads = 8;                      ///< query heads that are staged at once
inline constexpr std::uint32_t kTileHeads = 4;                  ///< query heads of a fragment, which has 8 columns
inline constexpr std::uint32_t kOctets = kBlockTokens / kRows;  ///< of a chunk
static_assert(kWarps == kHeads, "every warp stages one head");
/// use(std::integral_constant) of the bits of a code.
template <class Use>
void with_bits(std::uint32_t bits, const Use& use) {
  if (bits == kCodeBits) return use(std::integral_constant<std::uint32_t, kCodeBits>{});
  use(std::integral_constant<std::uint32_t, kFewCodeBits>{});
}

inline constexpr int kQueryBits = 22;  ///< of a query's numbers, beside the sign

/// Which of an octet's rows are there, in bytes: the first, and the one behind the last. One compare tells whether all
/// of a warp's are.
using Rows = std::uint16_t;
inline constexpr Rows kAllRows = kRows << 8;
/// Where an octet lies, counted from the first copy in units of 16 bytes: less than 64 GiB away.
inline constexpr std::uint32_t kUnit = 16;
struct alignas(16) Places {
  std::uint32_t codes[kWarpOctets];
};

template <std::uint32_t kHeadDim>
struct Shared {
  ScoreInt4Task task;
  std::int32_t q[kHeads][kHeadDim];  ///< in (-2^22, 2^22)
  float unit[kHeads];                ///< what a product has to be multiplied by
  float sum[kHeads];                 ///< over the channels, scaled
  float shift[kHeads];               ///< its product with the mean key, scaled
  float least[kHeads];               ///< scores from here on are candidates
  std::uint32_t draw[kHeads];        ///< keys of the heads' draws, if there are any
  /// Of each octet of the block's chunks. Those that are not there lie at the beginning.
  Places codes[kMostChunks * kOctets / kWarpOctets];
  std::uint32_t params[kMostChunks * kOctets];  ///< likewise
  alignas(8) Rows rows[kMostChunks * kOctets];
};

/// What one thread block scores of a row of pages laid end to end; or the tail of these heads.
struct Part {
  std::uint32_t first_head, heads;
  std::uint32_t count;   ///< tokens of the row's pages
  std::uint32_t stride;  ///< values of the row
  std::uint32_t block;   ///< of the `blocks` that share its chunks
  std::uint32_t blocks;
  std::uint32_t visible = kNone;  ///< values from here on are those of nothing: their copies are on their way

  [[nodiscard]] __device__ std::uint32_t chunk(std::uint32_t i) const { return block + i * blocks; }
  /// Of a warp in turn `i`: its first token, and its first octet among the block's.
  [[nodiscard]] __device__ std::uint32_t first(std::uint32_t i) const {
    return chunk(i) * kBlockTokens + threadIdx.x / kWarp * kWarpTokens;
  }
  [[nodiscard]] __device__ std::uint32_t octet(std::uint32_t i) const {
    return i * kOctets + threadIdx.x / kWarp * kWarpOctets;
  }
};

__device__ __forceinline__ Part part_of(const ScoreInt4Task& task, std::uint32_t group, std::uint32_t page_tokens,
                                        const Cut& cut) {
  const bool lists = task.lists != nullptr;
  Part part{.first_head = lists ? blockIdx.z : 0,
            .heads = lists ? 1 : group,
            .count = task.estimates(page_tokens),
            .stride = task.row(page_tokens),
            .block = blockIdx.x,
            .blocks = cut.blocks};
  if (!lists && blockIdx.z != 0) part.heads = part.count = 0;
  return part;
}

/// Where the octets of a part lie, one chunk's behind the other's: the loop over them divides by nothing.
template <std::uint32_t kHeadDim>
__device__ void stage_octets(Shared<kHeadDim>& s, const Part& part, const CodeLayout& layout, std::uint32_t chunks) {
  const std::uint32_t page_tokens = layout.page_tokens;
  for (std::uint32_t i = threadIdx.x; i < chunks * kOctets; i += kThreads) {
    const std::uint32_t token = part.chunk(i / kOctets) * kBlockTokens + i % kOctets * kRows;
    Rows rows = 0;
    std::uint64_t codes = 0;
    std::uint64_t params = 0;
    if (token < part.count) {
      const std::uint32_t page = token / page_tokens;
      const std::uint32_t row = token - page * page_tokens;
      const PageRun run = s.task.run(part.first_head, page, page_tokens);
      const auto in_octet = [&](std::uint32_t at) { return min(max(at, row) - row, kRows); };
      const std::uint32_t end = in_octet(min(run.end, part.visible - min(part.visible, token - row)));
      if (in_octet(run.begin) < end) {
        rows = static_cast<Rows>(in_octet(run.begin) | end << 8);
        const std::uint64_t copy = s.task.frames[run.page] * layout.page_bytes();
        codes = copy + row * layout.row_bytes();
        params = copy + layout.params_offset() + row * CodeLayout::kParamBytes;
      }
    }
    s.rows[i] = rows;
    s.codes[i / kWarpOctets].codes[i % kWarpOctets] = static_cast<std::uint32_t>(codes / kUnit);
    s.params[i] = static_cast<std::uint32_t>(params / kUnit);
  }
}

/// Where queries are read, float32: [heads, kHeadDim].
template <std::uint32_t kHeadDim>
struct QueryRows {
  const float* q;
  [[nodiscard]] __device__ float operator()(std::uint32_t head, std::uint32_t channel) const {
    return q[std::uint64_t{head} * kHeadDim + channel];
  }
};

/// A query as a warp reads it: in registers until it is staged, as it is requested early.
template <std::uint32_t kHeadDim>
struct QueryRow {
  float values[kHeadDim / kWarp];
  /// Of head first + the warp's number; heads beyond the last are 0.
  template <class Queries>
  __device__ __forceinline__ void load(const Queries& queries, std::uint32_t first, std::uint32_t heads) {
    const std::uint32_t head = threadIdx.x / kWarp;
#pragma unroll
    for (std::uint32_t i = 0; i < kHeadDim / kWarp; ++i)
      values[i] = head < heads ? queries(first + head, i * kWarp + threadIdx.x % kWarp) : 0.f;
  }
};

/// A center of keys, see Foresight, as a warp reads it: likewise. Nothing unless `kForesees`.
template <std::uint32_t kHeadDim, bool kForesees>
struct CenterRow {
  float values[kForesees ? kHeadDim / kWarp : 1] = {};
  __device__ __forceinline__ void load(const float* center) {
    if constexpr (kForesees) {
#pragma unroll
      for (std::uint32_t i = 0; i < kHeadDim / kWarp; ++i) values[i] = center[i * kWarp + threadIdx.x % kWarp];
    }
  }
};

/// The mean key of the sequence likewise; null: 0.
template <std::uint32_t kHeadDim>
struct MeanRow {
  float values[kHeadDim / kWarp];
  __device__ __forceinline__ void load(const float* mean) {
#pragma unroll
    for (std::uint32_t i = 0; i < kHeadDim / kWarp; ++i)
      values[i] = mean != nullptr ? mean[i * kWarp + threadIdx.x % kWarp] : 0.f;
  }
};

/// A warp stages its query, rotated. Returns what bounds of its scores go by, if `kForesees`.
template <std::uint32_t kHeadDim, bool kForesees>
__device__ foresight::QueryMeasure stage_query(Shared<kHeadDim>& s, const QueryRow<kHeadDim>& query,
                                               const MeanRow<kHeadDim>& mean,
                                               const CenterRow<kHeadDim, kForesees>& center, float scale) {
  const std::uint32_t head = threadIdx.x / kWarp;
  const std::uint32_t lane = threadIdx.x % kWarp;
  const float(&values)[kHeadDim / kWarp] = query.values;
  float most = 0.f;
  float sum = 0.f;
  float shift = 0.f;
  float squares = 0.f;
  float along = 0.f;
  float rotated[kHeadDim / kWarp];
#pragma unroll
  for (std::uint32_t i = 0; i < kHeadDim / kWarp; ++i) rotated[i] = values[i];
  detail::rotate(rotated, kHeadDim);
#pragma unroll
  for (std::uint32_t i = 0; i < kHeadDim / kWarp; ++i) {
    most = fmaxf(most, fabsf(rotated[i]));
    sum += rotated[i];
    shift += values[i] * mean.values[i];
    squares += values[i] * values[i];
    if constexpr (kForesees) along += values[i] * center.values[i];
  }
#pragma unroll
  for (int step = kWarp / 2; step > 0; step /= 2) {
    most = fmaxf(most, __shfl_xor_sync(detail::kAllLanes, most, step));
    sum += __shfl_xor_sync(detail::kAllLanes, sum, step);
    shift += __shfl_xor_sync(detail::kAllLanes, shift, step);
    squares += __shfl_xor_sync(detail::kAllLanes, squares, step);
    if constexpr (kForesees) along += __shfl_xor_sync(detail::kAllLanes, along, step);
  }
  const int exponent = min(max(static_cast<int>(__float_as_uint(most) >> 23) - 126, -100), 100);
  // All are below 1 by this power of two, and what is left of one behind 22 bits is about a rounding error of float.
  const float up = __int_as_float((127 + kQueryBits - exponent) << 23);
  constexpr auto kMost = static_cast<float>((1 << kQueryBits) - 1);
#pragma unroll
  for (std::uint32_t i = 0; i < kHeadDim / kWarp; ++i)
    s.q[head][i * kWarp + lane] = __float2int_rn(fminf(fmaxf(rotated[i] * up, -kMost), kMost));
  if (lane == 0) {
    s.unit[head] = __int_as_float((127 + exponent - kQueryBits) << 23) * scale;
    s.sum[head] = sum * scale;
    s.shift[head] = shift * scale;
  }
  return {.length = sqrtf(squares), .center = along * scale};
}

/// Whether all rows of a warp's octets are there.
template <std::uint32_t kHeadDim>
[[nodiscard]] __device__ __forceinline__ bool whole(const Shared<kHeadDim>& s, std::uint32_t number) {
  constexpr std::uint64_t kAll = 0x0001'0001'0001'0001u * std::uint64_t{kAllRows};
  static_assert(kWarpOctets * sizeof(Rows) == sizeof kAll);
  return *reinterpret_cast<const std::uint64_t*>(&s.rows[number]) == kAll;
}
/// The row of each octet whose scores a lane has.
[[nodiscard]] __device__ __forceinline__ std::uint32_t lane_row() { return threadIdx.x % kWarp / kTileHeads; }
/// Whether that is there in octet `octet` of a warp's.
template <std::uint32_t kHeadDim>
[[nodiscard]] __device__ __forceinline__ bool there(const Shared<kHeadDim>& s, std::uint32_t number,
                                                    std::uint32_t octet) {
  const Rows rows = s.rows[number + octet];
  return lane_row() >= (rows & 0xffu) && lane_row() < rows >> 8;
}

/// The query head of a fragment whose scores a lane has.
[[nodiscard]] __device__ __forceinline__ std::uint32_t lane_head() { return threadIdx.x % kTileHeads; }
/// The lanes that have scores of the same one.
[[nodiscard]] __device__ __forceinline__ std::uint32_t lanes_of_head() { return 0x1111'1111u << lane_head(); }

/// What a lane needs to know of the query head whose scores it has of a fragment.
struct LaneHead {
  bool there;
  float unit, sum, shift, least;  ///< see Shared
  std::uint32_t draw;
  float* out;              ///< of the part's first token that is the lane's
};

}  // namespace sluice::gpu::score_int4
