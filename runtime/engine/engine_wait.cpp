// How forwards end: all waits of an engine, and what becomes of what was planned.
#include <algorithm>
#include <atomic>
#include <thread>
#include <utility>

#include "cpu/threads/spin.hpp"
#include "runtime/engine/impl.hpp"

namespace sluice {
namespace {

using runtime::look;

/// Whether a thread that waits may keep its core busy for the time that a forward takes.
enum class Patience : bool { naps, spins };

/// Between two looks, having waited for so long: a nap takes 50 us longer than it is asked to, so the first ones would
/// let the end of a short forward pass, and none is longer than a small part of the wait.
std::chrono::nanoseconds nap_after(std::chrono::nanoseconds waited) {
  return std::clamp<std::chrono::nanoseconds>(waited / 16, std::chrono::microseconds(50), std::chrono::milliseconds(1));
}

/// By the clock of a process that runs: one that was suspended has not waited. What takes long may have failed:
/// `look_after` throws then. False if it is late.
template <class Ready, class LookAfter>
[[nodiscard]] bool comes(const Ready& ready, std::chrono::milliseconds timeout, Patience patience,
                         const LookAfter& look_after) {
  constexpr std::chrono::milliseconds kOdd{200};
  constexpr std::chrono::milliseconds kSpin{2};  // Most forwards that decode end within it.
  const Clock::time_point begin = Clock::now();
  const Deadline deadline = deadline_after(timeout);
  Deadline odd = deadline_after(kOdd);
  while (!cpu::spin_until(ready)) {
    if (RunClock::now() >= odd) {
      look_after();
      odd = deadline_after(kOdd);
    }
    if (RunClock::now() >= deadline) return false;
    const Clock::duration waited = Clock::now() - begin;
    if (patience == Patience::naps || waited >= kSpin) std::this_thread::sleep_for(nap_after(waited));
  }
  return true;
}

template <class Ready, class LookAfter>
void await(const Ready& ready, std::chrono::milliseconds timeout, Patience patience, const char* what,
           const LookAfter& look_after) {
  if (!comes(ready, timeout, patience, look_after)) throw Error(Errc::timeout, what);
}

/// Of a forward that ended, while none of the next kMostForwards has.
ForwardStatus status_at(ForwardMailbox& mailbox, std::uint64_t forward) noexcept {
  return std::atomic_ref(mailbox.outcome.status[forward % kMostForwards]).load(std::memory_order_relaxed);
}

}  // namespace

void Engine::Impl::await_read(const ForwardMemory& m, const runtime::Program& failed) {
  try {
    verbs.tell_read(m, failed.forward, failed.stream);
    const std::atomic_ref<std::uint64_t> read(m.slip->read);
    const auto ready = [&] { return read.load(std::memory_order_acquire) == failed.forward; };
    if (comes(ready, options.timeout, Patience::naps, [&] { verbs.require_alive(failed.stream); })) return;
  } catch (const Error&) {  // What made the plan fail is told, not this.
  }
  programs.lose(failed.slip);
}

ForwardStatus Engine::Impl::await_end(std::uint64_t forward) {
  const runtime::Program& program = *programs.find(forward);
  if (program.ended) return *program.ended;
  const Clock::time_point since = Clock::now();
  await([&] { return look(mailbox().outcome.forward) >= forward; }, options.timeout,
        far.spins() ? Patience::spins : Patience::naps,
        "the forward has not ended; was every layer enqueued, or the graph replayed?",
        [&] { verbs.require_alive(program.stream); });
  note_ended();
  if (program.trace) {
    program.trace->awaited_from = since;
    program.trace->awaited_until = Clock::now();
  }
  return *program.ended;
}

void Engine::Impl::await_answer(std::uint64_t signalled, void* stream) {
  const Patience patience = far.spins() ? Patience::spins : Patience::naps;
  const auto look_after = [&] { verbs.require_alive(stream); };
  await([&] { return look(mailbox().question.passed) >= signalled; }, options.timeout, patience,
        "attend: the device has not come to where it asks the CPU, and with handover host the calling thread waits for "
        "that; cancel the forward, and see what else its stream waits for",
        look_after);
  const std::uint64_t asked = look(mailbox().question.asked);
  // Of a layer that asked nothing the newest question is one that was waited for before, and may have been given up.
  if (std::exchange(heard, asked) == asked) return;
  const Clock::time_point begin = Clock::now();
  (void)comes([&] { return look(mailbox().answer.answered) >= asked; }, options.answer_timeout, patience, look_after);
  const auto waited = std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now() - begin);
  runtime::count(counted.waited_ns, static_cast<std::uint64_t>(waited.count()));
}

void Engine::Impl::note_ended() noexcept {
  const std::uint64_t newest = look(mailbox().outcome.forward);
  for (runtime::Program& program : programs.all()) {
    if (program.forward > newest || program.ended) continue;
    if (status_at(mailbox(), program.forward) == ForwardStatus::done) tally(program);
    program.ended = status_at(mailbox(), program.forward);
    if (program.ended == ForwardStatus::done) note_trace(program);
  }
}

void Engine::Impl::require_noted() {
  note_ended();
  for (runtime::Program& program : programs.all()) {
    if (program.forward + kMostForwards > planned + 1) continue;
    if (!program.ended)
      throw Error(Errc::invalid_argument, "plan: forward " + std::to_string(program.forward) +
                                              " is under way and far behind; finish or cancel it first");
    // The next forward's rows take the place of its own.
    if (program.ended == ForwardStatus::done) continue;
    const auto rest = await_idle();
    note_trace(program);
    choice.forget(program.forward);
  }
}

runtime::Rest Engine::Impl::await_idle() {
  await([&] { return far.idle(); }, options.timeout, Patience::naps,
        "a thread that attends the far part has not come back; repeat the call when it may have, or destroy the engine",
        [] {});
  return choice.rest(options.timeout);
}

runtime::Program Engine::Impl::retire(std::uint64_t forward, bool done) {
  runtime::Program program = programs.take(forward);
  keep_trace(program, done);
  if (!done) learn_in_vain(program);
  if (!done) choice.forget(forward);
  for (std::size_t i = 0; i < program.items.size(); ++i) {
    const PlanItem& item = program.items[i];
    Sequence& sequence = at(item.sequence);
    done ? sequence.tokens += item.tokens : sequence.planned -= item.tokens;
    if (done) {
      std::uint32_t& end = item.prefill ? sequence.prompt_end : sequence.policy_end;
      end = std::max(end, program.ends[i]);
      // Forwards may be finished in any order.
      if (!item.prefill) sequence.policy_chose = std::max(sequence.policy_chose, program.ends[i] - item.tokens + 1);
    }
    if (done) {
      publish(sequence);  // Before pages of it are passed.
      pass_windows(sequence);
      continue;
    }
    drop_look(sequence);
    forget_names(sequence, sequence.planned);
    sequence.tail.end = std::min(sequence.tail.end, sequence.planned);
    give_back(sequence, program, i);
    sequence.clusters.truncate(sequence.planned);
    sequence.shorten_policy(sequence.planned);
  }
  if (done) {
    settle(program);
    runtime::count(counted.estimated, program.estimated);
    runtime::count(counted.ranked_pages, program.ranked_pages);
  }
  if (done && !program.items.empty()) trim_prefixes();
  if (done) good = std::max(good, forward);
  if (importing == forward) importing = 0;
  if (programs.empty() && next_layer == kNone) next_layer = 0;  // Nothing is left that would have to be cancelled.
  return program;
}

/// Threads learn from a forward when the device says that it is done, and what is learnt pushes out what a policy could
/// go back to before. So one that was done counts as tokens that were decoded and taken back, whether a thread has had
/// time or not.
void Engine::Impl::learn_in_vain(const runtime::Program& program) noexcept {
  if (program.ended != ForwardStatus::done) return;
  for (const PlanItem& item : program.items) {
    if (const auto& policy = at(item.sequence).policy; policy && !item.prefill) policy->learn_all(program.forward);
  }
}

void Engine::Impl::take_back(std::uint64_t forward) {
  note_ended();  // Before it is written over that the newest was done.
  const runtime::Program& newest = programs.newest();
  const std::uint64_t last = newest.forward;
  // Those before it that are in flight run first, and the newest of them is what comes next builds on.
  std::uint64_t before = good;
  for (std::uint64_t f = forward; f-- > good + 1;) {
    if (programs.find(f) != nullptr) {
      before = f;
      break;
    }
  }
  verbs.cancel(memory.of(newest.bucket), before, newest.stream);
  // The device may be asking meanwhile: the workers stay awake until it has published that it does not.
  await([&] { return look(mailbox().outcome.cancelled) >= last; }, options.timeout, Patience::naps,
        "the plan's stream has not come to its end; what else is enqueued there?",
        [&] { verbs.require_alive(newest.stream); });
  const auto rest = await_idle();
  for (std::uint64_t f = last; f >= forward; --f) {
    if (programs.find(f) != nullptr) (void)retire(f, false);
  }
  note_ended();  // Those before it: forwards to come may use their places in the mailbox.
  next_layer = 0;
}

}  // namespace sluice
