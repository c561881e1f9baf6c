#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "cpu/machine/topology.hpp"
#include "cpu/threads/workers.hpp"
#include "scheduler/plan/cost_model.hpp"
#include "sluice/audit.hpp"
#include "tools/cli/bench/device.hpp"
#include "tools/cli/bench/gpu_cases.hpp"
#include "tools/cli/synthetic/synthetic_forwards.hpp"

namespace sluice::tools {

/// Relative error (L2 over all heads) that a correct result stays below: weights are rounded to bf16 on the device.
inline constexpr double kGpuTolerance = 1e-2;

/// What the sections of `sluice bench gpu` that time forwards have in common: the machine, synthetic layers, dense
/// attention of them, and engines as the options say.
class GpuRig {
 public:
  /// `options` must outlive it.
  GpuRig(const BenchGpuOptions& options, const AttentionShape& shape);

  [[nodiscard]] const BenchGpuOptions& options() const noexcept { return options_; }
  [[nodiscard]] const AttentionShape& shape() const noexcept { return shape_; }
  [[nodiscard]] const std::shared_ptr<Device>& device() const noexcept { return device_; }
  /// What `automatic` comes to.
  [[nodiscard]] Handover handover() const noexcept;
  /// Of pages as engines have them, measured when they are first asked for.
  [[nodiscard]] const scheduler::LaneRates& rates();

  using Use = std::function<void(const SyntheticLayer&, const DeviceSteps&, const std::vector<GpuCase>&)>;
  /// A layer of so many tokens and steps for each size of pages that there are cases of, and those cases.
  void for_each_layer(std::uint32_t length, std::uint32_t steps, const std::vector<GpuCase>& cases, const Use& use);

  /// Dense attention of all numbers of rows that there are cases of, and of one: microseconds of each.
  /// @throws Error{Errc::device} if a batch is not what its first sequence gives alone
  [[nodiscard]] std::map<std::uint32_t, double> time_dense(std::uint32_t length, const std::vector<GpuCase>& cases,
                                                           const SyntheticLayer& layer, const DeviceSteps& steps);
  /// With every token chosen an engine must give dense attention, which `time_dense` has kept.
  /// @throws Error{Errc::device} if it does not
  void require_dense(std::uint32_t length, const GpuCase& each, const SyntheticLayer& layer, const DeviceSteps& steps);
  /// How far a policy's choice is off, in the first step.
  [[nodiscard]] double first_error(std::uint32_t length, const GpuCase& each, const SyntheticLayer& layer,
                                   const DeviceSteps& steps) const;
  /// Of an engine with so many layers, in steps that come after the warm-up.
  [[nodiscard]] AuditReport audit(std::uint32_t length, const GpuCase& each, const SyntheticLayer& layer,
                                  const DeviceSteps& steps, std::uint32_t layers) const;

  /// With the budget of far tokens that --far says, at this length.
  [[nodiscard]] GpuCase limited(std::uint32_t length, GpuCase each, std::uint32_t page_tokens);
  [[nodiscard]] SyntheticForwardsOptions forwards_of(std::uint32_t length, const GpuCase& each) const;
  [[nodiscard]] double mean_length(std::uint32_t rows, std::uint32_t length) const;

 private:
  [[nodiscard]] double near_share(std::uint32_t length, const GpuCase& each) const noexcept {
    return each.all_near ? 1.0 : options_.near_share.value_or(usual_near_share(length));
  }

  const BenchGpuOptions& options_;
  AttentionShape shape_;
  cpu::Topology topology_;
  std::shared_ptr<Device> device_;
  std::shared_ptr<const cpu::Workers> builders_;
  std::vector<float> want_;                    ///< dense attention of the first step
  std::optional<scheduler::LaneRates> rates_;  ///< measured once they are asked for
};

}  // namespace sluice::tools
