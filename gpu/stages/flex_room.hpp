#pragma once

#include "gpu/kernels/prefill/flex.hpp"
#include "sluice/step/carver.hpp"

namespace sluice::gpu {

/// How much scratch memory FlexPrefill's kernels want for an item, and where its parts lie there.
struct FlexRoom {
  std::uint64_t key_blocks = 0;
  std::uint64_t query_blocks = 0;
  std::uint64_t splits = 0;
  std::uint64_t piece_floats = 0;  ///< of a query head
};

/// Of one chunk.
[[nodiscard]] FlexRoom flex_room(const FlexItem& item) noexcept;
/// Of any chunk of up to `count` tokens that sees up to `keys` keys.
[[nodiscard]] FlexRoom flex_room(std::uint32_t keys, std::uint32_t count) noexcept;

/// Points the item to its parts.
void place_scratch(FlexItem& item, const FlexRoom& room, const AttentionShape& shape, Carver& scratch);

}  // namespace sluice::gpu
