#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "sluice/device.hpp"

namespace sluice::tools {

/// Copies between ordinary memory and a device's, through pinned pieces. They wait, by a patience of minutes.
void upload(Device& device, Stream& stream, std::span<const std::byte> from, std::byte* to);
void download(Device& device, Stream& stream, const std::byte* from, std::span<std::byte> to);

/// Device memory that holds the same bytes.
[[nodiscard]] std::unique_ptr<Buffer> uploaded(Device& device, Stream& stream, std::span<const std::byte> from);

template <class T>
[[nodiscard]] std::vector<T> downloaded(Device& device, Stream& stream, const std::byte* from, std::size_t count) {
  std::vector<T> out(count);
  download(device, stream, from, std::as_writable_bytes(std::span(out)));
  return out;
}

}  // namespace sluice::tools
