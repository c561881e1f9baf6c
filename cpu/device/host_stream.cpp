#include "cpu/device/host_stream.hpp"

#include <pthread.h>

#include <algorithm>
#include <cstring>
#include <exception>
#include <system_error>
#include <utility>

#include "cpu/threads/spin.hpp"
#include "sluice/error.hpp"

namespace sluice::cpu {
namespace {

/// False if `stop` came first. Returns at once if there is no memory to wait with.
bool sleep(std::chrono::microseconds span, const std::stop_token& stop) noexcept {
  if (span.count() > 0) {
    try {
      std::mutex mutex;
      std::condition_variable_any never;
      std::unique_lock lock(mutex);
      (void)never.wait_for(lock, stop, span, [] { return false; });
    } catch (const std::bad_alloc&) {
    }
  }
  return !stop.stop_requested();
}

/// Host flags are plain words without a waiters' list, so after the spin they are polled.
Flag::State await(const Flag& flag, std::uint64_t value, Deadline deadline, const std::stop_token& stop) {
  constexpr std::chrono::microseconds kLongestNap{200};
  const auto arrived = [&] { return flag.state(value) != Flag::State::pending; };
  std::chrono::microseconds nap{20};
  if (!spin_until(arrived)) {
    while (!arrived() && RunClock::now() < deadline && sleep(nap, stop)) nap = std::min(2 * nap, kLongestNap);
  }
  return flag.state(value);
}

void check(std::span<const Copy> batch) {
  for (const Copy& copy : batch)
    if (copy.bytes != 0 && (copy.to == nullptr || copy.from == nullptr))
      throw Error(Errc::invalid_argument, "copy of " + std::to_string(copy.bytes) + " bytes has a null address");
}

template <class T>
void shuffle(std::vector<T>& items, Generator& generator) {
  for (std::size_t left = items.size(); left > 1; --left) std::swap(items[left - 1], items[generator.below(left)]);
}

}  // namespace

HostStream::HostStream(const HostStreamOptions& options, std::shared_ptr<FaultInjector> injector)
    : options_(options), injector_(std::move(injector)), sequence_(*injector_, options.actor) {
  try {
    thread_ = std::jthread([this](const std::stop_token& stop) { run(stop); });
  } catch (const std::system_error& error) {
    throw Error(Errc::out_of_capacity, "stream '" + options_.name + "' gets no thread (" + error.what() +
                                           "); raise the limit (ulimit -u, pids.max) or create fewer streams");
  }
  (void)::pthread_setname_np(thread_.native_handle(), options_.name.substr(0, 15).c_str());
}

void HostStream::copy(std::span<const Copy> batch) {
  check(batch);
  if (!batch.empty()) push(CopyBatch{{batch.begin(), batch.end()}}, FaultSite::copy);
}

void HostStream::fill(std::span<std::byte> memory, std::byte value) {
  if (!memory.empty()) push(Call{"fill", [=] { std::ranges::fill(memory, value); }}, FaultSite::copy);
}

void HostStream::record(Event& event) {
  auto* const host_event = dynamic_cast<HostEvent*>(&event);
  if (host_event == nullptr) throw Error(Errc::invalid_argument, "record: the event belongs to another kind of device");
  push(Record{host_event->renew()}, FaultSite::other);
}

void HostStream::wait(const Event& event) {
  const auto* const host_event = dynamic_cast<const HostEvent*>(&event);
  if (host_event == nullptr) throw Error(Errc::invalid_argument, "wait: the event belongs to another kind of device");
  if (auto point = host_event->point()) push(WaitPoint{std::move(point)}, FaultSite::other);
}

void HostStream::signal(Flag& flag, std::uint64_t value) { push(Signal{&flag, value}, FaultSite::other); }

void HostStream::wait(const Flag& flag, std::uint64_t value) { push(WaitFlag{&flag, value}, FaultSite::other); }

void HostStream::enqueue(const char* what, std::function<void()> run) {
  push(Call{what, std::move(run)}, FaultSite::verb);
}

void HostStream::synchronize(Deadline deadline) {
  const auto drained = [this] { return pending_.load(std::memory_order_acquire) == 0; };
  if (!spin_until(drained)) {
    std::unique_lock lock(mutex_);
    if (!wait_on(drained_, lock, deadline, drained))
      throw Error(Errc::timeout,
                  "stream '" + options_.name + "': " + std::to_string(pending_.load()) +
                      " operation(s) unfinished at the deadline; wait longer or look for a flag that nobody raises");
  }
  if (!failure_.empty()) throw Error(Errc::device, failure_);
}

void HostStream::push(Work work, FaultSite site) {
  Operation operation{.work = std::move(work), .fault = sequence_.next(site)};
  {
    const std::lock_guard lock(mutex_);
    queue_.push_back(std::move(operation));
    pending_.fetch_add(1, std::memory_order_relaxed);
  }
  filled_.notify_one();
}

void HostStream::run(const std::stop_token& stop) {
  const auto woken = [&] { return pending_.load(std::memory_order_relaxed) != 0 || stop.stop_requested(); };
  std::unique_lock lock(mutex_, std::defer_lock);
  for (;;) {
    (void)spin_until(woken);
    lock.lock();
    (void)filled_.wait(lock, stop, [this] { return !queue_.empty(); });
    if (stop.stop_requested()) break;
    Operation operation = std::move(queue_.front());
    queue_.pop_front();
    lock.unlock();
    execute(operation, stop);
    lock.lock();
    if (pending_.fetch_sub(1, std::memory_order_release) == 1) drained_.notify_all();
    lock.unlock();
  }
  for (const Operation& operation : queue_) abandon(operation);
}

void HostStream::execute(Operation& operation, const std::stop_token& stop) noexcept {
  if (!sleep(operation.fault.delay, stop)) return abandon(operation);
  const auto* const call = std::get_if<Call>(&operation.work);
  const char* const what = call != nullptr ? call->what : "operation";
  try {
    std::visit([&](auto& work) { perform(work, operation.fault, stop); }, operation.work);
  } catch (const std::exception& error) {
    fail(what, error.what());
  } catch (...) {
    fail(what, "unknown exception");
  }
}

void HostStream::abandon(const Operation& operation) noexcept {
  fail("destroyed", "the stream was destroyed with work in its queue");
  if (const auto* record = std::get_if<Record>(&operation.work)) record->point->pass(take_failure());
  if (const auto* signal = std::get_if<Signal>(&operation.work)) signal->flag->fail(signal->value);
}

void HostStream::perform(CopyBatch& batch, const Fault& fault, const std::stop_token&) {
  Generator generator(fault.seed);
  std::size_t count = batch.copies.size();
  if (fault.reorder) shuffle(batch.copies, generator);
  if (fault.fails) {
    count = generator.below(2) == 0 ? 0 : generator.below(count);
    injector_->count_failure();
    fail("copy", "injected failure");
  }
  for (std::size_t i = 0; i < count; ++i) {
    const Copy& copy = batch.copies[i];
    if (copy.bytes != 0) std::memcpy(copy.to, copy.from, copy.bytes);
  }
}

void HostStream::perform(Call& call, const Fault& fault, const std::stop_token&) {
  if (!fault.fails) return call.run();
  injector_->count_failure();
  fail(call.what, "injected failure");
}

void HostStream::perform(Record& record, const Fault&, const std::stop_token&) { record.point->pass(take_failure()); }

void HostStream::perform(WaitPoint& wait, const Fault&, const std::stop_token& stop) {
  if (wait.point->wait(stop) && wait.point->state() == Event::State::failed)
    fail("waited for an event that failed", wait.point->reason().c_str());
}

void HostStream::perform(Signal& signal, const Fault&, const std::stop_token&) {
  if (take_failure().empty())
    signal.flag->signal(signal.value);
  else
    signal.flag->fail(signal.value);
}

void HostStream::perform(WaitFlag& wait, const Fault&, const std::stop_token& stop) {
  const Flag::State state = await(*wait.flag, wait.value, deadline_after(options_.flag_timeout), stop);
  if (state == Flag::State::reached || stop.stop_requested()) return;
  if (state == Flag::State::failed)
    fail("waited for a flag that failed", ("value " + std::to_string(wait.value)).c_str());
  else
    fail("waited in vain for a flag", ("value " + std::to_string(wait.value) + " did not come within " +
                                       std::to_string(options_.flag_timeout.count()) + " ms")
                                          .c_str());
}

void HostStream::fail(const char* what, const char* reason) noexcept {
  if (!failure_.empty()) return;
  try {
    failure_ = "stream '" + options_.name + "': " + what + ": " + reason;
  } catch (...) {
    failure_ = "out of memory";  // Short enough to need none.
  }
}

std::string HostStream::take_failure() noexcept { return std::exchange(failure_, {}); }

}  // namespace sluice::cpu
