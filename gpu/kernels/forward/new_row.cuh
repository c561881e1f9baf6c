#pragma once

#include "gpu/kernels/e4m3.cuh"
#include "gpu/kernels/forward/describe.cuh"
#include "gpu/kernels/forward/forward.hpp"
#include "gpu/kernels/index/codes.cuh"
#include "gpu/kernels/index/key_mean.cuh"
#include "gpu/kernels/prefill/prefill_output.cuh"

/// A new key or value as a warp has it, and where it goes.
namespace sluice::gpu::forward {

inline constexpr std::uint32_t kRowLanes = 32;
using detail::kMostHeadDim;

/// A row of K or V as a warp has it: four neighbouring elements of each word of a lane, so that what crosses the link
/// goes in whole lines. Requested before it is known where it goes.
struct Row {
  static constexpr std::uint32_t kWords = kMostHeadDim / 4 / kRowLanes;
  float4 x[kWords] = {};
  std::uint32_t words = 0;

  Row() = default;
  /// A launch may have more rows than there are.
  __device__ Row(const TensorView& in, std::uint32_t row, std::uint32_t head)
      : words(row < in.tokens ? in.head_dim / 4 : 0) {
    const std::byte* const from = in.row(row, head);
#pragma unroll
    for (std::uint32_t w = 0; w < kWords; ++w) {
      if (has(w)) x[w] = load_four(from, word(w), in.dtype);
    }
  }
  [[nodiscard]] __device__ std::uint32_t word(std::uint32_t w) const { return threadIdx.x % kRowLanes + w * kRowLanes; }
  [[nodiscard]] __device__ bool has(std::uint32_t w) const { return word(w) < words; }
};

/// To a row's far page and, if there is one, its near page. `kept`, unless null, receives what a reader of the page
/// will see.
template <DType kType>
__device__ void put_row(const Row& row, std::byte* far, std::byte* near, float* kept) {
#pragma unroll
  for (std::uint32_t w = 0; w < Row::kWords; ++w) {
    if (!row.has(w)) continue;
    const std::uint32_t word = row.word(w);
    const float x[4] = {row.x[w].x, row.x[w].y, row.x[w].z, row.x[w].w};
    alignas(8) std::byte rounded[8];
#pragma unroll
    for (std::uint32_t i = 0; i < 4; ++i) detail::store_element<kType>(rounded + 2 * i, x[i]);
    const uint2 packed = *reinterpret_cast<const uint2*>(rounded);
    reinterpret_cast<uint2*>(far)[word] = packed;
    if (near != nullptr) reinterpret_cast<uint2*>(near)[word] = packed;
    if (kept == nullptr) continue;
#pragma unroll
    for (std::uint32_t i = 0; i < 4; ++i) kept[4 * word + i] = detail::load_element<kType>(rounded + 2 * i);
  }
}

/// A row with a scale, and its codes of 8 bits: four of each word of a lane.
struct ScaledRow {
  float scale;
  std::uint32_t codes[Row::kWords];

  __device__ explicit ScaledRow(const Row& row) {
    std::uint32_t largest = 0;
#pragma unroll
    for (std::uint32_t w = 0; w < Row::kWords; ++w) {
      const float x[4] = {row.x[w].x, row.x[w].y, row.x[w].z, row.x[w].w};
      for (const float each : x) largest = max(largest, __float_as_uint(each) & 0x7fff'ffffu);
    }
    largest = __reduce_max_sync(0xffff'ffffu, largest);
    scale = detail::scale_of(largest);
    const bool finite = scale == scale;
    const float inverse = finite ? detail::inverse_of(scale) : 0.f;
#pragma unroll
    for (std::uint32_t w = 0; w < Row::kWords; ++w) {
      const float x[4] = {row.x[w].x, row.x[w].y, row.x[w].z, row.x[w].w};
      codes[w] = 0;
#pragma unroll
      for (std::uint32_t i = 0; i < 4; ++i) {
        const std::uint32_t code = finite ? detail::code_of_e4m3(__fmul_rn(x[i], inverse)) : E4m3::kNaN;
        codes[w] |= code << (8 * i);
      }
    }
  }
};

/// The same of a row with a scale. What lies near and what is kept are the rounded values.
__device__ inline void put_scaled_row(const Row& row, std::byte* far, float* far_scale, std::byte* near, float* kept) {
  const ScaledRow scaled(row);
  if (threadIdx.x % kRowLanes == 0) *far_scale = scaled.scale;
#pragma unroll
  for (std::uint32_t w = 0; w < Row::kWords; ++w) {
    if (!row.has(w)) continue;
    const std::uint32_t word = row.word(w);
    const std::uint32_t codes = scaled.codes[w];
    reinterpret_cast<std::uint32_t*>(far)[word] = codes;
    if (near != nullptr) reinterpret_cast<uint2*>(near)[word] = detail::unfold_codes(codes, scaled.scale);
    if (kept == nullptr) continue;
    float wide[4];
    detail::widen_codes(codes, scaled.scale, wide);
#pragma unroll
    for (std::uint32_t i = 0; i < 4; ++i) kept[4 * word + i] = wide[i];
  }
}

/// A token among the packed rows of its forward, of which those of a sequence are neighbours.
struct PackedToken {
  ForwardToken token;
  std::uint32_t index;

  /// Whether the sequence's token at `position` comes with the same forward.
  [[nodiscard]] __device__ bool brings(const ForwardMemory& m, std::uint32_t position) const {
    const std::uint32_t at = row_of(position);  // Of one before the first row it is large.
    if (at >= m.bucket.rows()) return false;
    const ForwardToken other = m.tokens[at];
    return other.list == token.list && other.position == position;
  }
  /// Its packed row.
  [[nodiscard]] __device__ std::uint32_t row_of(std::uint32_t position) const {
    return index - token.position + position;
  }
  /// The first token of the sequence that comes with the forward, which brings `last`, too.
  [[nodiscard]] __device__ std::uint32_t first(const ForwardMemory& m, std::uint32_t last) const {
    std::uint32_t position = 0;
    while (position < last && !brings(m, position)) ++position;
    return position;
  }
};

/// The mean key of a sequence whose first page is made full by the forward: of rows that came before from the far page,
/// of the others as they come in. To `mean`: [head_dim]. A warp.
template <DType kType>
__device__ __noinline__ void mean_of_first_page(const ForwardMemory& m, const TensorView& k, const PackedToken& packed,
                                                std::uint32_t head, std::uint32_t plane, float* mean) {
  const std::uint32_t page_tokens = m.layout.page_tokens;
  const std::uint32_t first = packed.first(m, page_tokens - 1);
  const std::byte* const page = m.far_block(plane, m.list_of(packed.token.list)[0]);
  float sum[Row::kWords][4] = {};
#pragma unroll 4
  for (std::uint32_t position = 0; position < page_tokens; ++position) {
    const Row row(k, position < first ? kNone : packed.row_of(position), head);
    float x[Row::kWords][4];
    if (position < first) {
      const detail::PageKey<kType> key(page, m.far_layout, position);
#pragma unroll
      for (std::uint32_t w = 0; w < Row::kWords; ++w) {
#pragma unroll
        for (std::uint32_t i = 0; i < 4; ++i)
          x[w][i] = 4 * row.word(w) < m.shape.head_dim ? key(4 * row.word(w) + i) : 0.f;
      }
    } else if constexpr (detail::kScaled<kType>) {
      const ScaledRow scaled(row);
#pragma unroll
      for (std::uint32_t w = 0; w < Row::kWords; ++w) detail::widen_codes(scaled.codes[w], scaled.scale, x[w]);
    } else {
#pragma unroll
      for (std::uint32_t w = 0; w < Row::kWords; ++w) {
        const float own[4] = {row.x[w].x, row.x[w].y, row.x[w].z, row.x[w].w};
#pragma unroll
        for (std::uint32_t i = 0; i < 4; ++i) {
          const std::uint32_t bits = kType == DType::f16 ? detail::narrow_f16(own[i]) : detail::narrow_bf16(own[i]);
          x[w][i] = detail::widen_word<kType>(bits).x;
        }
      }
    }
#pragma unroll
    for (std::uint32_t w = 0; w < Row::kWords; ++w) {
#pragma unroll
      for (std::uint32_t i = 0; i < 4; ++i) sum[w][i] = detail::add_key(sum[w][i], x[w][i]);
    }
  }
#pragma unroll
  for (std::uint32_t w = 0; w < Row::kWords; ++w) {
    const std::uint32_t word = threadIdx.x % kRowLanes + w * kRowLanes;
    if (4 * word >= m.shape.head_dim) continue;
#pragma unroll
    for (std::uint32_t i = 0; i < 4; ++i) mean[4 * word + i] = detail::mean_of_keys(sum[w][i], page_tokens);
  }
  __syncwarp();
}

/// The first token behind a first page that its forward has made full: the mean key stays, and what came of the page
/// before is copied again, with it. A warp; `staged`: [head_dim] shared memory.
template <DType kType>
__device__ __noinline__ void keep_mean(const ForwardMemory& m, const PackedToken& packed, std::uint32_t plane,
                                       const detail::HeadLanes& mean, float* staged) {
  const CodeLayout layout = m.code_layout();
  float* const kept = m.key_mean_of(packed.token.list, plane);
  detail::each_channel(layout.head_dim, [&](std::uint32_t i, std::uint32_t channel) { kept[channel] = mean[i]; });
  const std::uint32_t block = m.list_of(packed.token.list)[0];
  const std::uint32_t first = packed.first(m, m.layout.page_tokens - 1);
  std::byte* const copy = m.codes + m.far_page(plane, block) * layout.page_bytes();
  for (std::uint32_t row = 0; row < first; ++row)
    detail::codes_of_row(detail::PageKey<kType>(m.far_block(plane, block), m.far_layout, row), mean, staged, copy, row,
                         layout);
}

/// What a key's copy is made with.
enum class MeanKey : std::uint8_t {
  /// 0: of a sequence without tokens behind its first page, and of layers with windows, whose codes nobody reads, or
  /// where there are no codes
  none,
  kept,  ///< ForwardMemory::key_means has it
  made,  ///< of a page that the forward itself makes full
};
[[nodiscard]] __device__ inline MeanKey mean_key_of(const ForwardMemory& m, const PackedToken& packed) {
  const std::uint32_t page_tokens = m.layout.page_tokens;
  if (m.window != 0 || !m.has_codes()) return MeanKey::none;
  if (packed.brings(m, page_tokens - 1) && packed.brings(m, page_tokens)) return MeanKey::made;
  return packed.token.position < page_tokens ? MeanKey::none : MeanKey::kept;
}

/// A token's key, by warp 0, or value, by warp 1, to its far page, its near page, if it has one, and, of a key, its
/// codes.
template <DType kType>
__device__ void put_token(const ForwardMemory& m, const ForwardLayer& layer, const Row& values,
                          const PackedToken& packed, std::uint32_t head, std::uint32_t plane) {
  __shared__ float key[kMostHeadDim];
  const ForwardToken& token = packed.token;
  const std::uint32_t is_value = threadIdx.x / kRowLanes;
  const std::uint32_t row = m.row_of(token.list, token.position);
  const MeanKey known = is_value == 0 ? mean_key_of(m, packed) : MeanKey::none;
  detail::HeadLanes mean = {};
  if (known != MeanKey::none) {
    if (known == MeanKey::made) mean_of_first_page<kType>(m, layer.k, packed, head, plane, key);
    const float* const from = known == MeanKey::made ? key : m.key_mean_of(token.list, plane);
    detail::each_channel(m.shape.head_dim, [&](std::uint32_t i, std::uint32_t channel) { mean[i] = from[channel]; });
    __syncwarp();  // The key takes its place.
  }
  const std::uint32_t block = row >> m.page_shift;
  const std::uint32_t page_row = row & (m.layout.page_tokens - 1);
  const std::uint32_t place = m.near_row_of(plane, row);
  std::byte* const near = place == kNone ? nullptr : m.near_key(plane, place) + is_value * m.layout.half_bytes();
  std::byte* const page = m.far_block(plane, block);
  std::byte* const far = page + page_row * m.far_layout.row_bytes() + is_value * m.far_layout.half_bytes();
  float* const kept = is_value == 0 ? key : nullptr;
  if constexpr (detail::kScaled<kType>) {
    auto* const scales = reinterpret_cast<float*>(page + m.far_layout.scales_offset()) + 2 * page_row;
    put_scaled_row(values, far, scales + is_value, near, kept);
  } else {
    put_row<kType>(values, far, near, kept);
  }
  if (is_value != 0 || !m.has_codes()) return;
  __syncwarp();
  const CodeLayout copy = m.code_layout();
  detail::codes_of_row([](std::uint32_t channel) { return key[channel]; }, mean, key,
                       m.codes + m.far_page(plane, block) * copy.page_bytes(), page_row, copy);
  if (known == MeanKey::made && token.position == m.layout.page_tokens)
    keep_mean<kType>(m, packed, plane, mean, key);
}

}  // namespace sluice::gpu::forward
