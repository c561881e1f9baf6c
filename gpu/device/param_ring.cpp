#include "gpu/device/param_ring.hpp"

#include <string>
#include <thread>

#include "gpu/device/cuda_error.hpp"
#include "gpu/device/handles.hpp"
#include "sluice/error.hpp"

namespace sluice::gpu {
namespace {

constexpr std::uint64_t kAlignment = 16;

/// Between two looks at a ring that is full. Rare and already slow, so other threads may have the driver's lock.
constexpr std::chrono::microseconds kNap{20};

}  // namespace

ParamRing::ParamRing(cudaStream_t stream, const Options& options) : stream_(stream), options_(options) {
  std::array<EventHandle, kSegments> events;
  for (EventHandle& event : events) event = make_event(cudaEventDisableTiming);
  memory_ = make_pinned_memory(kSegments * options_.segment_bytes, "pin memory for kernel arguments").release();
  for (std::size_t i = 0; i < kSegments; ++i) passed_[i] = events[i].release();
}

ParamRing::~ParamRing() {
  for (const cudaEvent_t event : passed_) DestroyEvent{}(event);
  FreePinned{}(memory_);
}

std::byte* ParamRing::take(std::uint64_t bytes) {
  const std::uint64_t rounded = div_up(bytes, kAlignment) * kAlignment;
  if (bytes > options_.segment_bytes || rounded > options_.segment_bytes) {
    throw Error(Errc::out_of_capacity, "kernel arguments of " + std::to_string(bytes) + " bytes exceed the " +
                                           std::to_string(options_.segment_bytes) +
                                           " of one launch; split the work into several calls");
  }
  if (used_ + rounded > options_.segment_bytes) open_next();
  std::byte* const taken = memory_ + segment_ * options_.segment_bytes + used_;
  used_ += rounded;
  return taken;
}

/// A segment's event is recorded when the next one is opened, which may be between a verb's `take` and its launch.
/// So the proof that the readers of a segment are through is the event of the segment after it.
void ParamRing::open_next() {
  check(cudaEventRecord(passed_[segment_], stream_), "record the end of a ring segment");
  const std::size_t next = (segment_ + 1) % kSegments;
  const cudaEvent_t proof = passed_[(next + 1) % kSegments];
  const Deadline deadline = deadline_after(options_.timeout);
  for (;;) {
    const cudaError_t status = cudaEventQuery(proof);
    if (status == cudaSuccess) break;
    if (status != cudaErrorNotReady) check(status, "reuse memory for kernel arguments");
    (void)cudaGetLastError();
    if (RunClock::now() > deadline) {
      throw Error(Errc::timeout, "the stream took no kernel arguments for " + std::to_string(options_.timeout.count()) +
                                     " ms; look for a flag or an event that never comes");
    }
    std::this_thread::sleep_for(kNap);
  }
  segment_ = next;
  used_ = 0;
}

}  // namespace sluice::gpu
