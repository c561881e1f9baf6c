#pragma once

#include "gpu/kernels/decode.hpp"
#include "gpu/tuning.hpp"
#include "sluice/decode.hpp"

namespace sluice::gpu {

/// The verbs of a decode forward on CUDA streams: six launches per layer, whose grids follow from the bucket. head_dim
/// 64 or 128, bf16 or f16 pages of a multiple of 8 tokens, up to 32 query heads per KV head.
class DecodeVerbs final : public sluice::DecodeVerbs {
 public:
  /// Loads every kernel, so that none is loaded while another spins.
  DecodeVerbs(int ordinal, std::uint32_t multiprocessors);

  [[nodiscard]] std::uint64_t scratch_bytes(const DecodeMemory& memory) const override;
  void apply(const DecodeMemory& memory, void* stream) override;
  void begin(const DecodeMemory& memory, void* stream) override;
  void append(const DecodeMemory& memory, const DecodeLayer& layer) override;
  void score(const DecodeMemory& memory, const DecodeLayer& layer) override;
  void choose(const DecodeMemory& memory, const DecodeLayer& layer) override;
  void split(const DecodeMemory& memory, const DecodeLayer& layer) override;
  void attend(const DecodeMemory& memory, const DecodeLayer& layer) override;
  void merge(const DecodeMemory& memory, const DecodeLayer& layer) override;
  void cancel(const DecodeMemory& memory, void* stream) override;
  void end(const DecodeMemory& memory, void* stream) override;

 private:
  [[nodiscard]] DecodeScratch scratch_of(const DecodeMemory& memory) const;
  [[nodiscard]] DecodeScratch carve(const DecodeMemory& memory, std::byte* from, std::uint64_t* used) const;

  int ordinal_;
  std::uint32_t multiprocessors_;
};

}  // namespace sluice::gpu
