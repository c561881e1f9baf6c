#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "sluice/device.hpp"

namespace sluice::test {

/// Memory that both sides see, for what is brought in: allocated once, as a GPU has to wait for that.
class Staging {
 public:
  explicit Staging(Device& memory) : memory_(memory) {}
  /// Nobody may use any longer what was there.
  [[nodiscard]] float* room(std::size_t floats) {
    const std::uint64_t bytes = floats * sizeof(float);
    if (!buffer_ || buffer_->bytes() < bytes) {
      buffer_.reset();
      buffer_ = memory_.allocate_pinned(bytes + bytes / 2);
    }
    return reinterpret_cast<float*>(buffer_->data());
  }

 private:
  Device& memory_;
  std::unique_ptr<Buffer> buffer_;
};

}  // namespace sluice::test
