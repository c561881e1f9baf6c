#include "scheduler/policy/history_upkeep.hpp"

#include <cmath>
#include <span>

namespace sluice::scheduler {

void HistoryUpkeep::end_step(SparseHead& head, std::uint32_t tokens) {
  head.history->catch_up(head.visible);
  // One that is repeated must find what it found before; a forecast since then knows better.
  if (tokens == head.visible || head.history->tokens() != head.visible) return;
  for (const std::uint32_t token : head.heavy) head.history->note(token);
}

void HistoryUpkeep::recall(std::uint32_t tokens, SparseHead& head) const {
  head.followed = spec_.history.observe_every != 1 && head.history->can_follow(tokens);
  if (head.followed) {
    head.history->follow(tokens);
  } else {
    head.history->forecast(tokens);
  }
}

bool HistoryUpkeep::turn_came(const SparseHead& head) const noexcept {
  const std::uint32_t step = head.steps.newest();
  const std::uint32_t before = head.steps.before() == 0 ? step - 1 : head.steps.before();
  return (step + layer_) / spec_.history.observe_every != (before + layer_) / spec_.history.observe_every;
}

void HistoryUpkeep::find_heavy(SparseHead& head) const {
  if (spec_.history.observe_every == 1 || head.observes) return;
  const std::span<const std::uint32_t> tokens = head.scored.tokens();
  const std::span<const float> scores = head.scored.scores();
  const std::span<const float> lse = head.scored.log_sums(group_, head.lse);
  head.heavy.clear();
  const float log_share = std::log(kHeavy);
  for (std::size_t i = 0; i < tokens.size(); ++i) {
    if (tokens[i] < spec_.near.sink_tokens) continue;  // Weighed by top-p; in no table.
    bool heavy = false;
    for (std::uint32_t h = 0; h < group_; ++h) heavy |= scores[i * group_ + h] > lse[h] + log_share;
    if (heavy) head.heavy.push_back(tokens[i]);
  }
}

void HistoryUpkeep::learn(SparseHead& head) const {
  head.history->begin_lesson();  // Also if it is to learn nothing: a forecast comes next.
  for (std::uint32_t h = 0; h < group_ && head.observes; ++h) {
    if (((head.observing >> h) & 1) == 0) continue;
    const ScoredSet::Observed seen = head.scored.observed(h, group_);
    head.history->observe(h, seen.tokens, seen.scores);
  }
  head.history->end_lesson();
  head.observing = 0;
}

}  // namespace sluice::scheduler
