#include "cpu/kernels/simd_avx2.hpp"
// After the vector class.
#include "cpu/kernels/table.hpp"
#include "cpu/kernels/variants.hpp"

namespace sluice::cpu {

constexpr Kernels kAvx2Kernels = make_kernels("avx2");

}  // namespace sluice::cpu
