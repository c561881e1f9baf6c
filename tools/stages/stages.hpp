#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "sluice/device.hpp"
#include "sluice/error.hpp"
#include "sluice/prefill.hpp"
#include "sluice/step/attend_tasks.hpp"
#include "sluice/step/prefill_tasks.hpp"
#include "sluice/step/select_tasks.hpp"
#include "tools/stages/dense_tasks.hpp"

namespace sluice::tools {

/// Stages of attention one by one, as tests and benchmarks call them on either device; an engine runs ForwardVerbs.
/// Host threads compute before they return and ignore `stream` (null is fine). A GPU only enqueues on `stream`; then
/// everything that a task points to, the task array included, must stay unchanged until the stream has passed the
/// stage.
///
/// Stages do not allocate device memory and do not synchronise. A stage with no tasks does nothing.
/// Thread safety: from several threads at once.
/// @throws Error{Errc::unsupported} for a shape that `unsupported_reasons` names; nothing was written.
class Stages {
 public:
  virtual ~Stages() = default;
  /// Why the device cannot serve the shape; empty if it can.
  [[nodiscard]] virtual std::vector<std::string> unsupported_reasons(const AttentionShape& shape,
                                                                     const PageLayout& layout) const = 0;

  // Dense attention to a cache of one's own.
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

  // Scores and budgets.
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

/// Of a GPU, on its streams, as long as it lives; for the embedded host device threads of their own compute at once,
/// whatever its streams still hold.
[[nodiscard]] std::shared_ptr<Stages> stages_of(Device& device);

/// Of a GPU; null if the device is none.
[[nodiscard]] std::shared_ptr<Stages> cuda_stages_of(Device& device);

}  // namespace sluice::tools
