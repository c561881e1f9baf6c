#pragma once

#include "cpu/stages/stages.hpp"
#include "tools/stages/stages.hpp"

namespace sluice::tools {

/// Stages on host threads, as forwards of the host device run them.
class HostStages final : public Stages {
 public:
  /// The workers outlive it.
  explicit HostStages(const cpu::Host& host) : host_(host) {}

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
  cpu::Host host_;
};

}  // namespace sluice::tools
