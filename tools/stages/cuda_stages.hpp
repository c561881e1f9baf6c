#pragma once

#include "gpu/device/cuda_device.hpp"
#include "tools/stages/stages.hpp"

namespace sluice::tools {

/// Stages on CUDA streams: each packs its tasks into the stream's ParamRing and launches the kernels of forwards, or
/// those of dense attention here. The task array and what it points to on the host (runs, tokens, frames of `attend`)
/// are read before the call returns; q, K, V, digests and outputs may be in device or pinned memory and are touched
/// when the stream gets there. Shapes: gpu/stages/shapes.hpp.
class CudaStages final : public Stages {
 public:
  /// The device outlives it.
  explicit CudaStages(gpu::CudaDevice& device);

  [[nodiscard]] std::vector<std::string> unsupported_reasons(const AttentionShape& shape,
                                                             const PageLayout& layout) const override;
  void append(std::span<const AppendTask> tasks, const PageLayout& layout, Stream* stream) override;
  using Stages::to_f32;
  void to_f32(std::span<const ToF32Task> tasks, Stream* stream) override;
  void attend(std::span<const AttendTask> tasks, const AttentionShape& shape, Stream* stream) override;
  void merge(std::span<const MergeTask> tasks, const AttentionShape& shape, DType out_dtype, Stream* stream) override;
  void score_pages(std::span<const ScorePagesTask> tasks, const AttentionShape& shape, DType digest_dtype,
                   Stream* stream) override;
  void score_int4(std::span<const ScoreInt4Task> tasks, const AttentionShape& shape, const PageLayout& layout,
                  Stream* stream) override;
  void top_k(std::span<const TopKTask> tasks, Stream* stream) override;
  void top_p(std::span<const TopPTask> tasks, Stream* stream) override;
  void cluster(std::span<const ClusterTask> tasks, Stream* stream) override;
  [[nodiscard]] std::uint64_t cluster_scratch_bytes(const ClusterTask& task) const override;
  void choose_clusters(std::span<const ChooseClustersTask> tasks, const AttentionShape& shape, const PageLayout& layout,
                       Stream* stream) override;
  [[nodiscard]] std::uint64_t choose_clusters_scratch_bytes(const ChooseClustersTask& task,
                                                            const AttentionShape& shape) const override;
  void choose_pages(std::span<const ChoosePagesTask> tasks, const AttentionShape& shape, const PageLayout& layout,
                    Stream* stream) override;
  void prefill(std::span<const PrefillTask> tasks, const PrefillShape& strides, const AttentionShape& shape,
               Stream* stream) override;
  void select_blocks(std::span<const SelectBlocksTask> tasks, const PrefillSpec& spec, const PrefillShape& strides,
                     const AttentionShape& shape, Stream* stream) override;
  [[nodiscard]] std::uint64_t select_blocks_scratch_bytes(std::uint32_t first, std::uint32_t count,
                                                          const AttentionShape& shape) const override;

 private:
  gpu::CudaDevice& device_;
};

}  // namespace sluice::tools
