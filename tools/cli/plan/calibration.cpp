#include "tools/cli/plan/calibration.hpp"

#include <algorithm>
#include <iterator>
#include <optional>
#include <string>
#include <vector>

#include "scheduler/plan/fitted_cost.hpp"
#include "scheduler/plan/forward_rows.hpp"
#include "sluice/error.hpp"
#include "tools/cli/bench/gpu_cases.hpp"
#include "tools/cli/bench/shapes.hpp"
#include "tools/cli/plan/calibration_cases.hpp"
#include "tools/cli/plan/case_times.hpp"
#include "tools/cli/plan/default_costs.hpp"
#include "tools/cli/plan/policy_costs.hpp"
#include "tools/cli/text/interrupt.hpp"
#include "tools/cli/text/progress_bar.hpp"

namespace sluice::tools {
namespace {

using scheduler::CostSample;

constexpr std::uint32_t kPageTokens = 16;
constexpr std::uint32_t kDensePageTokens = 256;
/// Of the memory that can be had, what engines of a calibration take at most.
constexpr std::uint64_t kMemoryPart = 4;

class Calibration {
 public:
  Calibration(Machine& machine, std::shared_ptr<Device> device, std::uint32_t threads,
              std::vector<CalibrationCase> cases)
      : machine_(machine),
        cases_(std::move(cases)),
        threads_(threads),
        builders_(std::make_shared<const cpu::Workers>(topology_, cpu::WorkersOptions{})),
        device_(std::move(device)),
        shape_(named_shape("llama-3.1-8b")) {
    if (!device_) device_ = std::make_shared<cpu::HostDevice>(builders_);
  }

  void run() {
    ProgressBar bar("measuring this machine");
    std::size_t done = 0;
    for (const CalibrationCase& each : cases_) {
      bar.update(done++, cases_.size(), std::to_string(each.tokens) + " tokens: " + each.policy);
      stop_if_interrupted();
      if (fits(each)) measure(each);
    }
    fit();
  }

 private:
  /// Keys and values of all layers.
  [[nodiscard]] bool fits(const CalibrationCase& each) const {
    const PageLayout layout{.page_tokens = kPageTokens, .head_dim = shape_.head_dim, .dtype = DType::bf16};
    const std::uint64_t layers = std::uint64_t{each.layers} * each.rows + 1;
    const std::uint64_t bytes = 2 * layout.row_bytes() * each.tokens * shape_.kv_heads * layers;
    return bytes <= machine_.host_bytes / kMemoryPart;
  }

  void measure(const CalibrationCase& each) {
    PolicySpec policy = timed_policy(each.policy);
    if (each.wide) policy.near.recent_tokens = each.tokens / 4;
    SyntheticOptions synthetic{.shape = shape_,
                               .layout = {.page_tokens = policy.page_tokens == 0 ? kPageTokens : policy.page_tokens,
                                          .head_dim = shape_.head_dim,
                                          .dtype = DType::bf16},
                               .tokens = each.tokens,
                               .steps = each.warm_up + each.steps};
    synthetic.prompt_queries = std::min(32u, each.tokens);
    const SyntheticLayer layer(synthetic, topology_, builders_);
    const DeviceSteps steps(layer, *device_);
    SyntheticForwardsOptions options{.policy = policy,
                                     .rows = each.rows,
                                     .layers = each.layers,
                                     .near_share = each.near_share,
                                     .placement = each.placement,
                                     .threads = threads_};
    const bool plain = std::string_view(each.policy) == kDefaultPolicy && each.placement == PlacementMode::hybrid;
    if (plain && each.rows == 1 && !each.wide) add_dense(layer, steps);
    CaseTimes times = time_case(options, layer, steps, device_, each.warm_up);
    if (!forward_us_) {
      options.layers = std::max(1u, each.layers / 4);
      const CaseTimes few = time_case(options, layer, steps, device_, each.warm_up);
      forward_us_ = forward_us(times, each.layers, few, options.layers);
    }
    times.apart_us = *forward_us_ / each.layers;
    correct(times);
    keep(each, times);
  }

  void keep(const CalibrationCase& each, const CaseTimes& times) {
    if (std::string_view(each.policy) == kDefaultPolicy && each.placement == PlacementMode::hybrid) {
      DefaultCases& cases = each.rows == 1 ? one_ : batch_;
      each.wide ? static_cast<void>(cases.wide = times) : cases.plain.push_back(times);
      return;
    }
    if (each.placement == PlacementMode::stream) streamed_.push_back(times);
    if (std::string_view(each.policy) == kDefaultPolicy) return;
    auto other = std::ranges::find(others_, each.policy, &PolicyCases::policy);
    if (other == others_.end()) other = others_.insert(other, {.policy = each.policy});
    auto& cases = each.placement == PlacementMode::stream ? other->streamed
                  : each.rows == 1                        ? other->alone
                                                          : other->together;
    cases.push_back(times);
  }

  /// What does not grow with the layers, from two numbers of them.
  [[nodiscard]] static double forward_us(const CaseTimes& all, std::uint32_t layers, const CaseTimes& some,
                                         std::uint32_t few) {
    const double whole = all.layer_us * layers;
    const double layer = (whole - some.layer_us * few) / (layers - few);
    return std::max(0.0, whole - layer * layers);
  }

  void add_dense(const SyntheticLayer& layer, const DeviceSteps& steps) {
    DenseOnDevice dense(layer, steps, *device_, kDensePageTokens, std::vector{layer.options().tokens});
    constexpr std::uint32_t kSamples = 5;
    const PageLayout& layout = layer.options().layout;
    dense_.push_back(
        {.us = percentile(dense.time(kSamples), 0.5),
         .bytes = 2.0 * static_cast<double>(layout.row_bytes()) * layer.options().tokens * shape_.kv_heads});
  }

  void fit(DefaultCases& cases, scheduler::StageCosts& costs) {
    const double gbps = machine_.rates.device_gbps;
    tell_near_apart(cases, gbps);
    const scheduler::StageCosts fitted = default_costs(cases, gbps);
    for (std::uint32_t i = 0; i < kStages; ++i) {
      if (fitted[i]) costs[i] = fitted[i];
    }
    std::ranges::copy_if(cases.plain, std::back_inserter(answered_),
                         [](const CaseTimes& times) { return times.far_bytes > 0.0; });
  }

  void fit() {
    scheduler::LaneRates& rates = machine_.rates;
    fit(one_, rates.stages);
    fit(batch_, rates.batch);
    rates.batch_rows = batch_.plain.empty() ? 0 : kBatchRows;
    // Beside `merge`, and beside forwards: its bytes alone, and nobody waits for a launch of its own.
    rates.stage(Stage::promote) = scheduler::StageCost{};
    if (forward_us_) rates.forward_us = *forward_us_;
    if (const auto cost = scheduler::fitted_cost(dense_, rates.device_gbps)) machine_.dense = *cost;
    fit_cpu();
    fit_others();
  }

  /// Those for which the device chooses first: where the CPU does, digests are ranked as well. Rows that the CPU has
  /// chosen are most of what is fetched.
  void fit_others() {
    scheduler::LaneRates& rates = machine_.rates;
    const auto by_device = [](const PolicyCases& cases) {
      return scheduler::chooser(parse_policy(cases.policy)) == scheduler::Chooser::device;
    };
    const auto by_cpu = std::ranges::stable_partition(others_, by_device).begin();
    for (auto cases = others_.begin(); cases != by_cpu; ++cases) fit(*cases);
    if (const auto cost = fetch_cost(streamed_, rates)) rates.stage(Stage::fetch) = cost;
    for (auto cases = by_cpu; cases != others_.end(); ++cases) fit(*cases);
  }

  void fit(const PolicyCases& cases) {
    scheduler::LaneRates& rates = machine_.rates;
    machine_.policies.push_back(policy_costs(cases, rates));
    // What no default has takes as long for policies that are like none of these.
    for (const Stage stage : {Stage::rank, Stage::choose_far}) {
      const auto& cost = machine_.policies.back().stages[static_cast<std::size_t>(stage)];
      if (cost && !rates.stage(stage)) rates.stage(stage) = cost;
    }
  }

  /// From the device's question until it has noticed the answer. Where it has waited, that is the time in which it
  /// attended what is near, and the wait; the rest, on its way there and back, is the same everywhere.
  void fit_cpu() {
    scheduler::LaneRates& rates = machine_.rates;
    constexpr double kWaited = 1.0, kMostUs = 1000.0;
    std::vector<double> away;
    for (const CaseTimes& times : answered_) {
      if (times.waited_us > kWaited)
        away.push_back(times.waited_us + times.stage_us[static_cast<std::size_t>(Stage::attend)] - times.answer_us);
    }
    if (!away.empty()) rates.hand_over_us = std::clamp(percentile(away, 0.5), 0.1, kMostUs);
    std::vector<CostSample> attending;
    for (const CaseTimes& times : answered_)
      attending.push_back({.us = times.answer_us + rates.hand_over_us, .bytes = times.far_bytes});
    if (const auto cost = scheduler::fitted_cost(attending, rates.cpu_gbps)) rates.stage(Stage::attend_far) = cost;
  }

  Machine& machine_;
  std::vector<CalibrationCase> cases_;
  std::uint32_t threads_;
  cpu::Topology topology_;
  std::shared_ptr<const cpu::Workers> builders_;
  std::shared_ptr<Device> device_;
  AttentionShape shape_;
  DefaultCases one_, batch_;  ///< of one sequence, and of kBatchRows
  std::vector<CostSample> dense_;
  std::vector<CaseTimes> answered_;  ///< of these, where the CPU was asked
  std::vector<CaseTimes> streamed_;  ///< of all policies, placed so
  std::vector<PolicyCases> others_;
  std::optional<double> forward_us_;
};

}  // namespace

void calibrate(Machine& machine, std::shared_ptr<Device> device, std::uint32_t threads, Effort effort) {
  auto cases = calibration_cases(device != nullptr, effort);
  Calibration(machine, std::move(device), threads, std::move(cases)).run();
}

}  // namespace sluice::tools
