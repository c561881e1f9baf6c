#include "scheduler/policy/budget.hpp"

#include <algorithm>

namespace sluice::scheduler {

void Budget::score(const HeadContext& context, std::uint32_t group, ScoredSet& scored, SelectCounters& counters) const {
  if (estimates()) {
    scored.estimate(*context.kv, context.q, group);
    counters.estimated += scored.size();
  } else {
    scored.score(*context.kv, context.q, group);
    counters.scored += scored.size();
  }
}

void Budget::choose(const HeadContext& context, std::uint32_t group, ScoredSet& scored) const {
  if (weighs()) {
    scored.choose_mass(spec_.budget.mass, attended_anyway(context), group);
    if (!spec_.far.all()) scored.keep_best(far_tokens_per_head(spec_.far, context.tokens, shape_), group, *context.kv);
  } else {
    scored.choose(tokens(context.tokens), group, *context.kv);
  }
}

AttendedAnyway Budget::attended_anyway(const HeadContext& context) const noexcept {
  const NearSet& near = *context.near;
  return {.sink_end = near.sink_end,
          .recent_begin = near.recent_begin,
          .open = estimates() ? newest_page(context.tokens, shape_.page_tokens) : context.tokens};
}

}  // namespace sluice::scheduler
