#include "gpu/stages/flex_room.hpp"

namespace sluice::gpu {

FlexRoom flex_room(const FlexItem& item) noexcept {
  return {.key_blocks = item.key_blocks,
          .query_blocks = item.query_blocks,
          .splits = item.splits,
          .piece_floats = item.splits * item.piece_length()};
}

FlexRoom flex_room(std::uint32_t keys, std::uint32_t count) noexcept {
  // Fewer keys may be cut into more pieces, but never into longer ones, and what they hold beyond the keys is bounded.
  return {.key_blocks = div_up(keys, kPrefillBlock),
          .query_blocks = div_up(count, kPrefillBlock) + 1,
          .splits = kFlexMaxSplits,
          .piece_floats = std::uint64_t{keys} + flex_split_keys(keys) + std::uint64_t{kFlexMaxSplits} * kFlexRows};
}

void place_scratch(FlexItem& item, const FlexRoom& room, const AttentionShape& shape, Carver& scratch) {
  const std::uint64_t heads = shape.group();
  const std::uint64_t lines = room.key_blocks * kPrefillBlock;
  const std::uint64_t blocks = heads * room.key_blocks;
  item.queries = scratch.take<std::byte>(heads * kFlexRows * shape.head_dim * 2);
  item.mean_query = scratch.take<float>(heads * shape.head_dim);
  item.mean_keys = scratch.take<float>(room.key_blocks * shape.head_dim);
  item.stats = scratch.take<float2>(heads * room.splits * kFlexRows);
  item.shifts = scratch.take<float>(heads * kFlexRows);
  item.columns = scratch.take<float>(heads * lines);
  item.pieces = scratch.take<float>(heads * room.piece_floats);
  item.diagonals = scratch.take<float>(heads * lines);
  item.column_blocks = scratch.take<float>(blocks);
  item.offset_blocks = scratch.take<float>(blocks);
  item.cuts = scratch.take<LineCut>(heads * 2);
  item.marks = scratch.take<std::uint32_t>(blocks);
  item.chosen = scratch.take<std::uint8_t>(blocks * 2);
  item.verdicts = scratch.take<FlexVerdict>(heads);
  item.row_kept = scratch.take<std::uint32_t>(heads * room.query_blocks);
}

}  // namespace sluice::gpu
