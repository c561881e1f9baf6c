#pragma once

#include "gpu/kernels/mma.cuh"
#include "gpu/kernels/prefill/prefill.hpp"
#include "gpu/kernels/prefill/prefill_output.cuh"
#include "gpu/kernels/prefill/prefill_rows.cuh"

/// Causal attention of a chunk. A block owns 64 rows, (token, head) pairs of an item with the head as the inner index,
/// 16 per warp, and walks over tiles of 64 keys (fewer beyond head_dim 128) that the next tile's copies overlap.
/// S = Q K^T and O += P V with the rows as the rows of the products. With a mask an item has one head, and its tiles of
/// rows lie on the grid of positions, so that all rows of one have the same mask.
///
/// Keys behind the last one that any row of the block may see are neither read nor counted: their rows in shared memory
/// are zero. A row's own limit is kept by weights of 0, so a NaN in V at a key that a later row of the same block
/// attends reaches earlier rows of the block too.
namespace sluice::gpu::detail {

/// A tile of K and of V in shared memory. Piece c (16 bytes) of row r lies at c ^ (r % 8), which keeps the eight rows
/// of a matrix in different banks. Where rows are an odd number of half such octets long, neighbouring rows are in
/// different halves anyway, and c ^ (r / 2 % 4) keeps pieces within theirs.
template <int kDim, int kKeys>
struct KeyTile {
  static constexpr int kPieces = kDim / 8;
  uint4 k[kKeys * kPieces];
  uint4 v[kKeys * kPieces];
  static_assert(kPieces % 4 == 0);
  [[nodiscard]] static __device__ int at(int row, int piece) {
    return row * kPieces + (piece ^ (kPieces % 8 == 0 ? row % 8 : row / 2 % 4));
  }
};

/// The queries' fragments lie behind it, if they are shared: [term][step][thread].
template <int kDim, int kTerms>
struct PrefillMemory {
  static constexpr int kQueries = kQueriesShared<kDim, kTerms> ? kTerms * (kDim / 16) * kPrefillThreads : 0;
  static constexpr int kBytes =
      sizeof(KeyTile<kDim, kKeysOf<kDim, kTerms>>) * kPrefill.stages + kQueries * sizeof(uint4);
  static_assert(kBytes <= 99 * 1024);
  KeyTile<kDim, kKeysOf<kDim, kTerms>> tiles[kPrefill.stages];
  [[nodiscard]] __device__ uint4* queries() { return reinterpret_cast<uint4*>(this + 1) + threadIdx.x; }
};

/// One warp's state: queries as A fragments, products as C fragments.
template <int kDim, int kTerms>
struct PrefillRows {
  std::uint32_t q[kTerms][kQueriesShared<kDim, kTerms> ? 1 : kDim / 16][4];
  uint4* shared_q;  ///< of this thread, every kPrefillThreads-th
  float out[kDim / 8][4];
  float top[2];
  float mass[2];  ///< of this lane's keys
};

template <class T, int kDim, int kTerms>
__device__ void load_queries(PrefillRows<kDim, kTerms>& state, const PrefillItem& item, const PrefillShape& shape,
                             const RowPair& rows) {
  const std::uint32_t t = threadIdx.x % 4;
#pragma unroll
  for (int step = 0; step < kDim / 16; ++step) {
    const int kept = kQueriesShared<kDim, kTerms> ? 0 : step;
#pragma unroll
    for (int part = 0; part < 4; ++part) {
      const int half = part % 2;
      const std::uint64_t at = rows.token[half] * shape.q_token_stride + rows.head[half] * shape.q_head_stride +
                               static_cast<std::uint64_t>(16 * step + part / 2 * 8) + 2 * t;
      const float a = load_number(item.q, shape.q_dtype, at);
      const float b = load_number(item.q, shape.q_dtype, at + 1);
      const Terms terms = split<T>(a, b);
      state.q[0][kept][part] = terms.high;
      if constexpr (kTerms == 2) state.q[1][kept][part] = terms.low;
    }
    if constexpr (kQueriesShared<kDim, kTerms>) {
#pragma unroll
      for (int term = 0; term < kTerms; ++term) {
        const auto& q = state.q[term][0];
        state.shared_q[(term * (kDim / 16) + step) * kPrefillThreads] = make_uint4(q[0], q[1], q[2], q[3]);
      }
    }
  }
}

/// Starts copying keys [first, first + kKeys) and their values; zeros where the rows see none.
template <int kDim, int kKeys>
__device__ void copy_tile(KeyTile<kDim, kKeys>& tile, const PrefillItem& item, std::uint32_t first,
                          const RowTile& rows) {
  constexpr int kPieces = KeyTile<kDim, kKeys>::kPieces;
  constexpr std::uint64_t kRowBytes = 2 * kDim;
#pragma unroll 4
  for (int i = static_cast<int>(threadIdx.x); i < kKeys * kPieces; i += kPrefillThreads) {
    const int row = i / kPieces;
    const int piece = i % kPieces;
    const std::uint32_t key = first + row - rows.key_begin;  // Of the window; wraps before it.
    const bool valid = key < rows.key_end - rows.key_begin;
    const std::uint32_t page = key / item.page_tokens;
    const std::uint64_t frame = valid ? item.frames[page] : 0;
    const std::uint64_t k_row = frame * 2 * item.page_tokens + (valid ? key - page * item.page_tokens : 0);
    const std::byte* from = item.base + k_row * kRowBytes + piece * 16;
    copy_async(&tile.k[KeyTile<kDim, kKeys>::at(row, piece)], from, valid);
    copy_async(&tile.v[KeyTile<kDim, kKeys>::at(row, piece)], from + item.page_tokens * kRowBytes, valid);
  }
}

/// A thread reads what it has written itself, so there is nothing to wait for.
template <int kDim, int kTerms>
__device__ void query_fragment(std::uint32_t (&q)[4], const PrefillRows<kDim, kTerms>& state, int term, int step) {
  const uint4 from = state.shared_q[(term * (kDim / 16) + step) * kPrefillThreads];
  q[0] = from.x, q[1] = from.y, q[2] = from.z, q[3] = from.w;
}

/// scores = Q K^T: tile n holds keys 8 n + 2t and + 1 of rows g and g + 8.
template <class T, int kDim, int kTerms, int kKeys>
__device__ void score_tile(float (&scores)[kKeys / 8][4], const PrefillRows<kDim, kTerms>& state,
                           const KeyTile<kDim, kKeys>& tile) {
  const int lane = static_cast<int>(threadIdx.x % 32);
#pragma unroll
  for (int n = 0; n < kKeys / 8; ++n) {
#pragma unroll
    for (int e = 0; e < 4; ++e) scores[n][e] = 0.f;
  }
#pragma unroll
  for (int step = 0; step < kDim / 16; ++step) {
    std::uint32_t shared_q[kTerms][4];
    if constexpr (kQueriesShared<kDim, kTerms>) {
#pragma unroll
      for (int term = 0; term < kTerms; ++term) query_fragment(shared_q[term], state, term, step);
    }
#pragma unroll
    for (int n = 0; n < kKeys / 8; n += 2) {
      std::uint32_t b[4];
      load_matrices(b, &tile.k[KeyTile<kDim, kKeys>::at((n + lane / 16) * 8 + lane % 8, 2 * step + lane / 8 % 2)]);
#pragma unroll
      for (int term = kTerms - 1; term >= 0; --term) {
        if constexpr (kQueriesShared<kDim, kTerms>) {
          mma<T>(scores[n], shared_q[term], b[0], b[1]);
          mma<T>(scores[n + 1], shared_q[term], b[2], b[3]);
        } else {
          mma<T>(scores[n], state.q[term][step], b[0], b[1]);
          mma<T>(scores[n + 1], state.q[term][step], b[2], b[3]);
        }
      }
    }
  }
}

/// Masks keys outside the window, beyond a row's own, and before its reach.
template <int kKeys>
__device__ inline void mask_tile(float (&scores)[kKeys / 8][4], const RowPair& rows, const RowTile& tile,
                                 std::uint32_t first_key, std::uint32_t first_token, std::uint32_t reach) {
  const std::uint32_t t = threadIdx.x % 4;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const std::uint32_t end = min(tile.key_end, first_token + rows.token[half] + 1);
    const std::uint32_t begin = max(tile.key_begin, first_seen(first_token + rows.token[half], reach));
#pragma unroll
    for (int n = 0; n < kKeys / 8; ++n) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const std::uint32_t key = first_key + 8 * n + 2 * t + e;
        if (key < begin || key >= end) scores[n][2 * half + e] = -INFINITY;
      }
    }
  }
}

/// Makes scores weights: raises the tops and scales what there is down to them.
template <int kKeys, int kDim, int kTerms>
__device__ void weigh_tile(float (&scores)[kKeys / 8][4], PrefillRows<kDim, kTerms>& state, float scale) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float top = state.top[half];
#pragma unroll
    for (int n = 0; n < kKeys / 8; ++n) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        scores[n][2 * half + e] *= scale;
        top = fmaxf(top, scores[n][2 * half + e]);
      }
    }
    top = fmaxf(top, __shfl_xor_sync(kAllLanes, top, 1));
    top = fmaxf(top, __shfl_xor_sync(kAllLanes, top, 2));
    const float base = top == -INFINITY ? 0.f : top;
    const float factor = exp2_fast(state.top[half] - base);
    state.top[half] = top;
    state.mass[half] *= factor;
#pragma unroll
    for (int n = 0; n < kDim / 8; ++n) {
      state.out[n][2 * half] *= factor;
      state.out[n][2 * half + 1] *= factor;
    }
#pragma unroll
    for (int n = 0; n < kKeys / 8; ++n) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        scores[n][2 * half + e] = exp2_fast(scores[n][2 * half + e] - base);
        state.mass[half] += scores[n][2 * half + e];
      }
    }
  }
}

/// O += P V
template <class T, int kDim, int kTerms, int kKeys>
__device__ void add_tile(PrefillRows<kDim, kTerms>& state, const float (&weights)[kKeys / 8][4],
                         const KeyTile<kDim, kKeys>& tile) {
  const int lane = static_cast<int>(threadIdx.x % 32);
#pragma unroll
  for (int step = 0; step < kKeys / 16; ++step) {
    std::uint32_t p[2][4];
#pragma unroll
    for (int part = 0; part < 4; ++part) {
      const float(&pair)[4] = weights[2 * step + part / 2];
      const Terms terms = split<T>(pair[part % 2 * 2], pair[part % 2 * 2 + 1]);
      p[0][part] = terms.high;
      p[1][part] = terms.low;
    }
#pragma unroll
    for (int n = 0; n < kDim / 8; n += 2) {
      std::uint32_t b[4];
      const auto row = 16 * step + lane / 8 % 2 * 8 + lane % 8;
      load_matrices_transposed(b, &tile.v[KeyTile<kDim, kKeys>::at(row, n + lane / 16)]);
#pragma unroll
      for (int term = kTerms - 1; term >= 0; --term) {
        mma<T>(state.out[n], p[term], b[0], b[1]);
        mma<T>(state.out[n + 1], p[term], b[2], b[3]);
      }
    }
  }
}

template <int kDim, int kTerms>
__device__ void write_rows(const PrefillRows<kDim, kTerms>& state, const PrefillItem& item, const PrefillArgs& args,
                           const RowPair& rows) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float mass = state.mass[half];
    mass += __shfl_xor_sync(kAllLanes, mass, 1);
    mass += __shfl_xor_sync(kAllLanes, mass, 2);
    const float base = state.top[half] == -INFINITY ? 0.f : state.top[half];
    RowPart<kDim> part;
#pragma unroll
    for (int n = 0; n < kDim / 8; ++n) part[n] = make_float2(state.out[n][2 * half], state.out[n][2 * half + 1]);
    write_row<kDim>(item, args, {.token = rows.token[half], .head = rows.head[half], .there = rows.there[half]}, mass,
                    base, part);
  }
}

template <class T, int kDim, int kTerms, bool kCapped>
__global__ void __launch_bounds__(kPrefillThreads, 2) prefill_kernel(const __grid_constant__ PrefillArgs args) {
  extern __shared__ uint4 shared[];
  auto& memory = *reinterpret_cast<PrefillMemory<kDim, kTerms>*>(shared);
  constexpr int kKeys = kKeysOf<kDim, kTerms>;
  const PrefillItem& item = args.items[blockIdx.y];
  // The last rows have the most keys and go first.
  const std::uint32_t index = gridDim.x - 1 - blockIdx.x;
  const std::uint32_t lead = item.blocks == nullptr ? 0 : item.first % kRows;
  if (item.count == 0 || index * kRows >= lead + item.count * item.heads) return;
  const RowTile tile = row_tile(item, index);

  std::uint32_t now = next_tile<kKeys>(tile, tile.seen_begin / kKeys);
  if (now != kNoTile) copy_tile(memory.tiles[0], item, now * kKeys, tile);
  commit_copies();
  PrefillRows<kDim, kTerms> state;
  if constexpr (kQueriesShared<kDim, kTerms>) state.shared_q = memory.queries();
  load_queries<T>(state, item, args.shape, rows_of_thread(tile, item));
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    state.top[half] = -INFINITY;
    state.mass[half] = 0.f;
#pragma unroll
    for (int n = 0; n < kDim / 8; ++n) state.out[n][2 * half] = state.out[n][2 * half + 1] = 0.f;
  }
  for (std::uint32_t stage = 0; now != kNoTile; stage = (stage + 1) % kPrefill.stages) {
    const std::uint32_t next = next_tile<kKeys>(tile, now + 1);
    if (next != kNoTile) copy_tile(memory.tiles[(stage + 1) % kPrefill.stages], item, next * kKeys, tile);
    commit_copies();  // An empty group behind the last tile, so that the wait below always means this one.
    wait_copies<1>();
    __syncthreads();
    const KeyTile<kDim, kKeys>& keys = memory.tiles[stage];
    float scores[kKeys / 8][4];
    score_tile<T>(scores, state, keys);
    if constexpr (kCapped) {
#pragma unroll
      for (int n = 0; n < kKeys / 8; ++n) cap_products(scores[n], args.score_scale, args.softcap);
    }
    if (now * kKeys < tile.full_begin || (now + 1) * kKeys > tile.full_end)
      mask_tile<kKeys>(scores, rows_of_thread(tile, item), tile, now * kKeys, item.first, item.reach);
    weigh_tile<kKeys>(scores, state, args.score_scale * kLog2E);
    add_tile<T>(state, scores, keys);
    __syncthreads();  // All warps are done with the tile that the next copies overwrite.
    now = next;
  }
  write_rows(state, item, args, rows_of_thread(tile, item));
}

}  // namespace sluice::gpu::detail
