// How much of a budget of device memory near rows may have.
#include <algorithm>

#include "runtime/engine/engine_options.hpp"
#include "sluice/engine_options.hpp"

namespace sluice {
namespace {

/// Bytes of near rows for all tokens that host memory holds.
std::uint64_t all_near(const EngineOptions& options) {
  const PageLayout far = runtime::far_layout(options);
  return options.host_bytes / far.page_bytes() * far.near().page_bytes();
}

}  // namespace

std::optional<std::uint64_t> near_bytes_within(EngineOptions options, std::uint64_t device_bytes, Device* device) {
  options.near_bytes = 0;
  if (memory_needed(options, device).device() > device_bytes) return std::nullopt;
  std::uint64_t near = std::min(all_near(options), device_bytes);
  // Tables grow with what is near, so that it takes a few turns.
  for (int turn = 0; turn < 8; ++turn) {
    options.near_bytes = near;
    const std::uint64_t takes = memory_needed(options, device).device();
    if (takes <= device_bytes) return near;
    const std::uint64_t over = takes - device_bytes;
    if (over > near) break;
    near -= over;
  }
  return 0;  // With nothing near there are no tables of it.
}

}  // namespace sluice
