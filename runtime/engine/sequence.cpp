#include "runtime/engine/sequence.hpp"

#include <algorithm>

namespace sluice::runtime {

void Sequence::drop_policy() noexcept {
  if (policy) policy->close();
  policy.reset();
}

void Sequence::shorten_policy(std::uint32_t left) noexcept {
  if (!policy) return;
  if (left < policy_tokens || !policy->can_truncate(left)) return drop_policy();
  policy->truncate(left);
  end_policy_at(left);
}

void Sequence::end_policy_at(std::uint32_t left) noexcept {
  if (left > policy_end) return;
  policy_end = left;
  // Prompts behind what it has chosen for are no more.
  prompt_end = std::min(prompt_end, policy_tokens);
}

void Sequence::extend_tail(std::uint32_t count, std::uint32_t queries, std::uint32_t room) noexcept {
  if (tail.end != planned || tail.begin > tail.end) tail.begin = planned;
  tail.end = planned + count;
  if (queries < count) tail.begin = tail.end - queries;
  tail.begin = std::max(tail.begin, tail.end - std::min(tail.end, room));
}

std::uint32_t Sequence::tail_row(const PlanItem& item, std::uint32_t token, std::uint32_t room) const noexcept {
  const std::uint32_t end = planned + item.tokens;
  if (!item.prefill || tail.slot == kNone || token + room < end) return kNone;
  return tail.slot * room + token % room;
}

}  // namespace sluice::runtime
