// Scores that the caller brings, in place of estimates by copies of keys.
#include <algorithm>

#include "cpu/forward/forward_layer.hpp"
#include "sluice/step/forward_tasks.hpp"

namespace sluice::cpu {

void spread_scores(const ForwardMemory& m, const ForwardLayer& layer) {
  for_each_head(m, layer.layer, [&](const ForwardRow& row, std::uint32_t head, std::uint32_t index) {
    if (!row.ranks() || !row.scored()) return;
    const ScoreInt4Task task = estimate_task(m, row, index, m.plane(layer.layer, head));
    for (std::uint32_t h = 0; h < m.shape.group(); ++h)
      std::copy_n(reinterpret_cast<const float*>(brought_scores(m, layer.scores, row, head, h)), row.tokens,
                  task.out + std::uint64_t{h} * row.tokens);
  });
}

}  // namespace sluice::cpu
