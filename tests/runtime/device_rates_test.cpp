#include <memory>

#include "cpu/host_device.hpp"
#include "tests/runtime/toy.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/forwarding.hpp"

namespace sluice::test {
namespace {

constexpr AttentionShape kShape{.layers = 1, .q_heads = 4, .kv_heads = 2, .head_dim = 32};

/// A device that knows its own speed.
class RatedDevice final : public ForwardingDevice {
 public:
  RatedDevice(std::shared_ptr<Device> inner, const DeviceRates& rates)
      : ForwardingDevice(std::move(inner)), rates_(rates), info_(inner_->info()) {
    info_.pci_bus_id = "ffff:ff:1f.7";  // Nowhere.
  }
  [[nodiscard]] const DeviceInfo& info() const noexcept override { return info_; }
  [[nodiscard]] DeviceRates rates(std::uint64_t page_bytes) const override {
    asked_ = page_bytes;
    return rates_;
  }
  [[nodiscard]] std::uint64_t asked() const noexcept { return asked_; }

 private:
  DeviceRates rates_;
  DeviceInfo info_;
  mutable std::uint64_t asked_ = 0;
};

std::shared_ptr<RatedDevice> rated(const DeviceRates& rates) {
  const auto workers = std::make_shared<cpu::Workers>(cpu::Topology(), cpu::WorkersOptions{.threads = 2, .pin = false});
  return std::make_shared<RatedDevice>(std::make_shared<cpu::HostDevice>(workers), rates);
}

RuntimeOptions automatic() {
  RuntimeOptions options = toy_options(kShape, 100);
  options.placement = PlacementMode::automatic;
  return options;
}

}  // namespace

TEST_CASE("automatic placement decides by the device's own rates, and by measured ones of the host",
          "[runtime][rates]") {
  const auto device = rated({.link_gbps = 51.25, .link_latency_us = 7.5, .near_gbps = 3900.0});
  const Runtime runtime(automatic(), device);
  const RuntimeInfo info = runtime.info();
  REQUIRE(device->asked() == info.page_bytes);
  REQUIRE(info.rates.link_gbps == 51.25);
  REQUIRE(info.rates.link_latency_us == 7.5);
  REQUIRE(info.rates.near_gbps == 3900.0);
  REQUIRE(info.rates.far_runs_gbps > 0.0);
  REQUIRE(info.rates.far_runs_gbps != CostRates{}.far_runs_gbps);
  REQUIRE(info.numa_node == 0);
}

TEST_CASE("what a device does not know of itself is measured on the host", "[runtime][rates]") {
  const Runtime runtime(automatic(), rated({.near_gbps = 3900.0}));
  const CostRates rates = runtime.info().rates;
  REQUIRE(rates.near_gbps == 3900.0);
  REQUIRE(rates.link_gbps > 0.0);
  REQUIRE(rates.link_latency_us == CostRates{}.link_latency_us);
}

}  // namespace sluice::test
