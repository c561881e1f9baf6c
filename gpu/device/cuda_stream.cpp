#include <algorithm>
#include <chrono>
#include <string>
#include <thread>
#include <utility>

#include "gpu/device/cuda_error.hpp"
#include "gpu/device/cuda_stream_impl.hpp"
#include "gpu/device/driver.hpp"
#include "gpu/kernels/transfer/signal.hpp"
#include "sluice/error.hpp"

namespace sluice::gpu {
namespace {

using Verdict = FlagWait::Verdict;

/// How long a thread asks CUDA without a pause: about what a step's device work takes. Then it leaves the driver's
/// lock to the threads that launch.
constexpr std::chrono::microseconds kSpin{50};
constexpr std::chrono::microseconds kShortestNap{20};
constexpr std::chrono::microseconds kLongestNap{200};
/// For a destroyed stream to finish what no flag holds up any more.
constexpr std::chrono::milliseconds kDrain{1000};

/// True once `ready()` is, false at the deadline. Looks at least once.
template <class Ready>
bool poll(Deadline deadline, Ready&& ready) {
  const Clock::time_point spin_end = Clock::now() + kSpin;
  do {
    if (ready()) return true;
  } while (Clock::now() < spin_end);
  std::chrono::microseconds nap = kShortestNap;
  for (;;) {
    if (ready()) return true;
    const Deadline now = RunClock::now();
    if (now >= deadline) return false;
    std::this_thread::sleep_for(std::min<RunClock::duration>(nap, deadline - now));
    nap = std::min(2 * nap, kLongestNap);
  }
}

void check_addresses(std::span<const Copy> batch) {
  for (const Copy& copy : batch) {
    if (copy.bytes != 0 && (copy.to == nullptr || copy.from == nullptr))
      throw Error(Errc::invalid_argument, "copy of " + std::to_string(copy.bytes) + " bytes has a null address");
  }
}

}  // namespace

CudaStream& cuda_stream(Stream* stream, const char* verb) {
  auto* const found = dynamic_cast<CudaStream*>(stream);
  if (found == nullptr)
    throw Error(Errc::invalid_argument,
                std::string(verb) + ": the device runs verbs on its own streams only; pass one of its create_stream");
  return *found;
}

QueueStream::QueueStream(std::shared_ptr<DeviceCore> core, std::string name)
    : core_(std::move(core)), name_(std::move(name)), lane_(core_->take_lane(name_)) {}

QueueStream::~QueueStream() {
  core_->activate();
  core_->watchdog.abandon(this);
  (void)poll(deadline_after(kDrain), [this] { return cudaStreamQuery(lane_->stream.get()) != cudaErrorNotReady; });
  (void)cudaGetLastError();
  core_->give_back(std::move(lane_));
}

cudaStream_t QueueStream::handle() const noexcept {
  core_->activate();
  dirty_ = true;
  return lane_->stream.get();
}

void* QueueStream::native_handle() const noexcept {
  shared_ = true;
  return handle();
}

void QueueStream::fail(const std::string& reason) noexcept {
  if (!outcome_.reason.empty()) return;
  try {
    outcome_.reason = "stream '" + name_ + "': " + reason;
  } catch (...) {
    outcome_.reason = "out of memory";  // Short enough to need none.
  }
}

/// What cannot be enqueued fails the next event instead of its caller.
template <class Enqueue>
void QueueStream::attempt(const char* what, Enqueue&& enqueue) {
  core_->activate();
  try {
    enqueue();
  } catch (const Error& error) {
    fail(std::string(what) + ": " + error.what());
  }
}

void QueueStream::copy(std::span<const Copy> batch) { copy(batch, {.path = core_->path}); }

void QueueStream::copy(std::span<const Copy> batch, const PathChoice& choice) {
  check_addresses(batch);
  if (batch.empty()) return;
  attempt("copy", [&] {
    Transfer& transfer = lane_->transfer;
    transfer.send(batch, choice, order(), core_->memory, core_->chooser);
    dirty_ = dirty_ || transfer.wrote_host();
  });
}

void QueueStream::fill(std::span<std::byte> memory, std::byte value) {
  if (memory.empty()) return;
  dirty_ = true;  // It may be pinned memory that a copy reads.
  attempt("fill", [&] {
    check(cudaMemsetAsync(memory.data(), std::to_integer<int>(value), memory.size(), lane_->stream.get()),
          "fill memory");
  });
}

/// Sources may be read at once only if nothing that is queued can change them.
Transfer::Order QueueStream::order() {
  dirty_ = dirty_ || shared_;
  if (dirty_ && core_->path == TransferPath::gather) return Transfer::Order::strict;  // which has no use for it
  if (dirty_ && cudaStreamQuery(lane_->stream.get()) == cudaSuccess) dirty_ = false;
  (void)cudaGetLastError();
  return dirty_ ? Transfer::Order::strict : Transfer::Order::free;
}

void QueueStream::record(Event& event) {
  CudaEvent& point = cuda_event(event, "record");
  core_->activate();
  sift_waits();
  point.record(lane_->stream.get(), std::exchange(outcome_, {}));
}

void QueueStream::wait(const Event& event) {
  const CudaEvent& point = cuda_event(event, "wait");
  core_->activate();
  dirty_ = true;
  const bool intact = outcome_.reason.empty();
  point.join(lane_->stream.get(), outcome_);
  if (intact && !outcome_.reason.empty()) fail(std::exchange(outcome_.reason, {}));
}

void QueueStream::signal(Flag& flag, std::uint64_t value) {
  require_pinned(flag, "signal");
  core_->activate();
  sift_waits();
  const bool failed = !std::exchange(outcome_.reason, {}).empty();
  const std::uint64_t word = failed ? Flag::failed_word(value) : Flag::reached_word(value);
  try {
    if (core_->memory_operations) {
      check(Driver::instance().write(lane_->stream.get(), flag.word(), word), "enqueue a flag");
    } else {
      launch_signal(flag.word(), word, lane_->stream.get());
    }
  } catch (const Error&) {
    flag.fail(value);  // The stream never will, and a thread may wait for it.
  }
}

void QueueStream::wait(const Flag& flag, std::uint64_t value) {
  require_pinned(flag, "wait");
  dirty_ = true;
  const Flag::State state = flag.state(value);
  if (state == Flag::State::reached) return;
  if (state == Flag::State::failed) return fail("waited for a flag (value " + std::to_string(value) + ") that failed");
  if (!core_->memory_operations) return wait_on_host(flag, value);
  sift_waits();
  attempt("wait for a flag", [&] {
    const std::uint64_t ticket = lane_->next_ticket++;
    auto watched = core_->watchdog.watch(flag, value, {.stream = this, .arrived = lane_->arrived(), .ticket = ticket});
    const cudaError_t status = Driver::instance().arrive_and_wait(lane_->stream.get(), lane_->arrived(), ticket,
                                                                  watched->word, Flag::reached_word(value));
    if (status == cudaSuccess) {
      outcome_.waits.push_back(std::move(watched));
    } else {
      core_->watchdog.dismiss(*watched);
      fail("cannot wait for a flag: " + describe(status));
    }
  });
}

/// In place of the stream, the enqueuing thread waits.
void QueueStream::wait_on_host(const Flag& flag, std::uint64_t value) {
  const auto raised = [&] { return flag.state(value) != Flag::State::pending; };
  const std::string what = "waited for a flag (value " + std::to_string(value) + ") ";
  if (!poll(deadline_after(core_->flag_timeout), raised))
    fail(what + "that did not come within " + std::to_string(core_->flag_timeout.count()) + " ms");
  else if (flag.state(value) == Flag::State::failed)
    fail(what + "that failed");
}

void QueueStream::synchronize(Deadline deadline) {
  core_->activate();
  cudaError_t status = cudaSuccess;
  const bool finished = poll(deadline, [&] {
    status = cudaStreamQuery(lane_->stream.get());
    return status != cudaErrorNotReady;
  });
  if (status != cudaSuccess) (void)cudaGetLastError();
  if (!finished)
    throw Error(Errc::timeout, "stream '" + name_ +
                                   "': work unfinished at the deadline; wait longer or look for a flag that nobody "
                                   "raises");
  if (status != cudaSuccess)
    throw Error(Errc::device, "stream '" + name_ + "': CUDA: work of the stream failed: " + describe(status));
  dirty_ = false;
  core_->watchdog.settle_all();  // also those of earlier events: their flags may go now
  sift_waits();
  if (!outcome_.reason.empty()) throw Error(Errc::device, outcome_.reason);
}

/// Forgets waits whose flags came, and turns those that failed into the stream's failure.
void QueueStream::sift_waits() {
  if (outcome_.waits.empty()) return;
  core_->watchdog.settle_all();
  std::erase_if(outcome_.waits, [this](const std::shared_ptr<FlagWait>& wait) {
    const Verdict verdict = wait->verdict.load(std::memory_order_acquire);
    if (verdict != Verdict::pending && verdict != Verdict::reached) fail(reason_of(*wait, core_->watchdog.timeout()));
    return verdict != Verdict::pending;
  });
}

/// The device cannot see a flag in ordinary memory, and would say so only by losing everything.
void QueueStream::require_pinned(const Flag& flag, const char* operation) const {
  const auto* const at = reinterpret_cast<const std::byte*>(&flag);
  if (MemoryMap::Reader(core_->memory).find(at, sizeof flag).kind == MemoryKind::pageable)
    throw Error(Errc::invalid_argument, std::string(operation) +
                                            ": the flag is not in pinned memory; place it in a buffer of the device's "
                                            "allocate_pinned");
}

}  // namespace sluice::gpu
