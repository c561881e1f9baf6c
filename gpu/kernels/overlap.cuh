#pragma once

namespace sluice::gpu::detail {

/// The first thing that a kernel of an OverlappingLaunch does, in every thread: the next kernel may come, and this one
/// goes on when the one before it has ended and what it wrote is there. Also before it returns early: a kernel that has
/// ended stands for all before it.
__device__ __forceinline__ void wait_for_kernel_before() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;\n griddepcontrol.wait;" ::: "memory");
#endif
}

}  // namespace sluice::gpu::detail
