#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <thread>

#include "gpu/device/cuda_stream.hpp"
#include "gpu/kernels/transfer/signal.hpp"
#include "sluice/device.hpp"
#include "sluice/error.hpp"

namespace sluice::test {

/// How a device fails; every choice follows from the seed.
struct Unruliness {
  std::uint64_t seed = 0;
  std::uint32_t device_delay_us = 0;  ///< longest pause of a stream before an operation
  std::uint32_t host_delay_us = 0;    ///< longest pause of the calling thread before it enqueues
  double delay_chance = 0.0;
  double fail_copy = 0.0;
  bool refuse_pinning = false;
};

/// A CUDA stream that dawdles: on the device by kernels that sleep, on the host by sleeping threads.
class UnrulyStream final : public gpu::CudaStream {
 public:
  UnrulyStream(std::unique_ptr<Stream> inner, const Unruliness& unruliness, std::uint64_t actor)
      : owned_(std::move(inner)),
        inner_(gpu::cuda_stream(owned_.get(), "test")),
        unruliness_(unruliness),
        rng_(unruliness.seed * 1'000'003 + actor) {}

  void copy(std::span<const Copy> batch) override {
    if (copies()) inner_.copy(batch);
  }
  void copy_in_background(std::span<const Copy> batch) override {
    if (copies()) inner_.copy_in_background(batch);
  }
  void record(Event& event) override {
    dawdle();
    inner_.record(event);
  }
  void wait(const Event& event) override {
    dawdle();
    inner_.wait(event);
  }
  void signal(Flag& flag, std::uint64_t value) override {
    dawdle();
    inner_.signal(flag, value);
  }
  void wait(const Flag& flag, std::uint64_t value) override {
    dawdle();
    inner_.wait(flag, value);
  }
  void begin_batch() override { inner_.begin_batch(); }
  void end_batch() override { inner_.end_batch(); }
  void synchronize(Deadline deadline) override { inner_.synchronize(deadline); }
  [[nodiscard]] void* native_handle() const noexcept override { return inner_.native_handle(); }
  [[nodiscard]] cudaStream_t handle() const noexcept override { return inner_.handle(); }
  [[nodiscard]] gpu::ParamRing& params() noexcept override { return inner_.params(); }
  [[nodiscard]] std::span<std::byte> scratch() const noexcept override { return inner_.scratch(); }
  void fail(const std::string& reason) noexcept override { inner_.fail(reason); }

 private:
  /// Before a copy; false if it is to fail instead.
  bool copies() {
    dawdle();
    if (!chance(unruliness_.fail_copy)) return true;
    fail("injected failure of a copy");
    return false;
  }
  bool chance(double of) { return of > 0.0 && std::uniform_real_distribution<double>()(rng_) < of; }
  std::uint32_t below(std::uint32_t most) { return std::uniform_int_distribution<std::uint32_t>(0, most)(rng_); }
  void dawdle() {
    if (unruliness_.host_delay_us != 0 && chance(unruliness_.delay_chance)) {
      std::this_thread::sleep_for(std::chrono::microseconds(below(unruliness_.host_delay_us)));
    }
    if (unruliness_.device_delay_us != 0 && chance(unruliness_.delay_chance)) {
      gpu::launch_delay(below(unruliness_.device_delay_us), inner_.handle());
    }
  }

  std::unique_ptr<Stream> owned_;
  gpu::CudaStream& inner_;
  Unruliness unruliness_;
  std::mt19937_64 rng_;
};

/// A CUDA device whose streams are unruly.
class UnrulyDevice final : public Device {
 public:
  UnrulyDevice(std::shared_ptr<Device> inner, const Unruliness& unruliness)
      : inner_(std::move(inner)), unruliness_(unruliness) {}

  [[nodiscard]] const DeviceInfo& info() const noexcept override { return inner_->info(); }
  [[nodiscard]] Backend& backend() noexcept override { return inner_->backend(); }
  [[nodiscard]] std::unique_ptr<Buffer> allocate(std::uint64_t bytes) override { return inner_->allocate(bytes); }
  [[nodiscard]] std::unique_ptr<Buffer> allocate_pinned(std::uint64_t bytes) override {
    return inner_->allocate_pinned(bytes);
  }
  [[nodiscard]] std::unique_ptr<Registration> register_host(std::span<std::byte> memory) override {
    if (unruliness_.refuse_pinning) throw Error(Errc::device, "injected refusal to pin");
    return inner_->register_host(memory);
  }
  [[nodiscard]] std::unique_ptr<Stream> create_stream(const std::string& name) override {
    return std::make_unique<UnrulyStream>(inner_->create_stream(name), unruliness_, ++streams_);
  }
  [[nodiscard]] std::unique_ptr<Event> create_event() override { return inner_->create_event(); }

 private:
  std::shared_ptr<Device> inner_;
  Unruliness unruliness_;
  std::uint64_t streams_ = 0;
};

}  // namespace sluice::test
