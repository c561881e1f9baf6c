#include "runtime/far/far_workers.hpp"

#include <algorithm>
#include <new>
#include <system_error>
#include <thread>

#include "cpu/threads/spin.hpp"
#include "runtime/far/answer_watchdog.hpp"
#include "runtime/far/mailbox.hpp"
#include "sluice/error.hpp"
#include "sluice/run_clock.hpp"

namespace sluice::runtime {
namespace {

std::int64_t now_ns() noexcept {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now().time_since_epoch()).count();
}

constexpr std::chrono::microseconds kNap{20};

}  // namespace

FarWorkers::FarWorkers(const ForwardMemory& memory, FarChoice& choice, FarNotes& notes,
                       const FarWorkersOptions& options, cpu::CoreShares::Lease cores)
    : memory_(memory),
      choice_(choice),
      notes_(notes),
      options_(options),
      cores_(std::move(cores)),
      parts_(memory, choice, threads_on(cores_.topology().cores())),
      most_(threads_on(cores_.topology().cores())),
      places_(most_ + 1) {
  settle_in();
  try {
    for (std::uint32_t i = 0; i < most_; ++i) threads_.add([this, i](const std::stop_token& stop) { work(i, stop); });
    if (options.jobs) threads_.add([this](const std::stop_token& stop) { work_for_jobs(stop); });
  } catch (const std::system_error& error) {
    throw Error(Errc::out_of_capacity, std::string("the system has no thread left for the far part: ") + error.what() +
                                           "; use fewer threads or raise the limit (ulimit -u, pids.max)");
  }
}

std::uint32_t FarWorkers::threads_on(std::uint32_t cores) const noexcept {
  return options_.threads != 0 ? options_.threads : std::max(cores, options_.spare + 1) - options_.spare;
}

void FarWorkers::settle_in() noexcept {
  const std::uint64_t generation = cores_.generation();
  if (generation == generation_) return;
  try {
    const cpu::CoreShare share = cores_.share();
    // The first core is the caller's.
    const std::size_t first = share.pus.size() > 1 ? 1 : 0;
    for (std::size_t i = 0; i < most_; ++i)
      places_[i].store(share.pus[first + i % (share.pus.size() - first)], std::memory_order_relaxed);
    places_[most_].store(share.pus[0], std::memory_order_relaxed);  // Who waits for a job is the caller.
    caller_place_ = first == 0 ? kNone : share.pus[0];
    const std::uint32_t active = std::min(threads_on(share.cores), most_);
    constexpr std::uint32_t kMostThatNap = 3;
    spins_.store(cores_.topology().cores() > kMostThatNap && active < share.cores, std::memory_order_relaxed);
    active_.store(active, std::memory_order_relaxed);
    generation_ = generation;
    { const std::lock_guard lock(mutex_); }  // Who has looked just before waits by now.
    resettled_.notify_all();
  } catch (const std::bad_alloc&) {
    // As before: the next plan tries again.
  }
}

std::uint32_t FarWorkers::caller_place() noexcept {
  settle_in();
  return caller_place_;
}

void FarWorkers::move(std::uint32_t thread, std::uint32_t& pu) const noexcept {
  const std::uint32_t place = places_[thread].load(std::memory_order_relaxed);
  if (options_.pin && place != std::exchange(pu, place)) (void)cores_.topology().bind_this_thread(place);
}

void FarWorkers::wake(std::uint64_t forward) {
  settle_in();
  {
    const std::lock_guard lock(mutex_);
    expected_.store(forward, std::memory_order_relaxed);
  }
  woken_.notify_all();
}

void FarWorkers::begin(std::shared_ptr<Job> job) {
  settle_in();
  jobs_.forget_done();  // Without mutex_: a job may own much.
  {
    const std::lock_guard lock(mutex_);
    jobs_.add(std::move(job));
  }
  woken_.notify_all();
  job_came_.notify_one();
}

bool FarWorkers::stop(std::chrono::milliseconds timeout) noexcept {
  cores_.end();
  return threads_.stop(timeout);
}

bool FarWorkers::idle() const noexcept {
  return look(memory_.mailbox->question.asked) == look(memory_.mailbox->answer.answered);
}

bool FarWorkers::under_way() const noexcept {
  return look(memory_.mailbox->outcome.forward) < expected_.load(std::memory_order_relaxed);
}

void FarWorkers::sleep(std::uint32_t thread, std::uint64_t seen, const std::stop_token& stop) {
  std::unique_lock lock(mutex_);
  asleep_.fetch_add(1, std::memory_order_relaxed);
  woken_.wait(lock, stop, [&] {
    stirrings_.fetch_add(1, std::memory_order_relaxed);
    return thread < active() && (under_way() || look(memory_.mailbox->question.asked) > seen || may_help(thread));
  });
  asleep_.fetch_sub(1, std::memory_order_relaxed);
}

void FarWorkers::stand_aside(std::uint32_t thread, std::uint64_t seen, Presence& presence,
                             const std::stop_token& stop) {
  presence.stand_aside(Clock::now());  // Where too many do so, nothing counts that was before.
  std::unique_lock lock(mutex_);
  if (aside() >= active() / 2) return;
  aside_.fetch_add(1, std::memory_order_relaxed);
  const auto needed = [&] { return thread >= active() || aside() > active() / 2; };
  for (bool reliable = false; !reliable && !stop.stop_requested();) {
    if (resettled_.wait_until(lock, stop, presence.until(), needed)) break;
    if (!under_way()) {  // Nothing spins between plans.
      aside_.fetch_sub(1, std::memory_order_relaxed);
      lock.unlock();
      sleep(thread, seen, stop);
      lock.lock();
      aside_.fetch_add(1, std::memory_order_relaxed);
      if (needed()) break;
    }
    lock.unlock();
    reliable = keeps_core(presence, options_.times_taken, stop);
    if (!reliable) presence.stand_aside(Clock::now());
    lock.lock();
  }
  aside_.fetch_sub(1, std::memory_order_relaxed);
}

void FarWorkers::work(std::uint32_t thread, const std::stop_token& stop) {
  // A forward that is not heard of for long is not waited for at full speed.
  constexpr std::chrono::milliseconds kSpin{2};
  constexpr std::chrono::milliseconds kCount{1};
  std::uint64_t seen = look(memory_.mailbox->answer.answered);
  std::uint64_t learnt = 0;  // Nothing is left to be learnt from forwards up to this one.
  std::uint32_t pu = kNone;
  Clock::time_point heard = Clock::now();
  Clock::time_point counted = heard;
  Presence presence(options_.times_taken());
  for (bool watched = false; !stop.stop_requested();) {
    if (presence.unreliable()) stand_aside(thread, seen, presence, stop);
    const bool watches = std::exchange(watched, false);
    const bool called = thread < active();
    const std::uint64_t asked = look(memory_.mailbox->question.asked);
    if (called && asked > seen) {
      answer(asked, thread, stop);
      seen = asked;
      heard = Clock::now();
    } else if (const std::uint64_t ended = look(memory_.mailbox->outcome.forward); called && ended > learnt) {
      move(thread, pu);
      const auto wanted = [&] { return look(memory_.mailbox->question.asked) > seen || stop.stop_requested(); };
      if (choice_.learn(look(memory_.mailbox->outcome.good), wanted)) {
        learnt = ended;
      } else if (!wanted()) {
        std::this_thread::sleep_for(kNap);  // A caller holds FarChoice::Rest: no thread may learn.
      }
    } else if (called && may_help(thread)) {
      move(thread, pu);
      help();
    } else if (!called || !under_way()) {
      sleep(thread, seen, stop);
      move(thread, pu);
      heard = Clock::now();
    } else if (const auto now = Clock::now(); spins() && now - heard < kSpin) {
      presence.look(now, watches);
      if (now - counted > kCount) presence.taken(options_.times_taken(), counted = now);
      watched = true;
      for (int i = 0; i < 4; ++i) cpu::relax();
    } else {
      std::this_thread::sleep_for(kNap);
    }
  }
}

std::uint32_t FarWorkers::most_helpers() const noexcept { return under_way() ? active() / 2 : active() - 1; }

void FarWorkers::help() noexcept {
  if (helping_.fetch_add(1, std::memory_order_relaxed) < most_helpers()) (void)jobs_.work();
  helping_.fetch_sub(1, std::memory_order_relaxed);
}

void FarWorkers::work_for_jobs(const std::stop_token& stop) {
  std::uint32_t pu = kNone;
  while (!stop.stop_requested()) {
    {
      std::unique_lock lock(mutex_);
      job_came_.wait(lock, stop, [&] { return jobs_.any(); });
    }
    move(most_, pu);
    while (!stop.stop_requested() && jobs_.work()) {
    }
  }
}

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
