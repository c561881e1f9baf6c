// How much of a budget of device memory near rows may have.
#include <algorithm>

#include "runtime/engine/engine_options.hpp"
#include "sluice/engine_options.hpp"

namespace sluice {
namespace {

/// A page of all layers and KV heads: of what is left of one nothing is used.
std::uint64_t near_block(const EngineOptions& options) {
  return runtime::far_layout(options).near().page_bytes() * options.shape.layers * options.shape.kv_heads;
}

/// Such pages of all tokens that host memory holds.
std::uint64_t all_near(const EngineOptions& options) {
  return options.host_bytes /
         (runtime::far_layout(options).page_bytes() * options.shape.layers * options.shape.kv_heads);
}

}  // namespace

std::optional<std::uint64_t> near_bytes_within(EngineOptions options, std::uint64_t device_bytes, Device* device) {
  const auto fits = [&](std::uint64_t pages) {
    options.near_bytes = pages * near_block(options);
    return memory_needed(options, device).device() <= device_bytes;
  };
  if (!fits(0)) return std::nullopt;
  std::uint64_t most = std::min(all_near(options), device_bytes / near_block(options));
  if (fits(most)) return most * near_block(options);
  // Tables grow with what is near, so that it is looked for.
  std::uint64_t least = 0;
  while (most - least > 1) {
    const std::uint64_t middle = least + (most - least) / 2;
    (fits(middle) ? least : most) = middle;
  }
  return least * near_block(options);
}

}  // namespace sluice
