#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "cpu/threads/workers.hpp"
#include "sluice/step/backend.hpp"

namespace sluice::cpu {

struct Kernels;

/// Tokens of one KV head, estimated from its 4-bit copies: out[i, h] = the score of q[h].k[tokens[i]].
struct EstimateTask {
  const float* q = nullptr;               ///< [group, head_dim]
  const std::byte* copies = nullptr;      ///< [frames, CodeLayout::page_bytes()]
  const float* mean = nullptr;            ///< as in ScoreInt4Task
  const std::uint32_t* frames = nullptr;  ///< [pages]
  std::span<const std::uint32_t> tokens;
  float* out = nullptr;                   ///< [tokens, group]
};

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
  using CoreVerbs::to_f32;
  void to_f32(std::span<const ToF32Task> tasks, Stream* stream) override;
  void attend(std::span<const AttendTask> tasks, const AttentionShape& shape, Stream* stream) override;
  void merge(std::span<const MergeTask> tasks, const AttentionShape& shape, DType out_dtype, Stream* stream) override;

  void digest(std::span<const DigestTask> tasks, DigestKind kind, const PageLayout& layout, Stream* stream) override;
  void make_codes(std::span<const CodesTask> tasks, const PageLayout& layout, Stream* stream) override;
  void score_tokens(std::span<const ScoreTokensTask> tasks, const AttentionShape& shape, Stream* stream) override;
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
  /// Like score_int4, but of any tokens, as host policies ask for them.
  void estimate_tokens(const EstimateTask& task, const AttentionShape& shape, const PageLayout& layout);

  void prefill(std::span<const PrefillTask> tasks, const PrefillShape& strides, const AttentionShape& shape,
               Stream* stream) override;
  void select_blocks(std::span<const SelectBlocksTask> tasks, const PrefillSpec& spec, const PrefillShape& strides,
                     const AttentionShape& shape, Stream* stream) override;
  [[nodiscard]] std::uint64_t select_blocks_scratch_bytes(std::uint32_t first, std::uint32_t count,
                                                          const AttentionShape& shape) const override;
  /// Of a Zen 4 core at head_dim 64 and 128: a choice takes 8% of dense attention at 4,096 tokens, 4% at 8,192, and
  /// attention by a mask 7% more than dense attention for what it computes.
  [[nodiscard]] PrefillCosts prefill_costs() const noexcept override {
    return {.per_chunk = 20.0, .per_key_block = 1.0, .per_pair = 0.035};
  }

 private:
  const Workers& workers_;
  const Kernels& kernels_;
};

}  // namespace sluice::cpu
