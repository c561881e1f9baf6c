#pragma once

#include "cpu/kernels/kernels.hpp"

namespace sluice::cpu {

/// One per translation unit; constant-initialised, so valid before any code runs. The latter two exist on
/// x86-64 only.
extern const Kernels kGenericKernels;
extern const Kernels kAvx2Kernels;
extern const Kernels kAvx512Kernels;

/// Of CPUs with AVX-512 that multiply bytes: takes the place of kAvx512Kernels.score_int4.
void score_int4_vnni(const ScoreInt4Rows& args) noexcept;

}  // namespace sluice::cpu
