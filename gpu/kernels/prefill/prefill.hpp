#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "gpu/tuning.hpp"
#include "sluice/step/prefill_tasks.hpp"

namespace sluice::gpu {

/// One PrefillTask as the kernels see it, for all query heads of its group or, from its pointers on, for some of them.
struct alignas(16) PrefillItem {
  const std::byte* q = nullptr;           ///< device
  const std::byte* base = nullptr;        ///< device or registered host memory, 16-byte aligned
  const std::uint32_t* frames = nullptr;  ///< device [pages], from the page of key_begin on
  std::byte* out = nullptr;               ///< device
  const std::uint32_t* blocks = nullptr;  ///< device [heads, query_blocks, mask_words] or null: all
  float* lse = nullptr;                   ///< device [count, PrefillArgs::row_heads] or null
  float* so_far = nullptr;                ///< device [count, PrefillArgs::row_heads, head_dim] or null, 8-byte aligned
  std::uint32_t first = 0;
  std::uint32_t count = 0;
  std::uint32_t heads = 0;
  std::uint32_t key_begin = 0;
  std::uint32_t key_end = 0;  ///< at most first + count
  std::uint32_t page_tokens = 0;
  std::uint32_t query_blocks = 0;
  std::uint32_t mask_words = 0;
  std::uint32_t reach = 0;  ///< as PrefillTask's; 0 if `blocks` is not null
  bool first_window = true;
  bool last_window = true;
};

struct PrefillArgs {
  const PrefillItem* items = nullptr;  ///< device
  PrefillShape shape{};
  std::uint32_t group = 0;      ///< query heads of a KV head
  std::uint32_t row_heads = 0;  ///< query heads between two tokens of lse and so_far
  float score_scale = 0.f;      ///< AttentionShape::score_scale
  float softcap = 0.f;          ///< AttentionShape::softcap
};

/// What the grid of a launch must cover.
struct PrefillExtent {
  std::uint32_t items = 0;   ///< at most 65,535
  std::uint32_t rows = 0;    ///< most (token, head) pairs of an item, from the first position of its tile of rows on
  std::uint32_t blocks = 0;  ///< most query blocks of an item
};

/// @throws Error{Errc::device} if the launch is refused.
void launch_prefill(const PrefillVariant& variant, const PrefillArgs& args, const PrefillExtent& extent,
                    cudaStream_t stream);
/// Loads all variants and allows them the shared memory that they need.
void load_prefill_kernels();

/// The same with products of whole warpgroups, behind the kernel that gives the items. All items have the pages that
/// `pages` describes, and all heads.
void launch_prefill_hopper(const PrefillVariant& variant, const PrefillArgs& args, const PrefillExtent& extent,
                           const CUtensorMap& pages, cudaStream_t stream);
/// Whether the current device has these kernels; loads them if it does.
[[nodiscard]] bool load_prefill_hopper_kernels();

}  // namespace sluice::gpu
