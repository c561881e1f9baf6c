#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "gpu/tuning.hpp"
#include "sluice/backend.hpp"

namespace sluice::gpu {

/// One PrefillTask as the kernel sees it.
struct alignas(16) PrefillItem {
  const std::byte* q = nullptr;           ///< device
  const std::byte* base = nullptr;        ///< device or registered host memory, 16-byte aligned
  const std::uint32_t* frames = nullptr;  ///< device [pages]
  std::byte* out = nullptr;               ///< device
  std::uint32_t first = 0;
  std::uint32_t count = 0;
  std::uint32_t page_tokens = 0;
  std::uint32_t unused = 0;
};

struct PrefillArgs {
  const PrefillItem* items = nullptr;  ///< device
  PrefillShape shape{};
  std::uint32_t group = 0;
  float score_scale = 0.f;  ///< 1 / sqrt(head_dim)
};

/// Attends `count` items, at most 65,535, of at most `tokens` tokens each.
/// @throws Error{Errc::device} if the launch is refused.
void launch_prefill(const PrefillVariant& variant, const PrefillArgs& args, std::uint32_t count, std::uint32_t tokens,
                    cudaStream_t stream);
/// Loads all variants and allows them the shared memory that they need.
void load_prefill_kernels();

}  // namespace sluice::gpu
