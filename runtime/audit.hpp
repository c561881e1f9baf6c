#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "cpu/backend.hpp"
#include "cpu/host_pool.hpp"
#include "cpu/workers.hpp"
#include "runtime/audit_group.hpp"
#include "runtime/step_buffers.hpp"
#include "sluice/audit.hpp"

namespace sluice::runtime {

/// Exact attention beside what a step attended: every N-th step of a sequence, on the CPU, after the step.
class Auditor {
 public:
  Auditor(const AttentionShape& shape, const PageLayout& layout, std::uint32_t every, const cpu::Workers& workers,
          cpu::Backend& host, const cpu::HostPool& pool)
      : shape_(shape), layout_(layout), every_(every), workers_(workers), host_(host), pool_(pool) {}

  /// Whether the step that runs now is audited; all its layers agree. To be asked before the step is booked.
  [[nodiscard]] bool due(const Sequence& sequence) const noexcept {
    return every_ != 0 && sequence.stats.steps % every_ == 0;
  }

  /// Compares the finished step of one layer. `heads` belong to sequences that were due.
  void run(std::uint32_t layer, std::span<const HeadWork* const> heads, const StepBuffers& buffers);

 private:
  struct Exact : AuditedGroup {
    std::vector<std::uint32_t> order;  ///< all tokens
  };

  void attend_exactly(std::uint32_t layer, std::span<const HeadWork* const> heads, const StepBuffers& buffers);
  void mark_attended(const HeadWork& work, Exact& exact) const;
  void compare(std::uint32_t layer, const HeadWork& work, Exact& exact, const StepBuffers& buffers);
  /// Largest norm of the values so far; each is read once in its life.
  [[nodiscard]] double largest_value(std::uint32_t layer, const HeadWork& work);

  AttentionShape shape_;
  PageLayout layout_;
  std::uint32_t every_;
  const cpu::Workers& workers_;
  cpu::Backend& host_;
  const cpu::HostPool& pool_;
  std::vector<Exact> exact_;
};

}  // namespace sluice::runtime
