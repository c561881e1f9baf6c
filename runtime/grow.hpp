#pragma once

#include <cstdint>
#include <memory>

#include "sluice/device.hpp"

namespace sluice::runtime {

/// Makes sure that a buffer that nothing in flight refers to has so many bytes.
template <class Allocate>
void grow(std::unique_ptr<Buffer>& buffer, std::uint64_t bytes, Allocate&& allocate) {
  if (buffer && buffer->bytes() >= bytes) return;
  buffer.reset();  // First: there may be room for only one of them.
  buffer = allocate(bytes);
}

}  // namespace sluice::runtime
