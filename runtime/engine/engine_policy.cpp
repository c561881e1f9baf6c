// Sequences whose policies choose on the CPU: what they know of their prompts, and when they get to know it.
#include <algorithm>
#include <string>

#include "runtime/engine/impl.hpp"
#include "scheduler/plan/forward_rows.hpp"

namespace sluice {

bool Engine::Impl::learns_on(const Sequence& sequence, std::uint32_t tokens) const noexcept {
  if (sequence.policy_chose == 0 || tokens < std::max(sequence.policy_chose, sequence.policy_tokens)) return false;
  const std::uint32_t page = tokens / options.page_tokens;
  return std::ranges::none_of(sequence.lists, [&](const runtime::PageList& list) {
    return page < list.pages() && table.shared(list.blocks()[page]);
  });
}

void Engine::Impl::take_back_choices(Sequence& sequence, std::uint32_t tokens) {
  if (!sequence.policy) return;
  if (learns_on(sequence, tokens)) {
    // A forward behind drafts that are rejected now may have chosen in vain, with them visible.
    sequence.policy->keep_at_most(tokens);
    return sequence.end_policy_at(tokens);
  }
  const auto rest = runtime::SequencePolicy::rest(sequence.policy, options.timeout);
  sequence.policy->learn_all(good);  // How far it goes back must not depend on whether a thread has had time.
  sequence.shorten_policy(tokens);
  sequence.policy_chose = std::min(sequence.policy_chose, tokens);
}

void Engine::Impl::learn_before_sharing(const Sequence& parent, std::uint32_t tokens) {
  const std::uint32_t page = options.page_tokens;
  const bool open = tokens % page != 0 && tokens / page == parent.tokens / page;
  if (!parent.policy || !open) return;
  const auto rest = runtime::SequencePolicy::rest(parent.policy, options.timeout);
  parent.policy->learn_all(good);
}

std::shared_ptr<runtime::SequencePolicy> Engine::Impl::policy_of(const Sequence& parent, std::uint32_t tokens) {
  if (!parent.policy || !scheduler::remembers(parent.spec)) return nullptr;
  if (tokens < parent.policy_tokens || tokens > parent.policy_end) return nullptr;
  const auto rest = runtime::SequencePolicy::rest(parent.policy, options.timeout);
  parent.policy->learn_all(good);
  if (!parent.policy->can_truncate(tokens)) return nullptr;
  std::shared_ptr<runtime::SequencePolicy> policy = parent.policy->clone();
  policy->truncate(tokens);
  return policy;
}

void Engine::Impl::copy_tail(const Sequence& from, Sequence& to) noexcept {
  const ForwardMemory& m = memory.largest();
  const std::uint64_t row = std::uint64_t{m.shape.q_heads} * m.shape.head_dim;
  for (std::uint32_t layer = 0; layer < m.shape.layers; ++layer) {
    float* const tails = m.tails + std::uint64_t{layer} * m.tail_rows * row;
    std::copy_n(tails + std::uint64_t{from.tail.slot} * sizes.prompt_queries * row, sizes.prompt_queries * row,
                tails + std::uint64_t{to.tail.slot} * sizes.prompt_queries * row);
  }
  to.tail.begin = from.tail.begin;
  to.tail.end = std::min(from.tail.end, to.tokens);
}

bool Engine::Impl::outdated(SequenceId id, const Sequence& sequence) const noexcept {
  if (!sequence.policy || sequence.policy->spoilt() || sequence.prompt_end > sequence.policy_tokens) return true;
  return std::ranges::any_of(programs.all(), [&](const runtime::Program& program) {
    if (program.forward <= sequence.policy_forward) return false;
    return std::ranges::any_of(program.items,
                               [&](const PlanItem& item) { return item.sequence == id && item.prefill; });
  });
}

std::vector<runtime::ChoosingRow> Engine::Impl::choosing_rows(const ForwardMemory& m,
                                                              std::span<const Wanted> wanted,
                                                              const runtime::Program& program) const {
  std::vector<runtime::ChoosingRow> rows;
  std::uint32_t index = 0;
  std::uint32_t audited = 0;
  for (const auto& [sequence, item] : wanted) {
    if (item.prefill) continue;
    if (sequence->tail.slot != kNone)
      rows.push_back({.sequence = item.sequence,
                      .policy = sequence->policy,
                      .index = index,
                      .audited = audited,
                      .window = m.slip_rows[index],
                      .audit = program.audit});
    index += static_cast<std::uint32_t>(div_up(item.tokens, m.bucket.drafts));
    audited += item.tokens;
  }
  return rows;
}

std::uint64_t Engine::Impl::policy_bytes() noexcept {
  if (!programs.empty()) return known_policy_bytes;
  known_policy_bytes = choice.heap_bytes();
  for (const auto& [id, sequence] : sequences) known_policy_bytes += sequence.policy_bytes();
  return known_policy_bytes;
}

void Engine::Impl::require_chosen(std::uint64_t forward) {
  const runtime::FarChoice::Failure failure = choice.failure(forward);
  if (failure.forward == 0) return;
  std::string lost;
  for (const runtime::Program& program : programs.all()) {
    for (const PlanItem& item : program.items) {
      if (program.forward >= failure.forward) lost += " sequence " + text(item.sequence.value);
    }
  }
  take_back(failure.forward);
  throw Error(Errc::device, "forward " + text(failure.forward) +
                                " and those behind it were taken back: the policy of sequence " +
                                text(failure.sequence.value) + " could not choose: " + failure.reason +
                                ". Without new tokens:" + lost + "; plan them again, and that one when it can");
}

}  // namespace sluice
