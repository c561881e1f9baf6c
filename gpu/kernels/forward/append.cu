// How the new keys and values of a layer come in, and what the kernels behind them need to know.

#include <type_traits>

#include "gpu/device/cuda_error.hpp"
#include "gpu/kernels/e4m3.cuh"
#include "gpu/kernels/forward/describe.cuh"
#include "gpu/kernels/forward/forward.hpp"
#include "gpu/kernels/forward/rest_mean.cuh"
#include "gpu/kernels/index/codes.cuh"
#include "gpu/kernels/index/digest.cuh"
#include "gpu/kernels/load.hpp"
#include "gpu/kernels/overlap.cuh"
#include "gpu/kernels/overlap.hpp"
#include "gpu/kernels/prefill/prefill_output.cuh"
#include "sluice/partial.hpp"

namespace sluice::gpu {
namespace {

using namespace forward;

constexpr std::uint32_t kWarp = 32;
constexpr std::uint32_t kMaxHeadDim = 256;
/// Who does what of a thread block, all at once: warps 0 and 1 take a key and a value, those from kQueries on queries,
/// kDescribes says what the kernels behind this one read.
constexpr std::uint32_t kQueries = 2;
constexpr std::uint32_t kDescribes = 4;
constexpr std::uint32_t kThreads = (kDescribes + 1) * kWarp;

/// A row of K or V as a warp has it: four neighbouring elements of each word of a lane, so that what crosses the link
/// goes in whole lines. Requested before it is known where it goes.
struct Row {
  static constexpr std::uint32_t kWords = kMaxHeadDim / 4 / kWarp;
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
  [[nodiscard]] __device__ std::uint32_t word(std::uint32_t w) const { return threadIdx.x % kWarp + w * kWarp; }
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

/// The same of a row with a scale. What lies near and what is kept are the rounded values.
__device__ void put_scaled_row(const Row& row, std::byte* far, float* far_scale, std::byte* near, float* kept) {
  std::uint32_t largest = 0;
#pragma unroll
  for (std::uint32_t w = 0; w < Row::kWords; ++w) {
    const float x[4] = {row.x[w].x, row.x[w].y, row.x[w].z, row.x[w].w};
    for (const float each : x) largest = max(largest, __float_as_uint(each) & 0x7fff'ffffu);
  }
  largest = __reduce_max_sync(0xffff'ffffu, largest);
  const float scale = detail::scale_of(largest);
  const bool finite = scale == scale;
  const float inverse = finite ? detail::inverse_of(scale) : 0.f;
  if (threadIdx.x % kWarp == 0) *far_scale = scale;
#pragma unroll
  for (std::uint32_t w = 0; w < Row::kWords; ++w) {
    if (!row.has(w)) continue;
    const std::uint32_t word = row.word(w);
    const float x[4] = {row.x[w].x, row.x[w].y, row.x[w].z, row.x[w].w};
    std::uint32_t codes = 0;
#pragma unroll
    for (std::uint32_t i = 0; i < 4; ++i) {
      const std::uint32_t code = finite ? detail::code_of_e4m3(__fmul_rn(x[i], inverse)) : E4m3::kNaN;
      codes |= code << (8 * i);
    }
    reinterpret_cast<std::uint32_t*>(far)[word] = codes;
    if (near != nullptr) reinterpret_cast<uint2*>(near)[word] = detail::unfold_codes(codes, scale);
    if (kept == nullptr) continue;
    float wide[4];
    detail::widen_codes(codes, scale, wide);
#pragma unroll
    for (std::uint32_t i = 0; i < 4; ++i) kept[4 * word + i] = wide[i];
  }
}

/// A token's key, by warp 0, or value, by warp 1, to its far page, its near page, if it has one, and, of a key, its
/// codes.
template <DType kType>
__device__ void put_token(const ForwardMemory& m, const Row& values, const ForwardToken& token, std::uint32_t plane) {
  __shared__ float key[kMaxHeadDim];
  const std::uint32_t is_value = threadIdx.x / kWarp;
  const std::uint32_t row = m.row_of(token.list, token.position);
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
  if (is_value != 0) return;
  __syncwarp();
  const Int4Layout copy(m.layout);
  detail::codes_of_row([](std::uint32_t channel) { return key[channel]; },
                       m.codes + m.far_page(plane, block) * copy.page_bytes(), page_row, copy);
}

/// What a list's center is after one more key, see Foresight. By the warp that has the key.
struct Center {
  float4* at = nullptr;  ///< null: there is none
  float4 before[Row::kWords];

  /// Requests it.
  __device__ Center(const Row& key, float* center) : at(reinterpret_cast<float4*>(center)) {
#pragma unroll
    for (std::uint32_t w = 0; w < Row::kWords; ++w) {
      if (at != nullptr && key.has(w)) before[w] = at[key.word(w)];
    }
  }
  __device__ void move(const Row& key) const {
    const auto moved = [](float was, float value) {
      const float is = was + kCenterStep * (value - was);
      return isfinite(is) ? is : 0.f;
    };
#pragma unroll
    for (std::uint32_t w = 0; w < Row::kWords; ++w) {
      if (at != nullptr && key.has(w))
        at[key.word(w)] = {moved(before[w].x, key.x[w].x), moved(before[w].y, key.x[w].y),
                           moved(before[w].z, key.x[w].z), moved(before[w].w, key.x[w].w)};
    }
  }
};

/// Queries of a group, of a row that chooses, to both sides, by the warps for them.
__device__ void put_queries(const ForwardMemory& m, const ForwardLayer& layer, std::uint32_t index, std::uint32_t at,
                            std::uint32_t head) {
  const std::uint32_t group = m.shape.group();
  const std::uint64_t first = (std::uint64_t{index} * m.shape.q_heads + head * group) * m.shape.head_dim;
  const std::uint32_t words = m.shape.head_dim / 4;
#pragma unroll 2
  for (std::uint32_t i = threadIdx.x - kQueries * kWarp; i < group * words; i += (kDescribes - kQueries) * kWarp) {
    const std::byte* const row = layer.q.row(at, head * group + i / words);
    const float4 four = load_four(row, i % words, layer.q.dtype);
    reinterpret_cast<float4*>(m.q + first)[i] = four;
    reinterpret_cast<float4*>(m.far_q + first)[i] = four;
  }
}

/// Queries of a group, of one of a prompt's last tokens, for the policies of the CPU.
__device__ void put_tail(const ForwardMemory& m, const ForwardLayer& layer, std::uint32_t tail, std::uint32_t head) {
  const std::uint32_t without = layer.k.tokens - layer.q.tokens;
  if (blockIdx.x < without) return;
  const std::uint32_t group = m.shape.group();
  const std::uint64_t row = std::uint64_t{layer.layer} * m.tail_rows + tail;
  float* const to = m.tails + (row * m.shape.q_heads + head * group) * m.shape.head_dim;
  for (std::uint32_t i = threadIdx.x; i < group * m.shape.head_dim; i += kThreads) {
    const std::byte* const from = layer.q.row(blockIdx.x - without, head * group + i / m.shape.head_dim);
    to[i] = load_any(from, i % m.shape.head_dim, layer.q.dtype);
  }
}

/// Outputs of a group, of a row that nothing else writes.
__device__ void fill_out(const ForwardMemory& m, const ForwardLayer& layer, std::uint32_t at, std::uint32_t head,
                         float value, float lse) {
  const std::uint32_t group = m.shape.group();
  for (std::uint32_t i = threadIdx.x; i < group * m.shape.head_dim; i += kThreads) {
    const std::uint32_t h = head * group + i / m.shape.head_dim;
    detail::store_number(layer.out.row(at, h), layer.out.dtype, i % m.shape.head_dim, value);
    if (layer.lse != nullptr && i % m.shape.head_dim == 0) layer.lse[std::uint64_t{at} * m.shape.q_heads + h] = lse;
  }
}

/// Thread block (x, y): packed row x, KV head y; and row x of those that choose. Behind the only row the means of it.
template <DType kType>
__global__ void __launch_bounds__(kThreads, 1)
    append_kernel(const __grid_constant__ ForwardMemory m, const __grid_constant__ ForwardScratch scratch,
                  const __grid_constant__ ForwardLayer layer) {
  detail::wait_for_kernel_before();
  const std::uint32_t head = blockIdx.y;
  if (const std::uint32_t rows = m.bucket.rows(); blockIdx.x >= rows)
    return put_means<kType, kThreads>(m, layer.layer, head, blockIdx.x - rows);
  const std::uint32_t warp = threadIdx.x / kWarp;
  const std::uint32_t plane = m.plane(layer.layer, head);
  const bool attends = layer.out.tokens != 0;
  // Of teams another kernel describes what they choose from.
  const bool describes = attends && m.bucket.drafts == 1 && blockIdx.x < m.bucket.decode_rows;
  // A load takes a good part of what this kernel does: keys and values are requested before it is known where they go.
  Row values;
  if (warp < kQueries) values = Row(warp == 0 ? layer.k : layer.v, blockIdx.x, head);
  const Foresight foresight = describes && warp == 0 ? foresight_of(m, scratch, layer.layer) : Foresight{};
  const std::uint64_t list = blockIdx.x * m.shape.kv_heads + head;
  const Center center(values, foresight.centers == nullptr ? nullptr : foresight.centers + list * m.shape.head_dim);
  const ForwardStatus status = m.state->status;
  const ForwardToken token = m.tokens[blockIdx.x];
  ForwardRow row = describes ? m.rows[blockIdx.x] : ForwardRow{};
  const std::uint32_t chooses = row.list;
  const std::uint32_t at = row.at;
  if (status != ForwardStatus::running) {
    const float nan = __int_as_float(0x7fc0'0000);
    if (attends) fill_out(m, layer, blockIdx.x, head, nan, nan);
    // The kernels behind this one run all the same: on nothing, not on what another bucket has left.
    if (describes && threadIdx.x == kDescribes * kWarp) describe(m, scratch, ForwardRow{}, blockIdx.x, head, plane);
    return;
  }
  if (warp < kQueries && token.list != kNone) {
    put_token<kType>(m, values, token, plane);
    // Of rows whose key this block has: others' centers stay, and may be those of strangers, which only costs time.
    if (chooses != kNone && at == blockIdx.x) center.move(values);
  } else if (threadIdx.x == kDescribes * kWarp && describes) {
    row.drafts = 0;  // As it is; to know that takes fewer registers.
    describe(m, scratch, row.in(layer.layer, m.window), blockIdx.x, head, plane);
  } else if (warp >= kQueries && warp < kDescribes && chooses != kNone) {
    put_queries(m, layer, blockIdx.x, at, head);
  }
  if (token.list == kNone) {
    if (attends) fill_out(m, layer, blockIdx.x, head, 0.f, kEmptyLse);
  } else if (token.tail != kNone) {
    put_tail(m, layer, token.tail, head);
  }
}

/// Thread block (x, y): packed row x, KV head y. The digest of the page that its token has filled: the others of that
/// page may have come with the same launch, so that it takes one of its own.
template <DType kType>
__global__ void __launch_bounds__(kWarp)
    digest_rows_kernel(const __grid_constant__ ForwardMemory m, std::uint32_t layer) {
  detail::wait_for_kernel_before();
  if (m.state->status != ForwardStatus::running) return;
  const ForwardToken token = m.tokens[blockIdx.x];
  if (token.list == kNone || ((token.position + 1) & (m.layout.page_tokens - 1)) != 0) return;
  const std::uint32_t block = m.row_of(token.list, token.position) >> m.page_shift;
  const std::uint32_t plane = m.plane(layer, blockIdx.y);
  detail::digest_page<kType>(m.far_block(plane, block), m.digest_of(plane, block), m.digest, m.far_layout, threadIdx.x);
}

/// use(std::integral_constant) of the type of far rows.
template <class Use>
void with_far_type(DType dtype, const Use& use) {
  if (dtype == DType::bf16) return use(std::integral_constant<DType, DType::bf16>{});
  if (dtype == DType::f16) return use(std::integral_constant<DType, DType::f16>{});
  use(std::integral_constant<DType, DType::fp8_e4m3>{});
}

}  // namespace

void launch_forward_append(const ForwardMemory& memory, const ForwardScratch& scratch, const ForwardLayer& layer) {
  const dim3 grid(memory.bucket.rows(), memory.shape.kv_heads);
  const bool apart = means_apart(memory.bucket);
  const dim3 with_means(grid.x + (memory.keeps_means && !apart ? kMeanParts : 0), grid.y);
  const auto stream = static_cast<cudaStream_t>(layer.stream);
  with_far_type(memory.far_layout.dtype, [&](auto type) {
    OverlappingLaunch(with_means, kThreads, 0, stream)
        .run(append_kernel<type()>, "launch the append kernel of a forward", memory, scratch, layer);
    if (memory.keeps_means && apart)
      OverlappingLaunch(grid, kWarp, 0, stream)
          .run(mean_rows_kernel<type()>, "launch the kernel of a forward's mean values", memory, layer.layer);
    if (memory.digests == nullptr) return;
    OverlappingLaunch(grid, kWarp, 0, stream)
        .run(digest_rows_kernel<type()>, "launch the digest kernel of a forward", memory, layer.layer);
  });
}

namespace detail {
void load_forward_append_kernels() {
  for (const DType dtype : {DType::bf16, DType::f16, DType::fp8_e4m3}) {
    with_far_type(dtype, [&](auto type) {
      load_kernel(append_kernel<type()>, "load the kernels of a forward");
      load_kernel(digest_rows_kernel<type()>, "load the kernels of a forward");
      load_kernel(mean_rows_kernel<type()>, "load the kernels of a forward");
    });
  }
}
}  // namespace detail

}  // namespace sluice::gpu
