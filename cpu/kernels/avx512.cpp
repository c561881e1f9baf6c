#include "cpu/kernels/simd_avx512.hpp"
// After the vector class.
#include "cpu/kernels/table.hpp"
#include "cpu/kernels/variants.hpp"

namespace sluice::cpu {

constexpr Kernels kAvx512Kernels = make_kernels("avx512");

}  // namespace sluice::cpu
