#pragma once

#include "cpu/kernels/rows.hpp"

namespace sluice::cpu {
namespace {

// The products of prefill are written in the same vector class as everything else, not in Eigen: Eigen's
// inline templates have external linkage, and per-instruction-set copies of them would be merged by the linker.

/// C[rows, columns] += A[rows, inner] B[inner, columns]; all row-major. `columns` is a multiple of 16.
struct Product {
  const float* a = nullptr;
  const float* b = nullptr;
  float* c = nullptr;
  std::uint32_t a_stride = 0;
  std::uint32_t b_stride = 0;
  std::uint32_t c_stride = 0;
  std::uint32_t inner = 0;
};

template <std::uint32_t kRows, std::uint32_t kVecs>
inline void product_tile(const Product& x, std::uint32_t row, std::uint32_t column) noexcept {
  const float* const a = x.a + std::size_t{row} * x.a_stride;
  const float* b = x.b + column;
  float* const c = x.c + std::size_t{row} * x.c_stride + column;
  Vec sums[kRows][kVecs];
#pragma GCC unroll 8
  for (std::uint32_t r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
    for (std::uint32_t v = 0; v < kVecs; ++v) sums[r][v] = Simd::load(c + std::size_t{r} * x.c_stride + v * kWidth);
  }
  for (std::uint32_t i = 0; i < x.inner; ++i, b += x.b_stride) {
    Vec columns[kVecs];
#pragma GCC unroll 8
    for (std::uint32_t v = 0; v < kVecs; ++v) columns[v] = Simd::load(b + v * kWidth);
#pragma GCC unroll 8
    for (std::uint32_t r = 0; r < kRows; ++r) {
      const Vec factor = Simd::set(a[std::size_t{r} * x.a_stride + i]);
#pragma GCC unroll 8
      for (std::uint32_t v = 0; v < kVecs; ++v) sums[r][v] = Simd::fma(factor, columns[v], sums[r][v]);
    }
  }
#pragma GCC unroll 8
  for (std::uint32_t r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
    for (std::uint32_t v = 0; v < kVecs; ++v) Simd::store(c + std::size_t{r} * x.c_stride + v * kWidth, sums[r][v]);
  }
}

template <std::uint32_t kRows, std::uint32_t kVecs>
inline void product_rows(const Product& x, std::uint32_t row, std::uint32_t rows, std::uint32_t column) noexcept {
  for (; row + kRows <= rows; row += kRows) product_tile<kRows, kVecs>(x, row, column);
  if constexpr (kRows > 1) product_rows<kRows / 2, kVecs>(x, row, rows, column);
}

template <std::uint32_t kVecs>
inline void product_columns(const Product& x, std::uint32_t rows, std::uint32_t column, std::uint32_t columns) noexcept {
  for (; column + kVecs * kWidth <= columns; column += kVecs * kWidth) {
    product_rows<Simd::kGemmRows, kVecs>(x, 0, rows, column);
  }
  if constexpr (kVecs > 1) product_columns<kVecs / 2>(x, rows, column, columns);
}

inline void multiply_add(const Product& x, std::uint32_t rows, std::uint32_t columns) noexcept {
  product_columns<Simd::kGemmVecs>(x, rows, 0, columns);
}

/// The parts of the scratch memory.
struct PrefillScratch {
  explicit PrefillScratch(const PrefillRows& args) noexcept
      : weights(args.scratch),
        keys(weights + std::size_t{args.rows} * kPrefillKeys),
        values(keys + std::size_t{kPrefillKeys} * args.head_dim),
        top(values + std::size_t{kPrefillKeys} * args.head_dim),
        mass(top + args.rows) {}
  float* weights;  ///< [rows, kPrefillKeys]
  float* keys;     ///< [head_dim, kPrefillKeys]
  float* values;   ///< [kPrefillKeys, head_dim]
  float* top;      ///< [rows]
  float* mass;     ///< [rows]
};

/// Rows of a list of pages; row 0 is the first of the first page.
struct PageRows {
  const std::byte* const* pages = nullptr;
  std::uint32_t page_tokens = 0;
  std::uint32_t head_dim = 0;
  std::uint64_t v_offset = 0;  ///< bytes from a token's K row to its V row
};

/// Widens `count` keys from row `first` on, once for all queries: `keys` becomes [head_dim, kPrefillKeys], 0 where keys
/// are missing; `values` [kPrefillKeys, head_dim], if that is not null.
template <DType kType>
inline void pack_keys(const PageRows& from, std::uint32_t first, std::uint32_t count, float* keys,
                      float* values) noexcept {
  const std::size_t row_bytes = std::size_t{from.head_dim} * kElementBytes<kType>;
  const std::size_t scales_offset = 2 * row_bytes * from.page_tokens;
  for (std::uint32_t j = 0; j < kPrefillKeys; ++j) {
    if (j >= count) {
      for (std::uint32_t c = 0; c < from.head_dim; ++c) keys[std::size_t{c} * kPrefillKeys + j] = 0.f;
      continue;
    }
    const std::uint32_t at = first + j;
    const std::byte* const page = from.pages[at / from.page_tokens];
    const std::byte* const k = page + at % from.page_tokens * row_bytes;
    const auto* const scales = reinterpret_cast<const float*>(page + scales_offset);
    const std::size_t scale = std::size_t{2} * (at % from.page_tokens);
    for (std::uint32_t c = 0; c < from.head_dim; c += kWidth) {
      alignas(64) float lanes[kWidth];
      Simd::store(lanes, unfold<kType>(Simd::load_as<kType>(k + std::size_t{c} * kElementBytes<kType>), scales, scale));
      for (std::uint32_t i = 0; i < kWidth; ++i) keys[std::size_t{c + i} * kPrefillKeys + j] = lanes[i];
      if (values == nullptr) continue;
      const std::byte* const v = k + from.v_offset + std::size_t{c} * kElementBytes<kType>;
      Simd::store(values + std::size_t{j} * from.head_dim + c,
                  unfold<kType>(Simd::load_as<kType>(v), scales, scale + 1));
    }
  }
}

/// One row of scores becomes weights relative to its new maximum; its sums so far are scaled to it. Called for every 64
/// scores, which is too often for a call. Those of [begin, valid) count.
[[gnu::always_inline]] inline void soften_row(float* weights, std::uint32_t begin, std::uint32_t valid, float* out,
                                              std::uint32_t head_dim, float& top, float& mass) noexcept {
  for (std::uint32_t j = 0; j < begin; ++j) weights[j] = -__builtin_inff();
  for (std::uint32_t j = valid; j < kPrefillKeys; ++j) weights[j] = -__builtin_inff();
  const Vec old_top = Simd::set(top);
  Vec new_top = old_top;
  for (std::uint32_t j = 0; j < kPrefillKeys; j += kWidth) new_top = Simd::max(Simd::load(weights + j), new_top);
  new_top = Simd::fold_max<1>(new_top);
  Vec sum = Simd::set(0.f);
  for (std::uint32_t j = 0; j < kPrefillKeys; j += kWidth) {
    const Vec p = exp_negative(Simd::sub(Simd::load(weights + j), new_top));
    Simd::store(weights + j, p);
    sum = Simd::add(sum, p);
  }
  alignas(64) float lanes[3][kWidth];
  const Vec scale = exp_negative(Simd::sub(old_top, new_top));
  Simd::store(lanes[0], new_top);
  Simd::store(lanes[1], scale);
  Simd::store(lanes[2], Simd::fold_add<1>(sum));
  if (lanes[0][0] != top) {
    for (std::uint32_t c = 0; c < head_dim; c += kWidth) Simd::store(out + c, Simd::mul(Simd::load(out + c), scale));
  }
  mass = mass * lanes[1][0] + lanes[2][0];
  top = lanes[0][0];
}

/// Rows [row0, row_end) of the queries: those that may see some key of a block.
struct SeeingRows {
  std::uint32_t row0 = 0;
  std::uint32_t row_end = 0;
};

inline SeeingRows rows_that_see(const PrefillRows& args, std::uint32_t key0, std::uint32_t count) noexcept {
  SeeingRows seeing{.row0 = key0 > args.first ? (key0 - args.first) * args.group : 0, .row_end = args.rows};
  if (args.reach == 0) return seeing;
  // The newest position that sees the block's last key.
  const std::uint64_t newest = std::uint64_t{key0} + count - 1 + args.reach - 1;
  const std::uint64_t end = newest < args.first ? 0 : (newest - args.first + 1) * args.group;
  if (end < seeing.row_end) seeing.row_end = static_cast<std::uint32_t>(end);
  return seeing;
}

/// One block of keys against the queries that may see it.
template <DType kType>
inline void prefill_keys(const PrefillRows& args, std::uint32_t key0, std::uint32_t count, const SeeingRows& seeing,
                         const PrefillScratch& scratch) noexcept {
  const std::uint32_t row0 = seeing.row0;
  const std::uint32_t rows = seeing.row_end - row0;
  float* const out = args.out + std::size_t{row0} * args.head_dim;
  pack_keys<kType>({.pages = args.pages,
                    .page_tokens = args.page_tokens,
                    .head_dim = args.head_dim,
                    .v_offset = args.v_offset},
                   key0 - args.key_begin, count, scratch.keys, scratch.values);
  for (std::size_t i = 0; i < std::size_t{rows} * kPrefillKeys; ++i) scratch.weights[i] = 0.f;
  multiply_add({.a = args.q + std::size_t{row0} * args.head_dim,
                .b = scratch.keys,
                .c = scratch.weights,
                .a_stride = args.head_dim,
                .b_stride = kPrefillKeys,
                .c_stride = kPrefillKeys,
                .inner = args.head_dim},
               rows, kPrefillKeys);
  for (std::size_t i = 0; args.softcap != 0.f && i < std::size_t{rows} * kPrefillKeys; i += kWidth)
    Simd::store(scratch.weights + i, soft_cap(Simd::load(scratch.weights + i), args.softcap));
  for (std::uint32_t r = 0; r < rows; ++r) {
    const std::uint32_t visible = args.first + (row0 + r) / args.group - key0 + 1;
    const std::uint32_t begin = args.reach != 0 && visible > args.reach ? visible - args.reach : 0;
    soften_row(scratch.weights + std::size_t{r} * kPrefillKeys, begin, visible < count ? visible : count,
               out + std::size_t{r} * args.head_dim, args.head_dim, scratch.top[row0 + r], scratch.mass[row0 + r]);
  }
  multiply_add({.a = scratch.weights,
                .b = scratch.values,
                .c = out,
                .a_stride = kPrefillKeys,
                .b_stride = args.head_dim,
                .c_stride = args.head_dim,
                .inner = count},
               rows, args.head_dim);
}

inline bool attends_block(const PrefillRows& args, std::uint32_t key) noexcept {
  const std::uint32_t block = key / kPrefillBlock;
  return args.blocks == nullptr || (args.blocks[block / 32] >> block % 32 & 1u) != 0;
}

template <DType kType>
void prefill(const PrefillRows& args) noexcept {
  static_assert(kPrefillBlock % kPrefillKeys == 0);
  const PrefillScratch scratch(args);
  for (std::uint32_t r = 0; r < args.rows; ++r) {
    scratch.top[r] = kLowest;
    scratch.mass[r] = 0.f;
  }
  for (std::size_t i = 0; i < std::size_t{args.rows} * args.head_dim; ++i) args.out[i] = 0.f;
  const std::uint32_t seen = args.first + (args.rows - 1) / args.group + 1;
  const std::uint32_t end = args.key_end < seen ? args.key_end : seen;
  std::uint32_t next = 0;
  for (std::uint32_t key0 = args.key_begin; key0 < end; key0 = next) {
    next = (key0 / kPrefillKeys + 1) * kPrefillKeys;  // Blocks of keys lie on the grid of positions.
    if (!attends_block(args, key0)) continue;
    const std::uint32_t count = (next < end ? next : end) - key0;
    const SeeingRows seeing = rows_that_see(args, key0, count);
    if (seeing.row0 < seeing.row_end) prefill_keys<kType>(args, key0, count, seeing, scratch);
  }
  for (std::uint32_t r = 0; r < args.rows; ++r) {
    float* const out = args.out + std::size_t{r} * args.head_dim;
    const bool empty = scratch.mass[r] == 0.f;
    const Vec scale = Simd::set(empty ? 0.f : 1.f / scratch.mass[r]);
    for (std::uint32_t c = 0; c < args.head_dim; c += kWidth) Simd::store(out + c, Simd::mul(Simd::load(out + c), scale));
    args.lse[r] = empty ? -__builtin_inff() : scratch.top[r] + __builtin_logf(scratch.mass[r]);
  }
}

}  // namespace
}  // namespace sluice::cpu
