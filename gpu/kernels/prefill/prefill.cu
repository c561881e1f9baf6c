#include "gpu/kernels/prefill/prefill.hpp"

#include "gpu/device/cuda_error.hpp"
#include "gpu/kernels/load.hpp"
#include "gpu/kernels/prefill/prefill.cuh"
#include "sluice/units.hpp"

namespace sluice::gpu {
namespace {

/// Calls `use` with the kernel of a dtype and head_dim, and the shared memory that it needs.
template <class T, int kDim, class Use>
void with_terms(const PrefillVariant& variant, const Use& use) {
  if (variant.capped) {
    variant.terms == 1 ? use(detail::prefill_kernel<T, kDim, 1, true>, detail::PrefillMemory<kDim, 1>::kBytes)
                       : use(detail::prefill_kernel<T, kDim, 2, true>, detail::PrefillMemory<kDim, 2>::kBytes);
  } else {
    variant.terms == 1 ? use(detail::prefill_kernel<T, kDim, 1, false>, detail::PrefillMemory<kDim, 1>::kBytes)
                       : use(detail::prefill_kernel<T, kDim, 2, false>, detail::PrefillMemory<kDim, 2>::kBytes);
  }
}

template <class Use>
void with_kernel(const PrefillVariant& variant, const Use& use) {
  KernelHeadDims::with(variant.head_dim, [&](auto dim) {
    variant.dtype == DType::f16 ? with_terms<__half, dim()>(variant, use)
                                : with_terms<__nv_bfloat16, dim()>(variant, use);
  });
}

}  // namespace

void launch_prefill(const PrefillVariant& variant, const PrefillArgs& args, const PrefillExtent& extent,
                    cudaStream_t stream) {
  const auto tiles = static_cast<unsigned>(div_up(extent.rows, kPrefill.rows));
  with_kernel(variant, [&](auto* kernel, int shared_bytes) {
    kernel<<<dim3(tiles, extent.items), detail::kPrefillThreads, shared_bytes, stream>>>(args);
  });
  check(cudaGetLastError(), "launch prefill");
}

void load_prefill_kernels() {
  const auto load = [](auto* kernel, int shared_bytes) {
    load_kernel(kernel, "load the prefill kernels", shared_bytes);
  };
  for (const DType dtype : {DType::f16, DType::bf16}) {
    KernelHeadDims::each([&](std::uint32_t head_dim) {
      for (const std::uint32_t terms : {1u, 2u}) {
        with_kernel({.dtype = dtype, .head_dim = head_dim, .terms = terms}, load);
        with_kernel({.dtype = dtype, .head_dim = head_dim, .terms = terms, .capped = true}, load);
      }
    });
  }
}

}  // namespace sluice::gpu
