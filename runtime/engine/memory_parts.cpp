#include "runtime/engine/memory_parts.hpp"

#include "sluice/step/carver.hpp"

namespace sluice::runtime {
namespace {

template <class T>
void take(Carver& parts, T*& part, std::uint64_t count) {
  part = parts.take<T>(count);
}

std::uint64_t heads(const ForwardMemory& m) { return std::uint64_t{m.largest.decode_rows} * m.shape.q_heads; }
std::uint64_t kv_heads(const ForwardMemory& m) { return std::uint64_t{m.largest.decode_rows} * m.shape.kv_heads; }

/// Which rows are near, and where.
void carve_near(Carver& parts, ForwardMemory& m) {
  if (m.near_pages == 0) return;
  take(parts, m.near_of, m.far_row(m.planes(), 0));
  take(parts, m.near_rows, m.near_row(m.planes(), 0));
  take(parts, m.near_hands, m.planes());
  take(parts, m.near_held, m.blocks);
  take(parts, m.arrivals, std::uint64_t{m.stacks} * m.planes());
  take(parts, m.arriving, std::uint64_t{m.stacks} * m.planes() * m.arriving_room());
}

/// What a plan says of a forward, and of sequences.
void carve_plan(Carver& parts, ForwardMemory& m) {
  take(parts, m.lists, std::uint64_t{m.stacks} * m.list_count * m.max_pages);
  take(parts, m.key_means, std::uint64_t{m.list_count} * m.planes() * m.shape.head_dim);
  take(parts, m.tokens, m.append_rows);
  take(parts, m.rows, m.largest.decode_rows);
  take(parts, m.chunks, m.largest.prefills);
}

/// What rows choose by, and what they have chosen.
void carve_choice(Carver& parts, ForwardMemory& m) {
  take(parts, m.q, heads(m) * m.shape.head_dim);
  if (m.largest.pages) {
    take(parts, m.page_scores, heads(m) * m.max_pages);
    take(parts, m.ranked, heads(m) * m.max_ranked);
  }
  if (m.cluster_slots != 0) {
    take(parts, m.centroids, m.cluster_head(m.cluster_slots, 0) * m.max_clusters * m.shape.head_dim);
    take(parts, m.cluster_starts, m.cluster_head(m.cluster_slots, 0) * (m.max_clusters + 1));
    take(parts, m.cluster_members, m.cluster_head(m.cluster_slots, 0) * m.largest.max_tokens);
  }
  take(parts, m.scores, heads(m) * m.score_room());
  take(parts, m.picks, heads(m) * m.max_picks);
  if (m.largest.unbounded) take(parts, m.masks, heads(m) * m.mask_words());
  take(parts, m.near_lists, kv_heads(m) * m.list_room());
  take(parts, m.near_counts, kv_heads(m));
  if (m.draw_room() != 0) {
    take(parts, m.thresholds, heads(m));
    take(parts, m.near_corrections, kv_heads(m) * m.draw_room());
  }
  take(parts, m.far_listed, kv_heads(m));
  take(parts, m.far_windows, kv_heads(m));
}

/// What rows attend, in parts.
void carve_partials(Carver& parts, ForwardMemory& m) {
  take(parts, m.near_out, heads(m) * m.shape.head_dim);
  take(parts, m.near_lse, heads(m));
  if (m.may_fetch()) {
    take(parts, m.fetch_heads, kv_heads(m));
    take(parts, m.fetched_out, heads(m) * m.shape.head_dim);
    take(parts, m.fetched_lse, heads(m));
  }
  if (m.largest.audit) take(parts, m.audit_sums, std::uint64_t{m.largest.rows()} * m.shape.q_heads);
}

void carve_audit(Carver& parts, ForwardMemory& m) {
  take(parts, m.audit_q, m.shape.layers * heads(m) * m.shape.head_dim);
  take(parts, m.audit_out, m.shape.layers * heads(m) * m.shape.head_dim);
  take(parts, m.audit_lse, m.shape.layers * heads(m));
  take(parts, m.audit_rows, m.shape.layers * kv_heads(m) * m.list_room());
  take(parts, m.audit_counts, m.shape.layers * kv_heads(m));
}

/// What a device and threads of the host tell each other of what is far, and what policies of the CPU need for it.
void carve_far(Carver& parts, ForwardMemory& m) {
  take(parts, m.far_q, heads(m) * m.shape.head_dim);
  if (m.largest.rehearsed) take(parts, m.rehearsed_q, heads(m) * m.shape.head_dim);
  if (m.largest.pages && m.tail_rows != 0) {
    take(parts, m.far_page_scores, heads(m) * m.max_pages);
    take(parts, m.far_ranked, heads(m) * m.max_ranked);
  }
  take(parts, m.far_rows, kv_heads(m) * m.list_room());
  if (m.draw_room() != 0) take(parts, m.far_corrections, kv_heads(m) * m.draw_room());
  take(parts, m.far_counts, kv_heads(m));
  take(parts, m.far_out, heads(m) * m.shape.head_dim);
  take(parts, m.far_lse, heads(m));
  if (m.fetches_chosen) {
    take(parts, m.chosen, kv_heads(m));
    take(parts, m.chosen_rows, kv_heads(m) * m.chosen_room());
  }
  take(parts, m.tails, std::uint64_t{m.shape.layers} * m.tail_rows * m.shape.q_heads * m.shape.head_dim);
  if (m.proposal_slots != 0) {
    const std::uint64_t layers = m.proposal_layer(m.proposal_slots, 0);
    take(parts, m.proposals, layers * m.shape.kv_heads);
    take(parts, m.proposed, layers * m.shape.q_heads * m.proposed_words());
    take(parts, m.proposed_q, layers * m.shape.q_heads * m.shape.head_dim);
  }
}

/// What the host says of one forward.
void carve_slip(Carver& parts, ForwardMemory& m, std::uint64_t listed_blocks) {
  const std::uint64_t lists = std::uint64_t{m.stacks} * m.list_count;
  take(parts, m.slip, 1);
  take(parts, m.slip_tokens, m.append_rows);
  take(parts, m.slip_rows, m.largest.decode_rows);
  take(parts, m.slip_chunks, m.largest.prefills);
  take(parts, m.slip_lists, lists);
  take(parts, m.slip_blocks, listed_blocks);
  take(parts, m.slip_freed, m.blocks);
  take(parts, m.slip_copies, 2 * lists);
  take(parts, m.slip_key_means, m.list_count);
}

}  // namespace

std::uint64_t carve_device(ForwardMemory& m, std::uint64_t scratch, std::byte* from) {
  Carver parts(from);
  take(parts, m.state, 1);
  carve_near(parts, m);
  carve_plan(parts, m);
  carve_choice(parts, m);
  carve_partials(parts, m);
  take(parts, m.scratch, scratch);
  return parts.used();
}

std::uint64_t carve_pinned(std::vector<ForwardMemory>& slips, std::uint64_t listed_blocks, std::byte* from) {
  Carver parts(from);
  ForwardMemory shared = slips.front();
  take(parts, shared.mailbox, 1);
  if (shared.near_pages != 0) take(parts, shared.near_seen, shared.blocks);
  carve_far(parts, shared);
  if (shared.sparse_prefill)
    take(parts, shared.choices,
         std::uint64_t{kMostForwards} * shared.shape.layers * shared.largest.prefills * shared.shape.q_heads);
  if (shared.largest.trace)
    take(parts, shared.stamps, std::uint64_t{kMostForwards} * shared.shape.layers * kStampedStages);
  if (shared.largest.audit) carve_audit(parts, shared);
  for (ForwardMemory& m : slips) {
    m = shared;
    carve_slip(parts, m, listed_blocks);
  }
  return parts.used();
}

}  // namespace sluice::runtime
