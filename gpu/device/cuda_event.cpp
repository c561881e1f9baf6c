#include "gpu/device/cuda_event.hpp"

#include <algorithm>
#include <chrono>
#include <utility>

#include "gpu/device/cuda_error.hpp"
#include "gpu/device/device_core.hpp"
#include "sluice/error.hpp"

namespace sluice::gpu {
namespace {

/// CUDA counts elapsed time in float milliseconds: a second is exact to a tenth of a microsecond.
constexpr std::chrono::seconds kLongestSpan{1};
/// An idle stream records an event within microseconds, unless the device is gone.
constexpr std::chrono::milliseconds kPatience{5};
/// The anchor is known to half of the time that it took to record. A thread that lost its core meanwhile tries again.
constexpr std::chrono::microseconds kNarrow{40};
constexpr int kAnchorTries = 8;

/// False if CUDA does not know.
bool elapsed(cudaEvent_t from, cudaEvent_t to, Clock::duration& span) noexcept {
  float milliseconds = 0.f;
  if (cudaEventElapsedTime(&milliseconds, from, to) != cudaSuccess) {
    (void)cudaGetLastError();
    return false;
  }
  span = std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double, std::milli>(milliseconds));
  return true;
}

}  // namespace

Timeline::Timeline() : stream_(make_stream(0)), base_(make_event(cudaEventDefault)) {}

bool Timeline::anchor() noexcept {
  const Clock::time_point until = Clock::now() + kPatience;
  for (int tries = 0; tries < kAnchorTries; ++tries) {
    base_at_ = {};
    const Clock::time_point before = Clock::now();
    if (cudaEventRecord(base_.get(), stream_.get()) != cudaSuccess) return false;
    while (cudaEventQuery(base_.get()) == cudaErrorNotReady) {
      if (Clock::now() > until) return false;
    }
    const Clock::duration took = Clock::now() - before;
    base_at_ = before + took / 2;
    if (took <= kNarrow || Clock::now() > until) break;
  }
  return true;
}

Clock::time_point Timeline::time_of(cudaEvent_t event, Clock::time_point enqueued, Clock::time_point seen) noexcept {
  const std::lock_guard lock(mutex_);
  const bool before = base_at_ < enqueued && enqueued - base_at_ < kLongestSpan;
  bool after = base_at_ > seen && base_at_ - seen < kLongestSpan;
  if (!before && !after) after = anchor();
  (void)cudaGetLastError();
  Clock::duration span{};
  Clock::time_point at = seen;
  if (after && elapsed(event, base_.get(), span)) at = base_at_ - span;
  if (!after && before && elapsed(base_.get(), event, span)) at = base_at_ + span;
  return std::clamp(at, enqueued, std::max(enqueued, seen));
}

CudaEvent::CudaEvent(std::shared_ptr<DeviceCore> core) : core_(std::move(core)), event_(make_event(cudaEventDefault)) {}

CudaEvent::~CudaEvent() = default;

Event::State CudaEvent::state() const noexcept {
  const std::lock_guard lock(mutex_);
  return state_locked();
}

std::string CudaEvent::reason() const {
  const std::lock_guard lock(mutex_);
  return state_locked() == State::failed ? outcome_.reason : std::string{};
}

Clock::time_point CudaEvent::time() const noexcept {
  const std::lock_guard lock(mutex_);
  if (state_locked() == State::pending) return {};
  if (!std::exchange(timed_, true))
    passed_ = recorded_ ? core_->timeline.time_of(event_.get(), enqueued_, seen_) : seen_;
  return passed_;
}

void CudaEvent::record(cudaStream_t stream, Outcome outcome) {
  const std::lock_guard lock(mutex_);
  outcome_ = std::move(outcome);
  enqueued_ = Clock::now();
  timed_ = false;
  state_ = State::pending;
  const cudaError_t status = cudaEventRecord(event_.get(), stream);
  recorded_ = status == cudaSuccess;
  if (recorded_) return;
  (void)cudaGetLastError();
  seen_ = enqueued_;
  fail_locked("CUDA: cannot record an event: " + describe(status));
}

void CudaEvent::join(cudaStream_t stream, Outcome& outcome) const {
  const std::lock_guard lock(mutex_);
  const State now = state_locked();
  if (now == State::done) return;
  std::string reason = now == State::failed ? outcome_.reason : std::string{};
  if (now == State::pending) {
    const cudaError_t status = cudaStreamWaitEvent(stream, event_.get(), 0);
    if (status != cudaSuccess) {
      (void)cudaGetLastError();
      reason = "CUDA: cannot wait for it: " + describe(status);
    } else {
      reason = outcome_.reason;
      outcome.waits.insert(outcome.waits.end(), outcome_.waits.begin(), outcome_.waits.end());
    }
  }
  if (!reason.empty() && outcome.reason.empty()) outcome.reason = "waited for an event that failed: " + reason;
}

/// Caller holds mutex_. Asks CUDA once more as long as nothing final is known.
Event::State CudaEvent::state_locked() const noexcept {
  if (state_ != State::pending) return state_;
  const cudaError_t status = cudaEventQuery(event_.get());
  if (status != cudaSuccess) (void)cudaGetLastError();
  if (status == cudaErrorNotReady) return state_;
  seen_ = Clock::now();
  try {
    if (status != cudaSuccess) outcome_.reason = "CUDA: work of the stream failed: " + describe(status);
    for (const auto& wait : outcome_.waits) {
      if (!outcome_.reason.empty()) break;
      (void)core_->watchdog.look(*wait);
      outcome_.reason = reason_of(*wait, core_->watchdog.timeout());
    }
    state_ = outcome_.reason.empty() ? State::done : State::failed;
  } catch (...) {
    fail_locked("out of memory");
  }
  outcome_.waits.clear();
  return state_;
}

/// Caller holds mutex_. An earlier reason stays.
void CudaEvent::fail_locked(const std::string& reason) const noexcept {
  state_ = State::failed;
  try {
    if (outcome_.reason.empty()) outcome_.reason = reason;
  } catch (...) {
    outcome_.reason = "out of memory";  // Short enough to need none.
  }
}

CudaEvent& cuda_event(Event& event, const char* operation) {
  auto* const found = dynamic_cast<CudaEvent*>(&event);
  if (found == nullptr)
    throw Error(Errc::invalid_argument, std::string(operation) + ": the event belongs to another kind of device");
  return *found;
}

const CudaEvent& cuda_event(const Event& event, const char* operation) {
  return cuda_event(const_cast<Event&>(event), operation);
}

}  // namespace sluice::gpu
