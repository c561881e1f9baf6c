#pragma once

#include "gpu/device/handles.hpp"
#include "gpu/head_dims.hpp"
#include "gpu/kernels/forward/forward.hpp"
#include "gpu/kernels/load_all.hpp"
#include "gpu/tuning.hpp"
#include "sluice/step/carver.hpp"
#include "sluice/step/forward_verbs.hpp"

namespace sluice::gpu {

/// The verbs of a forward on CUDA streams: a few launches per layer, more if rows choose by mass, pages are ranked, or
/// there are digests or drafts, and two per window of keys if there are chunks of prompts; one more for each stamp.
/// Their grids follow from the bucket. KernelHeadDims, bf16 or f16 pages of a
/// multiple of 8 tokens, up to 32 query heads per KV head; sparse prompts of TunedHeadDims.
class ForwardVerbs final : public sluice::ForwardVerbs {
 public:
  /// @param link_rows  CudaDeviceOptions::link_rows
  ForwardVerbs(int ordinal, std::uint32_t multiprocessors, const KernelLimits& limits, std::uint32_t link_rows);

  [[nodiscard]] bool sparse_prefill(const AttentionShape& shape) const noexcept override {
    return TunedHeadDims::has(shape.head_dim);
  }
  /// Of an H200 at Llama-3.1-8B's shape, from `sluice bench prefill`.
  [[nodiscard]] PrefillCosts prefill_costs() const noexcept override {
    return {.per_chunk = 750.0, .per_key_block = 3.1, .per_pair = 0.0057};
  }
  [[nodiscard]] std::uint64_t scratch_bytes(const ForwardMemory& memory) const override;
  [[nodiscard]] std::unique_ptr<sluice::ForwardSide> make_side() override;
  void apply(const ForwardMemory& memory, sluice::ForwardSide& side, void* stream) override;
  void fill(const ForwardMemory& memory, sluice::ForwardSide& side, void* stream) override;
  void cluster(const ForwardMemory& memory, std::span<const ForwardClustering> clusterings, void* stream) override;
  void derive(const ForwardMemory& memory, std::uint32_t plane, std::span<const FarPage> pages, const float* mean,
              void* stream) override;
  void begin(const ForwardMemory& memory, void* stream) override;
  void append(const ForwardMemory& memory, const ForwardLayer& layer) override;
  void prefill(const ForwardMemory& memory, const ForwardLayer& layer) override;
  void rank(const ForwardMemory& memory, const ForwardLayer& layer) override;
  void score(const ForwardMemory& memory, const ForwardLayer& layer) override;
  void propose(const ForwardMemory& memory, const ForwardLayer& layer) override;
  void choose(const ForwardMemory& memory, const ForwardLayer& layer) override;
  void split(const ForwardMemory& memory, const ForwardLayer& layer) override;
  void attend(const ForwardMemory& memory, const ForwardLayer& layer) override;
  void attend_whole(const ForwardMemory& memory, const ForwardLayer& layer) override;
  void promote(const ForwardMemory& memory, const ForwardLayer& layer) override;
  void fetch(const ForwardMemory& memory, const ForwardLayer& layer) override;
  void await_answer(const ForwardMemory& memory, void* stream) override;
  void signal(const ForwardMemory& memory, std::uint64_t ticket, void* stream) override;
  void tell_read(const ForwardMemory& memory, std::uint64_t forward, void* stream) override;
  [[nodiscard]] bool capturing(void* stream) const override;
  void merge(const ForwardMemory& memory, const ForwardLayer& layer) override;
  void audit(const ForwardMemory& memory, const ForwardLayer& layer) override;
  void stamp(const ForwardMemory& memory, std::uint32_t layer, Stage stage, void* stream) override;
  [[nodiscard]] bool stamps_by_clock() const noexcept override { return false; }
  void cancel(const ForwardMemory& memory, std::uint64_t before, void* stream) override;
  void require_alive(void* stream) override;
  void see_near(const ForwardMemory& memory, Deadline deadline) override;
  void end(const ForwardMemory& memory, void* stream) override;

 private:
  /// What the kernels of a forward tell each other, and where a prompt's pages are brought.
  struct Scratch {
    ForwardScratch choice;
    PrefillStage prompt;
    std::uint64_t bytes = 0;
  };
  /// Laid out for the largest bucket, described for this one.
  [[nodiscard]] Scratch scratch_of(const ForwardMemory& memory, std::byte* from) const;
  [[nodiscard]] ForwardScratch choice_of(const ForwardMemory& memory) const;
  /// What rows choose of their clusters.
  void choose_clusters(const ForwardMemory& memory, const ForwardScratch& scratch, const ForwardLayer& layer) const;
  /// What chunks need that choose blocks.
  static void place_choices(const ForwardMemory& memory, std::uint32_t items, Carver& carver, PrefillStage& prompt);
  void choose_blocks(const ForwardMemory& memory, const PrefillStage& stage, const PrefillArgs& prompts,
                     const ForwardLayer& layer);

  int ordinal_;
  std::uint32_t multiprocessors_;
  KernelLimits limits_;
  std::uint32_t link_rows_;
  StreamHandle sight_;  ///< of see_near
};

}  // namespace sluice::gpu
