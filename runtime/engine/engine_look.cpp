// Looks at prompts by policies that choose on the CPU, which are jobs of the engine's threads: when they begin, who
// waits for them, and what becomes of one that comes to nothing.
#include <algorithm>
#include <functional>
#include <string>
#include <utility>

#include "runtime/engine/impl.hpp"
#include "scheduler/plan/forward_rows.hpp"
#include "sluice/step/prefill_choice.hpp"

namespace sluice {

std::shared_ptr<runtime::Job> Engine::Impl::begin_job(std::uint32_t pieces, std::function<void(std::uint32_t)> piece) {
  if (options.before_answer) {
    piece = [before = options.before_answer, piece = std::move(piece)](std::uint32_t i) {
      before();
      piece(i);
    };
  }
  auto job = std::make_shared<runtime::Job>(pieces, std::move(piece));
  far.begin(job);
  return job;
}

void Engine::Impl::begin_look(Sequence& sequence) {
  const Sequence::Tail& tail = sequence.tail;
  const std::uint32_t queries = tail.end == sequence.planned && tail.begin < tail.end ? tail.end - tail.begin : 0;
  const runtime::SequencePolicy::Prompt prompt{.tokens = sequence.planned,
                                               .queries = std::min(queries, scheduler::prompt_queries(sequence.spec)),
                                               .tail = tail.slot * sizes.prompt_queries,
                                               .room = sizes.prompt_queries};
  auto policy = std::make_shared<runtime::SequencePolicy>(sequence.spec, memory.largest(), sequence.pages().blocks());
  auto job =
      begin_job(memory.largest().layer_heads(), [policy, prompt](std::uint32_t head) { policy->look(prompt, head); });
  sequence.look = {.job = std::move(job), .policy = std::move(policy)};
}

void Engine::Impl::look_ahead(const runtime::Program& program) noexcept {
  for (const PlanItem& item : program.items) {
    Sequence& sequence = at(item.sequence);
    const bool whole = item.prefill && sequence.names.ids.size() == sequence.tokens;
    if (!whole || sequence.tail.slot == kNone || sequence.policy || programs.has(item.sequence)) continue;
    drop_look(sequence);
    try {
      begin_look(sequence);
    } catch (const std::exception&) {
      // The plan of the first token behind it tries again, and says what is wrong.
    }
  }
}

void Engine::Impl::drop_look(Sequence& sequence) noexcept {
  const runtime::PromptLook look = std::exchange(sequence.look, {});
  if (!look.job) return;
  look.job->abandon();
  (void)look.job->await(options.timeout);  // Who is late is left behind with what it looks at, which means nothing now.
}

void Engine::Impl::begin_policies(std::span<const Wanted> wanted) {
  const auto begins = [&](const Wanted& each) {
    return each.sequence->tail.slot != kNone && !each.item.prefill && outdated(each.item.sequence, *each.sequence);
  };
  looked.clear();
  std::vector<Wanted> behind;  // A prompt that is looked at.
  std::ranges::copy_if(wanted, std::back_inserter(behind), begins);
  for (const auto& [sequence, item] : behind) {
    await_prompt(item.sequence);
    if (sequence->policy) {
      const auto rest = runtime::SequencePolicy::rest(sequence->policy, options.timeout);
      sequence->drop_policy();
    }
    if (!sequence->look.job || !sequence->look.job->idle()) runtime::count(counted.stalls);
    if (!sequence->look.job) begin_look(*sequence);
  }
  for (const auto& [sequence, item] : behind) end_look(item.sequence, *sequence);
}

void Engine::Impl::await_prompt(SequenceId id) {
  for (const runtime::Program& program : programs.all()) {
    if (std::ranges::find(program.items, id, &PlanItem::sequence) == program.items.end()) continue;
    if (await_end(program.forward) != ForwardStatus::done)
      throw Error(Errc::invalid_argument, "plan: forward " + text(program.forward) + " with tokens of sequence " +
                                              text(id.value) + " failed; finish it first");
  }
}

void Engine::Impl::end_look(SequenceId id, Sequence& sequence) {
  const runtime::PromptLook look = std::exchange(sequence.look, {});
  const Clock::time_point since = Clock::now();
  if (!look.job->await(options.timeout))
    throw Error(Errc::timeout, "plan: a thread in which the policy of sequence " + text(id.value) +
                                   " looks at its prompt has not come back within " + text(options.timeout.count()) +
                                   " ms, and is left behind; plan it again, or, if the machine is merely busy, with a "
                                   "longer EngineOptions::timeout");
  look.job->rethrow();
  const auto [begin, end] = look.job->span();
  looked.push_back(
      {.sequence = id.value, .begin = begin, .end = end, .waited_from = since, .waited_until = Clock::now()});
  look.policy->begun();
  sequence.policy = look.policy;
  sequence.policy_tokens = sequence.policy_end = sequence.planned;
  sequence.policy_forward = planned;
  sequence.policy_chose = 0;
}

}  // namespace sluice
