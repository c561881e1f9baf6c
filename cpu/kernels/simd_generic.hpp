#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "cpu/float16.hpp"
#include "sluice/tensor.hpp"

namespace sluice::cpu {
namespace {

/// The vector operations that the kernels are written in, on any CPU: four floats in the compiler's own vector
/// type. simd_avx2.hpp documents the operations; this is the same class once more.
struct Simd {
  typedef float Vec __attribute__((vector_size(16)));
  typedef std::int32_t Int __attribute__((vector_size(16)));
  struct Pair {
    Vec a, b;
  };
  static constexpr std::uint32_t kWidth = 4;
  static constexpr std::uint32_t kAccumulators = 8;
  static constexpr std::uint32_t kGemmRows = 4;
  static constexpr std::uint32_t kGemmVecs = 2;

  static Vec set(float x) noexcept { return Vec{x, x, x, x}; }
  static Vec load(const float* p) noexcept {
    Vec v;
    std::memcpy(&v, p, sizeof v);
    return v;
  }
  static Vec load_fours(const float* p, std::size_t) noexcept { return load(p); }
  static void store(float* p, Vec v) noexcept { std::memcpy(p, &v, sizeof v); }
  static Vec add(Vec a, Vec b) noexcept { return a + b; }
  static Vec sub(Vec a, Vec b) noexcept { return a - b; }
  static Vec mul(Vec a, Vec b) noexcept { return a * b; }
  static Vec fma(Vec a, Vec b, Vec c) noexcept { return a * b + c; }
  static Vec max(Vec a, Vec b) noexcept { return a > b ? a : b; }
  static Vec min(Vec a, Vec b) noexcept { return a < b ? a : b; }
  static Vec abs(Vec a) noexcept { return (Vec)((Int)a & 0x7fff'ffff); }
  static Vec by_sign(Vec sign, Vec positive, Vec negative) noexcept { return (Int)sign < 0 ? negative : positive; }
  static Vec zero_below(Vec x, float limit, Vec v) noexcept { return x < limit ? set(0.f) : v; }
  static Vec keep(std::uint32_t bits, Vec v, Vec other) noexcept {
    const auto word = static_cast<std::int32_t>(bits);
    return (Int{word, word, word, word} & Int{1, 2, 4, 8}) != 0 ? v : other;
  }
  static Vec round(Vec x) noexcept {
    const Vec shift = set(12582912.f);  // 1.5 * 2^23
    return (x + shift) - shift;
  }
  static Vec scale(Vec x, Vec power) noexcept {
    const Int exponent = (Int)(power + set(12582912.f)) << 23;  // low bits of the sum hold the integer
    return x * (Vec)(exponent + (127 << 23));
  }
  static Vec sum_lanes(const Vec (&v)[kWidth]) noexcept {
    return Vec{total(v[0]), total(v[1]), total(v[2]), total(v[3])};
  }
  template <std::uint32_t kPeriod>
  static Vec fold_max(Vec v) noexcept {
    if constexpr (kPeriod <= 2) v = max(v, Vec{v[2], v[3], v[0], v[1]});
    if constexpr (kPeriod == 1) v = max(v, Vec{v[1], v[0], v[3], v[2]});
    return v;
  }
  template <std::uint32_t kPeriod>
  static Vec fold_add(Vec v) noexcept {
    if constexpr (kPeriod <= 2) v = v + Vec{v[2], v[3], v[0], v[1]};
    if constexpr (kPeriod == 1) v = v + Vec{v[1], v[0], v[3], v[2]};
    return v;
  }

  template <DType kType>
  static Vec load_as(const std::byte* p) noexcept {
    if constexpr (kType == DType::f32) return load(reinterpret_cast<const float*>(p));
    if constexpr (kType == DType::fp8_e4m3) {
      std::int8_t c[4];
      std::memcpy(c, p, sizeof c);
      const Int bits = (Int{c[0], c[1], c[2], c[3]} << 20) & static_cast<std::int32_t>(0x87f0'0000u);
      return (Vec)bits * set(0x1p120f);
    }
    std::uint16_t h[4];
    std::memcpy(h, p, sizeof h);
    if constexpr (kType == DType::bf16) {
      return (Vec)(Int{h[0], h[1], h[2], h[3]} << 16);
    } else {
      return Vec{f16_to_float(h[0]), f16_to_float(h[1]), f16_to_float(h[2]), f16_to_float(h[3])};
    }
  }
  template <DType kType>
  static void store_as(std::byte* p, Vec v) noexcept {
    if constexpr (kType == DType::f32) return store(reinterpret_cast<float*>(p), v);
    std::uint16_t h[4];
    for (int i = 0; i < 4; ++i) h[i] = kType == DType::bf16 ? float_to_bf16(v[i]) : float_to_f16(v[i]);
    std::memcpy(p, h, sizeof h);
  }
  template <DType kType>
  static Pair load_pair(const std::byte* p) noexcept {
    if constexpr (kType == DType::bf16) {
      Int words;
      std::memcpy(&words, p, sizeof words);
      return {(Vec)(words << 16), (Vec)(words & static_cast<std::int32_t>(0xffff'0000u))};
    } else {
      return {load_as<kType>(p), load_as<kType>(p + kWidth * sizeof_element<kType>())};
    }
  }
  template <DType kType>
  static Pair load_half(const std::byte* p) noexcept {
    return load_pair<kType>(p);  // Never called: 16 elements are whole pairs of this width.
  }

  /// Up to kWidth words of 4-bit codes, the rest 0; and the n-th code of each as a float.
  using Words = Int;
  static Words load_words(const std::byte* p, std::uint32_t count) noexcept {
    Int words{};
    std::memcpy(&words, p, count * sizeof(std::int32_t));
    return words;
  }
  static Vec code(Words words, std::uint32_t n) noexcept {
    return __builtin_convertvector((words >> static_cast<std::int32_t>(4 * n)) & 15, Vec);
  }

 private:
  template <DType kType>
  static constexpr std::uint32_t sizeof_element() noexcept {
    return kType == DType::f32 ? 4 : kType == DType::fp8_e4m3 ? 1 : 2;
  }
  static float total(Vec v) noexcept { return (v[0] + v[2]) + (v[1] + v[3]); }
};

}  // namespace
}  // namespace sluice::cpu
