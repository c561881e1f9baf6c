#pragma once

#include "gpu/kernels/attend/attend_merge.cuh"
#include "gpu/kernels/attend/row_ring.cuh"
#include "gpu/kernels/forward/list.cuh"

/// Near rows attended by the thread blocks that found them, a cluster for each KV head: nothing is listed for another
/// kernel, and the parts meet in the cluster's shared memory.
namespace sluice::gpu::forward {

/// The warp that asks the CPU, and waits for the link, while the others attend.
inline constexpr std::uint32_t kAsker = kWarps - 1;
inline constexpr std::uint32_t kAttendWarps = kAsker;
inline constexpr std::uint32_t kAttendThreads = kAttendWarps * kWarp;
inline constexpr std::uint32_t kMostHeads = 8;  ///< of a group

template <int kDim>
struct NearShared {
  /// What some warps have attended, not yet divided by its mass.
  struct Result {
    float out[kMostHeads][kDim];
    float top[kMostHeads];
    float mass[kMostHeads];
  };
  alignas(16) Result result;  ///< of the block
  typename detail::QueryPiece<kDim, 1>::Fragments q;
  struct {
    float top[kAttendWarps][kMostHeads];
    float mass[kAttendWarps][kMostHeads];
  } sums;  ///< of the warps
  AttendSlice slice;      ///< what attend_units reads of it
  std::uint32_t forward;  ///< its number
  Listed listed;          ///< by the block
};

/// A block's part of a KV head's near rows. `kDim`: head_dim, of type T.
template <class T, int kDim>
class NearPart {
 public:
  using Shared = NearShared<kDim>;
  using WarpOut = float[kMostHeads][kDim + 4];
  static constexpr std::uint32_t kBytes = kAttendWarps * sizeof(WarpOut);  ///< of shared memory, for `outs`

  __device__ NearPart(const ForwardMemory& m, const Work& work, Shared& s, WarpOut* outs)
      : m_(m), work_(work), s_(s), outs_(outs) {
    detail::clear(sum_);
  }

  /// Before anything is attended. Warps below kAsker.
  __device__ void load_queries(float score_scale) const {
    detail::QueryPiece<kDim, 1> query;
    query.load({.q = m_.q + first() * kDim, .heads = m_.shape.group()});
    if (threadIdx.x == 0) {
      s_.slice = {.base = m_.near, .page_tokens = m_.layout.page_tokens, .corrected = work_.row.draws.any() ? 1u : 0u};
      s_.forward = static_cast<std::uint32_t>(m_.state->forward);
    }
    query.template store<T>(s_.q, score_scale * detail::kLog2E);
    sync();
  }

  /// The near ones of what was found, see Found::find. Warps below kAsker.
  __device__ void attend(const Found& found) {
    const std::uint32_t* const entries = found.entries();
    const std::uint32_t count = found.count();
    const bool corrected = found.corrected();
    const std::uint32_t shift = m_.page_shift;
    const std::uint32_t base = m_.near_entry(work_.plane, 0);
    const auto rows_at = [&](std::uint32_t unit) {
      const std::uint32_t i = 16 * unit + threadIdx.x % 16;
      const std::uint32_t entry = i < count ? entries[i] : 0;
      const std::uint32_t place = entry & ~kNearBit;
      // Pages have K rows, then V rows.
      const std::uint32_t row = base + (((place >> shift) << (shift + 1)) | (place & ((1u << shift) - 1)));
      if ((entry & kNearBit) == 0) return detail::UnitRows{detail::kNoRow, corrected ? detail::kNoCorrection : 0};
      return detail::UnitRows{row, corrected ? __float_as_uint(found.correction(i)) : kAll};
    };
    const std::uint32_t warp = threadIdx.x / kWarp;
    const std::uint32_t units = (count + 15) / 16;
    if (warp >= units) return;
    const detail::UnitRows rows = rows_at(warp);
    std::uint32_t keys[2][detail::RowShape<kDim>::kKeyPieces][4];
    std::uint32_t values[4][detail::RowShape<kDim>::kValuePieces][4];
    detail::UnitScales<false> scales;
    detail::load_key_rows<kDim, false>(keys, scales, s_.slice, rows.row);
    detail::load_value_rows<kDim, false>(values, s_.slice, rows.row);
    detail::attend_units<T, kDim, 1, false, false, false, false, kAttendWarps>(sum_, s_.slice, s_.q, rows_at, warp,
                                                                               units, rows, keys, values, scales, 0.f);
  }

  /// A unit of rows that this warp has in two slots of a ring, keys and behind them values. `members`: the heads that
  /// attend this lane's row, as UnitRows has them. Likewise.
  __device__ void attend(const detail::RowRing<kDim>& ring, std::uint32_t slot, std::uint32_t members) {
    float scores[1][4];
    {
      std::uint32_t keys[2][detail::RowShape<kDim>::kKeyPieces][4];
      ring.read_keys(keys, slot);
      detail::score<T, kDim>(scores[0], keys, s_.q[0]);
    }
    detail::admit(scores, members, s_.slice.corrected != 0);
    detail::raise_tops(sum_, scores);
    const detail::Weights weights[1] = {
        detail::weigh<T>(scores[0], sum_.top[0], sum_.mass[0], detail::UnitScales<false>{})};
    std::uint32_t values[4][detail::RowShape<kDim>::kValuePieces][4];
    ring.read_values(values, slot + 1);
    detail::add_values<T>(sum_, weights, values);
  }

  /// They are used, see ForwardMemory::keeps_near. Likewise.
  __device__ void use(const std::uint32_t* entries, std::uint32_t count) const {
    if (!m_.keeps_near(work_.row)) return;
    for (std::uint32_t i = threadIdx.x; i < count; i += kAttendThreads) {
      const std::uint32_t entry = entries[i];
      if ((entry & kNearBit) != 0) m_.near_rows[m_.near_row(work_.plane, entry & ~kNearBit)].used = s_.forward;
    }
  }

  /// The block's result, for its cluster. Warps below kAsker.
  __device__ void conclude() {
    detail::put_sums(s_.sums, sum_);
    sync();  // What lies where `outs` do has been read.
    detail::put_out<kDim, 1, 0>(outs_[threadIdx.x / kWarp], sum_, 0);
    sync();
    for (std::uint32_t i = threadIdx.x; i < columns(); i += kAttendThreads) {
      const std::uint32_t head = i / kColumns;
      const std::uint32_t dim = i % kColumns * 4;
      float top = -INFINITY;
#pragma unroll
      for (std::uint32_t w = 0; w < kAttendWarps; ++w) top = fmaxf(top, s_.sums.top[w][head]);
      float mass = 0.f;
      float4 sum = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll
      for (std::uint32_t w = 0; w < kAttendWarps; ++w) {
        const float weight = s_.sums.top[w][head] == -INFINITY ? 0.f : detail::exp2_fast(s_.sums.top[w][head] - top);
        mass += weight * s_.sums.mass[w][head];
        detail::add_scaled(sum, weight, *reinterpret_cast<const float4*>(&outs_[w][head][dim]));
      }
      *reinterpret_cast<float4*>(&s_.result.out[head][dim]) = sum;
      if (dim != 0) continue;
      s_.result.top[head] = top;
      s_.result.mass[head] = mass;
    }
  }

  /// What the cluster has attended, a share of it by each block, as many lanes for four dims as there are blocks. After
  /// a barrier of the cluster, with another one behind. All threads.
  __device__ void merge(const Part& part) const {
    const std::uint32_t blocks = part.blocks();
    const std::uint32_t share = (columns() + blocks - 1) / blocks;
    const std::uint32_t mine = threadIdx.x % blocks;
    const std::uint32_t of_warp = threadIdx.x % kWarp / blocks;  // Whole warps: lanes add to each other.
#pragma unroll 1
    for (std::uint32_t i = threadIdx.x / blocks; i - of_warp < share; i += kThreads / blocks) {
      const std::uint32_t column = min(part.rank() * share + i, columns() - 1);
      const std::uint32_t head = column / kColumns;
      const std::uint32_t dim = column % kColumns * 4;
      const float own_top = detail::load_float_in_cluster(detail::address_in(&s_.result.top[head], mine));
      float mass = detail::load_float_in_cluster(detail::address_in(&s_.result.mass[head], mine));
      const float4 own = detail::load4_in_cluster(detail::address_in(&s_.result.out[head][dim], mine));
      float top = own_top;
      for (std::uint32_t step = 1; step < blocks; step *= 2) top = fmaxf(top, __shfl_xor_sync(kAll, top, step));
      const float weight = own_top == -INFINITY ? 0.f : detail::exp2_fast(own_top - top);
      mass *= weight;
      float4 sum = make_float4(0.f, 0.f, 0.f, 0.f);
      detail::add_scaled(sum, weight, own);
      for (std::uint32_t step = 1; step < blocks; step *= 2) {
        mass += __shfl_xor_sync(kAll, mass, step);
        sum.x += __shfl_xor_sync(kAll, sum.x, step);
        sum.y += __shfl_xor_sync(kAll, sum.y, step);
        sum.z += __shfl_xor_sync(kAll, sum.z, step);
        sum.w += __shfl_xor_sync(kAll, sum.w, step);
      }
      if (mine != 0 || i >= share || part.rank() * share + i >= columns()) continue;
      const float scale = mass > 0.f ? 1.f / mass : 0.f;
      *reinterpret_cast<float4*>(m_.near_out + (first() + head) * kDim + dim) =
          make_float4(sum.x * scale, sum.y * scale, sum.z * scale, sum.w * scale);
      if (dim == 0) m_.near_lse[first() + head] = mass > 0.f ? (top + log2f(mass)) * detail::kLn2 : -INFINITY;
    }
  }

 private:
  static constexpr std::uint32_t kColumns = kDim / 4;  ///< four dims each, of a head
  [[nodiscard]] __device__ std::uint32_t columns() const { return m_.shape.group() * kColumns; }
  [[nodiscard]] __device__ std::uint64_t first() const { return std::uint64_t{work_.index} * m_.shape.group(); }
  /// All that attend. Barriers below are those of Choice.
  __device__ static void sync() { asm volatile("bar.sync 8, %0;" ::"n"(kAttendThreads) : "memory"); }

  const ForwardMemory& m_;
  const Work& work_;
  Shared& s_;
  WarpOut* outs_;
  detail::Accumulator<kDim, 1> sum_;
};

}  // namespace sluice::gpu::forward
