#include "scheduler/plan/far_advice.hpp"

#include <algorithm>
#include <vector>

namespace sluice::scheduler {
namespace {

/// Whether a row attends pages as they are.
bool whole_pages(const ForwardRow& row) noexcept { return row.in_pages() && !row.ranks(); }

/// Tokens that a query head of the row may choose.
std::uint32_t chosen(const ForwardRow& row, std::uint32_t page_tokens) noexcept {
  const std::uint32_t between = row.recent_begin - row.sink_end;
  if (row.picks != 0) return row.picks;
  if (row.mass <= 0.f && row.asks == 0 && !row.in_pages()) return 0;
  return std::min({between, row.most, row.in_pages() ? row.page_picks * page_tokens : between});
}

/// The row, of which each query head chooses no more than `each` tokens.
ForwardRow limited(ForwardRow row, std::uint32_t each, std::uint32_t page_tokens) noexcept {
  row.picks = std::min(row.picks, each);
  if (whole_pages(row)) row.page_picks = std::min(row.page_picks, each / page_tokens);
  row.most = each;
  return row;
}

/// Of all that a row attends, the share that lies near: sinks and recent tokens, and of the others `near`. What the CPU
/// chooses is not brought near.
double near_share(const WorkPlace& place, const ForwardRow& row, double near) noexcept {
  const double window = row.sink_end + (row.tokens - row.recent_begin);
  const double most = 1.0 * place.shape.group() * chosen(row, place.layout.page_tokens);
  const double others = std::min<double>(row.recent_begin - row.sink_end, most);
  return (window + (row.asks != 0 ? 0.0 : near) * others) / std::max(1.0, window + others);
}

/// Whether in the first layer the CPU has ended by the time that the device has attended what lies near.
bool hidden(const LaneRates& rates, const WorkPlace& place, const std::vector<ForwardRow>& rows, double near) {
  const std::vector<WorkItem> items = forward_work(place, rows, {}, {.near = near_share(place, rows.front(), near)});
  const std::vector<PlannedTime> times = estimate(items, rates);
  double attended = 0.0, far = 0.0;
  for (std::size_t i = 0; i < items.size(); ++i) {
    if (items[i].stage == Stage::attend) attended = times[i].end_us;
    if (items[i].stage == Stage::attend_far || items[i].stage == Stage::fetch) far = times[i].end_us;
  }
  return far <= attended;
}

}  // namespace

FarOptions advised_far(const LaneRates& rates, const WorkPlace& place, const ForwardRow& row, std::uint32_t rows,
                       double near) {
  const std::uint32_t page_tokens = place.layout.page_tokens;
  const std::uint32_t unit = whole_pages(row) ? page_tokens : 1;
  const std::uint32_t most = chosen(row, page_tokens);
  const std::uint32_t least = std::max(kLeastAdvised, unit);
  WorkPlace layer = place;
  layer.shape.layers = 1;
  layer.windows = {};
  const auto hides = [&](std::uint32_t each) {
    ForwardRow plain = limited(row, each, page_tokens);
    plain.list = 0;
    plain.dense_layers = plain.dense_every = 0;
    return hidden(rates, layer, std::vector<ForwardRow>(rows, plain), near);
  };
  if (most <= least || hides(most)) return {};
  // The largest that is hidden, above the least.
  std::uint32_t low = least / unit;
  for (std::uint32_t high = most / unit; high - low > 1;) {
    const std::uint32_t middle = low + (high - low) / 2;
    (hides(middle * unit) ? low : high) = middle;
  }
  const std::uint64_t far = std::uint64_t{low} * unit * place.shape.q_heads;
  return {.min_tokens = static_cast<std::uint32_t>(std::min<std::uint64_t>(far, 0x7fff'ffffu)), .share = 0.f};
}

}  // namespace sluice::scheduler
