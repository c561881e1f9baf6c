// Chunks of prompts in a forward: where their kernels work, dense or in chosen blocks.

#include "gpu/device/current_device.hpp"
#include "gpu/device/driver.hpp"
#include "gpu/forward/forward_verbs.hpp"
#include "gpu/kernels/prefill/prefill.hpp"
#include "gpu/stages/flex_room.hpp"
#include "gpu/stages/shapes.hpp"
#include "sluice/step/prefill_choice.hpp"

namespace sluice::gpu {
namespace {

/// Pages of PrefillStage::pages.
std::uint64_t staged_pages(const ForwardMemory& memory) {
  const std::uint64_t items = std::uint64_t{memory.largest.prefills} * memory.shape.kv_heads;
  return items * (memory.prefill_window / memory.layout.page_tokens);
}

}  // namespace

void ForwardVerbs::place_choices(const ForwardMemory& memory, std::uint32_t items, Carver& carver,
                                 PrefillStage& prompt) {
  const FlexRoom room = flex_room(memory.largest.max_tokens, memory.largest.prefill_rows);
  Carver counted(nullptr);
  FlexItem nowhere;
  place_scratch(nowhere, room, memory.shape, counted);
  prompt.choices = carver.take<FlexItem>(items);
  prompt.choice_bytes = counted.used();
  std::byte* const memory_of = carver.take<std::byte>(items * prompt.choice_bytes);
  Carver first(memory_of);
  place_scratch(prompt.choice, room, memory.shape, first);
  prompt.block_words = memory.shape.group() * room.query_blocks * prefill_mask_words(memory.largest.max_tokens);
  prompt.blocks = carver.take<std::uint32_t>(items * prompt.block_words);
}

void ForwardVerbs::prefill(const ForwardMemory& memory, const ForwardLayer& layer) {
  const CurrentDevice current(ordinal_);
  const auto stream = static_cast<cudaStream_t>(layer.stream);
  PrefillStage stage = scratch_of(memory, memory.scratch).prompt;
  const Bucket& bucket = memory.bucket;
  const PrefillVariant variant = prefill_variant(memory.shape, memory.layout, layer.q.dtype, limits_.warpgroups);
  // Kernels without warpgroups mix the heads of a group in their rows, and masks differ between heads.
  if (memory.sparse_prefill && !variant.warpgroups) stage.item_heads = memory.shape.group();
  const PrefillArgs args{.items = stage.items,
                         .shape = {.q_dtype = layer.q.dtype,
                                   .out_dtype = layer.out.dtype,
                                   .q_token_stride = layer.q.token_stride,
                                   .q_head_stride = layer.q.head_stride,
                                   .out_token_stride = layer.out.token_stride,
                                   .out_head_stride = layer.out.head_stride},
                         .group = memory.shape.group(),
                         .row_heads = memory.shape.q_heads,
                         .score_scale = memory.shape.score_scale(),
                         .softcap = memory.shape.softcap};
  // Tiles of rows begin at a multiple of their size where blocks are chosen.
  const std::uint32_t lead = memory.sparse_prefill ? kPrefill.rows - 1 : 0;
  const PrefillExtent extent{.items = bucket.prefills * memory.shape.kv_heads * stage.item_heads,
                             .rows = lead + bucket.prefill_rows * memory.shape.group(),
                             .blocks = static_cast<std::uint32_t>(div_up(bucket.prefill_rows, kPrefillBlock)) + 1};
  CUtensorMap pages{};
  if (variant.warpgroups)
    pages = map_pages({.base = stage.pages, .layout = memory.layout}, kPrefillBlock, staged_pages(memory));
  const auto stamp = [&](std::uint32_t window, GatherMark mark) {
    if (bucket.trace) launch_forward_gather_stamp(memory, layer.layer, window, mark, stream);
  };
  for (std::uint32_t window = 0; window < div_up(bucket.max_tokens, memory.prefill_window); ++window) {
    stamp(window, GatherMark::begins);
    launch_forward_stage(memory, stage, layer, window, multiprocessors_);
    stamp(window, GatherMark::ends);
    if (memory.sparse_prefill) choose_blocks(memory, stage, args, layer);
    if (variant.warpgroups) {
      launch_prefill_hopper(variant, args, extent, pages, stream);
    } else {
      launch_prefill(variant, args, extent, stream);
    }
  }
}

/// Of every chunk, whether it chooses or not: what is launched follows from the bucket.
void ForwardVerbs::choose_blocks(const ForwardMemory& memory, const PrefillStage& stage, const PrefillArgs& prompts,
                                 const ForwardLayer& layer) {
  FlexArgs args{.items = stage.choices,
                .shape = prompts.shape,
                .dtype = memory.layout.dtype,
                .head_dim = memory.shape.head_dim,
                .group = memory.shape.group(),
                .score_scale = prompts.score_scale};
  args.set_spec(memory.prefill);
  const FlexRoom room = flex_room(memory.bucket.max_tokens, memory.bucket.prefill_rows);
  const FlexExtent extent{.items = memory.bucket.prefills * memory.shape.kv_heads,
                          .splits = flex_most_splits(memory.bucket.max_tokens),
                          .key_blocks = static_cast<std::uint32_t>(room.key_blocks),
                          .query_blocks = static_cast<std::uint32_t>(room.query_blocks)};
  // Boxes of the tensor copies hold whole tiles of pages, or pages whole tiles.
  CUtensorMap pages{};
  if (limits_.warpgroups)
    pages = map_pages({.base = stage.pages, .layout = memory.layout}, kFlexTile, staged_pages(memory));
  launch_select_blocks(args, extent, limits_.warpgroups ? &pages : nullptr, static_cast<cudaStream_t>(layer.stream));
}

}  // namespace sluice::gpu
