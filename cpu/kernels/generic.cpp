#include "cpu/kernels/simd_generic.hpp"
// After the vector class.
#include "cpu/kernels/table.hpp"
#include "cpu/kernels/variants.hpp"

namespace sluice::cpu {

constexpr Kernels kGenericKernels = make_kernels("generic");

}  // namespace sluice::cpu
