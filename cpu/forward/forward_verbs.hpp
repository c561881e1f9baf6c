#pragma once

#include "cpu/kernels/kernels.hpp"
#include "cpu/stages/stages.hpp"
#include "cpu/threads/workers.hpp"
#include "sluice/step/forward_verbs.hpp"

namespace sluice::cpu {

/// The verbs of a forward on a HostDevice: enqueued on its stream, or done at once without one. Plain, and most of
/// them in one thread: what they are for is the contract, and every engine's tests without a GPU.
class ForwardVerbs final : public sluice::ForwardVerbs {
 public:
  /// @param kernels  null: the fastest
  explicit ForwardVerbs(const Workers& workers, const Kernels* kernels = nullptr);

  /// Of a Zen 4 core at head_dim 64 and 128: a choice takes 8% of dense attention at 4,096 tokens, 4% at 8,192, and
  /// attention by a mask 7% more than dense attention for what it computes.
  [[nodiscard]] PrefillCosts prefill_costs() const noexcept override {
    return {.per_chunk = 20.0, .per_key_block = 1.0, .per_pair = 0.035};
  }
  [[nodiscard]] std::uint64_t scratch_bytes(const ForwardMemory&) const override { return 0; }
  void apply(const ForwardMemory& memory, ForwardSide& side, void* stream) override;
  void fill(const ForwardMemory& memory, ForwardSide& side, void* stream) override;
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
  [[nodiscard]] bool capturing(void*) const override { return false; }
  void merge(const ForwardMemory& memory, const ForwardLayer& layer) override;
  void audit(const ForwardMemory& memory, const ForwardLayer& layer) override;
  void stamp(const ForwardMemory& memory, std::uint32_t layer, Stage stage, void* stream) override;
  [[nodiscard]] bool stamps_by_clock() const noexcept override { return true; }
  void cancel(const ForwardMemory& memory, std::uint64_t before, void* stream) override;
  void require_alive(void*) override {}
  void see_near(const ForwardMemory& memory, Deadline deadline) override;
  void end(const ForwardMemory& memory, void* stream) override;

 private:
  Host host_;
};

}  // namespace sluice::cpu
