#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "cpu/threads/workers.hpp"
#include "sluice/page_rules.hpp"
#include "sluice/step/backend.hpp"
#include "sluice/step/prefill_choice.hpp"

namespace sluice::cpu {

struct Kernels;

/// The Backend contract on host threads. Verbs compute before they return and ignore the stream.
/// Tasks run in parallel on the workers; one long task is split by tokens and merged. K and V are read
/// once per GQA group. Safe to call from several threads and from inside a worker.
/// A verb that throws Error{Errc::timeout} has left a worker behind. The task array may go all the same; the memory
/// that the tasks point to must stay for as long as the workers' threads, see Workers::keep.
class Backend final : public sluice::Backend {
 public:
  /// Uses the kernels of `kernels` (see kernels.hpp), by default the fastest for this machine.
  explicit Backend(const Workers& workers, const Kernels* kernels = nullptr);

  [[nodiscard]] std::string isa() const;

  [[nodiscard]] std::vector<std::string> unsupported_reasons(const AttentionShape& shape,
                                                             const PageLayout& layout) const override;

  void append(std::span<const AppendTask> tasks, const PageLayout& layout, Stream* stream) override;
  using sluice::Backend::to_f32;
  void to_f32(std::span<const ToF32Task> tasks, Stream* stream) override;
  void attend(std::span<const AttendTask> tasks, const AttentionShape& shape, Stream* stream) override;
  void merge(std::span<const MergeTask> tasks, const AttentionShape& shape, DType out_dtype, Stream* stream) override;

  void digest(std::span<const DigestTask> tasks, DigestKind kind, const PageLayout& layout, Stream* stream) override;
  void make_codes(std::span<const CodesTask> tasks, const PageLayout& layout, Stream* stream) override;
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
  const Workers& workers_;
  const Kernels& kernels_;
};

}  // namespace sluice::cpu
