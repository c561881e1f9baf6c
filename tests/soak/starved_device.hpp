#pragma once

#include <memory>
#include <utility>

#include "cpu/device/host_stream.hpp"
#include "sluice/step/forward_verbs.hpp"
#include "tests/soak/faults.hpp"
#include "tests/support/failing_new.hpp"
#include "tests/support/forwarding.hpp"

namespace sluice::test {

/// Verbs of a host device, of which `apply` finds no memory when it is told to.
class StarvedVerbs final : public ForwardingVerbs {
 public:
  StarvedVerbs(ForwardVerbs& inner, Faults& faults) : ForwardingVerbs(inner), faults_(faults) {}

  void apply(const ForwardMemory& memory, ForwardSide& side, void* stream) override {
    const auto run = [this, memory, &side, which = static_cast<long>(faults_.starved_apply())] {
      fail_own_allocation(which);
      try {
        inner_.apply(memory, side, nullptr);  // Now: nothing else of this thread may be what fails.
      } catch (...) {
        fail_own_allocation(-1);
        throw;
      }
      fail_own_allocation(-1);
    };
    cpu::run_or_enqueue(static_cast<Stream*>(stream), "apply", run);
  }

 private:
  Faults& faults_;
};

/// A host device with such verbs.
class StarvedDevice final : public ForwardingDevice {
 public:
  StarvedDevice(std::shared_ptr<Device> inner, std::shared_ptr<Faults> faults)
      : ForwardingDevice(std::move(inner)), faults_(std::move(faults)), verbs_(*inner_->forward_verbs(), *faults_) {}
  [[nodiscard]] ForwardVerbs* forward_verbs() noexcept override { return &verbs_; }

 private:
  std::shared_ptr<Faults> faults_;
  StarvedVerbs verbs_;
};

}  // namespace sluice::test
