// Rows of a team that attend together: what they ask, and what some of them see and others do not.
#include <algorithm>

#include "cpu/forward/forward_layer.hpp"
#include "sluice/step/forward_tasks.hpp"
#include "sluice/step/partial.hpp"

namespace sluice::cpu {
namespace {

/// A head's result becomes part of what it has attended near, if that is anything.
void add_to_near(const ForwardMemory& m, std::uint64_t h, bool any, const float* out, float lse) {
  float* const near = m.near_out + h * m.shape.head_dim;
  float& mass = m.near_lse[h];
  // Keys were attended and weigh nothing that is a number: `merge` says so of what is not above the empty lse.
  const bool numbers = lse > kEmptyLse && (!any || mass > kEmptyLse);
  const MergeWeights weights = merge_weights(any ? mass : kEmptyLse, lse);
  for (std::uint32_t c = 0; c < m.shape.head_dim; ++c)
    near[c] = any ? weights.a * near[c] + weights.b * out[c] : out[c];
  mass = numbers ? weights.lse : kEmptyLse;
}

}  // namespace

namespace {

/// Those of a row that chooses, to where it asks from: [q_heads, head_dim], of teams with their drafts'.
void widen_queries(const Kernels& kernels, const ForwardMemory& m, const TensorView& from, const ForwardRow& row,
                   float* to) {
  for (std::uint32_t h = 0; h < m.shape.q_heads; ++h) {
    const auto [draft, head] = m.asker(h);
    // Drafts that are not there ask what the newest asks, and so choose nothing of their own.
    const std::uint32_t at = row.at + std::min(draft, std::max(row.drafts, 1u) - 1);
    kernels_for(kernels, from.dtype).widen(from.row(at, head), to + h * m.shape.head_dim, m.shape.head_dim);
  }
}

}  // namespace

void append_queries(const Kernels& kernels, const ForwardMemory& m, const ForwardLayer& layer) {
  const std::uint64_t floats = std::uint64_t{m.shape.q_heads} * m.shape.head_dim;
  for (std::uint32_t r = 0; r < m.bucket.decode_rows; ++r) {
    if (m.rows[r].list == kNone) continue;
    float* const q = m.q + r * floats;
    widen_queries(kernels, m, layer.q, m.rows[r], q);
    std::copy_n(q, floats, m.far_q + r * floats);
    if (layer.rehearsed.tokens != 0) widen_queries(kernels, m, layer.rehearsed, m.rows[r], m.rehearsed_q + r * floats);
  }
}

void attend_edge(const Kernels& kernels, const ForwardMemory& m, const ForwardRow& row, std::uint32_t plane,
                 std::uint32_t index) {
  const ForwardEdge edge = edge_of(row, m.window);
  const std::uint32_t own = m.own_group();
  const std::byte* keys[ForwardEdge::kMost];
  const float* scales[ForwardEdge::kMost];
  float out[kMaxGroup * kMaxHeadDim];
  float lse[kMaxGroup];
  // Each row by itself: what it does not see may be no number.
  for (std::uint32_t draft = 0; draft < row.drafts; ++draft) {
    std::uint32_t count = 0;
    for (std::uint32_t i = 0; i < edge.count(); ++i) {
      if (!edge.sees(draft, edge.token(i))) continue;
      const std::uint32_t at = m.row_of(row.list, edge.token(i));
      if (m.far_layout.scaled()) scales[count] = m.far_scales(plane, at);
      keys[count++] = m.far_key(plane, at);
    }
    const std::uint64_t first = first_head(m, index) + draft * own;
    kernels_for(kernels, m.far_layout.dtype)
        .attend({.q = m.q + first * m.shape.head_dim,
                 .scale = m.shape.score_scale(),
                 .softcap = m.shape.softcap,
                 .k = keys,
                 .v_offset = m.far_layout.values_offset(),
                 .scales = m.far_layout.scaled() ? scales : nullptr,
                 .count = count,
                 .group = own,
                 .head_dim = m.shape.head_dim,
                 .out = out,
                 .lse = lse});
    for (std::uint32_t h = 0; h < own; ++h)
      add_to_near(m, first + h, m.near_counts[index] != 0, out + h * m.shape.head_dim, lse[h]);
  }
}

}  // namespace sluice::cpu
