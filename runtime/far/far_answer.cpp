// How FarWorkers answer a question: lists are opened as they are chosen for, and attended part by part.
#include <thread>

#include "cpu/threads/spin.hpp"
#include "runtime/far/answer_watchdog.hpp"
#include "runtime/far/far_workers.hpp"
#include "runtime/far/mailbox.hpp"
#include "sluice/run_clock.hpp"

namespace sluice::runtime {
namespace {

std::int64_t now_ns() noexcept {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now().time_since_epoch()).count();
}

}  // namespace

void FarWorkers::begin_piece(std::uint64_t asked) {
  std::uint64_t seen = seen_.load(std::memory_order_relaxed);
  if (seen != asked && seen_.compare_exchange_strong(seen, asked, std::memory_order_relaxed))
    seen_ns_.store(now_ns(), std::memory_order_relaxed);
  if (options_.before_answer) options_.before_answer();
}

void FarWorkers::say(const FarQuestion& question) {
  const std::int64_t seen = seen_ns_.load(std::memory_order_relaxed);
  const std::int64_t now = now_ns();
  answer_ns_.fetch_add(static_cast<std::uint64_t>(now - seen), std::memory_order_relaxed);
  if (notes_.wants(question.forward))
    notes_.answer(question.forward, question.layer, {.seen_ns = seen, .answered_ns = now});
  std::atomic_ref(memory_.mailbox->answer.answered).store(question.asked, std::memory_order_release);
  if (memory_.handover == Handover::stream) open_gate(*memory_.mailbox, question.asked);
}

template <class Work>
void FarWorkers::do_piece(const FarQuestion& question, Stage stage, std::uint32_t thread, const Work& work) {
  const bool noted = notes_.wants(question.forward);
  const std::int64_t begin = noted ? now_ns() : 0;
  begin_piece(question.asked);
  work();
  if (!noted) return;
  notes_.add(question.forward,
             {.stage = stage, .layer = question.layer, .thread = thread, .begin_ns = begin, .end_ns = now_ns()});
}

void FarWorkers::open_lists(const FarQuestion& question, std::uint32_t items, std::uint32_t thread) {
  for (std::uint32_t item = 0; (item = items_.claim(question.asked, items)) != kNone;) {
    if (item == 0) {
      for (std::uint32_t list = 0; list < question.lists; ++list)
        if (items == 1 || !choice_.chooses(question, list)) parts_.open(question.asked, list);
    } else {
      do_piece(question, Stage::choose_far, thread,
               [&] { parts_.open(question.asked, choice_.choose(question, item - 1)); });
    }
    if (!items_.finish(items)) continue;
    open_.store(question.asked, std::memory_order_release);
    if (parts_.close()) say(question);
  }
}

void FarWorkers::attend_parts(const FarQuestion& question, std::uint32_t thread) {
  std::uint32_t list = FarParts::first_list(question, thread, active());
  for (std::uint32_t seen = 0; seen < question.lists; ++seen, list = list + 1 == question.lists ? 0 : list + 1) {
    for (FarPart part; (part = parts_.claim(question, list)).parts != 0;) {
      do_piece(question, Stage::attend_far, thread, [&] { parts_.attend(question, part, thread); });
      if (parts_.finish()) say(question);
    }
  }
}

void FarWorkers::help_to_choose(const FarQuestion& question, std::uint32_t thread) {
  std::uint32_t list = FarParts::first_list(question, thread, active());
  for (std::uint32_t seen = 0; seen < question.lists; ++seen, list = list + 1 == question.lists ? 0 : list + 1) {
    while (SharedCalls::Claim claim = choice_.calls().claim(list)) {
      do_piece(claim.question(), Stage::choose_far, thread, [&] {
        claim.run();
        // The call, and what is written down of it, stand until its last piece is finished: one is always left.
        while (const SharedCalls::Claim next = choice_.calls().claim(list)) {
          claim.finish();
          claim = next;
          claim.run();
        }
      });
      claim.finish();
    }
  }
}

bool FarWorkers::await_more(std::uint64_t asked, const Offers& before, const std::stop_token& stop) const {
  const auto more = [&] { return offers() != before || all_open(asked); };
  if (spins() ? cpu::spin_until(more) : more()) return true;
  const Deadline deadline = deadline_after(options_.timeout);
  while (!(spins() ? cpu::spin_until(more) : more())) {
    if (stop.stop_requested() || RunClock::now() >= deadline) return false;
    spins() ? std::this_thread::yield() : std::this_thread::sleep_for(kNap);
  }
  return true;
}

void FarWorkers::answer(std::uint64_t asked, std::uint32_t thread, const std::stop_token& stop) {
  const auto word = [](auto& part) { return std::atomic_ref(part).load(std::memory_order_relaxed); };
  ForwardMailbox::Question& said = memory_.mailbox->question;
  const FarQuestion question{.asked = asked,
                             .forward = word(said.forward),
                             .layer = word(said.layer),
                             .drafts = word(said.drafts),
                             .lists = word(said.lists)};
  const std::uint32_t items = items_.total(asked, [&] { return 1 + word(said.choices); });
  if (items == kNone) return;
  open_lists(question, items, thread);
  while (true) {
    // Looked at first: what comes while this thread works is there for it to find.
    const Offers before = offers();
    const bool all = all_open(asked);
    attend_parts(question, thread);
    if (items > 1) help_to_choose(question, thread);
    if (all || !await_more(asked, before, stop)) return;
  }
}

}  // namespace sluice::runtime
