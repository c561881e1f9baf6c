#pragma once

#include "cpu/kernels/kernels.hpp"

namespace sluice::cpu {

/// One per translation unit; constant-initialised, so valid before any code runs. The latter two exist on
/// x86-64 only.
extern const Kernels kGenericKernels;
extern const Kernels kAvx2Kernels;
extern const Kernels kAvx512Kernels;

}  // namespace sluice::cpu
