#pragma once

// Included last in the translation unit of an instruction set.

#include "cpu/kernels/attend.hpp"
#include "cpu/kernels/digest.hpp"
#include "cpu/kernels/e4m3.hpp"
#include "cpu/kernels/int4.hpp"
#include "cpu/kernels/nearest.hpp"
#include "cpu/kernels/prefill.hpp"
#include "cpu/kernels/representative.hpp"
#include "cpu/kernels/score.hpp"
#include "cpu/kernels/weigh.hpp"

namespace sluice::cpu {
namespace {

template <DType kType>
void widen(const std::byte* in, float* out, std::size_t count) noexcept {
  for (std::size_t i = 0; i < count; i += kWidth) Simd::store(out + i, Simd::load_as<kType>(in + i * kElementBytes<kType>));
}

template <DType kType>
void narrow(const float* in, std::byte* out, std::size_t count) noexcept {
  for (std::size_t i = 0; i < count; i += kWidth) Simd::store_as<kType>(out + i * kElementBytes<kType>, Simd::load(in + i));
}

template <DType kType>
constexpr ElementKernels kRowKernels{.attend = attend<kType>,
                                     .score = score<kType>,
                                     .make_codes = make_codes<kType>,
                                     .digest_box = digest_box<kType>,
                                     .digest_cuboid_mean = digest_cuboid_mean<kType>,
                                     .prefill = prefill<kType>,
                                     .representative_masses = representative_masses<kType>,
                                     .representative_sums = representative_sums<kType>};

/// The same of a type that digests and tensors may have, too.
template <DType kType>
constexpr ElementKernels element() {
  ElementKernels kernels = kRowKernels<kType>;
  kernels.widen = widen<kType>;
  kernels.narrow = narrow<kType>;
  kernels.score_digests = score_digests<kType>;
  return kernels;
}

static_assert(static_cast<int>(DType::f32) == 0 && static_cast<int>(DType::f16) == 1 &&
              static_cast<int>(DType::bf16) == 2 && static_cast<int>(DType::fp8_e4m3) == 3);

constexpr Kernels make_kernels(const char* name) {
  return {
      .name = name,
      .element = {element<DType::f32>(), element<DType::f16>(), element<DType::bf16>(), kRowKernels<DType::fp8_e4m3>},
      .e4m3 = {.encode = encode_e4m3, .decode = decode_e4m3},
      .score_int4 = score_int4,
      .weigh = weigh,
      .nearest = nearest};
}

}  // namespace
}  // namespace sluice::cpu
