#include "tools/cli/bench/gpu_rig.hpp"

#include <algorithm>
#include <numeric>

#include "sluice/error.hpp"
#include "tools/cli/bench/batch_rows.hpp"
#include "tools/cli/bench/bench.hpp"
#include "tools/cli/far_flag.hpp"
#include "tools/cli/trace/trace.hpp"

namespace sluice::tools {
namespace {

constexpr std::uint32_t kDensePageTokens = 256;

std::vector<float> first_out(SyntheticForwards& forwards) {
  (void)forwards.time(1);
  return forwards.out();
}

}  // namespace

GpuRig::GpuRig(const BenchGpuOptions& options, const AttentionShape& shape)
    : options_(options),
      shape_(shape),
      device_(make_device(options.device)),
      builders_(std::make_shared<const cpu::Workers>(topology_, cpu::WorkersOptions{})) {
  // Without a GPU the same forwards run on the embedded device: for trying the command out, not for its times.
  if (!device_) device_ = std::make_shared<cpu::HostDevice>(builders_);
}

Handover GpuRig::handover() const noexcept {
  return options_.handover == Handover::automatic ? device_->info().handover : options_.handover;
}

const scheduler::LaneRates& GpuRig::rates() {
  const PageLayout layout{.page_tokens = options_.page_tokens, .head_dim = shape_.head_dim, .dtype = options_.kv_dtype};
  if (!rates_) rates_ = measured_rates(device_.get(), layout.page_bytes(), options_.threads);
  return *rates_;
}

void GpuRig::for_each_layer(std::uint32_t length, std::uint32_t steps, const std::vector<GpuCase>& cases,
                            const Use& use) {
  std::map<std::uint32_t, std::vector<GpuCase>> by_page;
  for (const GpuCase& each : cases)
    by_page[each.spec.page_tokens == 0 ? options_.page_tokens : each.spec.page_tokens].push_back(each);
  for (const auto& [page_tokens, alike] : by_page) {
    SyntheticOptions synthetic{
        .shape = shape_,
        .layout = {.page_tokens = page_tokens, .head_dim = shape_.head_dim, .dtype = DType::bf16},
        .tokens = length,
        .steps = steps,
        .prompt_queries = std::min(32u, length)};
    synthetic.pattern = parse_pattern(options_.pattern);
    synthetic.sinks = options_.sinks;
    synthetic.seed = options_.seed;
    synthetic.rounded = options_.kv_dtype == DType::fp8_e4m3;  // What the engine is to give is of what it stores.
    const SyntheticLayer layer(synthetic, topology_, builders_);
    use(layer, DeviceSteps(layer, *device_), alike);
  }
}

std::map<std::uint32_t, double> GpuRig::time_dense(std::uint32_t length, const std::vector<GpuCase>& cases,
                                                   const SyntheticLayer& layer, const DeviceSteps& steps) {
  std::map<std::uint32_t, double> us;
  std::vector<std::uint32_t> counts{1};
  for (const GpuCase& each : cases) counts.push_back(each.rows);
  for (const std::uint32_t rows : counts) {
    if (us.contains(rows)) continue;
    DenseOnDevice dense(layer, steps, *device_, kDensePageTokens, row_lengths(rows, length, options_.ragged));
    std::vector<float> out = dense.attend(0);
    if (rows == 1) want_ = std::move(out);
    if (rows != 1 && !(relative_error(out, want_) <= kGpuTolerance))
      throw Error(Errc::device, "bench gpu: dense attention of " + std::to_string(rows) +
                                    " sequences is not what the first of them gives alone; nothing of it was timed");
    us[rows] = percentile(dense.time(9), 0.5);
  }
  return us;
}

void GpuRig::require_dense(std::uint32_t length, const GpuCase& each, const SyntheticLayer& layer,
                           const DeviceSteps& steps) {
  GpuCase whole = each;
  whole.rows = 1;
  whole.all_near = false;
  whole.spec = parse_policy("exact | int4 | top_k=all | near=0,sinks=4,recent=128");
  SyntheticForwards forwards(forwards_of(length, whole), layer, steps, device_);
  const double off = relative_error(first_out(forwards), want_);
  if (!(off <= kGpuTolerance))
    throw Error(Errc::device, "bench gpu: dense attention of " + std::to_string(length) +
                                  " tokens is wrong (relative error " + std::to_string(off) +
                                  "); nothing of it was timed");
}

double GpuRig::first_error(std::uint32_t length, const GpuCase& each, const SyntheticLayer& layer,
                           const DeviceSteps& steps) const {
  SyntheticForwards chosen(forwards_of(length, each), layer, steps, device_);
  return relative_error(first_out(chosen), want_);
}

AuditReport GpuRig::audit(std::uint32_t length, const GpuCase& each, const SyntheticLayer& layer,
                          const DeviceSteps& steps, std::uint32_t layers) const {
  SyntheticForwardsOptions options = forwards_of(length, each);
  options.audit = true;
  options.layers = layers;
  SyntheticForwards forwards(options, layer, steps, device_);
  forwards.audit(false);
  (void)forwards.time(options_.warm_up);  // What is audited is what is timed.
  forwards.audit(true);
  (void)forwards.time(std::min(options_.audited_steps, options_.steps));
  return forwards.engine().audit(forwards.sequence());
}

GpuCase GpuRig::limited(std::uint32_t length, GpuCase each, std::uint32_t page_tokens) {
  const FarPlace place{.shape = shape_,
                       .kv_dtype = options_.kv_dtype,
                       .placement = each.placement,
                       .page_tokens = page_tokens,
                       .rows = each.rows,
                       .tokens = length,
                       .near_hits = usual_near_hits(near_share(length, each))};
  each.policy = with_far(each.policy, options_.far, place, [&] { return rates(); });
  each.spec = timed_policy(each.policy);
  return each;
}

SyntheticForwardsOptions GpuRig::forwards_of(std::uint32_t length, const GpuCase& each) const {
  return {.policy = each.spec,
          .rows = each.rows,
          .lengths = row_lengths(each.rows, length, options_.ragged),
          .layers = options_.layers,
          .kv_dtype = options_.kv_dtype,
          .near_share = near_share(length, each),
          .placement = each.placement,
          .fetch_share = share_for(each.placement, options_.fetch_share),
          .handover = options_.handover,
          .threads = options_.threads,
          .promotions = options_.promotions,
          .dense_tokens = options_.dense_tokens.value_or(0)};
}

double GpuRig::mean_length(std::uint32_t rows, std::uint32_t length) const {
  const std::vector<std::uint32_t> lengths = row_lengths(rows, length, options_.ragged);
  return std::accumulate(lengths.begin(), lengths.end(), 0.0) / rows;
}

}  // namespace sluice::tools
