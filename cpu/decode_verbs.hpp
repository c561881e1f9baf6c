#pragma once

#include "cpu/kernels.hpp"
#include "sluice/decode.hpp"

namespace sluice::cpu {

/// The verbs of a decode forward on a HostDevice: enqueued on its stream, or done at once without one. Plain and in one
/// thread: what they are for is the contract, and every engine's tests without a GPU.
class DecodeVerbs final : public sluice::DecodeVerbs {
 public:
  /// @param kernels  null: the fastest
  explicit DecodeVerbs(const Kernels* kernels = nullptr);

  [[nodiscard]] std::uint64_t scratch_bytes(const DecodeMemory&) const override { return 0; }
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
  const Kernels& kernels_;
};

}  // namespace sluice::cpu
