#pragma once

#include <memory>
#include <string>
#include <utility>

#include "sluice/device.hpp"
#include "sluice/error.hpp"
#include "sluice/step/forward_verbs.hpp"

namespace sluice::test {

/// A device that does what another does; tests override what they watch or spoil.
class ForwardingDevice : public Device {
 public:
  explicit ForwardingDevice(std::shared_ptr<Device> inner) : inner_(std::move(inner)) {}
  [[nodiscard]] const DeviceInfo& info() const noexcept override { return inner_->info(); }
  [[nodiscard]] std::unique_ptr<Buffer> allocate(std::uint64_t bytes) override { return inner_->allocate(bytes); }
  [[nodiscard]] std::unique_ptr<Buffer> allocate_pinned(std::uint64_t bytes) override {
    return inner_->allocate_pinned(bytes);
  }
  [[nodiscard]] std::unique_ptr<Registration> register_host(std::span<std::byte> memory) override {
    return inner_->register_host(memory);
  }
  [[nodiscard]] std::unique_ptr<Stream> create_stream(const std::string& name) override {
    return inner_->create_stream(name);
  }
  [[nodiscard]] std::unique_ptr<Event> create_event() override { return inner_->create_event(); }
  [[nodiscard]] DeviceRates rates(std::uint64_t page_bytes) const override { return inner_->rates(page_bytes); }
  [[nodiscard]] bool lost() const noexcept override { return inner_->lost(); }

 protected:
  std::shared_ptr<Device> inner_;
};

/// Verbs likewise.
class ForwardingVerbs : public ForwardVerbs {
 public:
  explicit ForwardingVerbs(ForwardVerbs& inner) : inner_(inner) {}
  [[nodiscard]] bool sparse_prefill(const AttentionShape& shape) const noexcept override {
    return inner_.sparse_prefill(shape);
  }
  [[nodiscard]] PrefillCosts prefill_costs() const noexcept override { return inner_.prefill_costs(); }
  [[nodiscard]] std::uint64_t scratch_bytes(const ForwardMemory& memory) const override {
    return inner_.scratch_bytes(memory);
  }
  [[nodiscard]] std::unique_ptr<ForwardSide> make_side() override { return inner_.make_side(); }
  void apply(const ForwardMemory& memory, ForwardSide& side, void* stream) override {
    inner_.apply(memory, side, stream);
  }
  void fill(const ForwardMemory& memory, ForwardSide& side, void* stream) override {
    inner_.fill(memory, side, stream);
  }
  void cluster(const ForwardMemory& memory, std::span<const ForwardClustering> clusterings, void* stream) override {
    inner_.cluster(memory, clusterings, stream);
  }
  void derive(const ForwardMemory& memory, std::uint32_t plane, std::span<const FarPage> pages, const float* mean,
              void* stream) override {
    inner_.derive(memory, plane, pages, mean, stream);
  }
  void begin(const ForwardMemory& memory, void* stream) override { inner_.begin(memory, stream); }
  void append(const ForwardMemory& memory, const ForwardLayer& layer) override { inner_.append(memory, layer); }
  void prefill(const ForwardMemory& memory, const ForwardLayer& layer) override { inner_.prefill(memory, layer); }
  void rank(const ForwardMemory& memory, const ForwardLayer& layer) override { inner_.rank(memory, layer); }
  void score(const ForwardMemory& memory, const ForwardLayer& layer) override { inner_.score(memory, layer); }
  void propose(const ForwardMemory& memory, const ForwardLayer& layer) override { inner_.propose(memory, layer); }
  void choose(const ForwardMemory& memory, const ForwardLayer& layer) override { inner_.choose(memory, layer); }
  void split(const ForwardMemory& memory, const ForwardLayer& layer) override { inner_.split(memory, layer); }
  void attend(const ForwardMemory& memory, const ForwardLayer& layer) override { inner_.attend(memory, layer); }
  void attend_whole(const ForwardMemory& memory, const ForwardLayer& layer) override {
    inner_.attend_whole(memory, layer);
  }
  void promote(const ForwardMemory& memory, const ForwardLayer& layer) override { inner_.promote(memory, layer); }
  void fetch(const ForwardMemory& memory, const ForwardLayer& layer) override { inner_.fetch(memory, layer); }
  void await_answer(const ForwardMemory& memory, void* stream) override { inner_.await_answer(memory, stream); }
  void signal(const ForwardMemory& memory, std::uint64_t ticket, void* stream) override {
    inner_.signal(memory, ticket, stream);
  }
  void tell_read(const ForwardMemory& memory, std::uint64_t forward, void* stream) override {
    inner_.tell_read(memory, forward, stream);
  }
  [[nodiscard]] bool capturing(void* stream) const override { return inner_.capturing(stream); }
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
  void see_near(const ForwardMemory& memory, Deadline deadline) override { inner_.see_near(memory, deadline); }
  void end(const ForwardMemory& memory, void* stream) override { inner_.end(memory, stream); }

 protected:
  ForwardVerbs& inner_;
};

/// Verbs that refuse the next plan if they are told to, or fail with it when it has been taken.
class RefusingVerbs final : public ForwardingVerbs {
 public:
  using ForwardingVerbs::ForwardingVerbs;
  void apply(const ForwardMemory& memory, ForwardSide& side, void* stream) override {
    if (std::exchange(refuses, false)) throw Error(Errc::device, "the test refuses this plan; repeat it");
    inner_.apply(memory, side, stream);
  }
  void fill(const ForwardMemory& memory, ForwardSide& side, void* stream) override {
    if (std::exchange(fails, false)) throw Error(Errc::device, "the test fails behind this plan; repeat it");
    inner_.fill(memory, side, stream);
  }
  void tell_read(const ForwardMemory& memory, std::uint64_t forward, void* stream) override {
    if (mute) throw Error(Errc::device, "the test does not say whether a plan was read");
    inner_.tell_read(memory, forward, stream);
  }
  [[nodiscard]] bool capturing(void* stream) const override { return captures || inner_.capturing(stream); }
  bool refuses = false;
  bool fails = false;     ///< before the near rows are filled that it has found
  bool mute = false;      ///< of plans that fail so nobody learns whether they have been read
  bool captures = false;  ///< every stream is captured, as it says
};

class RefusingDevice final : public ForwardingDevice {
 public:
  explicit RefusingDevice(std::shared_ptr<Device> inner)
      : ForwardingDevice(std::move(inner)), verbs(*inner_->forward_verbs()) {}
  [[nodiscard]] ForwardVerbs* forward_verbs() noexcept override { return &verbs; }
  RefusingVerbs verbs;
};

}  // namespace sluice::test
