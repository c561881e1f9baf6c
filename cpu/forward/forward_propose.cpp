// What histories propose, which threads of the host have written down ahead of time.
#include <algorithm>

#include "cpu/forward/forward_wait.hpp"

namespace sluice::cpu {
namespace {

/// Scores of what is not proposed to a query head are none.
void keep_proposed(const ForwardMemory& m, const ForwardRow& row, std::uint32_t layer, std::uint32_t head,
                   std::uint32_t index) {
  const std::uint32_t slot = row.proposed - 1;
  const bool together = m.proposal_of(slot, layer, head).shared != 0;
  for (std::uint32_t g = 0; g < m.shape.group(); ++g) {
    const std::uint32_t* const words =
        m.proposed_of(slot, layer, head) + std::uint64_t{together ? 0 : g} * m.proposed_words();
    float* const scores =
        m.scores + std::uint64_t{index} * m.shape.group() * m.score_room() + std::uint64_t{g} * row.tokens;
    for (std::uint32_t token = row.sink_end; token < row.recent_begin; ++token) {
      if ((words[token / 32] >> token % 32 & 1) == 0) scores[token] = kNaN;
    }
  }
}

}  // namespace

void propose(const ForwardMemory& m, std::uint32_t layer) {
  if (!runs(m)) return;
  const std::uint64_t forward = m.state->forward;
  const Deadline deadline = answer_deadline(m, RunClock::now());
  bool late = false;
  for_each_head(m, layer, [&](const ForwardRow& row, std::uint32_t head, std::uint32_t) {
    if (row.proposed == 0 || !runs(m)) return;
    const auto there = shared(m.proposal_of(row.proposed - 1, layer, head).forward);
    late |= there.load(std::memory_order_acquire) != forward;
    await(m, deadline, [&] { return there.load(std::memory_order_acquire) == forward; });
  });
  if (late) ++m.state->awaited;
  if (!runs(m)) return;
  for (std::uint32_t r = 0; r < m.bucket.decode_rows; ++r) {
    if (m.rows[r].list == kNone || m.rows[r].proposed == 0) continue;
    std::uint32_t asks = 0;
    for (std::uint32_t h = 0; h < m.shape.kv_heads; ++h) asks |= m.proposal_of(m.rows[r].proposed - 1, layer, h).asks;
    m.rows[r].asks = asks;
  }
  for_each_head(m, layer, [&](const ForwardRow& row, std::uint32_t head, std::uint32_t index) {
    if (row.proposed == 0 || row.asks != 0) return;
    keep_proposed(m, row, layer, head, index);
    std::copy_n(m.q + first_head(m, index) * m.shape.head_dim, m.shape.group() * m.shape.head_dim,
                m.proposed_q_of(row.proposed - 1, layer, head));
  });
}

}  // namespace sluice::cpu
