#include "runtime/far/far_parts.hpp"

#include <algorithm>

#include "cpu/stages/rows.hpp"

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

std::vector<ForwardMemory> teams_of(const ForwardMemory& memory) {
  std::vector<ForwardMemory> teams;
  for (std::uint32_t drafts = 1; drafts <= memory.largest.drafts; ++drafts) teams.push_back(memory.teams(drafts));
  return teams;
}

}  // namespace

FarParts::FarParts(const ForwardMemory& memory, FarChoice& choice, std::uint32_t threads)
    : memory_(teams_of(memory)),
      choice_(choice),
      kernels_(cpu::fastest_kernels()),
      shares_(std::uint64_t{memory.largest.decode_rows} * memory.shape.kv_heads),
      most_parts_(most_parts(longest_list(memory))),
      met_(std::uint64_t{memory.largest.decode_rows} * memory.shape.kv_heads * most_parts_),
      partials_(met_.size() * memory.shape.group() * (memory.shape.head_dim + 1)) {
  const std::uint32_t most = std::max(part_rows(longest_list(memory)), kMostRows);
  rows_.assign(threads, {.keys = std::vector<const std::byte*>(most),
                         .scales = std::vector<const float*>(memory.far_layout.scaled() ? most : 0)});
}

void FarParts::open(std::uint64_t asked, std::uint32_t list) noexcept {
  const std::uint32_t count = count_of(list) & ~kDrawnBit;
  if (count != 0) shares_.open(asked, list, static_cast<std::uint32_t>(div_up(count, part_rows(count))));
}

std::uint32_t FarParts::count_of(std::uint32_t list) const noexcept {
  return std::atomic_ref(memory_.front().far_counts[list]).load(std::memory_order_relaxed);
}

FarPart FarParts::claim(const FarQuestion& question, std::uint32_t list) noexcept {
  const auto [part, parts] = shares_.claim(question.asked, list);
  if (parts == 0) return {};
  const std::uint32_t count = count_of(list) & ~kDrawnBit;
  const std::uint32_t begin = part * part_rows(count);
  return {.list = list, .part = part, .parts = parts, .begin = begin, .end = std::min(begin + part_rows(count), count)};
}

Partial FarParts::place_of(const ForwardMemory& m, std::uint32_t list, std::uint32_t part) noexcept {
  const std::uint64_t head = std::uint64_t{list} * m.shape.group();
  if (part == 0) return {.out = m.far_out + head * m.shape.head_dim, .lse = m.far_lse + head};
  const std::uint64_t out = std::uint64_t{m.shape.group()} * m.shape.head_dim;
  float* const at = partials_.data() + (std::uint64_t{list} * most_parts_ + part) * (out + m.shape.group());
  return {.out = at, .lse = at + out};
}

void FarParts::attend_rows(const ForwardMemory& m, const FarQuestion& question, const FarPart& part, Rows& rows,
                           const ChosenList* chosen) {
  const std::uint32_t group = m.shape.group();
  const std::uint32_t plane = m.plane(question.layer, part.list % m.shape.kv_heads);
  const std::uint32_t* const list =
      chosen != nullptr ? chosen->rows.data() : m.far_rows + part.list * std::uint64_t{m.list_room()};
  for (std::uint32_t i = part.begin; i < part.end; ++i) rows.keys[i - part.begin] = m.far_key(plane, list[i]);
  for (std::uint32_t i = part.begin; i < part.end && m.far_layout.scaled(); ++i)
    rows.scales[i - part.begin] = m.far_scales(plane, list[i]);
  const bool drawn = (count_of(part.list) & kDrawnBit) != 0;
  const Partial place = place_of(m, part.list, part.part);
  const bool members = chosen != nullptr && !chosen->members.empty();
  const bool scores = chosen != nullptr && !chosen->scores.empty();
  cpu::kernels_for(kernels_, m.far_layout.dtype)
      .attend({.q = m.far_q + std::uint64_t{part.list} * group * m.shape.head_dim,
               .scale = m.shape.score_scale(),
               .softcap = m.shape.softcap,
               .k = rows.keys.data(),
               .v_offset = m.far_layout.values_offset(),
               .scales = rows.scales.data(),
               .members = members ? chosen->members.data() + part.begin : nullptr,
               .scores = scores ? chosen->scores.data() + std::uint64_t{part.begin} * group : nullptr,
               .corrections = drawn ? m.far_corrections_of(part.list) + part.begin : nullptr,
               .count = part.end - part.begin,
               .group = group,
               .head_dim = m.shape.head_dim,
               .out = place.out,
               .lse = place.lse});
}

bool FarParts::merge(const ForwardMemory& m, const FarPart& part) noexcept {
  std::atomic<std::uint32_t>* const met = met_.data() + std::uint64_t{part.list} * most_parts_;
  std::uint32_t at = part.part;
  for (std::uint32_t apart = 1; apart < part.parts; apart *= 2) {
    // Of `at` and what follows it so many parts have been merged, of its neighbour as many.
    const std::uint32_t left = at & ~apart;
    const std::uint32_t right = at | apart;
    at = left;
    if (right >= part.parts) continue;
    if (met[right].fetch_xor(1, std::memory_order_acq_rel) == 0) return false;
    cpu::merge_into(place_of(m, part.list, left), place_of(m, part.list, right), m.shape.group(), m.shape.head_dim);
  }
  return true;
}

void FarParts::attend(const FarQuestion& question, const FarPart& part, std::uint32_t thread) {
  const ForwardMemory& m = memory_[question.drafts - 1];
  const ChosenList* const chosen = choice_.find(question.asked, part.list);
  attend_rows(m, question, part, rows_[thread], chosen);
  if (merge(m, part) && chosen != nullptr) choice_.complete(question, *chosen, part.list);
}

}  // namespace sluice::runtime
