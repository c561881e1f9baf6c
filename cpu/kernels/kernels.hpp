#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>
#include <vector>

#include "sluice/prefill.hpp"
#include "sluice/step/int4.hpp"
#include "sluice/tensor.hpp"

namespace sluice::cpu {

/// What the kernels of one instruction set compute: plain functions of plain pointers, single-threaded, which
/// neither allocate nor throw. `head_dim` is a multiple of 16 up to kMaxHeadDim, `group` is in [1, kMaxGroup].
/// Rows of K and V are given by their addresses, so that pages are looked up in one place, and are read once
/// for all query heads of the group.
inline constexpr std::uint32_t kMaxHeadDim = 640;  // kMostLatentDim, in whole vectors of words of codes.
inline constexpr std::uint32_t kMaxGroup = 32;
inline constexpr std::uint32_t kHeadDimUnit = 16;

/// Attention of one group over a list of rows, into one partial (see partial.hpp).
struct AttendRows {
  const float* q = nullptr;                 ///< [group, head_dim], not scaled; not read if `scores` is given
  float scale = 0.f;                        ///< what q.k is multiplied by
  float softcap = 0.f;                      ///< of scores that are computed, see AttentionShape; 0: none
  const std::byte* const* k = nullptr;      ///< [count] addresses of K rows
  std::uint64_t v_offset = 0;               ///< bytes from a token's K row to its V row
  const float* const* scales = nullptr;     ///< [count] addresses of a token's K and V scale, of a type that has some
  const std::uint32_t* members = nullptr;   ///< [count] or null: bit h unset masks (row, h) out
  const float* scores = nullptr;            ///< [count, group] scores, or null: computed from K
  const float* corrections = nullptr;       ///< [count] what is added to the scores of each row; null: nothing
  float* seen = nullptr;                    ///< [count, group] or null: receives the scores
  std::uint32_t count = 0;
  std::uint32_t group = 0;
  std::uint32_t head_dim = 0;
  float* out = nullptr;                     ///< [group, head_dim]
  float* lse = nullptr;                     ///< [group]
};

/// out[i, h] = the score of q[h].k[i], see AttentionShape.
struct ScoreRows {
  const float* q = nullptr;             ///< [group, head_dim]
  float scale = 0.f;
  float softcap = 0.f;
  const std::byte* const* k = nullptr;  ///< [count]
  const float* const* scales = nullptr;  ///< [count] as in AttendRows
  std::uint32_t count = 0;
  std::uint32_t group = 0;
  std::uint32_t head_dim = 0;
  float* out = nullptr;                 ///< [count, group]
};

/// out[h * out_stride + i] = sum_c max(q[h,c] * hi[c], q[h,c] * lo[c]) for the digests of count frames.
struct ScoreDigests {
  const float* q = nullptr;               ///< [group, head_dim]
  const std::byte* digests = nullptr;     ///< [frames, 2, head_dim]
  const std::uint32_t* frames = nullptr;  ///< [count]
  std::uint32_t count = 0;
  std::uint32_t group = 0;
  std::uint32_t head_dim = 0;
  float* out = nullptr;
  std::uint64_t out_stride = 0;
};

/// Digest of `rows` consecutive K rows: hi, then lo. NaN elements may be ignored or kept.
struct DigestRows {
  const std::byte* k = nullptr;   ///< [rows, head_dim]
  const float* scales = nullptr;  ///< [rows, 2] of a type that has some; the first count
  std::byte* out = nullptr;       ///< [2, head_dim], of a type with scales in bf16
  std::uint32_t rows = 0;        ///< at least 1
  std::uint32_t head_dim = 0;
};

/// Copies in codes of `rows` consecutive K rows, which become rows [first, first + rows) of `copy`; see CodeLayout.
struct CodesRows {
  const std::byte* k = nullptr;   ///< [rows, head_dim]
  const float* scales = nullptr;  ///< as in DigestRows
  std::byte* copy = nullptr;      ///< of a page
  std::uint32_t first = 0;
  const float* mean = nullptr;    ///< [head_dim] the mean key; null: 0
  std::uint32_t rows = 0;
  CodeLayout layout{};
};

/// out[i * token_stride + h * head_stride] = the estimate of q[h].k[i] * scale by its copy in codes, see CodeLayout.
struct ScoreInt4Rows {
  const float* q = nullptr;                  ///< [group, head_dim]
  const float* mean = nullptr;               ///< [head_dim] the mean key; null: 0
  float scale = 0.f;
  const std::byte* const* codes = nullptr;   ///< [count] addresses of rows of codes
  const std::byte* const* thirds = nullptr;  ///< [count] of 3 bits, of their bytes c; else null
  const std::byte* const* params = nullptr;  ///< [count] addresses of their scale and zero
  std::uint32_t count = 0;
  std::uint32_t group = 0;
  std::uint32_t head_dim = 0;
  float* out = nullptr;
  std::uint64_t token_stride = 0;
  std::uint64_t head_stride = 0;
};

/// Keys of one block of a prefill product; queries are rows of (token, head), all heads of a token together.
inline constexpr std::uint32_t kPrefillKeys = 64;

/// Causal attention of `rows` queries: row r, at position first + r / group, attends the keys key_begin <= j <=
/// position below key_end, the newest `reach` of them, those whose bit of 128 positions is set in `blocks`.
struct PrefillRows {
  const float* q = nullptr;                 ///< [rows, head_dim], scaled
  float softcap = 0.f;                      ///< see AttentionShape
  std::uint32_t reach = 0;                  ///< keys that a row sees, its own included; 0: all up to its own
  const std::byte* const* pages = nullptr;  ///< addresses of the pages from key_begin on, up to the last key
  std::uint64_t v_offset = 0;               ///< bytes from a token's K row to its V row
  const std::uint32_t* blocks = nullptr;    ///< bit J % 32 of word J / 32 for positions from 128 J on; null: all set
  std::uint32_t page_tokens = 0;
  std::uint32_t key_begin = 0;  ///< where a page begins
  std::uint32_t key_end = 0;
  std::uint32_t first = 0;
  std::uint32_t rows = 0;
  std::uint32_t group = 0;
  std::uint32_t head_dim = 0;
  float* out = nullptr;      ///< [rows, head_dim], 0 where no key is attended
  float* lse = nullptr;      ///< [rows] natural log of the sum of exponentials
  float* scratch = nullptr;  ///< prefill_scratch_floats(rows, head_dim), 64-byte aligned
};

/// The block's weights, its keys transposed, its values, and maximum and sum of every row.
[[nodiscard]] constexpr std::uint64_t prefill_scratch_floats(std::uint32_t rows, std::uint32_t head_dim) noexcept {
  return std::uint64_t{rows} * (kPrefillKeys + 2) + 2 * std::uint64_t{kPrefillKeys} * head_dim;
}

/// What a chunk's last queries, up to 128 per head, attend of the keys [key_begin, key_end): FlexPrefill's
/// representative attention, in two passes over the keys. A score that is not a number weighs nothing; an infinite one
/// counts as the largest finite.
struct RepresentativeRows {
  const float* q = nullptr;                 ///< [heads, kPrefillBlock, head_dim], scaled; `rows` of each head count
  const std::byte* const* pages = nullptr;  ///< addresses of all pages from position 0 on
  std::uint32_t page_tokens = 0;
  std::uint32_t key_begin = 0;  ///< a multiple of kPrefillBlock
  std::uint32_t key_end = 0;
  std::uint32_t first = 0;  ///< position of row 0, which attends the keys 0 .. first
  std::uint32_t rows = 0;
  std::uint32_t heads = 0;
  std::uint32_t head_dim = 0;
  /// [heads, kPrefillBlock] the first pass writes every row's maximum and its sum of exponentials relative to that; the
  /// second reads the maximum and 1 / sum over all keys, 0 for a row that is to be left out.
  float* top = nullptr;
  float* mass = nullptr;
  float* key_means = nullptr;  ///< [key blocks, head_dim] first pass: means of the keys of each block of 128
  float* columns = nullptr;    ///< [heads, column_stride] second pass: attention of every key, summed over the rows
  std::uint64_t column_stride = 0;  ///< at least the keys, rounded up to kPrefillKeys
  /// [heads, representative_diagonals(keys)] second pass: element c is the attention at distance
  /// first + 127 - key_begin - c, summed over the rows.
  float* diagonals = nullptr;
  float* scratch = nullptr;  ///< representative_scratch_floats(head_dim), 64-byte aligned
};

[[nodiscard]] constexpr std::uint64_t representative_diagonals(std::uint32_t keys) noexcept {
  return div_up(keys, kPrefillKeys) * kPrefillKeys + kPrefillBlock;
}
/// One head's scores of one block of keys, with room for a vector beside every row, and the keys transposed.
[[nodiscard]] constexpr std::uint64_t representative_scratch_floats(std::uint32_t head_dim) noexcept {
  return std::uint64_t{kPrefillBlock} * (kPrefillKeys + 16) + 16 + std::uint64_t{kPrefillKeys} * head_dim;
}

/// Centroids of one block of a nearest-centroid search.
inline constexpr std::uint32_t kCentroidTile = 64;

/// nearest[i] = the j with the largest keys[i].centroids[j] - half_norms[j], the lowest among equals; 0 if none is a
/// number above -infinity. Centroids come in tiles of kCentroidTile, each transposed; half_norms is infinite where the
/// last tile has none.
struct NearestRows {
  const float* keys = nullptr;        ///< [rows, head_dim]
  const float* centroids = nullptr;   ///< [tiles, head_dim, kCentroidTile]
  const float* half_norms = nullptr;  ///< [tiles, kCentroidTile]
  std::uint32_t rows = 0;
  std::uint32_t tiles = 0;
  std::uint32_t head_dim = 0;
  float* scratch = nullptr;  ///< [rows, kCentroidTile + 1]
  std::uint32_t* nearest = nullptr;
};

/// Kernels for one element type of K, V and digests. They all accumulate in float32.
struct ElementKernels {
  void (*attend)(const AttendRows& args) noexcept;
  void (*score)(const ScoreRows& args) noexcept;
  void (*make_codes)(const CodesRows& args) noexcept;
  void (*digest_box)(const DigestRows& args) noexcept;
  void (*digest_cuboid_mean)(const DigestRows& args) noexcept;
  void (*prefill)(const PrefillRows& args) noexcept;
  void (*representative_masses)(const RepresentativeRows& args) noexcept;
  void (*representative_sums)(const RepresentativeRows& args) noexcept;
  // Null for a type with scales, which digests and tensors never have:
  /// `count` elements, a multiple of kHeadDimUnit.
  void (*widen)(const std::byte* in, float* out, std::size_t count) noexcept = nullptr;
  /// Rounds to nearest even.
  void (*narrow)(const float* in, std::byte* out, std::size_t count) noexcept = nullptr;
  void (*score_digests)(const ScoreDigests& args) noexcept = nullptr;
};

/// Rows with scales, see E4m3, of `count` elements, a multiple of kHeadDimUnit.
struct E4m3Kernels {
  void (*encode)(const float* in, std::byte* codes, float* scale, std::size_t count) noexcept;
  void (*decode)(const std::byte* codes, float scale, float* out, std::size_t count) noexcept;
};

/// One instruction set's kernels. There are as many objects as variants were built; they live forever.
struct Kernels {
  const char* name = "";      ///< "generic", "avx2" or "avx512"
  ElementKernels element[4];  ///< by DType
  E4m3Kernels e4m3;
  void (*score_int4)(const ScoreInt4Rows& args) noexcept;
  /// out[i] = exp(x[i] - top), for x[i] <= top; 1 where they are equal, even if infinite, and NaN where x[i] is.
  void (*weigh)(const float* x, std::size_t count, float top, float* out) noexcept;
  void (*nearest)(const NearestRows& args) noexcept = nullptr;
};

/// Variants that this build has and this CPU and operating system can run; the first is "generic".
[[nodiscard]] std::vector<const Kernels*> available_kernels();

/// @throws Error{Errc::unsupported} naming the available variants if `name` is not one of them.
[[nodiscard]] const Kernels& find_kernels(std::string_view name);

/// What the environment variable SLUICE_CPU_ISA names, or else the variant that was fastest in a race of a few
/// milliseconds on this machine. Decided once per process; safe to call from several threads.
/// @throws Error{Errc::unsupported} as find_kernels, at every call while the variable is wrong.
[[nodiscard]] const Kernels& fastest_kernels();

}  // namespace sluice::cpu
