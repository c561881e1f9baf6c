// Who answers, when: threads that watch, sleep, move, help with jobs and stand aside.
//
// They are ours, not oneTBB's. From when a word is written until a thread that spins on it begins is 0.4 us; until a
// task that an arena is given begins, 2 to 6 us where one came 100 us before, 15 us after a pause of 1 ms, 21 us of 3
// ms (medians of 3 runs, a realtime priority, oneTBB 2021.8): of a question that takes 9 to 11 us there and back. Jobs
// are done by the same threads, for oneTBB's are the process's, one fewer than its cores: on two cores the tasks of an
// arena of three ran one at a time, with a warning on stderr, and while one hung no other arena's ran. Here a piece
// that does not return costs its engine alone.
#include "runtime/far/far_workers.hpp"

#include <algorithm>
#include <new>
#include <optional>
#include <system_error>
#include <thread>

#include "cpu/threads/spin.hpp"
#include "runtime/far/mailbox.hpp"
#include "sluice/error.hpp"

namespace sluice::runtime {
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
    // The first core is the caller's, and the last that is taken.
    const std::size_t first = share.pus.size() > 1 ? 1 : 0;
    for (std::size_t i = 0; i < most_; ++i)
      places_[i].store(share.pus[(first + i) % share.pus.size()], std::memory_order_relaxed);
    places_[most_].store(share.pus[0], std::memory_order_relaxed);  // Who waits for a job is the caller.
    caller_place_ = first == 0 ? kNone : share.pus[0];
    const std::uint32_t active = std::min(threads_on(share.cores), most_);
    constexpr std::uint32_t kMostThatNap = 3;
    leaves_core_ = active < share.cores;
    spins_.store(cores_.topology().cores() > kMostThatNap && leaves_core_, std::memory_order_relaxed);
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

void FarWorkers::make_way() noexcept {
  if (!options_.pin || !leaves_core_ || caller_place_ == kNone) return;
  const std::optional<std::uint32_t> here = cores_.topology().pu_of_this_thread();
  if (!here || *here == caller_place_) return;
  bool taken = false;
  for (std::uint32_t i = 0; i < most_; ++i) {
    if (places_[i].load(std::memory_order_relaxed) != *here) continue;
    // Before it is woken: where it wakes up it takes the core from who woke it. Told first, bound then, so that one on
    // its way to where it was sent before sees that, or is bound here behind it: see move().
    places_[i].store(caller_place_, std::memory_order_relaxed);
    if (!cores_.topology().bind_thread(threads_.handle(i), caller_place_)) {
      places_[i].store(*here, std::memory_order_relaxed);
      break;
    }
    taken = true;
  }
  if (!taken) return;
  caller_place_ = *here;
  places_[most_].store(*here, std::memory_order_relaxed);
}

void FarWorkers::move(std::uint32_t thread, std::uint32_t& pu) const noexcept {
  if (!options_.pin) return;
  // Until it is where it is to be after it has been bound: meanwhile the caller may have sent it elsewhere.
  for (std::uint32_t place = 0; (place = places_[thread].load(std::memory_order_relaxed)) != pu; pu = place)
    (void)cores_.topology().bind_this_thread(place);
}

void FarWorkers::wake(std::uint64_t forward) {
  settle_in();
  make_way();
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
    } else if (called &&
               choice_.proposes(look(memory_.mailbox->outcome.good), expected_.load(std::memory_order_relaxed))) {
      move(thread, pu);
      if (options_.before_answer) options_.before_answer();
      const auto wanted = [&] { return look(memory_.mailbox->question.asked) > seen || stop.stop_requested(); };
      if (!choice_.propose(look(memory_.mailbox->outcome.good), expected_.load(std::memory_order_relaxed), wanted))
        std::this_thread::sleep_for(kNap);
      heard = Clock::now();
    } else if (const std::uint64_t ended = look(memory_.mailbox->outcome.forward); called && ended > learnt) {
      move(thread, pu);
      // A forward whose layers are proposed for asks nothing before that.
      const auto wanted = [&] {
        return look(memory_.mailbox->question.asked) > seen || stop.stop_requested() ||
               choice_.proposes(look(memory_.mailbox->outcome.good), expected_.load(std::memory_order_relaxed));
      };
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

}  // namespace sluice::runtime
