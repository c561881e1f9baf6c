#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "sluice/step/partial.hpp"
#include "sluice/tensor.hpp"

namespace sluice::tools {

struct MergeItem {
  std::byte* out = nullptr;      ///< [heads, head_dim] in the dtype of the launch; device or pinned
  float* lse = nullptr;          ///< [heads]; may be null
  std::uint32_t first_part = 0;  ///< among the parts of the launch
  std::uint32_t parts = 0;
};

/// Descriptors of a few tasks travel with the launch, those of many in pinned memory: a way over the link is what the
/// kernel then waits for twice.
struct MergeArgs {
  static constexpr std::uint32_t kInlineItems = 16;
  static constexpr std::uint32_t kInlineParts = 48;

  std::uint32_t heads = 0;
  std::uint32_t head_dim = 0;  ///< a multiple of 4
  DType out_dtype = DType::f32;
  const MergeItem* items = nullptr;  ///< pinned; null: `inline_items` and `inline_parts` hold all there is
  const Partial* parts = nullptr;    ///< pinned array of partials in device or pinned memory
  MergeItem inline_items[kInlineItems]{};
  Partial inline_parts[kInlineParts]{};
};

/// Merges `count` items, at most 65,535.  @throws Error{Errc::device} if the launch is refused.
void launch_merge(const MergeArgs& args, std::uint32_t count, cudaStream_t stream);
void load_merge_kernels();

}  // namespace sluice::tools
