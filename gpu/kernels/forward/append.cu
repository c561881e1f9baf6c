// How the new keys and values of a layer come in, and what the kernels behind them need to know.

#include <type_traits>

#include "gpu/device/cuda_error.hpp"
#include "gpu/kernels/forward/append_row.cuh"
#include "gpu/kernels/index/digest.cuh"
#include "gpu/kernels/load.hpp"
#include "gpu/kernels/overlap.cuh"
#include "gpu/kernels/overlap.hpp"

namespace sluice::gpu {
namespace {

using namespace forward;

/// Thread block (x, y): packed row x, KV head y; and row x of those that choose.
template <DType kType>
__global__ void __launch_bounds__(AppendBlock::kThreads, 1)
    append_kernel(const __grid_constant__ ForwardMemory m, const __grid_constant__ ForwardScratch scratch,
                  const __grid_constant__ ForwardLayer layer) {
  detail::wait_for_kernel_before();
  append_row<kType>(m, scratch, layer, blockIdx.x, blockIdx.y);
}

/// Thread block (x, y): packed row x, KV head y. The digest of the page that its token has filled: the others of that
/// page may have come with the same launch, so that it takes one of its own.
template <DType kType>
__global__ void __launch_bounds__(kRowLanes)
    digest_rows_kernel(const __grid_constant__ ForwardMemory m, std::uint32_t layer) {
  detail::wait_for_kernel_before();
  if (m.state->status != ForwardStatus::running) return;
  const ForwardToken token = m.tokens[blockIdx.x];
  if (token.list == kNone || ((token.position + 1) & (m.layout.page_tokens - 1)) != 0) return;
  const std::uint32_t block = m.row_of(token.list, token.position) >> m.page_shift;
  const std::uint32_t plane = m.plane(layer, blockIdx.y);
  detail::digest_page<kType>(m.far_block(plane, block), m.digest_of(plane, block), m.digest, m.far_layout, threadIdx.x);
}

/// use(std::integral_constant) of the type of far rows.
template <class Use>
void with_far_type(DType dtype, const Use& use) {
  if (dtype == DType::bf16) return use(std::integral_constant<DType, DType::bf16>{});
  if (dtype == DType::f16) return use(std::integral_constant<DType, DType::f16>{});
  use(std::integral_constant<DType, DType::fp8_e4m3>{});
}

}  // namespace

void launch_forward_append(const ForwardMemory& memory, const ForwardScratch& scratch, const ForwardLayer& layer) {
  const dim3 grid(memory.bucket.rows(), memory.shape.kv_heads);
  const auto stream = static_cast<cudaStream_t>(layer.stream);
  with_far_type(memory.far_layout.dtype, [&](auto type) {
    OverlappingLaunch(grid, AppendBlock::kThreads, 0, stream)
        .run(append_kernel<type()>, "launch the append kernel of a forward", memory, scratch, layer);
    if (memory.digests == nullptr) return;
    OverlappingLaunch(grid, kRowLanes, 0, stream)
        .run(digest_rows_kernel<type()>, "launch the digest kernel of a forward", memory, layer.layer);
  });
}

namespace detail {
void load_forward_append_kernels() {
  for (const DType dtype : {DType::bf16, DType::f16, DType::fp8_e4m3}) {
    with_far_type(dtype, [&](auto type) {
      load_kernel(append_kernel<type()>, "load the kernels of a forward");
      load_kernel(digest_rows_kernel<type()>, "load the kernels of a forward");
    });
  }
}
}  // namespace detail

}  // namespace sluice::gpu
