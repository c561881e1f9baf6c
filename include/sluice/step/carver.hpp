#pragma once

#include <cstddef>
#include <cstdint>

#include "sluice/units.hpp"

namespace sluice {

/// Hands out the parts of a piece of memory; from null, it counts.
class Carver {
 public:
  explicit Carver(std::byte* memory) : memory_(memory) {}
  template <class T>
  [[nodiscard]] T* take(std::uint64_t count) {
    std::byte* const part = memory_ == nullptr ? nullptr : memory_ + used_;
    used_ += div_up(count * sizeof(T), kAlignment) * kAlignment;
    return reinterpret_cast<T*>(part);
  }
  [[nodiscard]] std::uint64_t used() const noexcept { return used_; }

 private:
  static constexpr std::uint64_t kAlignment = 256;
  std::byte* memory_;
  std::uint64_t used_ = 0;
};

}  // namespace sluice
