#include "tools/cli/plan/near_hits.hpp"

#include <algorithm>
#include <array>
#include <string_view>

#include "gpu/split_rule.hpp"
#include "scheduler/layer_policy.hpp"
#include "scheduler/plan/forward_rows.hpp"
#include "sluice/cuda.hpp"
#include "tools/cli/plan/policy_costs.hpp"

namespace sluice::tools {
namespace {

/// One sequence of 16K, 32K or 64K tokens on an H200, structured attention, near memory for 3.5% of the tokens, and for
/// 5% where others than the default were measured (docs/data/plan_h200.json, docs/data/default_h200.md). The default's
/// are 95 to 98% from 4K to 512K tokens.
struct MeasuredHits {
  std::string_view policy;
  double share;
};
constexpr std::array<MeasuredHits, 6> kMeasured{{{"sluice", 0.97},
                                                 {"quest", 0.96},
                                                 {"twilight", 0.98},
                                                 {"exact | int4 | top_p=0.95", 0.64},
                                                 {"lfps", 0.80},
                                                 {"psa", 0.63}}};
constexpr double kGuess = 0.5;
/// Of what query heads that share a KV head choose, what is left once each token counts once: 0.53 to 0.57 of whole
/// pages, 0.6 to 0.8 of tokens, in the same measurements. So many have to lie near, or are far; what it takes to attend
/// them is planned by all that heads choose (`plan`), as the most that it can be.
constexpr double kDistinct = 0.55;

/// Tokens of a row, per KV head.
struct Wanted {
  double window = 0.0;  ///< sinks and recent ones, or all
  double chosen = 0.0;  ///< beyond them, about
};

Wanted wanted_of(const Workload& work, const ForwardRow& row) {
  Wanted wanted{.window = row.whole() ? 1.0 * row.tokens : 1.0 * row.sink_end + (row.tokens - row.recent_begin)};
  const double between = row.tokens - wanted.window;
  const double group = work.shape.group();
  if (row.picks != 0) {
    wanted.chosen = kDistinct * group * row.picks;
  } else if (row.mass > 0.f || row.asks != 0) {
    wanted.chosen = work.attended * row.tokens - wanted.window;
  } else if (row.in_pages()) {
    wanted.chosen = kDistinct * group * row.page_picks * work.page_tokens;
  }
  wanted.chosen = std::clamp(wanted.chosen, 0.0, between);
  return wanted;
}

NearHits of_policy(const PolicySpec& policy) {
  for (const MeasuredHits& each : kMeasured) {
    if (alike(policy, parse_policy(each.policy))) return {.share = each.share, .from = "measured"};
  }
  return {.share = kGuess, .from = "guess"};
}

ForwardRow row_of(const Workload& work) {
  return scheduler::forward_row(work.policy, work.tokens, scheduler::row_shape(work.shape, work.page_tokens));
}

}  // namespace

double usual_linked(const Workload& work, const Machine& machine) {
  constexpr std::uint32_t kMultiprocessors = 132;  // Of an H100 or H200, as all that is measured here.
  if (machine.device_bytes == 0 || work.placement != PlacementMode::hybrid || work.fetch_share != 0.f) return 0.0;
  const Bucket bucket = decoding_bucket(work);
  // A sequence of as many tokens is to have more.
  if (!bucket.top_k || bucket.pages || bucket.unbounded || work.tokens >= gpu::kMostSplitTokensAttended) return 0.0;
  const std::uint32_t lists = work.rows * work.shape.kv_heads;
  const std::uint32_t most = gpu::split_blocks_wanted(lists, work.tokens, kMultiprocessors, gpu::kMostSplitBlocks);
  const std::uint32_t blocks = gpu::split_blocks_attending(most, lists, work.tokens, kMultiprocessors);
  if (blocks == 0) return 0.0;
  const Wanted wanted = wanted_of(work, row_of(work));
  const double far = (1.0 - work.near_hits) * (wanted.window + wanted.chosen);
  const std::uint32_t room = gpu::list_link_rows(CudaDeviceOptions{}.link_rows, lists);
  return far <= std::min(room, blocks * gpu::kMostLinkRows) ? 1.0 - work.near_hits : 0.0;
}

NearHits usual_near_hits(const Workload& work) {
  const bool by_cpu = scheduler::chooser(work.policy) == scheduler::Chooser::cpu;
  if (by_cpu && work.placement == PlacementMode::hybrid) return {.share = 0.0, .from = "in place"};
  const ForwardRow row = row_of(work);
  const Wanted wanted = wanted_of(work, row);
  const double all = wanted.window + wanted.chosen;
  const double room = all <= 0.0 ? 1.0 : std::min(1.0, work.near_share * row.tokens / all);
  const bool chooses = !row.whole() && (wanted.chosen > 0.0 || row.ranks() || row.asks != 0);
  if (!chooses) return {.share = room, .from = "room"};
  const NearHits hits = of_policy(work.policy);
  return hits.share <= room ? hits : NearHits{.share = room, .from = "room"};
}

}  // namespace sluice::tools
