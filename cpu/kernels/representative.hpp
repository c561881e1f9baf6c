#pragma once

#include "cpu/kernels/prefill.hpp"

namespace sluice::cpu {
namespace {

/// Rows of weights have a vector of zeros on either side, so that a vector along the diagonals may begin before a row
/// and end behind it. Neighbouring rows share theirs.
constexpr std::uint32_t kWeightPad = 16;
constexpr std::uint32_t kWeightStride = kPrefillKeys + kWeightPad;

struct RepresentativeScratch {
  explicit RepresentativeScratch(const RepresentativeRows& args) noexcept
      : padded(args.scratch), weights(padded + kWeightPad), keys(weights + kPrefillBlock * kWeightStride) {}
  float* padded;
  float* weights;  ///< [kPrefillBlock, kWeightStride]
  float* keys;     ///< [head_dim, kPrefillKeys]
};

/// NaN and -inf become the lowest, +inf the highest: differences of scores are numbers or -inf.
inline Vec clean(Vec scores) noexcept { return Simd::min(Simd::max(scores, Simd::set(kLowest)), Simd::set(-kLowest)); }

/// Scores of one head's rows with the packed block of keys from `key0` on; the lowest where a row may not see the key.
inline void score_block(const RepresentativeRows& args, std::uint32_t head, std::uint32_t key0,
                        const RepresentativeScratch& scratch) noexcept {
  for (std::uint32_t r = 0; r < args.rows; ++r) {
    for (std::uint32_t j = 0; j < kPrefillKeys; ++j) scratch.weights[std::size_t{r} * kWeightStride + j] = 0.f;
  }
  multiply_add({.a = args.q + std::size_t{head} * kPrefillBlock * args.head_dim,
                .b = scratch.keys,
                .c = scratch.weights,
                .a_stride = args.head_dim,
                .b_stride = kPrefillKeys,
                .c_stride = kWeightStride,
                .inner = args.head_dim},
               args.rows, kPrefillKeys);
  for (std::uint32_t r = 0; r < args.rows && args.first + r < key0 + kPrefillKeys - 1; ++r) {
    const std::uint32_t visible = args.first + r < key0 ? 0 : args.first + r - key0 + 1;
    for (std::uint32_t j = visible; j < kPrefillKeys; ++j) {
      scratch.weights[std::size_t{r} * kWeightStride + j] = kLowest;
    }
  }
}

/// Means over each block of 128, added up from the packed blocks of 64.
inline void add_key_means(const RepresentativeRows& args, std::uint32_t key0, const float* keys) noexcept {
  const std::uint32_t block = key0 / kPrefillBlock;
  const std::uint32_t left = args.key_end - block * kPrefillBlock;
  const float share = 1.f / static_cast<float>(left < kPrefillBlock ? left : kPrefillBlock);
  float* const means = args.key_means + std::size_t{block - args.key_begin / kPrefillBlock} * args.head_dim;
  for (std::uint32_t c = 0; c < args.head_dim; ++c) {
    Vec sum = Simd::set(0.f);
    for (std::uint32_t j = 0; j < kPrefillKeys; j += kWidth) {
      sum = Simd::add(sum, Simd::load(keys + std::size_t{c} * kPrefillKeys + j));
    }
    alignas(64) float lanes[kWidth];
    Simd::store(lanes, Simd::fold_add<1>(sum));
    means[c] = (key0 % kPrefillBlock == 0 ? 0.f : means[c]) + lanes[0] * share;
  }
}

/// f(key0, head) for every block of 64 keys, packed before, and every head, whose scores are in scratch.weights;
/// before(key0) once per block.
template <DType kType, class Before, class F>
inline void for_each_scored(const RepresentativeRows& args, const RepresentativeScratch& scratch, Before&& before,
                            F&& f) {
  const PageRows pages{.pages = args.pages, .page_tokens = args.page_tokens, .head_dim = args.head_dim};
  for (std::uint32_t key0 = args.key_begin; key0 < args.key_end; key0 += kPrefillKeys) {
    const std::uint32_t left = args.key_end - key0;
    pack_keys<kType>(pages, key0, left < kPrefillKeys ? left : kPrefillKeys, scratch.keys, nullptr);
    before(key0);
    for (std::uint32_t head = 0; head < args.heads; ++head) {
      score_block(args, head, key0, scratch);
      f(key0, head);
    }
  }
}

inline void add_mass(const float* scores, float& top, float& mass) noexcept {
  Vec new_top = Simd::set(top);
  for (std::uint32_t j = 0; j < kPrefillKeys; j += kWidth) new_top = Simd::max(clean(Simd::load(scores + j)), new_top);
  new_top = Simd::fold_max<1>(new_top);
  Vec sum = Simd::set(0.f);
  for (std::uint32_t j = 0; j < kPrefillKeys; j += kWidth) {
    sum = Simd::add(sum, exp_negative(Simd::sub(clean(Simd::load(scores + j)), new_top)));
  }
  alignas(64) float lanes[3][kWidth];
  Simd::store(lanes[0], new_top);
  Simd::store(lanes[1], exp_negative(Simd::sub(Simd::set(top), new_top)));
  Simd::store(lanes[2], Simd::fold_add<1>(sum));
  top = lanes[0][0];
  // As long as nothing but the lowest was seen, there is nothing.
  mass = top == kLowest ? 0.f : mass * lanes[1][0] + lanes[2][0];
}

template <DType kType>
void representative_masses(const RepresentativeRows& args) noexcept {
  const RepresentativeScratch scratch(args);
  for (std::uint32_t i = 0; i < args.heads * kPrefillBlock; ++i) {
    args.top[i] = kLowest;
    args.mass[i] = 0.f;
  }
  for_each_scored<kType>(
      args, scratch, [&](std::uint32_t key0) { add_key_means(args, key0, scratch.keys); },
      [&](std::uint32_t, std::uint32_t head) {
        for (std::uint32_t r = 0; r < args.rows; ++r) {
          const std::uint32_t row = head * kPrefillBlock + r;
          add_mass(scratch.weights + std::size_t{r} * kWeightStride, args.top[row], args.mass[row]);
        }
      });
}

/// Scores become attention; returns its sums over the rows in `columns` [kPrefillKeys].
inline void attend_block(const RepresentativeRows& args, std::uint32_t head, float* weights, float* columns) noexcept {
  constexpr std::uint32_t kVecs = kPrefillKeys / kWidth;
  Vec sums[kVecs];
  for (std::uint32_t v = 0; v < kVecs; ++v) sums[v] = Simd::set(0.f);
  for (std::uint32_t r = 0; r < args.rows; ++r) {
    float* const row = weights + std::size_t{r} * kWeightStride;
    const Vec top = Simd::set(args.top[head * kPrefillBlock + r]);
    const Vec share = Simd::set(args.mass[head * kPrefillBlock + r]);
    for (std::uint32_t v = 0; v < kVecs; ++v) {
      const Vec score = clean(Simd::load(row + v * kWidth));
      const Vec weight = Simd::mul(share, exp_negative(Simd::sub(score, top)));
      Simd::store(row + v * kWidth, weight);
      sums[v] = Simd::add(sums[v], weight);
    }
  }
  for (std::uint32_t v = 0; v < kVecs; ++v) Simd::store(columns + v * kWidth, sums[v]);
}

/// Adds up the weights along the diagonals: diagonal d has the keys j = d + r - 127 of the block.
inline void add_diagonals(const float* weights, std::uint32_t rows, float* diagonals) noexcept {
  constexpr int kLast = kPrefillBlock - 1;
  constexpr int kStride = kWeightStride;
  for (int d = 0; d < kLast + static_cast<int>(kPrefillKeys); d += kWidth) {
    // Rows in which any of the lanes d .. d + kWidth - 1 is a key of the block.
    const int from = kLast - d - static_cast<int>(kWidth) + 1;
    const int to = kLast - d + static_cast<int>(kPrefillKeys);
    const int end = to < static_cast<int>(rows) ? to : static_cast<int>(rows);
    Vec even = Simd::load(diagonals + d);
    Vec odd = Simd::set(0.f);
    int r = from > 0 ? from : 0;
    const float* at = weights + (r * kStride + d + r - kLast);
    for (; r + 1 < end; r += 2, at += 2 * (kStride + 1)) {
      even = Simd::add(even, Simd::load(at));
      odd = Simd::add(odd, Simd::load(at + kStride + 1));
    }
    if (r < end) even = Simd::add(even, Simd::load(at));
    Simd::store(diagonals + d, Simd::add(even, odd));
  }
}

template <DType kType>
void representative_sums(const RepresentativeRows& args) noexcept {
  const RepresentativeScratch scratch(args);
  for (std::uint32_t i = 0; i < kWeightPad + kPrefillBlock * kWeightStride; ++i) scratch.padded[i] = 0.f;
  const std::uint64_t diagonals = representative_diagonals(args.key_end - args.key_begin);
  for (std::uint64_t i = 0; i < args.heads * diagonals; ++i) args.diagonals[i] = 0.f;
  for_each_scored<kType>(
      args, scratch, [](std::uint32_t) {},
      [&](std::uint32_t key0, std::uint32_t head) {
        const std::uint32_t at = key0 - args.key_begin;
        attend_block(args, head, scratch.weights, args.columns + head * args.column_stride + at);
        add_diagonals(scratch.weights, args.rows, args.diagonals + head * diagonals + at);
      });
}

}  // namespace
}  // namespace sluice::cpu
