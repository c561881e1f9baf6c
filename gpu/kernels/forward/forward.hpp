#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <span>

#include "gpu/kernels/attend/attend.hpp"
#include "gpu/kernels/index/int4.hpp"
#include "gpu/kernels/prefill/flex.hpp"
#include "gpu/kernels/prefill/prefill.hpp"
#include "gpu/kernels/select/foresight.hpp"
#include "gpu/kernels/select/top_k.hpp"
#include "gpu/kernels/select/top_p.hpp"
#include "gpu/split_rule.hpp"
#include "sluice/step/forward_verbs.hpp"
#include "sluice/step/select_tasks.hpp"

namespace sluice::gpu {

/// What the split kernel may use.
struct ForwardSplitLimits {
  std::uint32_t blocks = 1;       ///< of a cluster
  std::uint32_t most_shared = 0;  ///< bytes of shared memory of a block
  std::uint32_t shared_of_two = 0;  ///< likewise, of a block that leaves a multiprocessor room for another one
  std::uint32_t attend_shared = 0;  ///< likewise, of a block that attends what it finds near; 0: none does
  std::uint32_t max_tokens = 0;   ///< of a sequence whose choice it can mark there
};

/// What the kernels of a forward tell each other, in device memory; see ForwardVerbs::scratch_bytes.
struct ForwardScratch {
  ScoreInt4Task* score_tasks = nullptr;  ///< [decode_rows, kv_heads]
  ScorePagesTask* page_tasks = nullptr;  ///< [decode_rows, kv_heads] if the largest bucket has pages
  TopKRow* page_rows = nullptr;          ///< [decode_rows, q_heads] likewise
  TopKRow* top_k_rows = nullptr;         ///< likewise: tokens of their pages
  TopPRow* top_p_rows = nullptr;         ///< likewise, if the largest bucket is unbounded
  ChoosePagesTask* page_choices = nullptr;  ///< [decode_rows, kv_heads] if rows of the largest bucket may take pages
  std::uint32_t* page_room = nullptr;       ///< [decode_rows, kv_heads] scratch memory of these
  // If sequences may have clusters:
  ChooseClustersTask* cluster_tasks = nullptr;  ///< [decode_rows, kv_heads]
  std::byte* cluster_room = nullptr;            ///< [decode_rows, kv_heads] of as many words for each query head
  std::uint64_t cluster_words = 0;
  std::byte* clustering = nullptr;  ///< scratch memory of clusterings, of a few KV heads at a time
  std::uint64_t clustering_bytes = 0;
  AttendJob* jobs = nullptr;             ///< [decode_rows, kv_heads, head_blocks]; then as many of fetched rows
  std::uint32_t* counters = nullptr;     ///< [jobs] of AttendArgs
  float* partials = nullptr;             ///< of AttendArgs
  std::uint32_t* far_rows = nullptr;     ///< as in ForwardMemory, before they cross the link
  std::uint32_t* fetched = nullptr;      ///< likewise, if the device fetches: as an AttendJob wants them
  float* far_corrections = nullptr;      ///< as in ForwardMemory, likewise, before they cross the link
  /// Of choices by top-k of all tokens: bounds and centers with layers, the others without.
  Foresight foresight{};
  std::uint32_t head_blocks = 1;         ///< jobs that share the query heads of a KV head
  std::uint32_t block_heads = 8;         ///< query heads of a job
  std::uint32_t job_count = 0;           ///< of the bucket, without those of fetched rows
  std::uint32_t slices = 1;              ///< thread blocks of a job
  std::uint32_t fetch_slices = 0;        ///< and of one of fetched rows
  std::uint32_t jobs_at_once = 1;        ///< jobs of a launch
  std::uint32_t fetches_at_once = 1;     ///< and of one of fetched rows
  std::uint32_t first_fetch_slice = 0;   ///< their first thread block: 0 if they have launches of their own
  std::uint32_t multiprocessors = 1;     ///< of the device
  std::uint32_t link_rows = 0;           ///< CudaDeviceOptions::link_rows
  /// [decode_rows, kv_heads] where that is not 0 and `split` attends: not 0: it attended the list's far rows, too.
  std::uint32_t* linked = nullptr;
  ForwardSplitLimits split{};            ///< of the device
};

/// What chunks of prompts need, in device memory.
struct PrefillStage {
  PrefillItem* items = nullptr;     ///< [prefills, kv_heads, item_heads]
  /// Items of a KV head: its query heads, where kernels choose that mix them in a row.
  std::uint32_t item_heads = 1;
  std::byte* pages = nullptr;       ///< [prefills, kv_heads, prefill_window] tokens
  std::uint32_t* frames = nullptr;  ///< [prefills, kv_heads, pages of a window]
  float* lse = nullptr;             ///< [rows, q_heads]
  float* so_far = nullptr;          ///< [rows, q_heads, head_dim]
  // If chunks choose blocks:
  FlexItem* choices = nullptr;      ///< [prefills, kv_heads]
  FlexItem choice{};                ///< the first one's scratch memory
  std::uint64_t choice_bytes = 0;   ///< of each
  std::uint32_t* blocks = nullptr;  ///< [prefills, kv_heads, block_words] what is chosen
  std::uint64_t block_words = 0;
};

/// What is foreseen in a layer of a forward; nothing where pages are ranked first. (One H100, score and split together:
/// 13 us of 58 saved at 32K tokens, 13 of 103 at 128K, 19 of 92 where attention has no pattern.)
[[nodiscard]] constexpr Foresight foresight_of(const ForwardMemory& memory, const ForwardScratch& scratch,
                                               std::uint32_t layer) {
  Foresight foresight = scratch.foresight;
  const Bucket& bucket = memory.bucket;
  if (foresight.bounds == nullptr || !bucket.top_k || bucket.pages) return {};
  const std::uint64_t rows_before = std::uint64_t{layer} * (memory.largest.decode_rows / memory.drafts);
  foresight.bounds += rows_before * memory.shape.q_heads;
  foresight.centers += rows_before * memory.shape.kv_heads * memory.shape.head_dim;
  return foresight;
}

/// Whether far rows that are to come near are listed beside the layer's merge, in thread blocks of the same launch,
/// while that waits for the CPU. Apart where both are told apart, or where the device alone attends what is far.
[[nodiscard]] inline bool promotes_beside_merge(const ForwardMemory& memory) noexcept {
  return memory.promotions != 0 && memory.fetch_share != kWholeFetchShare && !memory.bucket.audit &&
         !memory.bucket.trace;
}

/// Near rows of freed blocks, of the tokens that come, and of rows that were listed to come near, after `apply`.
void launch_forward_acquire(const ForwardMemory& memory, cudaStream_t stream);
/// Fills those of the latter.
void launch_forward_fill(const ForwardMemory& memory, cudaStream_t stream);
/// Mean keys that the plan makes again, if there are any, after `apply`.
void launch_forward_key_means(const ForwardMemory& memory, cudaStream_t stream);
/// See ForwardVerbs::derive.
void launch_forward_derive(const ForwardMemory& memory, std::uint32_t plane, std::span<const FarPage> pages,
                           const float* mean, cudaStream_t stream);
void launch_forward_apply(const ForwardMemory& memory, cudaStream_t stream);
void launch_forward_begin(const ForwardMemory& memory, const ForwardScratch& scratch, cudaStream_t stream);
void launch_forward_append(const ForwardMemory& memory, const ForwardScratch& scratch, const ForwardLayer& layer);
/// Whether the new key and value come in beside the scores of the others, in `score`, and nothing is left to `append`.
[[nodiscard]] bool appends_beside_scores(const ForwardMemory& memory);
void launch_forward_append_score(const ForwardMemory& memory, const ForwardScratch& scratch, const ForwardLayer& layer,
                                 const ScoreInt4Shape& shape);
/// What `append` leaves to do for teams: they are described, and their queries go to both sides.
void launch_forward_teams(const ForwardMemory& memory, const ForwardScratch& scratch, const ForwardLayer& layer);
/// The caller's scores to where rows that are scored() choose by them.
void launch_forward_spread_scores(const ForwardMemory& memory, const ForwardLayer& layer);
/// Rehearsed queries of rows that choose, or of teams, to the host.
void launch_forward_rehearsed(const ForwardMemory& memory, const ForwardLayer& layer);
/// What of a team's rows some see and others do not, behind what they have attended near.
void launch_forward_edge(const ForwardMemory& memory, const ForwardLayer& layer);
/// Window `window` of the keys of all chunks, by as many thread blocks.
void launch_forward_stage(const ForwardMemory& memory, const PrefillStage& stage, const ForwardLayer& layer,
                          std::uint32_t window, std::uint32_t blocks);
/// What a layer of a bucket that is whole takes behind `append`. `slices`: thread blocks of a job, of
/// scratch.job_count.
void launch_forward_attend_whole(const ForwardMemory& memory, const ForwardScratch& scratch, const ForwardLayer& layer,
                                 const AttendVariant& variant, std::uint32_t slices);
/// What a layer attends of lists that the CPU has chosen, of jobs [first, last), where they lie: ForwardMemory has
/// keeps_chosen().
void launch_forward_attend_chosen(const ForwardMemory& memory, const ForwardScratch& scratch, const ForwardLayer& layer,
                                  const AttendVariant& variant, std::uint32_t first, std::uint32_t last);
/// Waits for what histories propose, and leaves no scores of anything else.
void launch_forward_propose(const ForwardMemory& memory, const ForwardLayer& layer);
void launch_forward_split(const ForwardMemory& memory, const ForwardScratch& scratch, const ForwardLayer& layer);
/// Whether `split` attends what it finds near, and nothing is left to `attend`.
[[nodiscard]] bool attends_in_split(const ForwardMemory& memory, const ForwardScratch& scratch);
/// Then: far rows of a list up to which they may attend these, too, over the link, so that the CPU is not asked for
/// them; else 0. Not of a list that the CPU adds to.
[[nodiscard]] std::uint32_t link_rows_of(const ForwardMemory& memory, const ForwardScratch& scratch);
void launch_forward_promote(const ForwardMemory& memory, const ForwardScratch& scratch, const ForwardLayer& layer);
/// Waits for what the CPU chooses for lists [first, last), and describes it.
void launch_forward_await(const ForwardMemory& memory, const ForwardScratch& scratch, const ForwardLayer& layer,
                          std::uint32_t first, std::uint32_t last);
void launch_forward_merge(const ForwardMemory& memory, const ForwardScratch& scratch, const ForwardLayer& layer);
void launch_forward_audit(const ForwardMemory& memory, const ForwardScratch& scratch, const ForwardLayer& layer);
void launch_forward_stamp(const ForwardMemory& memory, std::uint32_t layer, Stage stage, cudaStream_t stream);
/// Where a window of prompts begins to be gathered, and where it is.
enum class GatherMark : std::uint8_t { begins, ends };
/// Adds window `window` to the stamp of Stage::gather.
void launch_forward_gather_stamp(const ForwardMemory& memory, std::uint32_t layer, std::uint32_t window,
                                 GatherMark mark, cudaStream_t stream);
void launch_forward_cancel(const ForwardMemory& memory, std::uint64_t before, cudaStream_t stream);
void launch_forward_end(const ForwardMemory& memory, cudaStream_t stream);

/// Loads all of them, and asks for the shared memory that the longest sequences need.
void load_forward_kernels();

/// Loads the split kernel on the current device.
[[nodiscard]] ForwardSplitLimits load_forward_split_kernels();

}  // namespace sluice::gpu
