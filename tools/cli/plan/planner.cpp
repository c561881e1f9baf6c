#include "tools/cli/plan/planner.hpp"

#include <algorithm>
#include <vector>

#include "scheduler/clusters/cluster_schedule.hpp"
#include "scheduler/layer_policy.hpp"
#include "scheduler/plan/forward_rows.hpp"
#include "scheduler/plan/forward_work.hpp"
#include "sluice/error.hpp"
#include "sluice/step/fetch_share.hpp"
#include "tools/cli/bench/gpu_cases.hpp"
#include "tools/cli/engine_flags.hpp"

namespace sluice::tools {
namespace {

PageLayout layout_of(const Workload& work) {
  return {.page_tokens = work.page_tokens, .head_dim = work.shape.head_dim, .dtype = work.kv_dtype};
}

/// An engine of as many conversations, which reads their prompts, too.
/// @throws as `sized`
EngineOptions options_of(const Workload& work) {
  EngineFlags flags;
  flags.placement = work.placement;
  flags.fetch_share = work.fetch_share;
  flags.kv_dtype = work.kv_dtype;
  EngineOptions options = sized(flags, work.shape, {&work.policy, 1},
                                {.page_tokens = work.page_tokens, .tokens = work.tokens, .near = work.near_share});
  options.host_bytes *= work.rows;
  options.near_bytes *= work.rows;
  options.sequences = options.largest.decode_rows = work.rows;
  if (options.cpu_sequences != 0) options.cpu_sequences = work.rows;
  if (options.cluster_sequences != 0) options.cluster_sequences = work.rows;
  return options;
}

/// Of what a row may attend beyond sinks and recent tokens, the share that it does. A budget in tokens or pages is
/// taken as if no two query heads of a group wanted the same, unless it was measured; where the policy goes by mass,
/// `attended` says it.
double chosen_share(const Workload& work, const ForwardRow& row) {
  const bool counted = row.picks != 0 || (row.in_pages() && row.mass <= 0.f);
  if (row.whole() || (counted && !work.attended_known)) return 1.0;
  const double window = row.sink_end + (row.tokens - row.recent_begin);
  double candidates = row.tokens - window;
  if (row.in_pages()) candidates = std::min(candidates, 1.0 * work.shape.group() * row.page_picks * work.page_tokens);
  if (row.picks != 0) candidates = std::min(candidates, 1.0 * work.shape.group() * row.picks);
  if (row.most != kNone) candidates = std::min(candidates, 1.0 * work.shape.group() * row.most);
  return candidates <= 0.0 ? 1.0 : std::clamp((work.attended * row.tokens - window) / candidates, 0.0, 1.0);
}

/// With the most that policies keep on the heap; nothing if an engine cannot be as large.
std::optional<EngineMemoryUse> needed(const Workload& work) {
  try {
    EngineMemoryUse memory = memory_needed(options_of(work));
    if (scheduler::chooser(work.policy) == scheduler::Chooser::cpu)
      memory.policies = work.rows * scheduler::policy_state_bytes(work.policy, work.shape, work.tokens);
    return memory;
  } catch (const Error& error) {
    if (error.code() != Errc::invalid_argument) throw;
    return std::nullopt;  // More rows or blocks than an engine can have.
  }
}

bool fits(const EngineMemoryUse& memory, const Machine& machine, std::uint64_t reserved) {
  if (machine.device_bytes == 0) return memory.host() + memory.device() + reserved <= machine.host_bytes;
  return memory.host() <= machine.host_bytes && memory.device() + reserved <= machine.device_bytes;
}

/// The largest number up to `most` for which `fit` holds; it holds for none behind one for which it does not.
template <class Fit>
std::uint32_t largest(std::uint32_t most, const Fit& fit) {
  std::uint32_t low = 0;
  for (std::uint32_t high = most + 1; high - low > 1;) {
    const std::uint32_t middle = low + (high - low) / 2;
    (fit(middle) ? low : high) = middle;
  }
  return low;
}

}  // namespace

void place(const std::string& text, Workload& work) {
  const bool all_near = text == kNear;
  if (all_near && scheduler::chooser(work.policy) == scheduler::Chooser::cpu)
    throw Error(Errc::unsupported, "--placements near: policy '" + work.policy.name +
                                       "' chooses on the CPU, which reads keys in host memory; place it hybrid or "
                                       "stream");
  work.placement = all_near ? PlacementMode::hybrid : parse_placement(text);
  if (all_near) work.near_share = work.near_hits = 1.0;
}

const char* placement_of(const Workload& work) noexcept {
  const bool all_near = work.near_share >= 1.0 && work.near_hits >= 1.0;
  return all_near ? kNear : to_string(work.placement);
}

/// Of more rows and tokens than an engine can have, too: a policy wants the same features of one row and one page.
Bucket decoding_bucket(const Workload& work) {
  const EngineOptions one{.shape = work.shape,
                          .page_tokens = work.page_tokens,
                          .kv_dtype = work.kv_dtype,
                          .host_bytes = layout_of(work).page_bytes() * work.shape.layers * work.shape.kv_heads,
                          .policies = {work.policy},
                          .largest = {.decode_rows = 1, .top_k = false}};
  Bucket bucket = resolved(one).largest;
  bucket.decode_rows = work.rows;
  bucket.max_tokens = static_cast<std::uint32_t>(div_up(work.tokens, work.page_tokens)) * work.page_tokens;
  return bucket;
}

WorkloadPlan plan(const Workload& work, const Machine& machine, std::uint64_t reserved) {
  const Bucket decoding = decoding_bucket(work);
  const scheduler::WorkPlace place{.shape = work.shape,
                                   .layout = layout_of(work),
                                   .placement = work.placement,
                                   .fetch_share = fetch_share_of(work.fetch_share),
                                   .bucket = decoding,
                                   .promotes = work.near_share > 0.0,
                                   .code_bits = scheduler::code_bits_for(work.policy)};
  ForwardRow row = scheduler::forward_row(work.policy, work.tokens, scheduler::row_shape(work.shape, work.page_tokens));
  if (scheduler::clusters_on_device(work.policy)) {  // As if all that is before it had been a prompt.
    scheduler::ClusterSchedule schedule(work.policy.clusters);
    schedule.advance(work.tokens - 1);
    scheduler::choose_clusters(work.policy, 0, schedule.clusters(), schedule.clustered(), row);
  }
  std::vector<ForwardRow> rows(work.rows, row);
  for (std::uint32_t i = 0; i < work.rows; ++i) rows[i].list = rows[i].at = i;
  const std::vector<WorkItem> items = scheduler::forward_work(place, rows, {},
                                                              {.near = work.near_hits,
                                                               .linked = work.linked,
                                                               .chosen = chosen_share(work, rows.front()),
                                                               .promoted = work.promoted * work.rows,
                                                               .scored = work.scored * work.tokens});
  const scheduler::LaneRates rates = rates_for(work.policy, machine.policies, machine.rates);
  const std::vector<scheduler::PlannedTime> times = scheduler::estimate(items, rates);
  WorkloadPlan result;
  for (std::size_t i = 0; i < items.size(); ++i) {
    result.forward_us = std::max(result.forward_us, times[i].end_us);
    result.busy_us[static_cast<std::size_t>(items[i].lane)] += times[i].end_us - times[i].begin_us;
  }
  result.forward_us += machine.rates.forward_us;
  result.model_us = result.forward_us + static_cast<double>(work.weights_bytes) / (machine.rates.device_gbps * 1e3);
  result.bottleneck = static_cast<Lane>(std::ranges::max_element(result.busy_us) - result.busy_us.begin());
  const double layer_bytes =
      2.0 * static_cast<double>(place.layout.near().row_bytes()) * work.tokens * work.shape.kv_heads;
  const double dense_gbps = machine.rates.device_gbps * machine.dense.share;
  // One launch for all sequences.
  result.dense_us = work.shape.layers * (machine.dense.fixed_us + work.rows * layer_bytes / (dense_gbps * 1e3));
  if (const auto memory = needed(work)) {
    result.memory = *memory;
    result.fits = fits(*memory, machine, reserved);
  }
  return result;
}

std::uint32_t most_rows(Workload work, const Machine& machine, std::uint64_t reserved) {
  constexpr std::uint32_t kMost = 4096;
  return largest(kMost, [&](std::uint32_t rows) {
    work.rows = rows;
    const auto memory = needed(work);
    return memory && fits(*memory, machine, reserved);
  });
}

std::uint32_t most_tokens(Workload work, const Machine& machine, std::uint64_t reserved) {
  constexpr std::uint32_t kMostPages = (1u << 26) / 8;
  const std::uint32_t pages = largest(kMostPages, [&](std::uint32_t count) {
    work.tokens = count * work.page_tokens;
    const auto memory = needed(work);
    return memory && fits(*memory, machine, reserved);
  });
  return pages * work.page_tokens;
}

}  // namespace sluice::tools
