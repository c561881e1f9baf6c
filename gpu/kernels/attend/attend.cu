#include "gpu/kernels/attend/attend_kernel.cuh"
#include "gpu/kernels/load.hpp"
#include "gpu/kernels/overlap.hpp"

namespace sluice::gpu {
namespace {

template <class Use>
void with_kernel(const AttendVariant& variant, const Use& use) {
  KernelHeadDims::with(variant.head_dim, [&](auto dim) {
    variant.dtype == DType::f16 ? detail::with_attend_kernel<__half, dim()>(variant, use)
                                : detail::with_attend_kernel<__nv_bfloat16, dim()>(variant, use);
  });
}

}  // namespace

void launch_attend(const AttendVariant& variant, const AttendArgs& args, std::uint32_t slices, cudaStream_t stream) {
  if (variant.ring) return launch_attend_ring(variant, args, slices, stream);
  const OverlappingLaunch launch(slices, detail::kThreads, 0, stream);
  with_kernel(variant, [&](auto* kernel) { launch.run(kernel, "launch attend", args); });
}

void load_attend_kernels() {
  const auto load = [](auto* kernel) {
    load_kernel(kernel, "load the attend kernels");
  };
  detail::each_plain_variant([&](AttendVariant variant) {
    with_kernel(variant, load);
    variant.scaled = true;
    if (variant.dtype == DType::bf16) with_kernel(variant, load);
    variant.scaled = false;
    variant.scored = true;  // Capped or not is one kernel.
    if (!variant.capped) with_kernel(variant, load);
  });
}

}  // namespace sluice::gpu
