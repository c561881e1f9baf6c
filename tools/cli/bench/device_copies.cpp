#include "tools/cli/bench/device_copies.hpp"

#include <algorithm>
#include <chrono>
#include <cstring>

#include "sluice/units.hpp"

namespace sluice::tools {
namespace {

constexpr std::chrono::minutes kPatience{2};
constexpr std::uint64_t kPiece = 64 * MiB;

}  // namespace

void upload(Device& device, Stream& stream, std::span<const std::byte> from, std::byte* to) {
  const auto pinned = device.allocate_pinned(std::min<std::uint64_t>(from.size(), kPiece));
  for (std::uint64_t at = 0; at < from.size(); at += kPiece) {
    const std::uint64_t bytes = std::min<std::uint64_t>(kPiece, from.size() - at);
    std::memcpy(pinned->data(), from.data() + at, bytes);
    const Copy copy{.to = to + at, .from = pinned->data(), .bytes = bytes};
    stream.copy({&copy, 1});
    stream.synchronize(deadline_after(kPatience));
  }
}

void download(Device& device, Stream& stream, const std::byte* from, std::span<std::byte> to) {
  const auto pinned = device.allocate_pinned(std::min<std::uint64_t>(to.size(), kPiece));
  for (std::uint64_t at = 0; at < to.size(); at += kPiece) {
    const std::uint64_t bytes = std::min<std::uint64_t>(kPiece, to.size() - at);
    const Copy copy{.to = pinned->data(), .from = from + at, .bytes = bytes};
    stream.copy({&copy, 1});
    stream.synchronize(deadline_after(kPatience));
    std::memcpy(to.data() + at, pinned->data(), bytes);
  }
}

std::unique_ptr<Buffer> uploaded(Device& device, Stream& stream, std::span<const std::byte> from) {
  auto buffer = device.allocate(from.size());
  upload(device, stream, from, buffer->data());
  return buffer;
}

}  // namespace sluice::tools
