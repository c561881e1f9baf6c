#pragma once

#include "cpu/kernels/rows.hpp"

/// What scores weigh, each and together: see Kernels::weigh, largest and mass.
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

float largest(const float* x, std::size_t count) noexcept {
  alignas(64) float lanes[kWidth];
  for (float& lane : lanes) lane = kNoScore;
  Vec most = Simd::load(lanes);
  std::size_t i = 0;
  for (; i + kWidth <= count; i += kWidth) most = Simd::max(Simd::load(x + i), most);  // Of NaN the second one stays.
  Simd::store(lanes, most);
  for (; i < count; ++i) lanes[0] = x[i] > lanes[0] ? x[i] : lanes[0];
  for (const float lane : lanes) lanes[0] = lane > lanes[0] ? lane : lanes[0];
  return lanes[0];
}

double mass(const float* x, std::size_t count, float top) noexcept {
  constexpr std::size_t kBlock = 32 * kWidth;  // So few are added up as float.
  alignas(64) float lanes[kWidth];
  double sum = 0.0;
  const auto add = [&](Vec values) {
    Simd::store(lanes, values);
    for (const float lane : lanes) sum += static_cast<double>(lane);
  };
  const auto exponential = [top](Vec values) {
    return exp_negative(Simd::max(Simd::sub(values, Simd::set(top)), Simd::set(-200.f)));  // Of NaN, too.
  };
  for (std::size_t begin = 0; begin < count; begin += kBlock) {
    const std::size_t end = count - begin < kBlock ? count : begin + kBlock;
    Vec block = Simd::set(0.f);
    std::size_t i = begin;
    for (; i + kWidth <= end; i += kWidth) block = Simd::add(block, exponential(Simd::load(x + i)));
    if (i < end) block = Simd::add(block, exponential(load_last(x + i, end - i)));
    add(block);
  }
  return sum;
}

}  // namespace
}  // namespace sluice::cpu
