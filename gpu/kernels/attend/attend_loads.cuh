#pragma once

#include <cstddef>
#include <cstdint>

/// Loads of decode attention that have to be under way before something else is waited for: `volatile` keeps the
/// compiler from moving them behind it.
namespace sluice::gpu::detail {

/// A float that no thread of this launch writes; zero, and not read, if not `valid`.
__device__ inline float load_float(const float* from, bool valid) {
  float value;
  asm volatile("{\n .reg .pred p;\n setp.ne.u32 p, %2, 0;\n mov.f32 %0, 0f00000000;\n @p ld.global.nc.f32 %0, [%1];\n}"
               : "=&f"(value)
               : "l"(from), "r"(static_cast<std::uint32_t>(valid)));
  return value;
}

/// What another thread block wrote; `otherwise`, and not read, if not `valid`.
__device__ inline float load_partial(const float* from, bool valid, float otherwise) {
  float value;
  asm volatile("{\n .reg .pred p;\n setp.ne.u32 p, %2, 0;\n mov.f32 %0, %3;\n @p ld.global.cg.f32 %0, [%1];\n}"
               : "=&f"(value)
               : "l"(from), "r"(static_cast<std::uint32_t>(valid)), "f"(otherwise)
               : "memory");
  return value;
}

/// Four floats that another thread block wrote; zero, and not read, if not `valid`.
__device__ inline float4 load_partial4(const float4* from, bool valid) {
  float4 value;
  asm volatile(
      "{\n .reg .pred p;\n setp.ne.u32 p, %5, 0;\n"
      " mov.f32 %0, 0f00000000;\n mov.f32 %1, 0f00000000;\n mov.f32 %2, 0f00000000;\n mov.f32 %3, 0f00000000;\n"
      " @p ld.global.cg.v4.f32 {%0,%1,%2,%3}, [%4];\n}"
      : "=&f"(value.x), "=&f"(value.y), "=&f"(value.z), "=&f"(value.w)
      : "l"(from), "r"(static_cast<std::uint32_t>(valid))
      : "memory");
  return value;
}

/// Eight bytes in the first half of `out`; see load_once.
__device__ inline void load_half_once(std::uint32_t (&out)[4], const std::byte* from, bool valid) {
  asm volatile(
      "{\n .reg .pred p;\n setp.ne.u32 p, %3, 0;\n mov.u32 %0, 0;\n mov.u32 %1, 0;\n"
      " @p ld.global.nc.L1::no_allocate.L2::128B.v2.u32 {%0,%1}, [%2];\n}"
      : "=&r"(out[0]), "=&r"(out[1])
      : "l"(from), "r"(static_cast<std::uint32_t>(valid)));
}

/// Four bytes in the first element of `out`; see load_once.
__device__ inline void load_word_once(std::uint32_t (&out)[4], const std::byte* from, bool valid) {
  asm volatile(
      "{\n .reg .pred p;\n setp.ne.u32 p, %2, 0;\n mov.u32 %0, 0;\n"
      " @p ld.global.nc.L1::no_allocate.L2::128B.u32 %0, [%1];\n}"
      : "=&r"(out[0])
      : "l"(from), "r"(static_cast<std::uint32_t>(valid)));
}

/// Two floats that no thread of this launch writes; zero, and not read, if not `valid`.
__device__ inline float2 load_floats(const std::byte* from, bool valid) {
  float2 value;
  asm volatile(
      "{\n .reg .pred p;\n setp.ne.u32 p, %3, 0;\n mov.f32 %0, 0f00000000;\n mov.f32 %1, 0f00000000;\n"
      " @p ld.global.nc.v2.f32 {%0,%1}, [%2];\n}"
      : "=&f"(value.x), "=&f"(value.y)
      : "l"(from), "r"(static_cast<std::uint32_t>(valid)));
  return value;
}

/// Starts copying a word to shared memory.
__device__ inline void copy_word_async(std::uint32_t* to, const std::uint32_t* from) {
  const auto address = static_cast<std::uint32_t>(__cvta_generic_to_shared(to));
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(address), "l"(from) : "memory");
}

/// Starts copying 16 bytes that are read once to an address in shared memory; zeros, and nothing is read, if not
/// `valid`.
__device__ inline void copy_async_once(std::uint32_t to, const std::byte* from, bool valid) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(valid ? 16 : 0)
               : "memory");
}

/// 16 bytes at an address in shared memory.
__device__ inline void load_shared4(std::uint32_t (&out)[4], std::uint32_t from) {
  asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
               : "r"(from)
               : "memory");
}
/// Eight, in the first half of `out`; zeros in the other.
__device__ inline void load_shared2(std::uint32_t (&out)[4], std::uint32_t from) {
  out[2] = out[3] = 0;
  asm volatile("ld.shared.v2.u32 {%0,%1}, [%2];" : "=r"(out[0]), "=r"(out[1]) : "r"(from) : "memory");
}

}  // namespace sluice::gpu::detail
