#pragma once

#include "sluice/device.hpp"

namespace sluice::runtime {

/// Shows the scope that it lives in as a range of the calling thread, to profilers that the device knows.
class MarkedRange {
 public:
  MarkedRange(Device& device, const char* name) noexcept : device_(device) { device_.mark_begin(name); }
  ~MarkedRange() { device_.mark_end(); }
  MarkedRange(const MarkedRange&) = delete;
  MarkedRange& operator=(const MarkedRange&) = delete;

 private:
  Device& device_;
};

}  // namespace sluice::runtime
