// Top-p of rows that are too long to be held on chip: by one thread block each, which reads its row again and again.

#include <algorithm>

#include "gpu/device/cuda_error.hpp"
#include "gpu/kernels/load.hpp"
#include "gpu/kernels/select/top_p.cuh"

namespace sluice::gpu {
namespace {

using namespace top_p;

constexpr std::uint32_t kInFlight = 8;  ///< loads of a thread

struct Shared {
  TopPRow row;
  /// By warp. Passes take turns, so that one barrier each is enough: the next but one writes after the next one's,
  /// when all have read.
  Sums sums[2][kWarps];
  Range ranges[2][kWarps];
  std::uint32_t kept;
};

class LongRow {
 public:
  __device__ explicit LongRow(Shared& s) : s_(s), values_(s.row.values), count_(s.row.count) {}

  [[nodiscard]] __device__ std::uint32_t thread() const { return threadIdx.x; }
  [[nodiscard]] __device__ std::uint32_t threads() const { return kThreads; }
  __device__ Range range() const {
    Range range;
    for_each_key([&](std::uint32_t key) { range.add(key); });
    return range;
  }
  __device__ void weigh(std::uint32_t top) { top_ = top; }
  __device__ Sums weights(const std::uint32_t (&pivots)[kPivots]) const {
    Sums sums;
    for_each_key([&](std::uint32_t key) {
      sums.add(key, key > pivots[0] ? weight_of(key, top_, s_.row.softcap) : 0.f, pivots);
    });
    return sums;
  }
  __device__ Sums counts(const std::uint32_t (&pivots)[kPivots]) const {
    Sums sums;
    for_each_key([&](std::uint32_t key) { sums.add(key, 1.f, pivots); });
    return sums;
  }
  __device__ Sums reduce(const Sums& sums, std::uint32_t turn) { return over_block(s_.sums[turn % 2], sums); }
  __device__ Range reduce(const Range& range, std::uint32_t turn) { return over_block(s_.ranges[turn % 2], range); }

  /// Each warp looks at 32 words at a time and writes them as one line.
  __device__ void write_mask(std::uint32_t low) {
    const std::uint32_t lane = threadIdx.x % kWarp;
    const std::uint32_t words = (count_ + 31) / 32;
    std::uint32_t kept = 0;
    for (std::uint32_t base = threadIdx.x / kWarp * kWarp; base < words; base += kThreads) {
      std::uint32_t mine = 0;
      for (std::uint32_t w = 0; w < kWarp && base + w < words; ++w) {
        const std::uint32_t i = (base + w) * 32 + lane;
        const std::uint32_t bits = __ballot_sync(kAll, key_at(i) > low);
        if (lane == w) mine = bits;
      }
      if (base + lane < words) s_.row.mask[base + lane] = mine;
      kept += static_cast<std::uint32_t>(__popc(static_cast<int>(mine)));
    }
    atomicAdd(&s_.kept, kept);
  }

 private:
  template <class Use>
  __device__ __forceinline__ void for_each_key(const Use& use) const {
    for (std::uint32_t base = threadIdx.x; base < count_; base += kInFlight * kThreads) {
      std::uint32_t keys[kInFlight];
#pragma unroll
      for (std::uint32_t i = 0; i < kInFlight; ++i) keys[i] = key_at(base + i * kThreads);
#pragma unroll
      for (std::uint32_t i = 0; i < kInFlight; ++i) use(keys[i]);
    }
  }
  /// 0 from the row's end on.
  __device__ __forceinline__ std::uint32_t key_at(std::uint32_t i) const {
    return is_choice(s_.row, i) ? weighed_key(__ldg(values_ + i)) : 0;
  }
  /// The same for all threads, in an order that does not depend on timing; ends with all of them knowing the result.
  template <class Found>
  static __device__ Found over_block(Found (&warps)[kWarps], const Found& found) {
    const Found own = over_lanes(found);
    if (threadIdx.x % kWarp == 0) warps[threadIdx.x / kWarp] = own;
    __syncthreads();
    return over_lanes(warps[threadIdx.x % kWarp]);
  }

  Shared& s_;
  const float* values_;
  std::uint32_t count_;
  std::uint32_t top_ = 0;
};

/// One thread block per row.
__global__ void __launch_bounds__(kThreads) top_p_long_kernel(const __grid_constant__ TaskArray<TopPRow> rows) {
  __shared__ Shared s;
  if (threadIdx.x == 0) {
    s.row = rows[blockIdx.x];
    s.kept = 0;
  }
  __syncthreads();
  if (s.row.count == 0) {
    if (threadIdx.x == 0 && s.row.kept != nullptr) *s.row.kept = 0;
    return;
  }
  LongRow row(s);
  row.write_mask(cut(row, s.row));
  __syncthreads();
  if (threadIdx.x == 0 && s.row.kept != nullptr) *s.row.kept = s.kept;
}

void launch_rows(const TaskArray<TopPRow>& rows, std::uint32_t longest, std::uint32_t most_held, cudaStream_t stream) {
  if (longest <= most_held) return launch_top_p_held(rows, longest, stream);
  top_p_long_kernel<<<rows.count, kThreads, 0, stream>>>(rows);
  check(cudaGetLastError(), "launch the top_p kernel of long rows");
}

}  // namespace

void launch_top_p(const TaskArray<TopPRow>& rows, std::uint32_t most_held, cudaStream_t stream) {
  if (rows.count == 0) return;
  std::uint32_t longest = 0;
  for (std::uint32_t i = 0; i < rows.count; ++i) longest = std::max(longest, rows[i].count);
  launch_rows(rows, longest, most_held, stream);
}

void launch_top_p(const TopPRow* rows, std::uint32_t count, std::uint32_t longest, std::uint32_t most_held,
                  cudaStream_t stream) {
  TaskArray<TopPRow> array;
  array.queued = rows;
  array.count = count;
  launch_rows(array, longest, most_held, stream);
}

std::uint32_t load_top_p_kernels() {
  load_kernel(top_p_long_kernel, "load the top_p kernel of long rows");
  return load_top_p_held_kernel();
}

}  // namespace sluice::gpu
