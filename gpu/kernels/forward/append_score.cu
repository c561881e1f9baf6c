// One sequence that decodes: its new key and value come in beside the scores of those before them, in thread blocks of
// the same launch. Its new token is attended whatever it scores, and needs no score.

#include "gpu/device/cuda_error.hpp"
#include "gpu/head_dims.hpp"
#include "gpu/kernels/forward/append_row.cuh"
#include "gpu/kernels/load.hpp"
#include "gpu/kernels/overlap.cuh"
#include "gpu/kernels/overlap.hpp"
#include "gpu/kernels/select/score_int4_block.cuh"
#include "gpu/tuning.hpp"

namespace sluice::gpu {
namespace {

using namespace forward;
using score_int4::Cut;
using score_int4::kBlocksPerSm;
using score_int4::Shared;

constexpr std::uint32_t kThreads = score_int4::kThreads;
static_assert(AppendBlock::kThreads == kThreads);

/// Queries as the layer has them, of the heads of a group.
struct LayerQueries {
  const TensorView& q;
  std::uint32_t row, first_head;

  [[nodiscard]] __device__ float operator()(std::uint32_t head, std::uint32_t channel) const {
    return load_any(q.row(row, first_head + head), channel, q.dtype);
  }
};

/// One block does all that `append` does of a KV head: others would take room from those that score.
template <DType kType>
__device__ __noinline__ void append(const ForwardMemory& m, const ForwardScratch& scratch, const ForwardLayer& layer,
                                    std::uint32_t head) {
  append_row<kType>(m, scratch, layer, 0, head);
}

/// Thread block (0, y): what `append` does of the row's KV head y; (x, y): the part x - 1 of its scores.
template <std::uint32_t kHeadDim, std::uint32_t kBits, std::uint32_t kFragments>
__global__ void __launch_bounds__(kThreads, kBlocksPerSm)
    append_score_kernel(const __grid_constant__ ForwardMemory m, const __grid_constant__ ForwardScratch scratch,
                        const __grid_constant__ ForwardLayer layer, const __grid_constant__ Foresight foresight,
                        const ScoreInt4Shape shape, Cut cut) {
  __shared__ Shared<kHeadDim> s;
  __shared__ std::uint32_t row_at;
  detail::wait_for_kernel_before();
  const std::uint32_t head = blockIdx.y;
  if (blockIdx.x == 0) {
    if (m.far_layout.dtype == DType::bf16) return append<DType::bf16>(m, scratch, layer, head);
    if (m.far_layout.dtype == DType::f16) return append<DType::f16>(m, scratch, layer, head);
    return append<DType::fp8_e4m3>(m, scratch, layer, head);
  }
  if (threadIdx.x == 0) {
    const ForwardStatus status = m.state->status;
    const ForwardRow row = m.rows[0].in(layer.layer, m.window);
    s.task = estimate_task(m, row, head, m.plane(layer.layer, head));
    if (status != ForwardStatus::running) s.task.tokens = 0;
    row_at = row.at;
  }
  __syncthreads();
  const std::uint32_t tokens = s.task.tokens;
  const score_int4::Part part{.first_head = 0,
                              .heads = shape.group,
                              .count = tokens,
                              .stride = tokens,
                              .block = blockIdx.x - 1,
                              .blocks = cut.blocks,
                              .visible = max(tokens, 1u) - 1};
  score_int4::score_part<kHeadDim, kBits, kFragments, true>(
      s, part, head, LayerQueries{layer.q, row_at, head * shape.group}, foresight, shape, cut);
}

template <class Use>
void with_kernel(std::uint32_t head_dim, std::uint32_t bits, std::uint32_t group, const Use& use) {
  TunedHeadDims::with(head_dim, [&](auto dim) {
    score_int4::with_bits(bits, [&](auto code_bits) {
      use(group <= score_int4::kTileHeads ? append_score_kernel<dim(), code_bits(), 1>
                                          : append_score_kernel<dim(), code_bits(), 2>);
    });
  });
}

}  // namespace

bool appends_beside_scores(const ForwardMemory& memory) {
  const Bucket& bucket = memory.bucket;
  const bool alone = bucket.decode_rows == 1 && bucket.prefills == 0 && bucket.drafts == 1 && !bucket.whole;
  // Choices of all tokens by their copies: what else there is wants to know of the new key first.
  const bool copies = memory.has_codes() && !bucket.scores;
  const bool scores = bucket.top_k && copies && !bucket.pages && !bucket.unbounded && !memory.proposes();
  return alone && scores && memory.digests == nullptr && memory.max_picks != 0 &&
         TunedHeadDims::has(memory.shape.head_dim);
}

void launch_forward_append_score(const ForwardMemory& memory, const ForwardScratch& scratch, const ForwardLayer& layer,
                                 const ScoreInt4Shape& shape) {
  const std::uint32_t heads = memory.shape.kv_heads;
  const Cut cut = score_int4::cut_of(heads, memory.scores_in(memory.bucket),
                                     score_int4::room_beside(heads, scratch.multiprocessors));
  with_kernel(memory.shape.head_dim, shape.layout.bits, shape.group, [&](auto* kernel) {
    OverlappingLaunch(dim3(1 + cut.blocks, heads), kThreads, 0, static_cast<cudaStream_t>(layer.stream))
        .run(kernel, "launch the kernel of a forward that appends and scores", memory, scratch, layer,
             foresight_of(memory, scratch, layer.layer), shape, cut);
  });
}

namespace detail {
void load_forward_append_score_kernels() {
  TunedHeadDims::each([&](std::uint32_t head_dim) {
    for (const std::uint32_t bits : {kCodeBits, kFewCodeBits}) {
      for (const std::uint32_t group : {1u, score_int4::kHeads}) {
        with_kernel(head_dim, bits, group, [&](auto* kernel) { load_kernel(kernel, "load the kernels of a forward"); });
      }
    }
  });
}
}  // namespace detail

}  // namespace sluice::gpu
