#pragma once

#include <memory>
#include <string>
#include <utility>

#include "sluice/device.hpp"

namespace sluice::test {

/// A stream that does what another does; tests override what they watch or spoil.
class ForwardingStream : public Stream {
 public:
  explicit ForwardingStream(std::unique_ptr<Stream> inner) : inner_(std::move(inner)) {}
  void copy(std::span<const Copy> batch) override { inner_->copy(batch); }
  void copy_in_background(std::span<const Copy> batch) override { inner_->copy_in_background(batch); }
  void record(Event& event) override { inner_->record(event); }
  void wait(const Event& event) override { inner_->wait(event); }
  void signal(Flag& flag, std::uint64_t value) override { inner_->signal(flag, value); }
  void wait(const Flag& flag, std::uint64_t value) override { inner_->wait(flag, value); }
  void synchronize(Deadline deadline) override { inner_->synchronize(deadline); }

 protected:
  std::unique_ptr<Stream> inner_;
};

/// Likewise a device. Verbs go to the inner backend, which knows its own streams only: wrap streams that carry copies.
class ForwardingDevice : public Device {
 public:
  explicit ForwardingDevice(std::shared_ptr<Device> inner) : inner_(std::move(inner)) {}
  [[nodiscard]] const DeviceInfo& info() const noexcept override { return inner_->info(); }
  [[nodiscard]] Backend& backend() noexcept override { return inner_->backend(); }
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

}  // namespace sluice::test
