#include "runtime/far/far_parts.hpp"

#include <algorithm>

#include "cpu/backend/verbs.hpp"

namespace sluice::runtime {
namespace {

/// A list is cut evenly, into parts with enough rows to make up for what a part costs, and no more than there is room
/// for: a thread that gets a small one left over keeps the answer waiting as long as the others do.
constexpr std::uint32_t kMostRows = 64;  ///< of a part, of lists that are not longer than kMostParts of these
constexpr std::uint32_t kMostParts = 32;
constexpr std::uint32_t kEven = 4;  ///< rows that kernels take at once
constexpr std::uint32_t part_rows(std::uint32_t count) noexcept {
  const std::uint64_t parts = std::clamp<std::uint64_t>(div_up(count, kMostRows), 1, kMostParts);
  return static_cast<std::uint32_t>(kEven * std::max<std::uint64_t>(div_up(count, parts * kEven), 1));
}
/// A policy of the CPU may choose everything.
std::uint32_t longest_list(const ForwardMemory& memory) noexcept {
  return memory.tail_rows == 0 ? memory.teams(memory.largest.drafts).list_room() : memory.largest.max_tokens;
}
/// Of a list, none of which is longer than `room`.
constexpr std::uint32_t most_parts(std::uint32_t room) noexcept {
  return std::min(kMostParts, static_cast<std::uint32_t>(div_up(room, kMostRows)));
}

}  // namespace

FarParts::FarParts(const ForwardMemory& memory, FarChoice& choice, std::uint32_t threads)
    : memory_(memory),
      choice_(choice),
      kernels_(cpu::fastest_kernels()),
      shares_(std::uint64_t{memory.largest.decode_rows} * memory.shape.kv_heads),
      ended_(std::uint64_t{memory.largest.decode_rows} * memory.shape.kv_heads),
      most_parts_(most_parts(longest_list(memory))),
      partials_(ended_.size() * most_parts_ * memory.shape.group() * (memory.shape.head_dim + 1)) {
  const std::uint32_t most = std::max(part_rows(longest_list(memory)), kMostRows);
  rows_.assign(threads, {.keys = std::vector<const std::byte*>(most),
                         .scales = std::vector<const float*>(memory.far_layout.scaled() ? most : 0)});
}

void FarParts::open(std::uint64_t asked, std::uint32_t list) noexcept {
  const std::uint32_t count = std::atomic_ref(memory_.far_counts[list]).load(std::memory_order_relaxed);
  if (count != 0) shares_.open(asked, list, static_cast<std::uint32_t>(div_up(count, part_rows(count))));
}

FarPart FarParts::claim(const FarQuestion& question, std::uint32_t& list) noexcept {
  for (; list < question.lists; ++list) {
    const auto [part, parts] = shares_.claim(question.asked, list);
    if (parts == 0) continue;
    const std::uint32_t count = std::atomic_ref(memory_.far_counts[list]).load(std::memory_order_relaxed);
    const std::uint32_t begin = part * part_rows(count);
    return {
        .list = list, .part = part, .parts = parts, .begin = begin, .end = std::min(begin + part_rows(count), count)};
  }
  return {};
}

Partial FarParts::whole_of(const ForwardMemory& m, std::uint32_t list) noexcept {
  const std::uint64_t head = std::uint64_t{list} * m.shape.group();
  return {.out = m.far_out + head * m.shape.head_dim, .lse = m.far_lse + head};
}

Partial FarParts::place_of(const ForwardMemory& m, std::uint32_t list, std::uint32_t part) noexcept {
  const std::uint64_t out = std::uint64_t{m.shape.group()} * m.shape.head_dim;
  float* const at = partials_.data() + (std::uint64_t{list} * most_parts_ + part) * (out + m.shape.group());
  return {.out = at, .lse = at + out};
}

void FarParts::attend_rows(const FarQuestion& question, const FarPart& part, Rows& rows, const ChosenList* chosen) {
  const ForwardMemory m = memory_.teams(question.drafts);
  const std::uint32_t group = m.shape.group();
  const std::uint32_t plane = m.plane(question.layer, part.list % m.shape.kv_heads);
  const std::uint32_t* const list =
      chosen != nullptr ? chosen->rows.data() : m.far_rows + part.list * std::uint64_t{m.list_room()};
  for (std::uint32_t i = part.begin; i < part.end; ++i) rows.keys[i - part.begin] = m.far_key(plane, list[i]);
  for (std::uint32_t i = part.begin; i < part.end && m.far_layout.scaled(); ++i)
    rows.scales[i - part.begin] = m.far_scales(plane, list[i]);
  // The first part goes to its place at once, the others follow in their order.
  const Partial place = part.part == 0 ? whole_of(m, part.list) : place_of(m, part.list, part.part);
  const bool members = chosen != nullptr && !chosen->members.empty();
  const bool scores = chosen != nullptr && !chosen->scores.empty();
  cpu::kernels_for(kernels_, m.far_layout.dtype)
      .attend({.q = m.far_q + std::uint64_t{part.list} * group * m.shape.head_dim,
               .scale = m.shape.score_scale(),
               .softcap = m.shape.softcap,
               .k = rows.keys.data(),
               .v_offset = m.far_layout.half_bytes(),
               .scales = rows.scales.data(),
               .members = members ? chosen->members.data() + part.begin : nullptr,
               .scores = scores ? chosen->scores.data() + std::uint64_t{part.begin} * group : nullptr,
               .count = part.end - part.begin,
               .group = group,
               .head_dim = m.shape.head_dim,
               .out = place.out,
               .lse = place.lse});
}

void FarParts::attend(const FarQuestion& question, const FarPart& part, std::uint32_t thread) {
  const ChosenList* const chosen = choice_.find(question.asked, part.list);
  attend_rows(question, part, rows_[thread], chosen);
  if (ended_[part.list].fetch_add(1, std::memory_order_acq_rel) + 1 != part.parts) return;
  ended_[part.list].store(0, std::memory_order_relaxed);
  const ForwardMemory m = memory_.teams(question.drafts);
  for (std::uint32_t i = 1; i < part.parts; ++i)
    cpu::merge_into(whole_of(m, part.list), place_of(m, part.list, i), m.shape.group(), m.shape.head_dim);
  if (chosen != nullptr) choice_.complete(question, *chosen, part.list);
}

}  // namespace sluice::runtime
