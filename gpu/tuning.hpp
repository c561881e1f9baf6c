#pragma once

#include <cstdint>
#include <string>

#include "gpu/head_dims.hpp"
#include "sluice/prefill.hpp"
#include "sluice/shape.hpp"
#include "sluice/step/page.hpp"

/// Sizes that the attention kernels are compiled with, and the one answer to "which kernel?".
namespace sluice::gpu {

/// Query heads that share a KV head, at most: group members are kept as bits.
inline constexpr std::uint32_t kMaxGroup = 32;

/// Decode attention. A unit is 16 rows, one step of a warp; a slice is what one thread block attends.
struct AttendTuning {
  std::uint32_t warps = 8;            ///< per thread block; each keeps up to 16 rows of K and V in flight
  std::uint32_t blocks_per_sm = 2;    ///< one with two head tiles, given scores or head_dim > 128: registers
  std::uint32_t whole_units = 16;     ///< tasks up to this are one slice: merging would cost more than it saves
  std::uint32_t min_slice_units = 8;  ///< one per warp
  std::uint32_t waves = 3;            ///< of slices, when there are more tasks than blocks fit the machine
  std::uint32_t next_job_units = 12;  ///< what a block could attend until it goes on with another job
  std::uint32_t stage_words = 6000;   ///< row lists of a slice in shared memory
  std::uint32_t ring_words = 2800;    ///< the same where K and V come through shared memory, too
  std::uint32_t max_slices = 1024;    ///< per launch: which job each belongs to travels as a kernel argument
  friend constexpr bool operator==(const AttendTuning&, const AttendTuning&) = default;
};
inline constexpr AttendTuning kAttend{};
/// What a multiprocessor must have for that: 9.0 and 10.0 do.
inline constexpr std::uint32_t kRingSharedBytes = 228 * 1024;

/// Prefill. A thread block owns `rows` (token, head) pairs of one KV head and walks over tiles of `keys` keys.
struct PrefillTuning {
  std::uint32_t rows = 64;  ///< 16 per warp
  std::uint32_t keys = 64;
  std::uint32_t stages = 2;  ///< tiles of K and V in shared memory
  friend constexpr bool operator==(const PrefillTuning&, const PrefillTuning&) = default;
};
inline constexpr PrefillTuning kPrefill{};

/// Prefill by warpgroups, on Hopper. A thread block owns the 128 rows of one query head and one block of positions.
struct PrefillHopperTuning {
  std::uint32_t stages = 2;  ///< tiles of 128 keys, and as many of values, in shared memory
  friend constexpr bool operator==(const PrefillHopperTuning&, const PrefillHopperTuning&) = default;
};
inline constexpr PrefillHopperTuning kPrefillHopper{};

/// What an instance of the decode kernel is compiled for.
struct AttendVariant {
  DType dtype = DType::bf16;
  std::uint32_t head_dim = 128;
  std::uint32_t head_tiles = 1;  ///< tiles of 8 query heads that share one read of K and V
  bool scored = false;           ///< some tokens come with their scores
  bool capped = false;           ///< scores are soft-capped
  /// K and V are e4m3 rows with scales, multiplied as bf16; not with given scores.
  bool scaled = false;
  bool ring = false;  ///< K and V come through shared memory: neither scored nor scaled
  [[nodiscard]] constexpr std::uint32_t heads() const noexcept { return 8 * head_tiles; }
  friend constexpr bool operator==(const AttendVariant&, const AttendVariant&) = default;
};

/// What an instance of the prefill kernel is compiled for.
struct PrefillVariant {
  DType dtype = DType::bf16;
  std::uint32_t head_dim = 128;
  /// Terms of the KV dtype that queries and weights are split into: 1 if the queries have that dtype, else 2, which
  /// keeps some 16 bits (bf16) or 22 bits (f16) of them.
  std::uint32_t terms = 2;
  bool warpgroups = false;  ///< the kernel for Hopper, with one term
  bool capped = false;      ///< scores are soft-capped
  friend constexpr bool operator==(const PrefillVariant&, const PrefillVariant&) = default;
};

/// Blocks of a variant that run at once on one multiprocessor.
[[nodiscard]] constexpr std::uint32_t blocks_per_sm(const AttendVariant& variant) noexcept {
  return variant.head_tiles == 1 && !variant.scored && variant.head_dim <= 128 ? kAttend.blocks_per_sm : 1;
}

/// Words of row lists that a slice may have.
[[nodiscard]] constexpr std::uint32_t list_words(const AttendVariant& variant) noexcept {
  return variant.ring ? kAttend.ring_words : kAttend.stage_words;
}

/// Which decode kernel serves this shape. Groups of more than 16 heads read K and V once per 16; per 8 beyond head_dim
/// 128, where two tiles of results would not fit into registers.
[[nodiscard]] constexpr AttendVariant attend_variant(const AttentionShape& shape, const PageLayout& layout,
                                                     bool scored) noexcept {
  return {.dtype = layout.dtype,
          .head_dim = shape.head_dim,
          .head_tiles = shape.group() > 8 && shape.head_dim <= 128 ? 2u : 1u,
          .scored = scored,
          .capped = shape.softcap != 0.f};
}

/// Which prefill kernel serves this shape. `warpgroups`: the device has the kernels for Hopper, whose copies bring
/// whole pages or whole parts of pages into a tile of 128 keys.
[[nodiscard]] constexpr PrefillVariant prefill_variant(const AttentionShape& shape, const PageLayout& layout,
                                                       DType q_dtype, bool warpgroups) noexcept {
  const bool pages_fit = kPrefillBlock % layout.page_tokens == 0 || layout.page_tokens == 2 * kPrefillBlock;
  return {.dtype = layout.dtype,
          .head_dim = shape.head_dim,
          .terms = q_dtype == layout.dtype ? 1u : 2u,
          .warpgroups = warpgroups && q_dtype == layout.dtype && pages_fit && TunedHeadDims::has(shape.head_dim),
          .capped = shape.softcap != 0.f};
}

/// "attend bf16 d128 heads8 scored"
[[nodiscard]] inline std::string to_string(const AttendVariant& variant) {
  return std::string("attend ") + to_string(variant.dtype) + " d" + std::to_string(variant.head_dim) + " heads" +
         std::to_string(variant.heads()) + (variant.scored ? " scored" : "") + (variant.capped ? " capped" : "") +
         (variant.scaled ? " scaled" : "") + (variant.ring ? " ring" : "");
}

/// "prefill bf16 d128 terms2", "prefill bf16 d128 terms1 warpgroups"
[[nodiscard]] inline std::string to_string(const PrefillVariant& variant) {
  return std::string("prefill ") + to_string(variant.dtype) + " d" + std::to_string(variant.head_dim) + " terms" +
         std::to_string(variant.terms) + (variant.warpgroups ? " warpgroups" : "") + (variant.capped ? " capped" : "");
}

}  // namespace sluice::gpu
