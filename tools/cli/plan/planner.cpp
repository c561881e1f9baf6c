#include "tools/cli/plan/planner.hpp"

#include <algorithm>
#include <vector>

#include "scheduler/plan/forward_rows.hpp"
#include "scheduler/plan/forward_work.hpp"
#include "sluice/error.hpp"

namespace sluice::tools {
namespace {

PageLayout layout_of(const Workload& work) {
  return {.page_tokens = work.page_tokens, .head_dim = work.shape.head_dim, .dtype = work.kv_dtype};
}

/// @throws as make_room_for
EngineOptions options_of(const Workload& work) {
  const PageLayout layout = layout_of(work);
  const std::uint64_t block = layout.page_bytes() * work.shape.layers * work.shape.kv_heads;
  const std::uint64_t blocks = div_up(std::uint64_t{work.tokens}, work.page_tokens) * work.rows;
  EngineOptions options;
  options.shape = work.shape;
  options.page_tokens = work.page_tokens;
  options.kv_dtype = work.kv_dtype;
  options.placement = work.placement;
  options.host_bytes = blocks * block;
  options.near_bytes = static_cast<std::uint64_t>(work.near_share * static_cast<double>(blocks)) * block;
  options.sequences = work.rows;
  options.largest = {.decode_rows = work.rows, .max_tokens = work.tokens, .top_k = false};
  options.prompt_queries = options.max_picks = options.max_ranked = options.max_window = 1;
  options.import_rows = std::min(options.import_rows, work.tokens);
  make_room_for(work.policy, work.tokens, options);
  if (options.cpu_sequences != 0) options.cpu_sequences = work.rows;
  return options;
}

/// Of what a row may attend beyond sinks and recent tokens, the share that it does. A budget in tokens or pages is
/// taken as if no two query heads of a group wanted the same; where the policy goes by mass, `attended` says it.
double chosen_share(const Workload& work, const ForwardRow& row) {
  const bool counted = row.picks != 0 || (row.in_pages() && row.mass <= 0.f);
  if (row.whole() || counted) return 1.0;
  const double window = row.sink_end + (row.tokens - row.recent_begin);
  double candidates = row.tokens - window;
  if (row.in_pages()) candidates = std::min(candidates, 1.0 * work.shape.group() * row.page_picks * work.page_tokens);
  return candidates <= 0.0 ? 1.0 : std::clamp((work.attended * row.tokens - window) / candidates, 0.0, 1.0);
}

std::optional<EngineMemoryUse> needed(const Workload& work) {
  try {
    return memory_needed(options_of(work));
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

WorkloadPlan plan(const Workload& work, const Machine& machine, std::uint64_t reserved) {
  const EngineOptions options = options_of(work);
  const scheduler::WorkPlace place{.shape = work.shape,
                                   .layout = layout_of(work),
                                   .placement = work.placement,
                                   .bucket = options.largest,
                                   .promotes = false};
  std::vector<ForwardRow> rows(work.rows, scheduler::forward_row(work.policy, work.tokens, work.page_tokens));
  for (std::uint32_t i = 0; i < work.rows; ++i) rows[i].list = rows[i].at = i;
  const std::vector<WorkItem> items =
      scheduler::forward_work(place, rows, {}, {.near = work.near_hits, .chosen = chosen_share(work, rows.front())});
  const std::vector<scheduler::PlannedTime> times = scheduler::estimate(items, machine.rates);
  WorkloadPlan result;
  for (std::size_t i = 0; i < items.size(); ++i) {
    result.forward_us = std::max(result.forward_us, times[i].end_us);
    result.busy_us[static_cast<std::size_t>(items[i].lane)] += times[i].end_us - times[i].begin_us;
  }
  result.bottleneck = static_cast<Lane>(std::ranges::max_element(result.busy_us) - result.busy_us.begin());
  const double kv_bytes = 2.0 * static_cast<double>(place.layout.row_bytes()) * work.tokens * work.rows *
                          work.shape.kv_heads * work.shape.layers;
  result.dense_us = kv_bytes / (machine.rates.device_gbps * 1e3);
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
