#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "sluice/error.hpp"
#include "sluice/prefill.hpp"
#include "sluice/step/attend_tasks.hpp"
#include "sluice/step/prefill_tasks.hpp"
#include "sluice/step/select_tasks.hpp"

namespace sluice {

class Stream;

/// Stages of attention one by one, as tests and benchmarks call them; an engine runs ForwardVerbs. `cpu::Backend`
/// computes before it returns and ignores `stream` (null is fine). A device's backend only enqueues on `stream`; then
/// everything that a task points to, the task array included, must stay unchanged until the stream has passed the verb.
///
/// Verbs do not allocate device memory and do not synchronise. A verb with no tasks does nothing.
/// Thread safety: verbs may be called from several threads at once.
/// @throws Error{Errc::unsupported} for a shape that `unsupported_reasons` names; nothing was written.
class Backend {
 public:
  virtual ~Backend() = default;
  /// Why this backend cannot serve the shape; empty if it can.
  [[nodiscard]] virtual std::vector<std::string> unsupported_reasons(const AttentionShape& shape,
                                                                     const PageLayout& layout) const = 0;

  // Tokens into pages, attention over chosen ones of them, and partial results into one.
  virtual void append(std::span<const AppendTask> tasks, const PageLayout& layout, Stream* stream) = 0;
  /// All tensors in one launch. The task array is copied; it may go when the call returns.
  virtual void to_f32(std::span<const ToF32Task> tasks, Stream* stream) = 0;
  void to_f32(const TensorView& in, float* out, Stream* stream) {
    const ToF32Task task{.in = in, .out = out};
    to_f32(std::span(&task, 1), stream);
  }
  virtual void attend(std::span<const AttendTask> tasks, const AttentionShape& shape, Stream* stream) = 0;
  virtual void merge(std::span<const MergeTask> tasks, const AttentionShape& shape, DType out_dtype,
                     Stream* stream) = 0;

  // Side data of pages, scores by it, and budgets.
  virtual void digest(std::span<const DigestTask> tasks, DigestKind kind, const PageLayout& layout, Stream* stream) = 0;
  virtual void make_codes(std::span<const CodesTask> tasks, const PageLayout& layout, Stream* stream) = 0;
  virtual void score_pages(std::span<const ScorePagesTask> tasks, const AttentionShape& shape, DType digest_dtype,
                           Stream* stream) = 0;
  virtual void score_int4(std::span<const ScoreInt4Task> tasks, const AttentionShape& shape, const PageLayout& layout,
                          Stream* stream) = 0;
  virtual void top_k(std::span<const TopKTask> tasks, Stream* stream) = 0;
  virtual void top_p(std::span<const TopPTask> tasks, Stream* stream) = 0;
  /// @throws Error{Errc::invalid_argument} for more clusters than keys, none, or no iteration; nothing was written.
  virtual void cluster(std::span<const ClusterTask> tasks, Stream* stream) = 0;
  /// Device memory that `cluster` needs for such a task; 0 if ClusterTask::scratch is not used. No two tasks that may
  /// run at once share it. The task's pointers are not looked at.
  [[nodiscard]] virtual std::uint64_t cluster_scratch_bytes(const ClusterTask& task) const = 0;
  virtual void choose_clusters(std::span<const ChooseClustersTask> tasks, const AttentionShape& shape,
                               const PageLayout& layout, Stream* stream) = 0;
  /// Likewise, for `choose_clusters`.
  [[nodiscard]] virtual std::uint64_t choose_clusters_scratch_bytes(const ChooseClustersTask& task,
                                                                    const AttentionShape& shape) const = 0;
  virtual void choose_pages(std::span<const ChoosePagesTask> tasks, const AttentionShape& shape,
                            const PageLayout& layout, Stream* stream) = 0;

  // Attention of prompts, by all keys or by a choice of blocks.
  virtual void prefill(std::span<const PrefillTask> tasks, const PrefillShape& strides, const AttentionShape& shape,
                       Stream* stream) = 0;
  /// Chooses as `spec.mode` says; automatic is flexprefill.
  /// @throws Error{Errc::invalid_argument} for PrefillMode::full, which chooses nothing
  virtual void select_blocks(std::span<const SelectBlocksTask> tasks, const PrefillSpec& spec,
                             const PrefillShape& strides, const AttentionShape& shape, Stream* stream) = 0;
  /// Device memory that `select_blocks` needs for such a task; 0 if `scratch` is not used. No two
  /// tasks that may run at once share it, those of one call included.
  [[nodiscard]] virtual std::uint64_t select_blocks_scratch_bytes(std::uint32_t first, std::uint32_t count,
                                                                  const AttentionShape& shape) const = 0;
};

}  // namespace sluice
