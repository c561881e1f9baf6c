// The embedded host device: each engine has one of its own, or one that the engine brings.
#include <thread>
#include <utility>

#include "cpu/device/host_device.hpp"
#include "cpu/device/host_stream.hpp"
#include "cpu/machine/topology.hpp"
#include "cpu/threads/workers.hpp"
#include "tests/soak/ground.hpp"
#include "tests/soak/hindered_device.hpp"
#include "tests/soak/starved_device.hpp"

namespace sluice::test {
namespace {

/// There are no graphs: it is enqueued again.
class Repeated final : public Recorded {
 public:
  Repeated(std::function<void(void*)> enqueue, void* handle) : enqueue_(std::move(enqueue)), handle_(handle) {}
  void replay() override { enqueue_(handle_); }

 private:
  std::function<void(void*)> enqueue_;
  void* handle_;
};

class HostGround final : public Ground {
 public:
  HostGround(const std::shared_ptr<const cpu::Workers>& workers, const std::shared_ptr<Faults>& faults,
             const GroundOptions& options)
      : memory_(workers), refuses_(options.refuses) {
    if (options.at_once) return;
    const cpu::HostDeviceOptions patient{.flag_timeout = kSoakTimeout, .faults = {}};
    device_ = std::make_shared<cpu::HostDevice>(workers, patient);
    for_engine_ = device_;
    if (options.breaks) for_engine_ = std::make_shared<StarvedDevice>(device_, faults);
    if (options.refuses) for_engine_ = std::make_shared<HinderedDevice>(device_, faults, true);
    stream_ = device_->create_stream("caller");
  }

  std::shared_ptr<Device> device() const override { return for_engine_; }
  Device& memory() const override { return memory_; }
  Stream* stream() const override { return stream_.get(); }
  void* handle() const override { return stream_.get(); }
  void inject(const cpu::FaultOptions& faults) override {
    if (device_) device_->inject(faults);
  }
  bool refuses() const noexcept override { return refuses_; }
  void delay(void* handle, std::chrono::microseconds time) override {
    cpu::run_or_enqueue(static_cast<Stream*>(handle), "delay", [time] { std::this_thread::sleep_for(time); });
  }
  std::unique_ptr<Recorded> record(std::function<void(void*)> enqueue) override {
    return std::make_unique<Repeated>(std::move(enqueue), handle());
  }

 private:
  mutable cpu::HostDevice memory_;
  bool refuses_;
  std::shared_ptr<cpu::HostDevice> device_;  ///< null: the engine's own
  std::shared_ptr<Device> for_engine_;
  std::unique_ptr<Stream> stream_;
};

class HostWorld final : public World {
 public:
  explicit HostWorld(std::shared_ptr<Faults> faults) : faults_(std::move(faults)) {
    const auto before_body = [faults = faults_](std::uint32_t) { faults->compute(); };
    workers_ = std::make_shared<cpu::Workers>(
        cpu::Topology(),
        cpu::WorkersOptions{.threads = 2, .pin = false, .timeout = kSoakTimeout, .before_body = before_body});
  }

  const Terrain& terrain() const noexcept override { return terrain_; }
  std::unique_ptr<Ground> ground(const GroundOptions& options) override {
    return std::make_unique<HostGround>(workers_, faults_, options);
  }

 private:
  Terrain terrain_{.shape = {.layers = 3, .q_heads = 4, .kv_heads = 2, .head_dim = 16},
                   .kv_dtypes = {DType::f32, DType::f32, DType::bf16, DType::f16, DType::fp8_e4m3}};
  std::shared_ptr<Faults> faults_;
  std::shared_ptr<const cpu::Workers> workers_;
};

}  // namespace

std::unique_ptr<World> host_world(std::shared_ptr<Faults> faults) {
  return std::make_unique<HostWorld>(std::move(faults));
}

}  // namespace sluice::test
