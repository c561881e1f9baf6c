#include "cpu/kernels/simd_avx512.hpp"
// After the vector class.
#include "cpu/kernels/int4_bytes.hpp"
#include "cpu/kernels/variants.hpp"

namespace sluice::cpu {

void score_int4_vnni(const ScoreInt4Rows& args) noexcept { score_int4_bytes(args); }

}  // namespace sluice::cpu
