// A GPU: all engines share it, each with a stream of its own.
#include <cuda_runtime_api.h>

#include <utility>

#include "gpu/kernels/transfer/signal.hpp"
#include "sluice/cuda.hpp"
#include "sluice/device.hpp"
#include "tests/gpu/forward_graph.hpp"
#include "tests/soak/ground.hpp"
#include "tests/soak/hindered_device.hpp"

namespace sluice::test {
namespace {

class Replayed final : public Recorded {
 public:
  Replayed(cudaStream_t recorder, const std::function<void(void*)>& enqueue, cudaStream_t stream)
      : graph_(recorder, cudaStreamCaptureModeRelaxed, [&] { enqueue(recorder); }), stream_(stream) {}
  void replay() override { graph_.replay(stream_); }

 private:
  ForwardGraph graph_;
  cudaStream_t stream_;
};

class CudaGround final : public Ground {
 public:
  CudaGround(const std::shared_ptr<Device>& device, const std::shared_ptr<Faults>& faults, cudaStream_t recorder,
             bool refuses)
      : device_(device),
        for_engine_(std::make_shared<HinderedDevice>(device, faults, refuses)),
        stream_(device->create_stream("caller")),
        recorder_(recorder),
        refuses_(refuses) {}

  std::shared_ptr<Device> device() const override { return for_engine_; }
  Device& memory() const override { return *device_; }
  Stream* stream() const override { return stream_.get(); }
  void* handle() const override { return stream_->native_handle(); }
  void inject(const cpu::FaultOptions& faults) override { for_engine_->inject(faults); }
  bool refuses() const noexcept override { return refuses_; }
  void delay(void* handle, std::chrono::microseconds time) override {
    gpu::launch_delay(static_cast<std::uint32_t>(time.count()), static_cast<cudaStream_t>(handle));
  }
  std::unique_ptr<Recorded> record(std::function<void(void*)> enqueue) override {
    // What is refused is refused to who enqueues.
    if (refuses_ || !device_->info().captures_forwards(Handover::automatic)) return nullptr;
    return std::make_unique<Replayed>(recorder_, enqueue, static_cast<cudaStream_t>(handle()));
  }

 private:
  std::shared_ptr<Device> device_;
  std::shared_ptr<HinderedDevice> for_engine_;
  std::unique_ptr<Stream> stream_;
  cudaStream_t recorder_;
  bool refuses_;
};

class CudaWorld final : public World {
 public:
  CudaWorld(int ordinal, std::shared_ptr<Faults> faults)
      : faults_(std::move(faults)),
        device_(make_cuda_device({.ordinal = ordinal, .flag_timeout = kSoakTimeout})),
        recorder_(device_->create_stream("recorder")) {}

  const Terrain& terrain() const noexcept override { return terrain_; }
  std::unique_ptr<Ground> ground(const GroundOptions& options) override {
    // It does what it is told, or is lost: what breaks is what is launched there.
    return std::make_unique<CudaGround>(device_, faults_, static_cast<cudaStream_t>(recorder_->native_handle()),
                                        options.breaks || options.refuses);
  }

 private:
  Terrain terrain_{.shape = {.layers = 3, .q_heads = 4, .kv_heads = 2, .head_dim = 64},
                   .kv_dtypes = {DType::bf16, DType::bf16, DType::f16, DType::fp8_e4m3},
                   .tolerance = 2e-3,
                   .short_timeout = std::chrono::milliseconds(50),
                   .least_window = 64,
                   .in_parts = true,
                   .rounds = true};
  std::shared_ptr<Faults> faults_;
  std::shared_ptr<Device> device_;
  std::unique_ptr<Stream> recorder_;  ///< nothing runs on it: what is captured is replayed elsewhere
};

}  // namespace

std::unique_ptr<World> cuda_world(int ordinal, std::shared_ptr<Faults> faults) {
  return std::make_unique<CudaWorld>(ordinal, std::move(faults));
}

}  // namespace sluice::test
