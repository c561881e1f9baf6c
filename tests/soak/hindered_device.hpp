#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <utility>

#include "cpu/device/fault_injector.hpp"
#include "sluice/error.hpp"
#include "sluice/step/forward_verbs.hpp"
#include "tests/soak/faults.hpp"
#include "tests/support/forwarding.hpp"
#include "tests/support/random.hpp"

namespace sluice::test {

/// Verbs that refuse to enqueue a plan, or a layer anywhere, when they are told to.
class HinderedVerbs final : public ForwardingVerbs {
 public:
  HinderedVerbs(ForwardVerbs& inner, Faults& faults) : ForwardingVerbs(inner), faults_(faults) {}

  void apply(const ForwardMemory& memory, ForwardSide& side, void* stream) override {
    if (faults_.starved_apply() >= 0) refuse("a plan");
    inner_.apply(memory, side, stream);
  }
  void append(const ForwardMemory& memory, const ForwardLayer& layer) override {
    go_on();
    inner_.append(memory, layer);
  }
  void split(const ForwardMemory& memory, const ForwardLayer& layer) override {
    go_on();
    inner_.split(memory, layer);
  }
  void attend(const ForwardMemory& memory, const ForwardLayer& layer) override {
    go_on();
    inner_.attend(memory, layer);
  }
  void merge(const ForwardMemory& memory, const ForwardLayer& layer) override {
    go_on();
    inner_.merge(memory, layer);
  }

 private:
  static void refuse(const char* what) { throw Error(Errc::device, std::string("the soak refuses ") + what); }
  void go_on() {
    if (faults_.breaks_now()) refuse("to launch a layer");
  }

  Faults& faults_;
};

/// A device that gives no memory and registers none at times, with such verbs if it `refuses`.
class HinderedDevice final : public ForwardingDevice {
 public:
  HinderedDevice(std::shared_ptr<Device> inner, std::shared_ptr<Faults> faults, bool refuses)
      : ForwardingDevice(std::move(inner)),
        faults_(std::move(faults)),
        verbs_(*inner_->forward_verbs(), *faults_),
        refuses_(refuses) {}

  [[nodiscard]] ForwardVerbs* forward_verbs() noexcept override { return refuses_ ? &verbs_ : inner_->forward_verbs(); }
  [[nodiscard]] std::unique_ptr<Buffer> allocate(std::uint64_t bytes) override {
    perhaps(now_.fail_allocation, Errc::out_of_capacity);
    return inner_->allocate(bytes);
  }
  [[nodiscard]] std::unique_ptr<Buffer> allocate_pinned(std::uint64_t bytes) override {
    perhaps(now_.fail_allocation, Errc::out_of_capacity);
    return inner_->allocate_pinned(bytes);
  }
  [[nodiscard]] std::unique_ptr<Registration> register_host(std::span<std::byte> memory) override {
    perhaps(now_.fail_registration, Errc::device);
    return inner_->register_host(memory);
  }
  void inject(const cpu::FaultOptions& faults) {
    now_ = faults;
    random_ = Random(faults.seed);
  }

 private:
  void perhaps(double chance, Errc code) {
    if (chance > 0.0 && random_.uniform() < chance) throw Error(code, "the soak has no memory for the device");
  }

  std::shared_ptr<Faults> faults_;
  HinderedVerbs verbs_;
  bool refuses_;
  cpu::FaultOptions now_{};  ///< chances are above 0 only while the caller builds an engine
  Random random_{0};
};

}  // namespace sluice::test
