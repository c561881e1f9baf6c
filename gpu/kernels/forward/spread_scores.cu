// Scores that the caller brings, in place of estimates by copies of keys: of each KV head, or of all, to the rows of
// query heads that choices are made of.

#include "gpu/kernels/forward/forward.hpp"
#include "gpu/kernels/load.hpp"
#include "gpu/kernels/overlap.cuh"
#include "gpu/kernels/overlap.hpp"
#include "sluice/step/forward_tasks.hpp"

namespace sluice::gpu {
namespace {

constexpr std::uint32_t kThreads = 256;
constexpr std::uint32_t kBlockTokens = 8 * kThreads;

/// Thread block (x, y, z): tokens [x * kBlockTokens, ...) of KV head y of row z of those that choose, or team.
__global__ void __launch_bounds__(kThreads)
    spread_scores_kernel(const __grid_constant__ ForwardMemory m, const __grid_constant__ ForwardLayer layer) {
  detail::wait_for_kernel_before();
  if (m.state->status != ForwardStatus::running) return;
  const ForwardRow row = m.rows[blockIdx.z].in(layer.layer, m.window);
  if (row.list == kNone || !row.scored() || !row.ranks()) return;
  const std::uint32_t group = m.shape.group();
  const std::uint32_t own = m.own_group();
  const std::uint32_t list = blockIdx.z * m.shape.kv_heads + blockIdx.y;
  const std::uint32_t end = min(row.tokens, (blockIdx.x + 1) * kBlockTokens);
  float* const out = m.scores + std::uint64_t{list} * group * m.score_room();
  // Query heads of a draft have the same scores.
  for (std::uint32_t first = 0; first < group; first += own) {
    const auto* const from =
        reinterpret_cast<const float*>(brought_scores(m, layer.scores, row, blockIdx.y, first));
    for (std::uint32_t token = blockIdx.x * kBlockTokens + threadIdx.x; token < end; token += kThreads) {
      const float score = from[token];
      for (std::uint32_t h = first; h < first + own; ++h) out[std::uint64_t{h} * row.tokens + token] = score;
    }
  }
}

}  // namespace

void launch_forward_spread_scores(const ForwardMemory& memory, const ForwardLayer& layer) {
  const dim3 grid(static_cast<unsigned>(div_up(memory.bucket.max_tokens, kBlockTokens)), memory.shape.kv_heads,
                  memory.bucket.decode_rows);
  OverlappingLaunch(grid, kThreads, 0, static_cast<cudaStream_t>(layer.stream))
      .run(spread_scores_kernel, "launch the kernel of the caller's scores", memory, layer);
}

namespace detail {
void load_forward_spread_scores_kernel() {
  load_kernel(spread_scores_kernel, "load the kernel of the caller's scores");
}
}  // namespace detail

}  // namespace sluice::gpu
