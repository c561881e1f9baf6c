#pragma once

#include "gpu/kernels/forward/new_row.cuh"
#include "sluice/step/partial.hpp"

/// What a thread block does of `append`: a row's key and value of a KV head come in, and what the kernels behind it
/// need to know of the row is written down.
namespace sluice::gpu::forward {

/// Who does what of a thread block, all at once: warps 0 and 1 take a key and a value, those from kQueries on queries,
/// kDescribes says what the kernels behind this one read.
struct AppendBlock {
  static constexpr std::uint32_t kQueries = 2;
  static constexpr std::uint32_t kDescribes = 4;
  static constexpr std::uint32_t kThreads = 256;
};

/// Queries of a group, of a row that chooses, to both sides, by the warps for them.
__device__ inline void put_queries(const ForwardMemory& m, const ForwardLayer& layer, std::uint32_t index,
                                   std::uint32_t at, std::uint32_t head) {
  const std::uint32_t group = m.shape.group();
  const std::uint64_t first = (std::uint64_t{index} * m.shape.q_heads + head * group) * m.shape.head_dim;
  const std::uint32_t words = m.shape.head_dim / 4;
#pragma unroll 2
  for (std::uint32_t i = threadIdx.x - AppendBlock::kQueries * kRowLanes; i < group * words;
       i += (AppendBlock::kDescribes - AppendBlock::kQueries) * kRowLanes) {
    const std::byte* const row = layer.q.row(at, head * group + i / words);
    const float4 four = load_four(row, i % words, layer.q.dtype);
    reinterpret_cast<float4*>(m.q + first)[i] = four;
    reinterpret_cast<float4*>(m.far_q + first)[i] = four;
  }
}

/// Queries of a group, of one of a prompt's last tokens, for the policies of the CPU.
__device__ inline void put_tail(const ForwardMemory& m, const ForwardLayer& layer, std::uint32_t index,
                                std::uint32_t tail, std::uint32_t head) {
  const std::uint32_t without = layer.k.tokens - layer.q.tokens;
  if (index < without) return;
  const std::uint32_t group = m.shape.group();
  const std::uint64_t row = std::uint64_t{layer.layer} * m.tail_rows + tail;
  float* const to = m.tails + (row * m.shape.q_heads + head * group) * m.shape.head_dim;
  for (std::uint32_t i = threadIdx.x; i < group * m.shape.head_dim; i += AppendBlock::kThreads) {
    const std::byte* const from = layer.q.row(index - without, head * group + i / m.shape.head_dim);
    to[i] = load_any(from, i % m.shape.head_dim, layer.q.dtype);
  }
}

/// Outputs of a group, of a row that nothing else writes.
__device__ inline void fill_out(const ForwardMemory& m, const ForwardLayer& layer, std::uint32_t at, std::uint32_t head,
                                float value, float lse) {
  const std::uint32_t group = m.shape.group();
  for (std::uint32_t i = threadIdx.x; i < group * m.shape.head_dim; i += AppendBlock::kThreads) {
    const std::uint32_t h = head * group + i / m.shape.head_dim;
    detail::store_number(layer.out.row(at, h), layer.out.dtype, i % m.shape.head_dim, value);
    if (layer.lse != nullptr && i % m.shape.head_dim == 0) layer.lse[std::uint64_t{at} * m.shape.q_heads + h] = lse;
  }
}

/// Packed row `index`, KV head `head`; and row `index` of those that choose. All threads of a block of AppendBlock.
template <DType kType>
__device__ void append_row(const ForwardMemory& m, const ForwardScratch& scratch, const ForwardLayer& layer,
                           std::uint32_t index, std::uint32_t head) {
  const std::uint32_t warp = threadIdx.x / kRowLanes;
  const std::uint32_t plane = m.plane(layer.layer, head);
  const bool attends = layer.out.tokens != 0;
  // Of teams another kernel describes what they choose from.
  const bool describes = attends && m.bucket.drafts == 1 && index < m.bucket.decode_rows;
  // A load takes a good part of what is done here: keys and values are requested before it is known where they go.
  Row values;
  if (warp < AppendBlock::kQueries) values = Row(warp == 0 ? layer.k : layer.v, index, head);
  const ForwardStatus status = m.state->status;
  const ForwardToken token = m.tokens[index];
  ForwardRow row = describes ? m.rows[index] : ForwardRow{};
  const std::uint32_t chooses = row.list;
  const std::uint32_t at = row.at;
  if (status != ForwardStatus::running) {
    const float nan = __int_as_float(0x7fc0'0000);
    if (attends) fill_out(m, layer, index, head, nan, nan);
    // The kernels behind this one run all the same: on nothing, not on what another bucket has left.
    if (describes && threadIdx.x == AppendBlock::kDescribes * kRowLanes)
      describe(m, scratch, ForwardRow{}, index, head, plane);
    return;
  }
  if (warp < AppendBlock::kQueries && token.list != kNone) {
    put_token<kType>(m, layer, values, {.token = token, .index = index}, head, plane);
  } else if (threadIdx.x == AppendBlock::kDescribes * kRowLanes && describes) {
    row.drafts = 0;  // As it is; to know that takes fewer registers.
    describe(m, scratch, row.in(layer.layer, m.window), index, head, plane);
  } else if (warp >= AppendBlock::kQueries && warp < AppendBlock::kDescribes && chooses != kNone) {
    put_queries(m, layer, index, at, head);
  }
  if (token.list == kNone) {
    if (attends) fill_out(m, layer, index, head, 0.f, kEmptyLse);
  } else if (token.tail != kNone) {
    put_tail(m, layer, index, token.tail, head);
  }
}

}  // namespace sluice::gpu::forward
