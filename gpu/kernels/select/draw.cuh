#pragma once

#include <cstdint>

#include "sluice/step/sample.hpp"

/// Draws of tokens, see sample.hpp: the same bits as on the CPU, by the faster functions of a GPU, which are off by
/// some 2^-15.
namespace sluice::gpu::draw {

/// The exponential number that a draw is.
__device__ __forceinline__ float exponential(std::uint32_t head_key, std::uint32_t token) {
  const float u = HeadDraws::uniform(HeadDraws::bits(head_key, token));
  // Where it is small, what is left of 1 would have few digits.
  const float series = u * fmaf(u, fmaf(u, 1.f / 3.f, 0.5f), 1.f);
  return u < 0x1p-6f ? series : -__logf(1.f - u);
}

/// What is added to a token's estimate.
__device__ __forceinline__ float gumbel(std::uint32_t head_key, std::uint32_t token) {
  return -__logf(exponential(head_key, token));
}

/// See draw_rate.
__device__ __forceinline__ float rate(float score, float exponential, const DrawThresholds& thresholds) {
  const float above = score - (score > thresholds.largest_left ? thresholds.largest_left : thresholds.least_drawn);
  if (above == above) return exponential * __expf(above);
  return score == score ? __int_as_float(0x7f80'0000) : 0.f;
}

/// That a token with such a rate is drawn: 1 - exp(-rate).
__device__ __forceinline__ float chance(float rate) {
  const float series = rate * fmaf(rate, fmaf(rate, 1.f / 6.f, -0.5f), 1.f);
  return rate < 0x1p-6f ? series : 1.f - __expf(-rate);
}
/// See draw_correction.
__device__ __forceinline__ float correction(float rate) { return -__logf(chance(rate)); }

}  // namespace sluice::gpu::draw
