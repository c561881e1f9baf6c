// What the host may look at while forwards run.
#include <cuda_runtime_api.h>

#include <chrono>
#include <thread>

#include "gpu/device/cuda_error.hpp"
#include "gpu/device/current_device.hpp"
#include "gpu/forward/forward_verbs.hpp"
#include "sluice/error.hpp"

namespace sluice::gpu {
namespace {

/// This thread may call what would break a capture of another stream, another thread's or its own, in its usual mode:
/// what it does is none of that capture's business.
class BesideCaptures {
 public:
  BesideCaptures() { check(cudaThreadExchangeStreamCaptureMode(&mode_), "look beside a capture"); }
  ~BesideCaptures() { (void)cudaThreadExchangeStreamCaptureMode(&mode_); }
  BesideCaptures(const BesideCaptures&) = delete;
  BesideCaptures& operator=(const BesideCaptures&) = delete;

 private:
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

}  // namespace

void ForwardVerbs::see_near(const ForwardMemory& memory, Deadline deadline) {
  constexpr std::chrono::microseconds kNap{20};
  const CurrentDevice current(ordinal_);
  const BesideCaptures beside;
  check(cudaMemcpyAsync(memory.near_seen, memory.near_held, memory.blocks * sizeof(*memory.near_held),
                        cudaMemcpyDeviceToHost, sight_.get()),
        "look at near rows");
  while (true) {
    const cudaError_t status = cudaStreamQuery(sight_.get());
    if (status != cudaErrorNotReady) return check(status, "look at near rows");
    (void)cudaGetLastError();
    if (RunClock::now() >= deadline)
      throw Error(Errc::timeout,
                  "the device has not said in time which rows are near; ask again when it does less, or "
                  "raise EngineOptions::timeout");
    std::this_thread::sleep_for(kNap);
  }
}

}  // namespace sluice::gpu
