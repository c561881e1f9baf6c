#pragma once

#include <memory>
#include <utility>

#include "cpu/device/host_stream.hpp"
#include "sluice/forward_verbs.hpp"
#include "tests/soak/faults.hpp"
#include "tests/support/failing_new.hpp"
#include "tests/support/forwarding.hpp"

namespace sluice::test {

/// Verbs of a host device, of which `apply` finds no memory when it is told to.
class StarvedVerbs final : public ForwardVerbs {
 public:
  StarvedVerbs(ForwardVerbs& inner, Faults& faults) : inner_(inner), faults_(faults) {}

  void apply(const ForwardMemory& memory, void* stream) override {
    const auto run = [this, memory, which = static_cast<long>(faults_.starved_apply())] {
      fail_own_allocation(which);
      try {
        inner_.apply(memory, nullptr);  // Now: nothing else of this thread may be what fails.
      } catch (...) {
        fail_own_allocation(-1);
        throw;
      }
      fail_own_allocation(-1);
    };
    cpu::run_or_enqueue(static_cast<Stream*>(stream), "apply", run);
  }

  [[nodiscard]] std::uint64_t scratch_bytes(const ForwardMemory& memory) const override {
    return inner_.scratch_bytes(memory);
  }
  void begin(const ForwardMemory& memory, void* stream) override { inner_.begin(memory, stream); }
  void append(const ForwardMemory& memory, const ForwardLayer& layer) override { inner_.append(memory, layer); }
  void prefill(const ForwardMemory& memory, const ForwardLayer& layer) override { inner_.prefill(memory, layer); }
  void rank(const ForwardMemory& memory, const ForwardLayer& layer) override { inner_.rank(memory, layer); }
  void score(const ForwardMemory& memory, const ForwardLayer& layer) override { inner_.score(memory, layer); }
  void choose(const ForwardMemory& memory, const ForwardLayer& layer) override { inner_.choose(memory, layer); }
  void split(const ForwardMemory& memory, const ForwardLayer& layer) override { inner_.split(memory, layer); }
  void attend(const ForwardMemory& memory, const ForwardLayer& layer) override { inner_.attend(memory, layer); }
  void promote(const ForwardMemory& memory, const ForwardLayer& layer) override { inner_.promote(memory, layer); }
  void fetch(const ForwardMemory& memory, const ForwardLayer& layer) override { inner_.fetch(memory, layer); }
  void merge(const ForwardMemory& memory, const ForwardLayer& layer) override { inner_.merge(memory, layer); }
  void audit(const ForwardMemory& memory, const ForwardLayer& layer) override { inner_.audit(memory, layer); }
  void stamp(const ForwardMemory& memory, std::uint32_t layer, Stage stage, void* stream) override {
    inner_.stamp(memory, layer, stage, stream);
  }
  [[nodiscard]] bool stamps_by_clock() const noexcept override { return inner_.stamps_by_clock(); }
  void cancel(const ForwardMemory& memory, std::uint64_t before, void* stream) override {
    inner_.cancel(memory, before, stream);
  }
  void require_alive(void* stream) override { inner_.require_alive(stream); }
  void end(const ForwardMemory& memory, void* stream) override { inner_.end(memory, stream); }

 private:
  ForwardVerbs& inner_;
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
