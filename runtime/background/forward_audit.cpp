#include "runtime/background/forward_audit.hpp"

#include <algorithm>
#include <bit>
#include <cmath>
#include <unordered_map>
#include <utility>

#include "cpu/stages/rows.hpp"

namespace sluice::runtime {

void ForwardAudit::add(AuditedRow row) {
  row.notes.resize(memory_.layer_heads());
  rows_.push_back(std::move(row));
}

std::uint32_t ForwardAudit::begin() {
  results_.assign(rows_.size() * memory_.layer_heads(), {});
  return static_cast<std::uint32_t>(results_.size());
}

void ForwardAudit::compare(std::uint32_t piece) {
  const std::uint32_t heads = memory_.layer_heads();
  const std::uint32_t kv_heads = memory_.shape.kv_heads;
  compare(piece / heads, piece % heads / kv_heads, piece % kv_heads, results_[piece]);
}

void ForwardAudit::compare(std::uint32_t index, std::uint32_t layer, std::uint32_t kv_head, Result& result) const {
  const AuditedRow& row = rows_[index];
  const std::uint32_t heads = memory_.own_group();
  const ChoiceNote& note = row.notes[memory_.layer_head(layer, kv_head)];
  const std::uint64_t list = memory_.audit_list(layer, row.list * memory_.shape.kv_heads + kv_head);
  const std::uint64_t first = list * memory_.shape.group() + row.draft * heads;
  AuditedGroup group{.first = row.tokens - visible(row, layer),
                     .tokens = visible(row, layer),
                     .group = heads,
                     .head_dim = memory_.shape.head_dim};
  attend_exactly(row, layer, kv_head, memory_.audit_q + first * group.head_dim, group);
  mark(row, layer, note, list, group);
  group.attended_out = memory_.audit_out + first * group.head_dim;
  group.attended_lse = memory_.audit_lse + first;
  group.estimated = row.corrected ? ~0u : note.bypassed;
  for (std::uint32_t h = 0; h < heads; ++h) result.heads.push_back(find(group, h, row.watched));
  result.attended = static_cast<std::uint32_t>(
      std::ranges::count_if(group.heads, [](std::uint32_t members) { return members != 0; }));
  result.bypassed = static_cast<std::uint32_t>(std::popcount(note.bypassed));
}

void ForwardAudit::attend_exactly(const AuditedRow& row, std::uint32_t layer, std::uint32_t kv_head, const float* q,
                                  AuditedGroup& group) const {
  const PageLayout& layout = memory_.far_layout;
  std::vector<const std::byte*> keys(group.tokens);
  std::vector<const float*> scales(layout.scaled() ? group.tokens : 0);
  std::vector<float> value(group.head_dim);
  const std::vector<std::uint32_t>& blocks = row.blocks[memory_.place_of(layer).stack];
  for (std::uint32_t t = 0; t < group.tokens; ++t) {
    const std::uint32_t token = group.first + t;
    const std::uint32_t at = blocks[token / layout.page_tokens] * layout.page_tokens + token % layout.page_tokens;
    const std::uint32_t plane = memory_.plane(layer, kv_head);
    keys[t] = memory_.far_key(plane, at);
    if (layout.scaled()) scales[t] = memory_.far_scales(plane, at);
    cpu::read_row(kernels_, layout, keys[t] + layout.values_offset(), layout.scaled() ? scales[t] + 1 : nullptr,
                  value.data());
    double squares = 0.0;
    for (const float v : value) squares += double{v} * v;
    group.largest_value = std::max(group.largest_value, std::sqrt(squares));
  }
  group.scores.resize(std::size_t{group.tokens} * group.group);
  group.out.resize(std::size_t{group.group} * group.head_dim);
  group.lse.resize(group.group);
  cpu::kernels_for(kernels_, layout.dtype)
      .attend({.q = q,
               .scale = memory_.shape.score_scale(),
               .softcap = memory_.shape.softcap,
               .k = keys.data(),
               .v_offset = layout.values_offset(),
               .scales = scales.data(),
               .seen = group.scores.data(),
               .count = group.tokens,
               .group = group.group,
               .head_dim = group.head_dim,
               .out = group.out.data(),
               .lse = group.lse.data()});
}

void ForwardAudit::mark(const AuditedRow& row, std::uint32_t layer, const ChoiceNote& note, std::uint64_t list,
                        AuditedGroup& group) const {
  const std::uint32_t page_tokens = memory_.layout.page_tokens;
  const std::uint32_t all = ~0u >> (32 - group.group);
  std::unordered_map<std::uint32_t, std::uint32_t> pages;  // By block.
  const std::vector<std::uint32_t>& blocks = row.blocks[memory_.place_of(layer).stack];
  for (std::uint32_t page = 0; page < blocks.size(); ++page) pages[blocks[page]] = page;
  group.heads.assign(group.tokens, 0);
  const auto members = [&](std::uint32_t at) -> std::uint32_t& {
    return group.heads.at(pages.at(at / page_tokens) * page_tokens + at % page_tokens - group.first);
  };
  const std::uint32_t* const listed = memory_.audit_rows + list * memory_.list_room();
  for (std::uint32_t i = 0; i < memory_.audit_counts[list]; ++i) members(listed[i]) |= all;
  // Beside what is listed a row of a team attends what of it not all of them see: its own tokens up to itself and,
  // where there is a window, all that it sees.
  const bool windowed = memory_.window_in(layer) != 0;
  for (std::uint32_t t = windowed ? group.first : row.listed; row.listed != kNone && t < row.tokens; ++t)
    group.heads.at(t - group.first) = all;
  for (std::size_t i = 0; i < note.rows.size(); ++i)
    members(note.rows[i]) |= note.members.empty() ? all & ~note.bypassed : note.members[i];
}

void ForwardAudit::report(std::uint32_t index, AuditReport& report) const noexcept {
  const AttentionShape& shape = memory_.shape;
  const std::uint32_t heads = memory_.own_group();
  report.layers = shape.layers;
  report.q_heads = heads * shape.kv_heads;
  ++report.tokens;
  for (std::uint32_t head = 0; head < memory_.layer_heads(); ++head) {
    const Result& result = results_[std::size_t{index} * memory_.layer_heads() + head];
    report.attended_tokens += result.attended;
    report.dense_tokens += visible(rows_[index], head / shape.kv_heads);
    report.bypassed_heads += result.bypassed;
    for (std::uint32_t h = 0; h < heads; ++h) {
      const HeadFinding& found = result.heads[h];
      runtime::add(found, report.heads[std::size_t{head} * heads + h]);
      report.coverage.add(found.coverage);
      report.overlap.add(found.overlap);
      if (found.watched) report.watched.add(found.watched_kept);
    }
  }
}

}  // namespace sluice::runtime
