#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <numbers>
#include <type_traits>

#include "sluice/tensor.hpp"

/// What the attention kernels need of the instruction set: matrix fragments, and loads that C++ has no words for.
///
/// Fragments of mma.m16n8k16, lane = 4 * g + t (two 16-bit elements per register, the lower index in the lower half):
///   A [16, 16]  a[0] (g, 2t..)  a[1] (g + 8, 2t..)  a[2] (g, 2t + 8..)  a[3] (g + 8, 2t + 8..)
///   B [16, 8]   b[0] (2t.., g)  b[1] (2t + 8.., g)
///   C [16, 8]   c[0], c[1] (g, 2t), (g, 2t + 1)  c[2], c[3] (g + 8, 2t), (g + 8, 2t + 1)
namespace sluice::gpu::detail {

inline constexpr std::uint32_t kAllLanes = 0xffff'ffffu;

template <DType kDType>
using Element = std::conditional_t<kDType == DType::f16, __half, __nv_bfloat16>;

template <class T>
[[nodiscard]] __device__ inline std::uint32_t pack(float low, float high) {
  std::uint32_t bits;
  if constexpr (std::is_same_v<T, __half>) {
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(high), "f"(low));
  } else {
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(high), "f"(low));
  }
  return bits;
}

template <class T>
[[nodiscard]] __device__ inline float low_of(std::uint32_t bits) {
  if constexpr (std::is_same_v<T, __half>) {
    return __half2float(__ushort_as_half(static_cast<unsigned short>(bits & 0xffffu)));
  } else {
    return __uint_as_float(bits << 16);
  }
}

template <class T>
[[nodiscard]] __device__ inline float high_of(std::uint32_t bits) {
  if constexpr (std::is_same_v<T, __half>) {
    return __half2float(__ushort_as_half(static_cast<unsigned short>(bits >> 16)));
  } else {
    return __uint_as_float(bits & 0xffff'0000u);
  }
}

/// Two floats as sums of two elements each: their rounding, and the rounding of what that left.
struct Terms {
  std::uint32_t high = 0;
  std::uint32_t low = 0;
};
template <class T>
[[nodiscard]] __device__ inline Terms split(float a, float b) {
  if constexpr (std::is_same_v<T, __half>) {  // The first term of what float16 cannot hold is its largest number.
    a = fminf(fmaxf(a, -131008.f), 131008.f);
    b = fminf(fmaxf(b, -131008.f), 131008.f);
    const std::uint32_t high = pack<T>(fminf(fmaxf(a, -65504.f), 65504.f), fminf(fmaxf(b, -65504.f), 65504.f));
    return {high, pack<T>(a - low_of<T>(high), b - high_of<T>(high))};
  } else {
    const std::uint32_t high = pack<T>(a, b);
    return {high, pack<T>(a - low_of<T>(high), b - high_of<T>(high))};
  }
}

/// c += a * b
template <class T>
__device__ inline void mma(float (&c)[4], const std::uint32_t (&a)[4], std::uint32_t b0, std::uint32_t b1) {
  if constexpr (std::is_same_v<T, __half>) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  } else {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
}

/// An 8x8 matrix of 16-bit elements, of which a lane holds (g, 2t) and (g, 2t + 1), transposed.
[[nodiscard]] __device__ inline std::uint32_t transpose(std::uint32_t bits) {
  std::uint32_t out;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(out) : "r"(bits));
  return out;
}

/// The lower halves of two registers in one, and the upper halves.
[[nodiscard]] __device__ inline std::uint32_t lower_halves(std::uint32_t a, std::uint32_t b) {
  return __byte_perm(a, b, 0x5410);
}
[[nodiscard]] __device__ inline std::uint32_t upper_halves(std::uint32_t a, std::uint32_t b) {
  return __byte_perm(a, b, 0x7632);
}

/// Softmax is by powers of 2, of logits times this.
inline constexpr float kLog2E = std::numbers::log2e_v<float>;

/// 2^x; 0 for -infinity.
[[nodiscard]] __device__ inline float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

/// tanh(x), to 2^-21 of 1.
[[nodiscard]] __device__ inline float tanh_fast(float x) {
  return 1.f - __fdividef(2.f, exp2_fast(x * (2.f * kLog2E)) + 1.f);
}

/// 16 bytes of global memory that are read once; zero, and not read, if not `valid`. Stays where it is in the order
/// of loads and products, so that what is in flight is what the source says.
__device__ inline void load_once(std::uint32_t (&out)[4], const std::byte* from, bool valid) {
  asm volatile(
      "{\n .reg .pred p;\n setp.ne.u32 p, %5, 0;\n"
      " mov.u32 %0, 0;\n mov.u32 %1, 0;\n mov.u32 %2, 0;\n mov.u32 %3, 0;\n"
      " @p ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0,%1,%2,%3}, [%4];\n}"
      : "=&r"(out[0]), "=&r"(out[1]), "=&r"(out[2]), "=&r"(out[3])
      : "l"(from), "r"(static_cast<std::uint32_t>(valid)));
}

/// Four 8x8 matrices from shared memory; lane 8 * m + r gives the address of row r of matrix m.
__device__ inline void load_matrices(std::uint32_t (&out)[4], const void* row) {
  const auto address = static_cast<std::uint32_t>(__cvta_generic_to_shared(row));
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
               : "r"(address)
               : "memory");
}
/// The same, each transposed.
__device__ inline void load_matrices_transposed(std::uint32_t (&out)[4], const void* row) {
  const auto address = static_cast<std::uint32_t>(__cvta_generic_to_shared(row));
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
               : "r"(address)
               : "memory");
}

/// Starts copying 16 bytes to shared memory; writes zeros, and reads nothing, if not `valid`.
__device__ inline void copy_async(void* to, const std::byte* from, bool valid) {
  const auto address = static_cast<std::uint32_t>(__cvta_generic_to_shared(to));
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(address), "l"(from), "r"(valid ? 16 : 0)
               : "memory");
}
__device__ inline void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
/// Waits until at most `kPending` of the thread's latest groups of copies are under way.
template <int kPending>
__device__ inline void wait_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

}  // namespace sluice::gpu::detail
