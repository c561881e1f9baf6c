// Chunks of prompts: their keys and values are brought together window by window, near pages from where they are, far
// ones over the link, and attended there.

#include "gpu/device/cuda_error.hpp"
#include "gpu/kernels/e4m3.cuh"
#include "gpu/kernels/forward/forward.hpp"
#include "gpu/kernels/load.hpp"
#include "sluice/step/prefill_choice.hpp"

namespace sluice::gpu {
namespace {

constexpr std::uint32_t kThreads = 512;
constexpr std::uint32_t kMostPageTokens = 256;
static_assert(2 * kMostPageTokens <= kThreads);

/// The pages of a window that some token of the chunk sees.
struct Window {
  std::uint32_t begin = 0;  ///< tokens
  std::uint32_t end = 0;    ///< not above `begin` if it sees none
  bool first = false;       ///< that has some
};
__device__ Window window_of(const ForwardMemory& m, const ForwardChunk& chunk, std::uint32_t index) {
  const std::uint32_t begin = index * m.prefill_window;
  const bool all = m.window == 0 || chunk.first < m.window;
  const std::uint32_t seen = all ? 0 : (chunk.first + 1 - m.window) & ~(m.layout.page_tokens - 1);
  return {.begin = max(begin, seen),
          .end = min(begin + m.prefill_window, chunk.first + chunk.count),
          .first = index == seen / m.prefill_window};
}

template <class T>
__device__ void move(T*& part, std::uint64_t bytes) {
  part = reinterpret_cast<T*>(reinterpret_cast<std::byte*>(part) + bytes);
}

/// The same item, with scratch memory so many bytes behind.
__device__ FlexItem moved(FlexItem item, std::uint64_t bytes) {
  move(item.queries, bytes);
  move(item.mean_query, bytes);
  move(item.mean_keys, bytes);
  move(item.stats, bytes);
  move(item.shifts, bytes);
  move(item.columns, bytes);
  move(item.pieces, bytes);
  move(item.diagonals, bytes);
  move(item.column_blocks, bytes);
  move(item.offset_blocks, bytes);
  move(item.cuts, bytes);
  move(item.marks, bytes);
  move(item.chosen, bytes);
  move(item.verdicts, bytes);
  move(item.row_kept, bytes);
  return item;
}

/// Item (chunk, KV head) of the kernels that choose blocks. Returns where these go, or null if the chunk is dense.
__device__ const std::uint32_t* describe_choice(const ForwardMemory& m, const PrefillStage& stage,
                                                const ForwardLayer& layer, const ForwardChunk& chunk,
                                                std::uint32_t item, bool there) {
  if (!m.sparse_prefill) return nullptr;
  const bool sparse = there && chunk.sparse_in(layer.layer);
  FlexItem choice = moved(stage.choice, item * stage.choice_bytes);
  const std::uint32_t head = item % m.shape.kv_heads * m.shape.group();
  if (sparse) {
    choice.set_chunk(chunk.first, chunk.count, representative_rows(m.prefill.mode));
    choice.q = layer.q.row(chunk.at, head);
    choice.base = stage.pages;
    choice.frames = stage.frames + std::uint64_t{item} * (m.prefill_window / m.layout.page_tokens);
    choice.blocks = stage.blocks + item * stage.block_words;
    choice.choices = m.choices_of(m.state->forward, layer.layer, item / m.shape.kv_heads) + head;
    choice.page_tokens = m.layout.page_tokens;
  }
  stage.choices[item] = choice;
  return choice.blocks;
}

/// Items of (chunk, KV head) of the prefill kernels: one, or one per query head where blocks are chosen by kernels
/// whose rows mix the heads. The others have nothing to do.
__device__ void describe(const ForwardMemory& m, const PrefillStage& stage, const ForwardLayer& layer,
                         const ForwardChunk& chunk, std::uint32_t item, std::uint32_t index, bool there) {
  const Window window = window_of(m, chunk, index);
  const std::uint32_t first_head = item % m.shape.kv_heads * m.shape.group();
  const std::uint32_t* const blocks = describe_choice(m, stage, layer, chunk, item, there);
  const bool apart = blocks != nullptr && stage.item_heads != 1;
  const std::uint32_t query_blocks = prefill_blocks(chunk.first, chunk.count);
  const std::uint32_t mask_words = prefill_mask_words(chunk.keys());
  for (std::uint32_t h = 0; h < stage.item_heads; ++h) {
    const std::uint32_t head = first_head + h;
    const std::uint64_t row = std::uint64_t{chunk.at} * m.shape.q_heads + head;
    stage.items[std::uint64_t{item} * stage.item_heads + h] = {
        .q = layer.q.row(chunk.at, head),
        .base = stage.pages,
        .frames = stage.frames + std::uint64_t{item} * (m.prefill_window / m.layout.page_tokens),
        .out = layer.out.row(chunk.at, head),
        .blocks = apart ? blocks + std::uint64_t{h} * query_blocks * mask_words : blocks,
        .lse = (layer.lse != nullptr ? layer.lse : stage.lse) + row,
        .so_far = stage.so_far + row * m.shape.head_dim,
        .first = chunk.first,
        .count = there && (apart || h == 0) ? chunk.count : 0,
        .heads = apart ? 1 : m.shape.group(),
        .key_begin = window.begin,
        .key_end = window.end,
        .page_tokens = m.layout.page_tokens,
        .query_blocks = query_blocks,
        .mask_words = mask_words,
        .reach = m.window,
        .first_window = window.first,
        .last_window = window.end == chunk.first + chunk.count};
  }
}

/// Sixteen bytes of a page, from where they lie near if they do.
__device__ uint4 quad_of(const ForwardMemory& m, std::uint32_t plane, std::uint32_t block, std::uint32_t quad) {
  const auto row_quads = static_cast<std::uint32_t>(m.layout.row_bytes() / sizeof(uint4));
  const std::uint32_t half_quads = row_quads * m.layout.page_tokens;
  const std::uint32_t at = quad % half_quads;
  const std::uint32_t row = block * m.layout.page_tokens + at / row_quads;
  const std::uint32_t place = m.near_row_of(plane, row);
  const std::byte* const key = place == kNone ? m.far_key(plane, row) : m.near_key(plane, place);
  const std::byte* const from = quad < half_quads ? key : key + m.layout.half_bytes();
  return __ldcv(reinterpret_cast<const uint4*>(from) + at % row_quads);
}

/// The same of pages with scales, which are [page_tokens, 2] and of far rows.
__device__ uint4 unfolded_quad_of(const ForwardMemory& m, std::uint32_t plane, std::uint32_t block, std::uint32_t quad,
                                  const float* scales) {
  const auto row_quads = static_cast<std::uint32_t>(m.layout.row_bytes() / sizeof(uint4));
  const std::uint32_t half_quads = row_quads * m.layout.page_tokens;
  const std::uint32_t half = quad < half_quads ? 0 : 1;
  const std::uint32_t at = quad - half * half_quads;
  const std::uint32_t page_row = at / row_quads;
  const std::uint32_t row = block * m.layout.page_tokens + page_row;
  if (const std::uint32_t place = m.near_row_of(plane, row); place != kNone) {
    const std::byte* const near = m.near_key(plane, place) + half * m.layout.half_bytes();
    return __ldcv(reinterpret_cast<const uint4*>(near) + at % row_quads);
  }
  const std::byte* const far = m.far_key(plane, row) + half * m.far_layout.half_bytes();
  return detail::unfold_codes(__ldcv(reinterpret_cast<const uint2*>(far) + at % row_quads),
                              scales[2 * page_row + half]);
}

/// Scales of a page's far rows, once for all of its elements. All threads.
__device__ void load_scales(const ForwardMemory& m, std::uint32_t plane, std::uint32_t block,
                            float (&scales)[2 * kMostPageTokens]) {
  __syncthreads();  // Those of the page before have been read.
  const std::uint32_t row = block * m.layout.page_tokens + threadIdx.x / 2;
  if (threadIdx.x < 2 * m.layout.page_tokens && m.near_row_of(plane, row) == kNone)
    scales[threadIdx.x] = __ldcv(reinterpret_cast<const float*>(m.far_scale_bytes(plane, row)) + threadIdx.x % 2);
  __syncthreads();
}

/// Brings window `index` of all chunks: thread blocks share the pages of all their KV heads.
template <bool kScaled>
__global__ void __launch_bounds__(kThreads)
    stage_kernel(const __grid_constant__ ForwardMemory m, const __grid_constant__ PrefillStage stage,
                 const __grid_constant__ ForwardLayer layer, std::uint32_t index) {
  [[maybe_unused]] __shared__ float scales[kScaled ? 2 * kMostPageTokens : 1];
  const bool runs = m.state->status == ForwardStatus::running;
  const std::uint32_t room = m.prefill_window / m.layout.page_tokens;
  const auto quads = static_cast<std::uint32_t>(m.layout.page_bytes() / sizeof(uint4));
  for (std::uint32_t c = 0; c < m.bucket.prefills; ++c) {
    const ForwardChunk chunk = runs ? m.chunks[c] : ForwardChunk{};
    const Window window = window_of(m, chunk, index);
    const bool there = chunk.list != kNone && window.begin < window.end;
    for (std::uint32_t h = threadIdx.x; h < m.shape.kv_heads && blockIdx.x == 0; h += kThreads)
      describe(m, stage, layer, chunk, c * m.shape.kv_heads + h, index, there);
    if (!there) continue;
    const std::uint32_t pages = (window.end - window.begin + m.layout.page_tokens - 1) / m.layout.page_tokens;
    const std::uint32_t* const list =
        m.lists + std::uint64_t{chunk.list} * m.max_pages + window.begin / m.layout.page_tokens;
    for (std::uint32_t i = blockIdx.x; i < pages * m.shape.kv_heads; i += gridDim.x) {
      const std::uint32_t head = i / pages;
      const std::uint32_t page = i % pages;
      const std::uint32_t block = list[page];
      const std::uint32_t plane = m.plane(layer.layer, head);
      const std::uint32_t frame = (c * m.shape.kv_heads + head) * room + page;
      auto* const to = reinterpret_cast<uint4*>(stage.pages + std::uint64_t{frame} * m.layout.page_bytes());
      if constexpr (kScaled) {
        load_scales(m, plane, block, scales);
        for (std::uint32_t q = threadIdx.x; q < quads; q += kThreads)
          to[q] = unfolded_quad_of(m, plane, block, q, scales);
      } else {
        for (std::uint32_t q = threadIdx.x; q < quads; q += kThreads) to[q] = quad_of(m, plane, block, q);
      }
      if (threadIdx.x == 0) stage.frames[frame] = frame;
    }
  }
}

}  // namespace

void launch_forward_stage(const ForwardMemory& memory, const PrefillStage& stage, const ForwardLayer& layer,
                          std::uint32_t window, std::uint32_t blocks) {
  auto* const kernel = memory.far_layout.scaled() ? stage_kernel<true> : stage_kernel<false>;
  kernel<<<blocks, kThreads, 0, static_cast<cudaStream_t>(layer.stream)>>>(memory, stage, layer, window);
  check(cudaGetLastError(), "launch the kernel that brings a prompt's pages");
}

namespace detail {
void load_forward_prefill_kernels() {
  load_kernel(stage_kernel<false>, "load the kernels of a forward");
  load_kernel(stage_kernel<true>, "load the kernels of a forward");
}
}  // namespace detail

}  // namespace sluice::gpu
