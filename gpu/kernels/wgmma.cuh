#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "gpu/kernels/tma.cuh"

/// Products of a warpgroup (compute capability 9.0): C [64, N] += A [64, 16] B [16, N], with C in registers, A in
/// registers or shared memory and B in shared memory.
///
/// Warp w of the warpgroup has rows 16 w to 16 w + 15; within them C and A lie in its lanes as in mma.cuh, the tiles of
/// eight columns one after the other: c[4 n + i] is c[i] of tile n.
///
/// In shared memory an operand is a stack of slabs: rows of 64 elements (128 bytes), where piece p (16 bytes) of row r
/// lies at p ^ (r % 8). That is what tensor copies write with their 128-byte swizzle. Slabs begin at multiples of 1
/// KiB.
namespace sluice::gpu::detail {

inline constexpr std::uint32_t kSlabRowBytes = 128;
inline constexpr std::uint32_t kSlabColumns = 64;

/// The low word of an operand's descriptor: where it lies, and its leading stride. It gets on by sixteenths of bytes
/// that are added to it; an address has 18 bits.
[[nodiscard]] __device__ inline std::uint32_t describe_low(std::uint32_t address, std::uint32_t leading_bytes) {
  return leading_bytes / 16 << 16 | (address & 0x3ffffu) / 16;
}
/// The high word is the same for all: eight rows make a step, pieces are swizzled.
[[nodiscard]] __device__ inline std::uint64_t describe(std::uint32_t low) {
  constexpr std::uint32_t kSwizzle128 = 1u << 30;
  constexpr std::uint32_t kEightRows = 8 * kSlabRowBytes / 16;
  return std::uint64_t{kSwizzle128 | kEightRows} << 32 | low;
}
/// An operand whose rows run along the products' inner dimension (A, or the transpose of B), from a piece of even
/// number within one slab on. The leading stride has no meaning there.
inline constexpr std::uint32_t kRowsLeading = 16;
[[nodiscard]] __device__ inline std::uint64_t describe_rows(std::uint32_t address) {
  return describe(describe_low(address, kRowsLeading));
}

/// Before the first product, and between other accesses to its registers and a product.
__device__ inline void begin_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ inline void commit_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
/// Waits until at most `kPending` of the latest groups are under way.
template <int kPending>
__device__ inline void wait_products() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}
/// Keeps the compiler from moving accesses to the registers of a product across this point.
template <int kCount>
__device__ inline void pin_registers(float (&c)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(c[i])::"memory");
}

#define SLUICE_8(c, i)                                                                                        \
  "+f"(c[i]), "+f"(c[i + 1]), "+f"(c[i + 2]), "+f"(c[i + 3]), "+f"(c[i + 4]), "+f"(c[i + 5]), "+f"(c[i + 6]), \
      "+f"(c[i + 7])
#define SLUICE_32(c, i) SLUICE_8(c, i), SLUICE_8(c, i + 8), SLUICE_8(c, i + 16), SLUICE_8(c, i + 24)
#define SLUICE_NAMES_32                                                                                       \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, " \
  "%23, %24, %25, %26, %27, %28, %29, %30, %31"
#define SLUICE_NAMES_64                                                                                         \
  SLUICE_NAMES_32                                                                                               \
  ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, " \
  "%53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define SLUICE_SHARED_128(type)                                                          \
  asm volatile(                                                                          \
      "{\n .reg .pred add;\n setp.ne.b32 add, %66, 0;\n"                                 \
      " wgmma.mma_async.sync.aligned.m64n128k16.f32." type "." type " {" SLUICE_NAMES_64 \
      "}, %64, %65, add, 1, 1, 0, 0;\n}"                                                 \
      : SLUICE_32(c, 0), SLUICE_32(c, 32)                                                \
      : "l"(a), "l"(b), "r"(add ? 1 : 0))
#define SLUICE_REGISTERS_128(type)                                                       \
  asm volatile(                                                                          \
      "{\n .reg .pred add;\n setp.eq.b32 add, 0, 0;\n"                                   \
      " wgmma.mma_async.sync.aligned.m64n128k16.f32." type "." type " {" SLUICE_NAMES_64 \
      "}, {%64, %65, %66, %67}, %68, add, 1, 1, 1;\n}"                                   \
      : SLUICE_32(c, 0), SLUICE_32(c, 32)                                                \
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b))
#define SLUICE_REGISTERS_64(type)                                                       \
  asm volatile(                                                                         \
      "{\n .reg .pred add;\n setp.eq.b32 add, 0, 0;\n"                                  \
      " wgmma.mma_async.sync.aligned.m64n64k16.f32." type "." type " {" SLUICE_NAMES_32 \
      "}, {%32, %33, %34, %35}, %36, add, 1, 1, 1;\n}"                                  \
      : SLUICE_32(c, 0)                                                                 \
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b))

#define SLUICE_REGISTERS_ROWS_64(type)                                                  \
  asm volatile(                                                                         \
      "{\n .reg .pred add;\n setp.ne.b32 add, %37, 0;\n"                                \
      " wgmma.mma_async.sync.aligned.m64n64k16.f32." type "." type " {" SLUICE_NAMES_32 \
      "}, {%32, %33, %34, %35}, %36, add, 1, 1, 0;\n}"                                  \
      : SLUICE_32(c, 0)                                                                 \
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add ? 1 : 0))

/// C [64, 128] (+)= A B, with A and the transpose of B by rows.
template <class T>
__device__ inline void multiply_rows(float (&c)[64], std::uint64_t a, std::uint64_t b, bool add) {
  if constexpr (std::is_same_v<T, __half>) {
    SLUICE_SHARED_128("f16");
  } else {
    SLUICE_SHARED_128("bf16");
  }
}

/// C [64, 64] (+)= A B, with A in registers and the transpose of B by rows.
template <class T>
__device__ inline void multiply_rows(float (&c)[32], const std::uint32_t (&a)[4], std::uint64_t b, bool add) {
  if constexpr (std::is_same_v<T, __half>) {
    SLUICE_REGISTERS_ROWS_64("f16");
  } else {
    SLUICE_REGISTERS_ROWS_64("bf16");
  }
}

/// C [64, kCount * 2] += A B, with A in registers and B by columns.
template <class T, int kCount>
__device__ inline void multiply_columns(float (&c)[kCount], const std::uint32_t (&a)[4], std::uint64_t b) {
  static_assert(kCount == 32 || kCount == 64);
  if constexpr (kCount == 64 && std::is_same_v<T, __half>) {
    SLUICE_REGISTERS_128("f16");
  } else if constexpr (kCount == 64) {
    SLUICE_REGISTERS_128("bf16");
  } else if constexpr (std::is_same_v<T, __half>) {
    SLUICE_REGISTERS_64("f16");
  } else {
    SLUICE_REGISTERS_64("bf16");
  }
}

#undef SLUICE_8
#undef SLUICE_32
#undef SLUICE_NAMES_32
#undef SLUICE_NAMES_64
#undef SLUICE_SHARED_128
#undef SLUICE_REGISTERS_128
#undef SLUICE_REGISTERS_64
#undef SLUICE_REGISTERS_ROWS_64

}  // namespace sluice::gpu::detail
