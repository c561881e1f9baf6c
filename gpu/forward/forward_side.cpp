#include "gpu/forward/forward_side.hpp"

#include <chrono>
#include <thread>

#include "gpu/device/cuda_error.hpp"
#include "gpu/device/current_device.hpp"
#include "gpu/kernels/forward/forward.hpp"
#include "sluice/run_clock.hpp"

namespace sluice::gpu {

ForwardSide::ForwardSide(int ordinal) : ordinal_(ordinal) {
  const CurrentDevice current(ordinal);
  stream_ = make_stream(0);
  placed_ = make_event(cudaEventDisableTiming);
  filled_ = make_event(cudaEventDisableTiming);
}

ForwardSide::~ForwardSide() {
  constexpr std::chrono::seconds kMoment{1};
  constexpr std::chrono::microseconds kNap{50};
  const Deadline deadline = deadline_after(kMoment);
  // A capture elsewhere is none of its business.
  cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
  (void)cudaThreadExchangeStreamCaptureMode(&mode);
  while (cudaStreamQuery(stream_.get()) == cudaErrorNotReady && RunClock::now() < deadline)
    std::this_thread::sleep_for(kNap);
  (void)cudaThreadExchangeStreamCaptureMode(&mode);
  (void)cudaGetLastError();
}

void ForwardSide::join(cudaStream_t stream) const {
  // Here, not behind `fill`: where that could not be noted nobody would wait for rows that are being filled.
  check(cudaEventRecord(filled_.get(), stream_.get()), "note which near rows are filled");
  check(cudaStreamWaitEvent(stream, filled_.get()), "wait for near rows that are filled");
}

void ForwardSide::fill(const ForwardMemory& memory, cudaStream_t stream) const {
  check(cudaEventRecord(placed_.get(), stream), "note which near rows are to be filled");
  check(cudaStreamWaitEvent(stream_.get(), placed_.get()), "wait for near rows that are to be filled");
  launch_forward_fill(memory, stream_.get());
}

}  // namespace sluice::gpu
