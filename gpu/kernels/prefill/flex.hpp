#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "sluice/step/prefill_choice.hpp"
#include "sluice/step/prefill_tasks.hpp"

/// Choices of blocks, FlexPrefill's and others', as a chain of kernels. Only what they hand on lies in memory; no
/// [rows, keys] matrix does, and no sum depends on the order in which threads run.
namespace sluice::gpu {

/// Rows that stand for a chunk: its last ones.
inline constexpr std::uint32_t kFlexRows = kPrefillBlock;
/// Keys that a thread block scores at a time.
inline constexpr std::uint32_t kFlexTile = 64;
/// Keys of a chunk at most: counts of 2^20 lines and their 12-bit parts of mantissas fit into 32 bits.
inline constexpr std::uint32_t kFlexMaxKeys = 1u << 20;
inline constexpr std::uint32_t kFlexMaxBlocks = kFlexMaxKeys / kPrefillBlock;

/// Which lines (columns or diagonals) are the fewest with a share of gamma. A line is one of them if the bits of its
/// weight are above `bits`, or equal to them and its index is below `ties_end`.
struct LineCut {
  std::uint32_t count = 0;
  std::uint32_t bits = 0;
  std::uint32_t ties_end = 0;  ///< only if whole lines are asked for
};

struct FlexVerdict {
  float divergence = 0.f;
  std::uint32_t query_aware = 0;
  std::uint32_t columns = 0;
  std::uint32_t diagonals = 0;
  HeadPattern pattern = HeadPattern::vertical_slash;
};

/// A head's keys are shared by so many thread blocks at most, which is enough for one head to fill a GPU; with fewer
/// keys per block, reading the queries would cost too much.
inline constexpr std::uint32_t kFlexMaxSplits = 64;
inline constexpr std::uint32_t kFlexLeastSplit = 512;
static_assert(kFlexLeastSplit >= kFlexRows && kFlexLeastSplit % kFlexTile == 0);

/// Thread blocks that share a head's keys, of up to so many, at most.
[[nodiscard]] constexpr std::uint32_t flex_most_splits(std::uint32_t keys) {
  const auto least = static_cast<std::uint32_t>(div_up(keys, kFlexLeastSplit));
  return least < kFlexMaxSplits ? least : kFlexMaxSplits;
}
/// Keys of one thread block, where there are so many.
[[nodiscard]] constexpr std::uint32_t flex_split_keys(std::uint32_t keys) {
  const std::uint64_t share = div_up(div_up(keys, kFlexMaxSplits), kFlexTile) * kFlexTile;
  return share > kFlexLeastSplit ? static_cast<std::uint32_t>(share) : kFlexLeastSplit;
}

/// One SelectBlocksTask as the kernels see it. What follows `splits` lies in its scratch memory; heads are the group's.
/// With a count of 0 they do nothing.
struct alignas(16) FlexItem {
  const std::byte* q = nullptr;           ///< device
  const std::byte* base = nullptr;        ///< device or registered host memory, 16-byte aligned
  const std::uint32_t* frames = nullptr;  ///< device [pages]
  std::uint32_t* blocks = nullptr;        ///< [heads, query_blocks, words]
  PrefillChoice* choices = nullptr;       ///< [heads]
  std::uint32_t first = 0;
  std::uint32_t count = 0;
  std::uint32_t page_tokens = 0;
  std::uint32_t keys = 0;  ///< first + count
  std::uint32_t rows = 0;  ///< representative ones, at most kFlexRows
  std::uint32_t key_blocks = 0;
  std::uint32_t query_blocks = 0;
  std::uint32_t words = 0;
  std::uint32_t split_keys = 0;  ///< keys of one thread block; a multiple of kFlexTile, at least 128
  std::uint32_t splits = 0;
  std::byte* queries = nullptr;       ///< [heads, kFlexRows, head_dim] rounded to the KV dtype
  float* mean_query = nullptr;        ///< [heads, head_dim] of the representative rows
  float* mean_keys = nullptr;         ///< [key_blocks, head_dim]
  float2* stats = nullptr;            ///< [heads, splits, kFlexRows] largest score, and sum of exponentials, base 2
  float* shifts = nullptr;            ///< [heads, kFlexRows] a score less this is the log2 of its weight in the mean
  float* columns = nullptr;           ///< [heads, lines()] weight of every key
  float* pieces = nullptr;            ///< [heads, splits, split_keys + kFlexRows], see diagonal_weight
  float* diagonals = nullptr;         ///< [heads, lines()] weight of every distance
  float* column_blocks = nullptr;     ///< [heads, key_blocks]
  float* offset_blocks = nullptr;     ///< [heads, key_blocks]
  LineCut* cuts = nullptr;            ///< [heads, 2] columns, diagonals
  std::uint32_t* marks = nullptr;     ///< [heads, key_blocks], see LineMark; only if whole lines are asked for
  std::uint8_t* chosen = nullptr;     ///< [heads, 2, key_blocks] 1: this column of blocks, this block offset
  FlexVerdict* verdicts = nullptr;    ///< [heads]
  std::uint32_t* row_kept = nullptr;  ///< [heads, query_blocks]

  /// What follows from the chunk alone.
  constexpr void set_chunk(std::uint32_t first_token, std::uint32_t tokens, std::uint32_t most_rows) {
    first = first_token;
    count = tokens;
    keys = first + count;
    rows = count < most_rows ? count : most_rows;
    key_blocks = static_cast<std::uint32_t>(div_up(keys, kPrefillBlock));
    query_blocks = prefill_blocks(first, count);
    words = prefill_mask_words(keys);
    split_keys = flex_split_keys(keys);
    splits = static_cast<std::uint32_t>(div_up(keys, split_keys));
  }
  [[nodiscard]] constexpr std::uint64_t lines() const { return std::uint64_t{key_blocks} * kPrefillBlock; }
  [[nodiscard]] constexpr std::uint64_t piece_length() const { return std::uint64_t{split_keys} + kFlexRows; }
};

/// What of a block a chosen line touches.
enum LineMark : std::uint32_t {
  kMarkColumn = 1,
  kMarkDiagonal = 2,  ///< a distance of this block offset
  kMarkSpill = 4,     ///< one that also touches the next offset: it is no multiple of the block
};

struct FlexArgs {
  const FlexItem* items = nullptr;  ///< device
  PrefillShape shape{};
  PrefillMode mode = PrefillMode::flexprefill;
  PromptLook look = PromptLook::attention;
  FlexPrefillSpec spec{};       ///< of other modes, what query blocks choose that choose for themselves
  MInferenceSpec minference{};  ///< of StreamingLLM, its A-shape
  DType dtype = DType::bf16;  ///< of the keys
  std::uint32_t head_dim = 0;
  std::uint32_t group = 0;
  float score_scale = 0.f;  ///< AttentionShape::score_scale

  constexpr void set_spec(const PrefillSpec& from) {
    mode = from.mode;
    look = looks_at(from);
    spec = from.flex;
    minference = from.minference;
    if (mode == PrefillMode::streaming) minference.a_shape = from.streaming;
    if (mode == PrefillMode::streaming || mode == PrefillMode::minference)
      spec = {.gamma = 1.f, .tau = 0.f, .min_budget = 0, .max_budget = minference.blocks};
  }
};

/// What one launch of all items has to cover: the largest of each.
struct FlexExtent {
  std::uint32_t items = 0;  ///< at most 65,535
  std::uint32_t splits = 0;
  std::uint32_t key_blocks = 0;
  std::uint32_t query_blocks = 0;
};

/// Enqueues the whole choice. With `pages`, which then describes the pages of all items in boxes of up to kFlexTile
/// rows and 64 columns, by the kernels for Hopper.
/// @throws Error{Errc::device} if a launch is refused.
void launch_select_blocks(const FlexArgs& args, const FlexExtent& extent, const CUtensorMap* pages,
                          cudaStream_t stream);
void load_select_blocks_kernels();

/// The parts of `launch_select_blocks` in their order. flex_pool.cu: mean queries and keys, sums over blocks.
void launch_flex_pool(const FlexArgs& args, const FlexExtent& extent, cudaStream_t stream);
void launch_flex_sums(const FlexArgs& args, const FlexExtent& extent, cudaStream_t stream);
void load_flex_pool_kernels();
/// flex_scores.cu: columns and diagonals of the representative attention.
void launch_flex_scores(const FlexArgs& args, const FlexExtent& extent, const CUtensorMap* pages, cudaStream_t stream);
void load_flex_score_kernels();
/// flex_scores_hopper.cu: its two passes over the keys where the device has products of warpgroups.
void launch_flex_hopper_stats(const FlexArgs& args, const FlexExtent& extent, const CUtensorMap& pages,
                              cudaStream_t stream);
void launch_flex_hopper_weigh(const FlexArgs& args, const FlexExtent& extent, const CUtensorMap& pages,
                              cudaStream_t stream);
void load_flex_hopper_kernels();
/// flex_lines.cu: how many lines make gamma, and what these touch.
void launch_flex_lines(const FlexArgs& args, const FlexExtent& extent, cudaStream_t stream);
void load_flex_line_kernels();
/// flex_choose.cu: verdicts.
void launch_flex_choose(const FlexArgs& args, const FlexExtent& extent, cudaStream_t stream);
void load_flex_choose_kernels();
/// streaming.cu, minference.cu: those of other methods.
void launch_streaming_choose(const FlexArgs& args, const FlexExtent& extent, cudaStream_t stream);
void load_streaming_kernels();
void launch_minference_choose(const FlexArgs& args, const FlexExtent& extent, cudaStream_t stream);
void load_minference_kernels();
/// flex_masks.cu: what follows from them.
void launch_flex_masks(const FlexArgs& args, const FlexExtent& extent, cudaStream_t stream);
void load_flex_mask_kernels();

}  // namespace sluice::gpu
