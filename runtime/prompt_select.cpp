// What the prompt phase has the device find out while a layer's keys are there: FlexPrefill's choice of blocks, and sums
// over the attention of the last queries, with which policies begin.
#include <algorithm>

#include "runtime/grow.hpp"
#include "runtime/prompt.hpp"

namespace sluice::runtime {

void Prompt::reserve_scratch(const Pass& pass, std::span<const Piece> group) {
  std::uint64_t bytes = 0;
  for (std::size_t i = 0; i < group.size(); ++i) {
    if (group[i].sparse || pass.legacies[i].sums != 0) bytes = std::max(bytes, scratch_bytes(group[i]) * shape_.kv_heads);
  }
  if (bytes == 0 || (scratch_ && scratch_->bytes() >= bytes)) return;
  collect(passes_[newest_ ^ 1]);  // It may be using the old memory.
  // Half as much again: the next chunks see more keys.
  grow(scratch_, bytes + bytes / 2, [this](std::uint64_t size) { return parts_.device.allocate(size); });
}

/// FlexPrefill's choice of blocks for the pieces that are to be sparse.
void Prompt::select(Pass& pass, std::span<const Piece> group) {
  Backend& device = parts_.device.backend();
  std::uint64_t words = 0;
  std::uint64_t choices = 0;
  for (const Piece& piece : group) {
    if (!piece.sparse) continue;
    words += mask_words(piece) * shape_.kv_heads;
    choices += shape_.q_heads;
  }
  if (choices == 0) return;
  const auto on_device = [this](std::uint64_t bytes) { return parts_.device.allocate(bytes); };
  grow(pass.blocks, words * sizeof(std::uint32_t), on_device);
  grow(pass.choices, choices * sizeof(PrefillChoice), [this](std::uint64_t b) { return parts_.device.allocate_pinned(b); });
  std::byte* const memory = scratch_ ? scratch_->data() : nullptr;
  pass.selects.reserve(choices / shape_.group());
  auto* blocks = reinterpret_cast<std::uint32_t*>(pass.blocks->data());
  auto* choice = reinterpret_cast<PrefillChoice*>(pass.choices->data());
  for (std::size_t i = 0; i < group.size(); ++i) {
    const Piece& piece = group[i];
    if (!piece.sparse) continue;
    pass.legacies[i].sparse = true;
    pass.legacies[i].choices = static_cast<std::uint64_t>(choice - reinterpret_cast<PrefillChoice*>(pass.choices->data()));
    const std::size_t first = pass.selects.size();
    for (std::uint32_t kv = 0; kv < shape_.kv_heads; ++kv) {
      PrefillTask& attended = pass.prefills[i * shape_.kv_heads + kv];
      attended.blocks = blocks;
      pass.selects.push_back({.q = attended.q,
                              .kv = attended.kv,
                              .first = piece.first,
                              .count = piece.count,
                              .blocks = blocks,
                              .choices = choice,
                              .scratch = memory == nullptr ? nullptr : memory + kv * scratch_bytes(piece)});
      blocks += mask_words(piece);
      choice += shape_.group();
    }
    device.select_blocks(std::span(pass.selects).subspan(first), piece.chunk->sequence->prefill.flex, strides(piece),
                         shape_, &parts_.device_stream);
  }
  pass.device_marks.mark(parts_.device_stream, &PromptStats::select_ns);
}

std::uint64_t Prompt::mask_words(const Piece& piece) const noexcept {
  return std::uint64_t{shape_.group()} * prefill_blocks(piece.first, piece.count) * prefill_mask_words(piece.keys());
}

std::uint64_t Prompt::scratch_bytes(const Piece& piece) const {
  constexpr std::uint64_t kAlignment = 256;
  return div_up(parts_.device.backend().select_blocks_scratch_bytes(piece.first, piece.count, shape_), kAlignment) *
         kAlignment;
}

void Prompt::plan_sums(Pass& pass, std::span<const Piece> group) {
  std::uint64_t floats = 0;
  for (std::size_t i = 0; i < group.size(); ++i) {
    Legacy& legacy = pass.legacies[i];
    const scheduler::SumRequest wanted = parts_.heir.sums(*legacy.sequence, *legacy.layer, legacy.end);
    if (!legacy.complete || wanted.queries == 0 || wanted.queries > group[i].count) continue;
    legacy.sums_at = floats;
    legacy.sums = std::uint64_t{2} * shape_.q_heads * (legacy.end - wanted.sinks);
    floats += legacy.sums;
  }
  if (floats == 0) return;
  grow(pass.sums, floats * sizeof(float), [this](std::uint64_t size) { return parts_.device.allocate_pinned(size); });
}

void Prompt::sum_attention(Pass& pass, std::span<const Piece> group) {
  const auto wants = [](const Legacy& legacy) { return legacy.sums != 0; };
  if (std::none_of(pass.legacies.begin(), pass.legacies.end(), wants)) return;
  std::byte* const memory = scratch_ ? scratch_->data() : nullptr;
  pass.sum_tasks.reserve(group.size() * shape_.kv_heads);
  for (std::size_t i = 0; i < group.size(); ++i) {
    const Legacy& legacy = pass.legacies[i];
    if (legacy.sums == 0) continue;
    const scheduler::SumRequest wanted = parts_.heir.sums(*legacy.sequence, *legacy.layer, legacy.end);
    const std::size_t first = pass.sum_tasks.size();
    const std::uint64_t table = legacy.sums / (2 * shape_.kv_heads);
    float* out = reinterpret_cast<float*>(pass.sums->data()) + legacy.sums_at;
    for (std::uint32_t kv = 0; kv < shape_.kv_heads; ++kv, out += 2 * table) {
      const PrefillTask& attended = pass.prefills[i * shape_.kv_heads + kv];
      pass.sum_tasks.push_back({.q = attended.q,
                                .kv = attended.kv,
                                .first = attended.first,
                                .count = attended.count,
                                .rows = wanted.queries,
                                .sinks = wanted.sinks,
                                .by_position = out,
                                .by_distance = out + table,
                                .scratch = memory == nullptr ? nullptr : memory + kv * scratch_bytes(group[i])});
    }
    parts_.device.backend().sum_attention(std::span(pass.sum_tasks).subspan(first), strides(group[i]), shape_,
                                          &parts_.device_stream);
  }
  pass.device_marks.mark(parts_.device_stream, &PromptStats::tables_ns);
}

}  // namespace sluice::runtime
