// Who attends what of a layer: near rows are listed for the device, far rows for the workers, who are asked for them.

#include <cuda/atomic>

#include "gpu/cuda_error.hpp"
#include "gpu/kernels/forward.hpp"

namespace sluice::gpu {
namespace {

constexpr std::uint32_t kWarp = 32;
constexpr std::uint32_t kThreads = 512;
constexpr std::uint32_t kWarps = kThreads / kWarp;
constexpr std::uint32_t kAll = 0xffff'ffffu;

/// One row and KV head, as its thread block works on it.
struct Work {
  ForwardRow row;
  std::uint32_t* near_rows;
  std::uint32_t* far_rows;
  std::uint32_t index;  ///< row * kv_heads + KV head
  std::uint32_t plane;
};

/// Sets the bits of what the heads of the group have chosen in their pages. A head's pages are laid end to end, and
/// eight tokens of them are neighbours.
__device__ void mark_in_pages(const ForwardMemory& m, const Work& work, std::uint32_t* marks) {
  const ForwardRow& row = work.row;
  const std::uint32_t group = m.shape.group();
  const std::uint64_t first = std::uint64_t{work.index} * group;
  const std::uint32_t* const ranked = m.ranked_of(work.index, false);
  const std::uint32_t in_page = m.layout.page_tokens - 1;
  const auto token_of = [&](std::uint32_t h, std::uint32_t value) {
    return (ranked[h * row.page_picks + (value >> m.page_shift)] << m.page_shift) | (value & in_page);
  };
  for (std::uint32_t i = threadIdx.x; i < group * row.picks; i += kThreads) {
    const std::uint32_t h = i / row.picks;
    const std::uint32_t token = token_of(h, m.picks[(first + h) * m.max_picks + i % row.picks]);
    atomicOr(marks + token / 32, 1u << token % 32);
  }
  if (row.picks != 0) return;
  const std::uint32_t eighths = row.page_picks << m.page_shift >> 3;
  for (std::uint32_t i = threadIdx.x; i < group * eighths; i += kThreads) {
    const std::uint32_t h = i / eighths;
    const std::uint32_t value = i % eighths * 8;
    const std::uint32_t kept =
        row.mass > 0.f ? m.masks[(first + h) * m.mask_words() + value / 32] >> value % 32 & 0xffu : 0xffu;
    const std::uint32_t token = token_of(h, value);
    if (kept != 0) atomicOr(marks + token / 32, kept << token % 32);
  }
}

/// Sets the bit of every token that some head of the group attends.
__device__ void mark(const ForwardMemory& m, const Work& work, std::uint32_t* marks) {
  const ForwardRow& row = work.row;
  for (std::uint32_t i = threadIdx.x; i < (row.tokens + 31) / 32; i += kThreads) marks[i] = 0;
  __syncthreads();
  const auto set = [marks](std::uint32_t token) { atomicOr(marks + token / 32, 1u << token % 32); };
  for (std::uint32_t i = threadIdx.x; i < row.sink_end; i += kThreads) set(i);
  for (std::uint32_t i = row.recent_begin + threadIdx.x; i < row.tokens; i += kThreads) set(i);
  const std::uint32_t group = m.shape.group();
  const std::uint64_t first = std::uint64_t{work.index} * group;
  if (row.in_pages()) {
    mark_in_pages(m, work, marks);
  } else {
    for (std::uint32_t i = threadIdx.x; i < group * row.picks; i += kThreads)
      set(row.sink_end + m.picks[(first + i / row.picks) * m.max_picks + i % row.picks]);
    // Words of a mask say nothing of what is attended anyway.
    for (std::uint32_t i = threadIdx.x; i < (row.tokens + 31) / 32 && row.mass > 0.f; i += kThreads) {
      std::uint32_t kept = 0;
      for (std::uint32_t h = 0; h < group; ++h) kept |= m.masks[(first + h) * m.mask_words() + i];
      if (kept != 0) atomicOr(marks + i, kept);
    }
  }
  __syncthreads();
}

/// Which of a word's tokens are sinks or recent ones.
__device__ std::uint32_t window_bits(const ForwardRow& row, std::uint32_t word) {
  const auto below = [word](std::uint32_t token) {
    const std::uint32_t first = word * 32;
    return token <= first ? 0u : token - first >= 32 ? kAll : (1u << (token - first)) - 1;
  };
  return below(row.sink_end) | ~below(row.recent_begin);
}

/// Where the tokens of a word lie, those whose bits are set.
struct Word {
  std::uint32_t rows[4];      ///< far row of each eighth token: no page has less than eight
  std::uint32_t entries[32];  ///< of near_of, 0 without near pages
};

/// All loads at once: one after the other, those of a word of recent tokens would take longer than all else.
__device__ Word read_word(const ForwardMemory& m, const Work& work, std::uint32_t word, std::uint32_t bits) {
  Word read;
#pragma unroll
  for (std::uint32_t i = 0; i < 4; ++i)
    read.rows[i] = (bits >> 8 * i & 0xffu) != 0 ? m.row_of(work.row.list, word * 32 + 8 * i) : 0;
  const std::uint32_t* const near_of = m.near_of + m.far_row(work.plane, 0);
#pragma unroll
  for (std::uint32_t i = 0; i < 32; ++i)
    read.entries[i] = m.near_pages != 0 && (bits >> i & 1) != 0 ? near_of[read.rows[i / 8] + i % 8] : 0;
  return read;
}

/// Which of a word's tokens lie near. They are used, unless everything is, which says nothing of what will be.
__device__ std::uint32_t near_bits(const ForwardMemory& m, const Work& work, const Word& read) {
  const auto forward = static_cast<std::uint32_t>(m.state->forward);
  ForwardNearRow* const rows = m.near_rows + m.near_row(work.plane, 0);
  std::uint32_t near = 0;
#pragma unroll
  for (std::uint32_t i = 0; i < 32; ++i) {
    if ((read.entries[i] & kNearBit) == 0) continue;
    near |= 1u << i;
    if (!work.row.whole()) rows[read.entries[i] & ~kNearBit].used = forward;
  }
  return near;
}

__device__ void write_rows(const ForwardMemory& m, const Work& work, const Word& read, std::uint32_t bits,
                           std::uint32_t* near, std::uint32_t* far) {
#pragma unroll
  for (std::uint32_t i = 0; i < 32; ++i) {
    if ((bits >> i & 1) == 0) continue;
    if ((read.entries[i] & kNearBit) != 0) {
      *near++ = m.near_entry(work.plane, read.entries[i] & ~kNearBit);
    } else {
      *far++ = read.rows[i / 8] + i % 8;
    }
  }
}

/// Entries before this thread's, and of all threads. Two counts at once, 16 bits each: a turn has fewer.
struct Places {
  std::uint32_t before;
  std::uint32_t all;
};
__device__ Places place(std::uint32_t counts, std::uint32_t (&sums)[kWarps]) {
  const std::uint32_t lane = threadIdx.x % kWarp;
  const std::uint32_t warp = threadIdx.x / kWarp;
  std::uint32_t inclusive = counts;
#pragma unroll
  for (std::uint32_t step = 1; step < kWarp; step *= 2) {
    const std::uint32_t below = __shfl_up_sync(kAll, inclusive, step);
    if (lane >= step) inclusive += below;
  }
  __syncthreads();  // The sums of the turn before have been read.
  if (lane == kWarp - 1) sums[warp] = inclusive;
  __syncthreads();
  Places places{.before = inclusive - counts, .all = 0};
  for (std::uint32_t w = 0; w < kWarps; ++w) {
    if (w < warp) places.before += sums[w];
    places.all += sums[w];
  }
  return places;
}
static_assert(kThreads * 32 < 1u << 16);

/// Lists what is marked, ascending; returns how many are near, and how many far in the upper half.
__device__ std::uint64_t list_rows(const ForwardMemory& m, const Work& work, const std::uint32_t* marks,
                                   std::uint32_t (&sums)[kWarps]) {
  std::uint32_t near_total = 0;
  std::uint32_t far_total = 0;
  const std::uint32_t words = (work.row.tokens + 31) / 32;
  for (std::uint32_t base = 0; base < words; base += kThreads) {
    const std::uint32_t word = base + threadIdx.x;
    const std::uint32_t bits = word < words ? marks[word] : 0;
    const Word read = read_word(m, work, word, bits);
    const std::uint32_t near = near_bits(m, work, read);
    const std::uint32_t far = bits & ~near;
    if ((far & window_bits(work.row, word)) != 0) m.far_windows[work.index] = 1;
    const Places places = place(__popc(near) | __popc(far) << 16, sums);
    write_rows(m, work, read, bits, work.near_rows + near_total + (places.before & 0xffffu),
               work.far_rows + far_total + (places.before >> 16));
    near_total += places.all & 0xffffu;
    far_total += places.all >> 16;
  }
  return near_total | std::uint64_t{far_total} << 32;
}

__device__ void write_jobs(const ForwardMemory& m, const ForwardScratch& scratch, const Work& work, std::uint32_t head,
                           std::uint32_t near) {
  const std::uint32_t group = m.shape.group();
  const std::uint64_t first = std::uint64_t{work.index / m.shape.kv_heads} * m.shape.q_heads + head * group;
  for (std::uint32_t b = 0; b < scratch.head_blocks; ++b) {
    const std::uint32_t job = work.index * scratch.head_blocks + b;
    const std::uint32_t begin = b * scratch.block_heads;
    scratch.jobs[job] = {.q = m.q + (first + begin) * m.shape.head_dim,
                         .base = m.near,
                         .out = m.near_out + (first + begin) * m.shape.head_dim,
                         .lse = m.near_lse + first + begin,
                         .lists = work.near_rows,
                         .heads = min(scratch.block_heads, group - begin),
                         .group = group,
                         .first_head = begin,
                         .page_tokens = m.layout.page_tokens,
                         .tokens = near,
                         .slices = scratch.slices,
                         .first_slice = job * scratch.slices,
                         .first_partial = job * scratch.slices,
                         .counter = job};
  }
}

/// The last thread block to get here asks the workers, if any has far rows or a choice for them. Its fence is the only
/// one across the link, and covers what all thread blocks wrote: one by every warp takes longer than the rest of a
/// layer.
__device__ void ask(const ForwardMemory& m, std::uint32_t layer, std::uint32_t near, std::uint32_t far,
                    std::uint32_t choices) {
  using Sum = cuda::atomic_ref<std::uint64_t, cuda::thread_scope_device>;
  ForwardState& state = *m.state;
  Sum(state.near_tokens).fetch_add(near, cuda::memory_order_relaxed);
  Sum(state.far_tokens).fetch_add(far, cuda::memory_order_relaxed);
  cuda::atomic_ref<std::uint32_t, cuda::thread_scope_device> total(state.layer_far_tokens);
  cuda::atomic_ref<std::uint32_t, cuda::thread_scope_device> arrived(state.arrived);
  cuda::atomic_ref<std::uint32_t, cuda::thread_scope_device> chosen(state.layer_choices);
  total.fetch_add(far, cuda::memory_order_relaxed);
  if (choices != 0) chosen.fetch_add(choices, cuda::memory_order_relaxed);
  if (arrived.fetch_add(1, cuda::memory_order_acq_rel) != gridDim.x - 1) return;
  const std::uint32_t all_choices = chosen.load(cuda::memory_order_relaxed);
  const bool wanted = total.load(cuda::memory_order_relaxed) != 0 || all_choices != 0;
  state.layer_far_tokens = state.layer_choices = state.arrived = 0;
  if (!wanted) return;
  auto& question = m.mailbox->question;
  question.forward = state.forward;
  question.layer = layer;
  question.choices = all_choices;
  question.lists = gridDim.x;
  __threadfence_system();
  cuda::atomic_ref<std::uint64_t, cuda::thread_scope_system>(question.asked)
      .store(++state.asked, cuda::memory_order_release);
}

/// Thread block i: row i / kv_heads, KV head i % kv_heads.
__global__ void __launch_bounds__(kThreads)
    split_kernel(const __grid_constant__ ForwardMemory m, const __grid_constant__ ForwardScratch scratch,
                 std::uint32_t layer) {
  extern __shared__ std::uint32_t marks[];
  __shared__ std::uint32_t sums[kWarps];
  const std::uint32_t head = blockIdx.x % m.shape.kv_heads;
  const std::uint64_t room = m.list_room();
  const bool runs = m.state->status == ForwardStatus::running;
  Work work{.row = m.rows[blockIdx.x / m.shape.kv_heads].in(layer),
            .near_rows = m.near_lists + blockIdx.x * room,
            .far_rows = scratch.far_rows + blockIdx.x * room,
            .index = blockIdx.x,
            .plane = m.plane(layer, head)};
  if (!runs) {
    // `attend` runs all the same: on nothing, not on jobs that another bucket has left.
    if (threadIdx.x == 0) write_jobs(m, scratch, work, head, 0);
    return;
  }
  std::uint64_t counts = 0;
  if (work.row.list != kNone) {
    if (threadIdx.x == 0) m.far_windows[work.index] = 0;  // Before the barriers of `mark`.
    mark(m, work, marks);
    counts = list_rows(m, work, marks, sums);
  }
  const auto near = static_cast<std::uint32_t>(counts);
  const auto far = static_cast<std::uint32_t>(counts >> 32);
  __syncthreads();
  // Whole lines: single words would each take their own way over the link.
  for (std::uint32_t i = threadIdx.x; i < far; i += kThreads) m.far_rows[blockIdx.x * room + i] = work.far_rows[i];
  __syncthreads();
  if (threadIdx.x != 0) return;
  m.near_counts[blockIdx.x] = near;
  m.far_counts[blockIdx.x] = m.far_listed[blockIdx.x] = far;
  write_jobs(m, scratch, work, head, near);
  ask(m, layer, near, far, work.row.list == kNone ? 0 : work.row.asks);
}

}  // namespace

void launch_forward_split(const ForwardMemory& memory, const ForwardScratch& scratch, const ForwardLayer& layer) {
  const std::uint32_t bytes = (memory.bucket.max_tokens + 31) / 32 * 4;
  split_kernel<<<memory.bucket.decode_rows * memory.shape.kv_heads, kThreads, bytes,
                 static_cast<cudaStream_t>(layer.stream)>>>(memory, scratch, layer.layer);
  check(cudaGetLastError(), "launch the split kernel of a forward");
}

std::uint32_t most_forward_tokens() {
  int device = 0;
  int bytes = 0;
  check(cudaGetDevice(&device), "ask for the current device");
  check(cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device), "ask for shared memory");
  return (static_cast<std::uint32_t>(bytes) - 1024) / 4 * 32;
}

namespace detail {
void load_forward_split_kernels() {
  cudaFuncAttributes attributes;
  check(cudaFuncGetAttributes(&attributes, split_kernel), "load the split kernel of a forward");
  check(cudaFuncSetAttribute(split_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                             static_cast<int>(most_forward_tokens() / 32 * 4)),
        "give the split kernel shared memory");
}
}  // namespace detail

}  // namespace sluice::gpu
