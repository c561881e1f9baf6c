#include "tests/gpu/gpu_support.hpp"

#include <stdexcept>

namespace sluice::test {
namespace {

/// Pinning takes milliseconds, so all tests use the same memory, one after the other.
std::span<std::byte> pinned_memory() {
  static const std::unique_ptr<Buffer> buffer = gpu_device()->allocate_pinned(256 * MiB);
  return {buffer->data(), static_cast<std::size_t>(buffer->bytes())};
}

}  // namespace

const std::shared_ptr<Device>& gpu_device() {
  static const std::shared_ptr<Device> device = make_cuda_device();
  return device;
}

std::byte* GpuUnderTest::memory(std::uint64_t bytes) {
  constexpr std::uint64_t kAlignment = 64;
  const std::uint64_t rounded = div_up(bytes + 1, kAlignment) * kAlignment;
  if (rounded > pinned_memory().size() - used_)
    throw std::length_error("a test needs more pinned memory; raise it here");
  std::byte* const taken = pinned_memory().data() + used_;
  used_ += rounded;
  return taken;
}

std::unique_ptr<StagesUnderTest> stages_under_test() { return std::make_unique<GpuUnderTest>(); }

}  // namespace sluice::test
