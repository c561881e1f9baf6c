#include <algorithm>

#include "gpu/cuda_error.hpp"
#include "gpu/kernels/mma.cuh"
#include "gpu/kernels/top_p.hpp"

namespace sluice::gpu {
namespace {

constexpr std::uint32_t kWarp = 32;
constexpr std::uint32_t kThreads = 1024;
constexpr std::uint32_t kWarps = kThreads / kWarp;
static_assert(kWarps == kWarp, "the last step of a reduction has one lane per warp");
constexpr std::uint32_t kAll = 0xffff'ffffu;
constexpr float kLog2E = 1.44269504f;

/// Values of a row that a thread holds in registers; a longer row lies in shared memory or is read again and again.
constexpr std::uint32_t kHeld = 8;
constexpr std::uint32_t kShort = kHeld * kThreads;

/// Unsigned keys in the order of the values; 0 for what is never kept. The two zeros are equal.
__device__ __forceinline__ std::uint32_t order_key(float value) {
  const std::uint32_t bits = __float_as_uint(__fadd_rn(value, 0.f));
  if ((bits & 0x7fff'ffffu) > 0x7f80'0000u || bits == 0xff80'0000u) return 0;
  return (bits >> 31) != 0 ? ~bits : bits | 0x8000'0000u;
}
__device__ __forceinline__ float value_of(std::uint32_t key) {
  return __uint_as_float((key >> 31) != 0 ? key ^ 0x8000'0000u : ~key);
}
/// Relative to the largest key's. Infinities are equal, though their difference is not 0.
__device__ __forceinline__ float weight_of(std::uint32_t key, std::uint32_t top) {
  return key == top ? 1.f : detail::exp2_fast((value_of(key) - value_of(top)) * kLog2E);
}

/// What a pass over the row finds out, of one thread or of all.
struct Found {
  float mass = 0.f;            ///< of the keys above the middle
  std::uint32_t above = kAll;  ///< the least of these
  std::uint32_t below = 0;     ///< the largest of the others

  __device__ __forceinline__ void add(std::uint32_t key, float weight, std::uint32_t middle) {
    const bool counts = key > middle;
    mass += counts ? weight : 0.f;
    above = min(above, counts ? key : kAll);
    below = max(below, counts ? 0 : key);
  }
};

struct Shared {
  TopPRow row;
  /// By warp. Passes take turns, so that one barrier each is enough: the next but one writes after the next one's,
  /// when all have read.
  Found warps[2][kWarps];
  std::uint32_t mask[kShort / 32];
  std::uint32_t kept;
};

__device__ __forceinline__ Found over_lanes(Found found) {
#pragma unroll
  for (int step = kWarp / 2; step > 0; step /= 2) found.mass += __shfl_xor_sync(kAll, found.mass, step);
  found.above = __reduce_min_sync(kAll, found.above);
  found.below = __reduce_max_sync(kAll, found.below);
  return found;
}

/// The same for all threads, in an order that does not depend on timing; ends with all of them knowing the result.
__device__ __forceinline__ Found over_block(Shared& s, Found found, std::uint32_t turn) {
  found = over_lanes(found);
  if (threadIdx.x % kWarp == 0) s.warps[turn % 2][threadIdx.x / kWarp] = found;
  __syncthreads();
  return over_lanes(s.warps[turn % 2][threadIdx.x % kWarp]);
}

/// `above`: the least key of those that count, less 1; `below`: the largest.
__device__ __forceinline__ void add_to_range(std::uint32_t key, Found& found) {
  found.above = min(found.above, key - 1);  // 0 becomes the largest.
  found.below = max(found.below, key);
}

/// A row of up to kShort values: thread t holds values t, t + kThreads ...
class HeldRow {
 public:
  __device__ HeldRow(const Shared& s, std::uint32_t*, std::uint32_t) {
    const float* const values = s.row.values;
    float value[kHeld];
#pragma unroll
    for (std::uint32_t i = 0; i < kHeld; ++i) {
      const std::uint32_t at = threadIdx.x + i * kThreads;
      value[i] = at < s.row.count ? __ldg(values + at) : __int_as_float(0xff80'0000);
    }
#pragma unroll
    for (std::uint32_t i = 0; i < kHeld; ++i) keys_[i] = order_key(value[i]);
  }
  __device__ Found range() const {
    Found found;
#pragma unroll
    for (std::uint32_t i = 0; i < kHeld; ++i) add_to_range(keys_[i], found);
    return found;
  }
  __device__ void weigh(std::uint32_t top) {
#pragma unroll
    for (std::uint32_t i = 0; i < kHeld; ++i) weights_[i] = weight_of(keys_[i], top);
  }
  __device__ Found pass(std::uint32_t middle) const {
    Found found;
#pragma unroll
    for (std::uint32_t i = 0; i < kHeld; ++i) found.add(keys_[i], weights_[i], middle);
    return found;
  }
  /// Through shared memory, so that the mask leaves in whole lines.
  __device__ void write_mask(Shared& s, std::uint32_t low) const {
#pragma unroll
    for (std::uint32_t i = 0; i < kHeld; ++i) {
      const std::uint32_t bits = __ballot_sync(kAll, keys_[i] > low);
      if (threadIdx.x % kWarp == 0) s.mask[i * kWarps + threadIdx.x / kWarp] = bits;
    }
    __syncthreads();
    const std::uint32_t word = threadIdx.x;
    if (word >= (s.row.count + 31) / 32) return;
    s.row.mask[word] = s.mask[word];
    atomicAdd(&s.kept, static_cast<std::uint32_t>(__popc(static_cast<int>(s.mask[word]))));
  }

 private:
  std::uint32_t keys_[kHeld];
  float weights_[kHeld];
};
static_assert(kShort / 32 <= kThreads, "one thread per word of the mask");

/// A row of any length: its keys lie in shared memory if there is room, else they are made again from the values.
class LongRow {
 public:
  __device__ LongRow(const Shared& s, std::uint32_t* cache, std::uint32_t room)
      : values_(s.row.values), count_(s.row.count), cache_(s.row.count <= room ? cache : nullptr) {}

  /// Fills the cache on the way; the barrier of the reduction that follows lets all threads see it.
  __device__ Found range() const {
    Found found;
    for (std::uint32_t base = threadIdx.x; base < count_; base += kHeld * kThreads) {
      float value[kHeld];
#pragma unroll
      for (std::uint32_t i = 0; i < kHeld; ++i) {
        const std::uint32_t at = base + i * kThreads;
        value[i] = at < count_ ? __ldg(values_ + at) : __int_as_float(0xff80'0000);
      }
#pragma unroll
      for (std::uint32_t i = 0; i < kHeld; ++i) {
        const std::uint32_t at = base + i * kThreads;
        const std::uint32_t key = order_key(value[i]);
        if (cache_ != nullptr && at < count_) cache_[at] = key;
        add_to_range(key, found);
      }
    }
    return found;
  }
  __device__ void weigh(std::uint32_t top) { top_ = top; }
  __device__ Found pass(std::uint32_t middle) const {
    Found found;
    for (std::uint32_t i = threadIdx.x; i < count_; i += kThreads) {
      const std::uint32_t key = key_at(i);
      found.add(key, key > middle ? weight_of(key, top_) : 0.f, middle);
    }
    return found;
  }
  /// Each warp looks at 32 words at a time and writes them as one line.
  __device__ void write_mask(Shared& s, std::uint32_t low) const {
    const std::uint32_t lane = threadIdx.x % kWarp;
    const std::uint32_t words = (count_ + 31) / 32;
    std::uint32_t kept = 0;
    for (std::uint32_t base = threadIdx.x / kWarp * kWarp; base < words; base += kThreads) {
      std::uint32_t mine = 0;
      for (std::uint32_t w = 0; w < kWarp && base + w < words; ++w) {
        const std::uint32_t i = (base + w) * 32 + lane;
        const std::uint32_t bits = __ballot_sync(kAll, i < count_ && key_at(i) > low);
        if (lane == w) mine = bits;
      }
      if (base + lane < words) s.row.mask[base + lane] = mine;
      kept += static_cast<std::uint32_t>(__popc(static_cast<int>(mine)));
    }
    atomicAdd(&s.kept, kept);
  }

 private:
  __device__ __forceinline__ std::uint32_t key_at(std::uint32_t i) const {
    return cache_ != nullptr ? cache_[i] : order_key(__ldg(values_ + i));
  }

  const float* values_;
  std::uint32_t count_;
  std::uint32_t* cache_;
  std::uint32_t top_ = 0;
};

/// The largest key such that all above it hold `p` of the mass; `low` and `high` are the least key, less 1, and the
/// largest. All keys above `low` hold enough, those above `high` do not; both move to where keys are, so that the end
/// is exact: nothing lies between them.
template <class Row>
__device__ std::uint32_t search(Shared& s, Row& row, std::uint32_t low, std::uint32_t high) {
  row.weigh(high);
  const float p = s.row.p;
  std::uint32_t turn = 1;
  const float total = over_block(s, row.pass(low), turn++).mass;
  const float need = p * total;
  // What is lighter than this can be left out altogether: a start that saves the first halvings.
  const float light = (1.f - p) * total / static_cast<float>(s.row.count);
  std::uint32_t middle = order_key(value_of(high) + logf(light));
  while (high - low > 1) {
    if (middle <= low || middle >= high) middle = low + (high - low) / 2;
    const Found found = over_block(s, row.pass(middle), turn++);
    if (found.mass >= need) {
      low = found.above - 1;
    } else {
      high = found.below;
    }
    middle = low + (high - low) / 2;
  }
  return low;
}

/// One thread block per row. `room`: keys that fit into dynamic shared memory.
template <class Row>
__global__ void __launch_bounds__(kThreads)
    top_p_kernel(const __grid_constant__ TaskArray<TopPRow> rows, std::uint32_t room) {
  extern __shared__ std::uint32_t cache[];
  __shared__ Shared s;
  if (threadIdx.x == 0) {
    s.row = rows[blockIdx.x];
    s.kept = 0;
  }
  __syncthreads();
  Row row(s, cache, room);
  const Found range = over_block(s, row.range(), 0);
  std::uint32_t low = range.above;  // If nothing counts, no key is above it.
  if (range.below != 0 && s.row.p < 1.f) low = search(s, row, range.above, range.below);
  row.write_mask(s, low);
  __syncthreads();
  if (threadIdx.x == 0 && s.row.kept != nullptr) *s.row.kept = s.kept;
}

/// Dynamic shared memory that a thread block of the kernel for long rows may have at most, on the current device.
std::uint32_t largest_shared() {
  int device = 0;
  int bytes = 0;
  cudaFuncAttributes attributes{};
  check(cudaGetDevice(&device), "ask for the current device");
  check(cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device), "ask for shared memory");
  check(cudaFuncGetAttributes(&attributes, top_p_kernel<LongRow>), "ask for the top_p kernel's own shared memory");
  return static_cast<std::uint32_t>(bytes) - static_cast<std::uint32_t>(attributes.sharedSizeBytes);
}

}  // namespace

void launch_top_p(const TaskArray<TopPRow>& rows, cudaStream_t stream) {
  if (rows.count == 0) return;
  std::uint32_t longest = 0;
  for (std::uint32_t i = 0; i < rows.count; ++i) longest = std::max(longest, rows[i].count);
  if (longest <= kShort) {
    top_p_kernel<HeldRow><<<rows.count, kThreads, 0, stream>>>(rows, 0);
  } else {
    const std::uint32_t room = std::min(longest, largest_shared() / static_cast<std::uint32_t>(sizeof(std::uint32_t)));
    top_p_kernel<LongRow><<<rows.count, kThreads, room * sizeof(std::uint32_t), stream>>>(rows, room);
  }
  check(cudaGetLastError(), "launch the top_p kernel");
}

void load_top_p_kernels() {
  cudaFuncAttributes attributes;
  check(cudaFuncGetAttributes(&attributes, top_p_kernel<HeldRow>), "load the top_p kernel for short rows");
  check(cudaFuncGetAttributes(&attributes, top_p_kernel<LongRow>), "load the top_p kernel for long rows");
  check(cudaFuncSetAttribute(top_p_kernel<LongRow>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                             static_cast<int>(largest_shared())),
        "give the top_p kernel shared memory");
}

}  // namespace sluice::gpu
