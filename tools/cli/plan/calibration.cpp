#include "tools/cli/plan/calibration.hpp"

#include <algorithm>
#include <iterator>
#include <optional>
#include <string>
#include <vector>

#include "scheduler/plan/fitted_cost.hpp"
#include "sluice/error.hpp"
#include "tools/cli/bench/shapes.hpp"
#include "tools/cli/plan/case_times.hpp"
#include "tools/cli/plan/default_costs.hpp"
#include "tools/cli/text/interrupt.hpp"
#include "tools/cli/text/progress_bar.hpp"

namespace sluice::tools {
namespace {

using scheduler::CostSample;

constexpr std::uint32_t kPageTokens = 16;
constexpr std::uint32_t kDensePageTokens = 256;
/// Of the memory that can be had, what engines of a calibration take at most.
constexpr std::uint64_t kMemoryPart = 4;

struct Case {
  std::uint32_t tokens = 0;
  const char* policy = "sluice";
  PlacementMode placement = PlacementMode::hybrid;
  std::uint32_t rows = 1;  ///< sequences; kBatchRows in a batch
  bool wide = false;       ///< with a long window, all of it near; see DefaultCases
};
/// Of a batch, from which on a GPU is full, whatever the KV heads: 4 sequences of 8 KV heads are 32 lists, for which
/// `split` has a thread block for each multiprocessor of the largest devices, or two.
constexpr std::uint32_t kBatchRows = 4;

struct Program {
  std::uint32_t layers = 0;
  std::uint32_t warm_up = 0;
  std::uint32_t steps = 0;
  std::vector<Case> cases;  ///< the shortest of the default first
};

/// As many layers that what is far of all of them is in no cache of the CPU; lengths that tell a rate from a fixed
/// cost. On a GPU near rows may be attended in `split`, from which windows of two lengths tell them apart.
Program program_of(bool gpu, Effort effort) {
  constexpr PlacementMode kStream = PlacementMode::stream;
  constexpr PlacementMode kHybrid = PlacementMode::hybrid;
  constexpr Case kWide{.tokens = 32768, .wide = true};
  Program program{.layers = 16, .warm_up = 64, .steps = 16, .cases = {{8192}, {32768}, kWide}};
  if (gpu && effort == Effort::thorough) {
    program.cases = {{8192},
                     {32768},
                     {131072},
                     {8192, "quest"},
                     {131072, "quest"},
                     {8192, "sluice", kStream},
                     {32768, "sluice", kStream},
                     {8192, "lfps"},
                     {32768, "lfps"},
                     {8192, "sluice", kHybrid, kBatchRows},
                     {32768, "sluice", kHybrid, kBatchRows},
                     kWide,
                     {32768, "sluice", kHybrid, kBatchRows, true}};
  }
  if (gpu) return program;
  program = {.layers = 4, .warm_up = 16, .steps = 12, .cases = {{1024}, {4096}}};
  if (effort == Effort::thorough) {
    program.cases = {{1024},
                     {4096},
                     {16384},
                     {4096, "quest"},
                     {16384, "quest"},
                     {4096, "sluice", kStream},
                     {16384, "sluice", kStream},
                     {4096, "lfps"},
                     {16384, "lfps"},
                     {1024, "sluice", kHybrid, kBatchRows},
                     {4096, "sluice", kHybrid, kBatchRows}};
  }
  return program;
}

class Calibration {
 public:
  Calibration(Machine& machine, std::shared_ptr<Device> device, std::uint32_t threads, const Program& program)
      : machine_(machine),
        program_(program),
        threads_(threads),
        builders_(std::make_shared<const cpu::Workers>(topology_, cpu::WorkersOptions{})),
        device_(std::move(device)),
        shape_(named_shape("llama-3.1-8b")) {
    if (!device_) device_ = std::make_shared<cpu::HostDevice>(builders_);
  }

  void run() {
    ProgressBar bar("measuring this machine");
    std::size_t done = 0;
    for (const Case& each : program_.cases) {
      bar.update(done++, program_.cases.size(), std::to_string(each.tokens) + " tokens: " + each.policy);
      stop_if_interrupted();
      if (fits(each)) measure(each);
    }
    fit();
  }

 private:
  /// Keys and values of all layers.
  [[nodiscard]] bool fits(const Case& each) const {
    const PageLayout layout{.page_tokens = kPageTokens, .head_dim = shape_.head_dim, .dtype = DType::bf16};
    const std::uint64_t layers = std::uint64_t{program_.layers} * each.rows + 1;
    const std::uint64_t bytes = 2 * layout.row_bytes() * each.tokens * shape_.kv_heads * layers;
    return bytes <= machine_.host_bytes / kMemoryPart;
  }

  void measure(const Case& each) {
    PolicySpec policy = parse_policy(each.policy);
    policy.dense_layers = policy.dense_every = 0;
    if (each.wide) policy.near.recent_tokens = each.tokens / 4;
    SyntheticOptions synthetic{.shape = shape_,
                               .layout = {.page_tokens = policy.page_tokens == 0 ? kPageTokens : policy.page_tokens,
                                          .head_dim = shape_.head_dim,
                                          .dtype = DType::bf16},
                               .tokens = each.tokens,
                               .steps = program_.warm_up + program_.steps};
    synthetic.prompt_queries = std::min(32u, each.tokens);
    const SyntheticLayer layer(synthetic, topology_, builders_);
    const DeviceSteps steps(layer, *device_);
    constexpr double kNear = 0.05, kNearWide = 0.4;
    SyntheticForwardsOptions options{.policy = policy,
                                     .rows = each.rows,
                                     .layers = program_.layers,
                                     .near_share = each.wide ? kNearWide : kNear,
                                     .placement = each.placement,
                                     .threads = threads_};
    const bool plain = std::string_view(each.policy) == "sluice" && each.placement == PlacementMode::hybrid;
    if (plain && each.rows == 1 && !each.wide) add_dense(layer, steps);
    CaseTimes times = time_case(options, layer, steps, device_, program_.warm_up);
    if (!forward_us_) {
      options.layers = std::max(1u, program_.layers / 4);
      forward_us_ =
          forward_us(times, options.layers, time_case(options, layer, steps, device_, program_.warm_up).layer_us);
    }
    correct(times, *forward_us_ / program_.layers);
    if (!plain) {
      others_.push_back(times);
      return;
    }
    DefaultCases& cases = each.rows == 1 ? one_ : batch_;
    if (each.wide)
      cases.wide = times;
    else
      cases.plain.push_back(times);
  }

  /// What does not grow with the layers, from two numbers of them.
  [[nodiscard]] double forward_us(const CaseTimes& all, std::uint32_t few_layers, double few_layer_us) const {
    const double whole = all.layer_us * program_.layers;
    const double layer = (whole - few_layer_us * few_layers) / (program_.layers - few_layers);
    return std::max(0.0, whole - layer * program_.layers);
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
    for (const Stage stage : {Stage::rank, Stage::fetch, Stage::choose_far}) fit_rest(stage);
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

  /// A stage that the default has none of takes what is left of a layer where other policies have it.
  void fit_rest(Stage stage) {
    scheduler::LaneRates& rates = machine_.rates;
    const auto has = [&](const CaseTimes& times, Stage which) {
      if (which == Stage::choose_far) return times.scored_bytes > 0.0;
      if (which == Stage::attend_far) return times.far_bytes > 0.0;
      return times.ran[static_cast<std::size_t>(which)];
    };
    const auto bytes_of = [&](const CaseTimes& times, Stage which) {
      if (which == Stage::choose_far) return times.scored_bytes;
      return which == Stage::attend_far ? times.far_bytes : times.stage_bytes[static_cast<std::size_t>(which)];
    };
    const auto rate_of = [&](Stage which) {
      return lane_of(which) == Lane::cpu    ? rates.cpu_gbps
             : lane_of(which) == Lane::link ? rates.link_gbps
                                            : rates.device_gbps;
    };
    std::vector<CostSample> samples;
    for (const CaseTimes& times : others_) {
      if (!has(times, stage)) continue;
      const auto cost_us = [&](Stage which) {
        const std::optional<scheduler::StageCost>& cost = rates.stage(which);
        if (which == stage || !cost || !has(times, which)) return 0.0;
        return cost->fixed_us + bytes_of(times, which) / (cost->share * rate_of(which) * 1e3);
      };
      double rest = times.layer_us - *forward_us_ / program_.layers;
      for (const Stage which :
           {Stage::append, Stage::rank, Stage::score, Stage::choose, Stage::split, Stage::fetch, Stage::merge})
        rest -= cost_us(which);
      const double near_us = cost_us(Stage::attend), far_us = cost_us(Stage::attend_far);
      rest -= stage == Stage::choose_far ? far_us : std::max(near_us, far_us);
      samples.push_back({.us = std::max(rest, 0.1), .bytes = bytes_of(times, stage)});
    }
    if (const auto cost = scheduler::fitted_cost(samples, rate_of(stage))) rates.stage(stage) = cost;
  }

  Machine& machine_;
  const Program& program_;
  std::uint32_t threads_;
  cpu::Topology topology_;
  std::shared_ptr<const cpu::Workers> builders_;
  std::shared_ptr<Device> device_;
  AttentionShape shape_;
  DefaultCases one_, batch_;  ///< of one sequence, and of kBatchRows
  std::vector<CostSample> dense_;
  std::vector<CaseTimes> answered_;  ///< of these, where the CPU was asked
  std::vector<CaseTimes> others_;    ///< of other policies and placements
  std::optional<double> forward_us_;
};

}  // namespace

void calibrate(Machine& machine, std::shared_ptr<Device> device, std::uint32_t threads, Effort effort) {
  const Program program = program_of(device != nullptr, effort);
  Calibration(machine, std::move(device), threads, program).run();
}

}  // namespace sluice::tools
