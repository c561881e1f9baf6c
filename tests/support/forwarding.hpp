#pragma once

#include <memory>
#include <string>
#include <utility>

#include "sluice/device.hpp"

namespace sluice::test {

/// A device that does what another does; tests override what they watch or spoil.
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
