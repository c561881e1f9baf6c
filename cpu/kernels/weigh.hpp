#pragma once

#include "cpu/kernels/rows.hpp"

/// What scores weigh: see Kernels::weigh.
namespace sluice::cpu {
namespace {

constexpr float kNoScore = -__builtin_inff();

/// The last scores, fewer than a vector holds, and behind them what weighs nothing.
Vec load_last(const float* x, std::size_t count) noexcept {
  alignas(64) float lanes[kWidth];
  for (std::size_t j = 0; j < kWidth; ++j) lanes[j] = j < count ? x[j] : kNoScore;
  return Simd::load(lanes);
}

void weigh(const float* x, std::size_t count, float top, float* out) noexcept {
  if (top - top != 0.f) {  // The difference of equal ones would be NaN; what is below weighs nothing.
    for (std::size_t i = 0; i < count; ++i) out[i] = x[i] == top ? 1.f : x[i] < top ? 0.f : x[i] - top;
    return;
  }
  const auto weight = [top](Vec values) { return exp_negative(Simd::sub(values, Simd::set(top))); };
  std::size_t i = 0;
  for (; i + kWidth <= count; i += kWidth) Simd::store(out + i, weight(Simd::load(x + i)));
  if (i == count) return;
  alignas(64) float lanes[kWidth];
  Simd::store(lanes, weight(load_last(x + i, count - i)));
  for (std::size_t j = 0; i + j < count; ++j) out[i + j] = lanes[j];
}

}  // namespace
}  // namespace sluice::cpu
