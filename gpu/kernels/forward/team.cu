// Rows of a team that attend together: what they choose from, and what some of them see and others do not.

#include "gpu/kernels/e4m3.cuh"
#include "gpu/kernels/forward/describe.cuh"
#include "gpu/kernels/forward/forward.hpp"
#include "gpu/kernels/load.hpp"
#include "gpu/kernels/overlap.cuh"
#include "gpu/kernels/overlap.hpp"
#include "sluice/step/partial.hpp"

namespace sluice::gpu {
namespace {

using namespace forward;

constexpr std::uint32_t kWarp = 32;
constexpr std::uint32_t kAll = 0xffff'ffffu;
constexpr std::uint32_t kThreads = 256;
constexpr std::uint32_t kWarps = kThreads / kWarp;
constexpr std::uint32_t kMaxHeadDim = 256;
constexpr std::uint32_t kLaneDims = kMaxHeadDim / kWarp;  ///< of a lane, every 32nd
constexpr std::uint32_t kWarpHeads = kMaxGroup / kWarps;  ///< of a warp, every 8th
constexpr std::uint32_t kTile = 8;                        ///< tokens in shared memory at once

/// Thread block (x, y): team x, KV head y.
__global__ void __launch_bounds__(kThreads)
    team_kernel(const __grid_constant__ ForwardMemory m, const __grid_constant__ ForwardScratch scratch,
                const __grid_constant__ ForwardLayer layer) {
  detail::wait_for_kernel_before();
  const bool runs = m.state->status == ForwardStatus::running;
  const ForwardRow row = runs ? m.rows[blockIdx.x] : ForwardRow{};
  const std::uint32_t plane = m.plane(layer.layer, blockIdx.y);
  if (threadIdx.x == 0) describe(m, scratch, row.in(layer.layer, m.window), blockIdx.x, blockIdx.y, plane);
  if (row.list == kNone) return;
  const std::uint32_t group = m.shape.group();
  const std::uint64_t first = (std::uint64_t{blockIdx.x} * m.shape.kv_heads + blockIdx.y) * group * m.shape.head_dim;
  for (std::uint32_t i = threadIdx.x; i < group * m.shape.head_dim; i += kThreads) {
    const auto [draft, head] = m.asker(blockIdx.y * group + i / m.shape.head_dim);
    // Drafts that are not there ask what the newest asks, and so choose nothing of their own.
    const std::byte* const q = layer.q.row(row.at + min(draft, row.drafts - 1), head);
    m.q[first + i] = m.far_q[first + i] = load_any(q, i % m.shape.head_dim, layer.q.dtype);
  }
}

/// Some tokens' keys and values.
struct alignas(16) Tile {
  float keys[kTile][kMaxHeadDim];
  float values[kTile][kMaxHeadDim];
};

/// Four channels of a row of K or V, near or far.
__device__ float4 load_channels(const std::byte* row, std::uint32_t channel, DType dtype, float scale) {
  if (dtype == DType::fp8_e4m3) {
    float wide[4];
    detail::widen_codes(__ldcv(reinterpret_cast<const std::uint32_t*>(row + channel)), scale, wide);
    return make_float4(wide[0], wide[1], wide[2], wide[3]);
  }
  const uint2 words = __ldcv(reinterpret_cast<const uint2*>(row + 2 * channel));
  const float2 low =
      dtype == DType::f16 ? detail::widen_word<DType::f16>(words.x) : detail::widen_word<DType::bf16>(words.x);
  const float2 high =
      dtype == DType::f16 ? detail::widen_word<DType::f16>(words.y) : detail::widen_word<DType::bf16>(words.y);
  return make_float4(low.x, low.y, high.x, high.y);
}

/// Tokens [first, first + count) of an edge, from where they lie near if they do. All threads.
__device__ void load_tile(const ForwardMemory& m, const ForwardRow& row, const ForwardEdge& edge, std::uint32_t plane,
                          std::uint32_t first, std::uint32_t count, Tile& tile) {
  const std::uint32_t quads = m.shape.head_dim / 4;
  for (std::uint32_t i = threadIdx.x; i < count * 2 * quads; i += kThreads) {
    const std::uint32_t t = i / (2 * quads);
    const std::uint32_t half = i / quads % 2;  // Of K, of V.
    const std::uint32_t channel = i % quads * 4;
    const std::uint32_t at = m.row_of(row.list, edge.token(first + t));
    const std::uint32_t place = m.near_row_of(plane, at);
    float4 channels;
    if (place != kNone) {
      channels = load_channels(m.near_key(plane, place) + half * m.layout.half_bytes(), channel, m.layout.dtype, 1.f);
    } else {
      float scale = 1.f;
      if (m.far_layout.scaled())
        scale = __ldcv(reinterpret_cast<const float*>(m.far_scale_bytes(plane, at)) + half);
      channels =
          load_channels(m.far_key(plane, at) + half * m.far_layout.half_bytes(), channel, m.far_layout.dtype, scale);
    }
    *reinterpret_cast<float4*>((half == 0 ? tile.keys : tile.values)[t] + channel) = channels;
  }
}

/// What a query head has attended so far, in all lanes of a warp; each has its dims of the output.
struct Sum {
  float top = -INFINITY;
  float mass = 0.f;
  float out[kLaneDims] = {};

  __device__ void add(float score, const float* value, std::uint32_t head_dim) {
    if (score == -INFINITY) return;
    const float raised = fmaxf(top, score);  // What is no number leaves the top, and spoils the mass.
    const float before = top == -INFINITY ? 0.f : expf(top - raised);
    const float weight = expf(score - raised);
    top = raised;
    mass = mass * before + weight;
#pragma unroll
    for (std::uint32_t i = 0; i < kLaneDims; ++i) {
      const std::uint32_t c = threadIdx.x % kWarp + kWarp * i;
      if (c < head_dim) out[i] = out[i] * before + weight * value[c];
    }
  }
};

/// A token's score, in all lanes of a warp.
__device__ float score(const ForwardMemory& m, const float* q, const float* key, float scale) {
  float dot = 0.f;
  for (std::uint32_t c = threadIdx.x % kWarp; c < m.shape.head_dim; c += kWarp) dot += q[c] * key[c];
#pragma unroll
  for (std::uint32_t step = 1; step < kWarp; step *= 2) dot += __shfl_xor_sync(kAll, dot, step);
  dot *= scale;
  return m.shape.softcap == 0.f ? dot : m.shape.softcap * tanhf(dot / m.shape.softcap);
}

/// Becomes part of what query head `h` of all has attended near, if that is `any`. All lanes of a warp.
__device__ void add_to_near(const ForwardMemory& m, std::uint64_t h, bool any, const Sum& sum) {
  const float lse = sum.mass == 0.f ? kEmptyLse : sum.top + logf(sum.mass);
  const float before = any ? m.near_lse[h] : kEmptyLse;
  const float top = fmaxf(lse, before);
  const float a = before == kEmptyLse ? 0.f : expf(before - top);
  const float b = lse == kEmptyLse ? 0.f : expf(lse - top);
  float* const near = m.near_out + h * m.shape.head_dim;
#pragma unroll
  for (std::uint32_t i = 0; i < kLaneDims; ++i) {
    const std::uint32_t c = threadIdx.x % kWarp + kWarp * i;
    if (c >= m.shape.head_dim) continue;
    const float value = sum.out[i] / sum.mass;
    near[c] = any ? (a * near[c] + b * value) / (a + b) : value;
  }
  __syncwarp();  // All lanes have read what comes to its place.
  // Keys were attended and weigh nothing that is a number: `merge` says so of what is not above the empty lse.
  const bool numbers = lse > kEmptyLse && (!any || before > kEmptyLse);
  if (threadIdx.x % kWarp == 0) m.near_lse[h] = numbers ? top + logf(a + b) : kEmptyLse;
}

/// Thread block i: team i / kv_heads, KV head i % kv_heads.
__global__ void __launch_bounds__(kThreads)
    edge_kernel(const __grid_constant__ ForwardMemory m, std::uint32_t layer, float scale) {
  __shared__ Tile tile;
  detail::wait_for_kernel_before();
  const ForwardRow& row = m.rows[blockIdx.x / m.shape.kv_heads];
  if (m.state->status != ForwardStatus::running || row.list == kNone) return;
  const ForwardEdge edge = edge_of(row, m.window);
  const std::uint32_t own = m.own_group();
  const std::uint32_t heads = own * edge.drafts;
  const std::uint64_t first_head = std::uint64_t{blockIdx.x} * m.shape.group();
  const std::uint32_t plane = m.plane(layer, blockIdx.x % m.shape.kv_heads);
  Sum sums[kWarpHeads];
  for (std::uint32_t first = 0; first < edge.count(); first += kTile) {
    const std::uint32_t count = min(kTile, edge.count() - first);
    __syncthreads();  // The tile before has been read.
    load_tile(m, row, edge, plane, first, count, tile);
    __syncthreads();
#pragma unroll
    for (std::uint32_t i = 0; i < kWarpHeads; ++i) {
      const std::uint32_t h = threadIdx.x / kWarp + kWarps * i;
      if (h >= heads) break;
      const float* const q = m.q + (first_head + h) * m.shape.head_dim;
#pragma unroll 1
      for (std::uint32_t t = 0; t < count; ++t) {
        // Not read where it is not seen: it may be no number.
        if (edge.sees(h / own, edge.token(first + t)))
          sums[i].add(score(m, q, tile.keys[t], scale), tile.values[t], m.shape.head_dim);
      }
    }
  }
  const bool any = m.near_counts[blockIdx.x] != 0;
#pragma unroll
  for (std::uint32_t i = 0; i < kWarpHeads; ++i) {
    const std::uint32_t h = threadIdx.x / kWarp + kWarps * i;
    if (h < heads) add_to_near(m, first_head + h, any, sums[i]);
  }
}

}  // namespace

void launch_forward_teams(const ForwardMemory& memory, const ForwardScratch& scratch, const ForwardLayer& layer) {
  OverlappingLaunch(dim3(memory.bucket.decode_rows, memory.shape.kv_heads), kThreads, 0,
                    static_cast<cudaStream_t>(layer.stream))
      .run(team_kernel, "launch the kernel that describes teams", memory, scratch, layer);
}

void launch_forward_edge(const ForwardMemory& memory, const ForwardLayer& layer) {
  OverlappingLaunch(memory.bucket.decode_rows * memory.shape.kv_heads, kThreads, 0,
                    static_cast<cudaStream_t>(layer.stream))
      .run(edge_kernel, "launch the kernel of what some rows of a team see", memory, layer.layer,
           memory.shape.score_scale());
}

namespace detail {
void load_forward_team_kernels() {
  load_kernel(team_kernel, "load the kernels of teams");
  load_kernel(edge_kernel, "load the kernels of teams");
}
}  // namespace detail

}  // namespace sluice::gpu
