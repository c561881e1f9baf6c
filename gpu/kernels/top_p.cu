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
/// Loads that a thread has in flight while the row is read for the first time.
constexpr std::uint32_t kInFlight = 8;
constexpr float kLog2E = 1.44269504f;

/// Unsigned keys in the order of the values; 0 for what is never kept. The two zeros are equal.
__device__ __forceinline__ std::uint32_t order_key(float value) {
  const std::uint32_t bits = __float_as_uint(__fadd_rn(value, 0.f));
  if ((bits & 0x7fff'ffffu) > 0x7f80'0000u || bits == 0xff80'0000u) return 0;
  return (bits >> 31) != 0 ? ~bits : bits | 0x8000'0000u;
}
__device__ __forceinline__ float value_of(std::uint32_t key) {
  return __uint_as_float((key >> 31) != 0 ? key ^ 0x8000'0000u : ~key);
}

/// What a pass over the row finds out, of one thread or of all.
struct Found {
  float mass;           ///< of the keys above the middle
  std::uint32_t above;  ///< the least of these
  std::uint32_t below;  ///< the largest of the others
};

struct Shared {
  TopPRow row;
  /// By warp. Passes take turns, so that one barrier each is enough: the next but one writes after the next one's,
  /// when all have read.
  Found warps[2][kWarps];
  std::uint32_t kept;
};

/// Keys of a row: kept in shared memory if they fit, else made again from the values.
struct Keys {
  const float* values;
  const std::uint32_t* cached;  ///< null: made again
  __device__ __forceinline__ std::uint32_t operator[](std::uint32_t i) const {
    return cached != nullptr ? cached[i] : order_key(__ldg(values + i));
  }
};

__device__ __forceinline__ Found over_lanes(Found found) {
#pragma unroll
  for (int step = kWarp / 2; step > 0; step /= 2) found.mass += __shfl_xor_sync(kAll, found.mass, step);
  return {found.mass, __reduce_min_sync(kAll, found.above), __reduce_max_sync(kAll, found.below)};
}

/// The same for all threads, in an order that does not depend on timing; ends with all of them knowing the result.
__device__ __forceinline__ Found over_block(Shared& s, Found found, std::uint32_t turn) {
  found = over_lanes(found);
  if (threadIdx.x % kWarp == 0) s.warps[turn % 2][threadIdx.x / kWarp] = found;
  __syncthreads();
  return over_lanes(s.warps[turn % 2][threadIdx.x % kWarp]);
}

/// Reads the row and caches its keys if there is room. `above`: the least key, less 1; `below`: the largest.
__device__ Found read_row(const TopPRow& row, std::uint32_t* cached) {
  Found found{.mass = 0.f, .above = kAll, .below = 0};
  for (std::uint32_t base = threadIdx.x; base < row.count; base += kInFlight * kThreads) {
    float value[kInFlight];
#pragma unroll
    for (std::uint32_t i = 0; i < kInFlight; ++i) {
      if (base + i * kThreads < row.count) value[i] = __ldg(row.values + base + i * kThreads);
    }
#pragma unroll
    for (std::uint32_t i = 0; i < kInFlight; ++i) {
      if (base + i * kThreads >= row.count) break;
      const std::uint32_t key = order_key(value[i]);
      if (cached != nullptr) cached[base + i * kThreads] = key;
      found.above = min(found.above, key - 1);  // 0 becomes the largest.
      found.below = max(found.below, key);
    }
  }
  return found;
}

/// What one thread finds of its keys. Weights are relative to the largest key's.
__device__ __forceinline__ Found pass(const Keys& keys, std::uint32_t count, std::uint32_t middle, std::uint32_t top) {
  const float most = value_of(top);
  Found found{.mass = 0.f, .above = kAll, .below = 0};
  for (std::uint32_t i = threadIdx.x; i < count; i += kThreads) {
    const std::uint32_t key = keys[i];
    if (key > middle) {
      // Infinities are equal, though their difference is not 0.
      found.mass += key == top ? 1.f : detail::exp2_fast((value_of(key) - most) * kLog2E);
      found.above = min(found.above, key);
    } else {
      found.below = max(found.below, key);
    }
  }
  return found;
}

/// The largest key `least` such that all above it hold `p` of the mass; `low` and `high` are the least key, less 1, and
/// the largest. All keys above `low` hold enough, those above `high` do not; both move to where keys are, so that the
/// end is exact: nothing lies between them.
__device__ std::uint32_t search(Shared& s, const Keys& keys, std::uint32_t low, std::uint32_t high) {
  const TopPRow& row = s.row;
  const std::uint32_t top = high;
  std::uint32_t turn = 1;
  const float need = row.p * over_block(s, pass(keys, row.count, low, top), turn++).mass;
  while (high - low > 1) {
    const std::uint32_t middle = low + (high - low) / 2;
    const Found found = over_block(s, pass(keys, row.count, middle, top), turn++);
    if (found.mass >= need) {
      low = found.above - 1;
    } else {
      high = found.below;
    }
  }
  return low;
}

/// Each warp looks at 32 words at a time and writes them as one line.
__device__ void write_mask(Shared& s, const Keys& keys, std::uint32_t low) {
  const std::uint32_t lane = threadIdx.x % kWarp;
  const std::uint32_t words = (s.row.count + 31) / 32;
  std::uint32_t kept = 0;
  for (std::uint32_t base = threadIdx.x / kWarp * kWarp; base < words; base += kThreads) {
    std::uint32_t mine = 0;
    for (std::uint32_t w = 0; w < kWarp && base + w < words; ++w) {
      const std::uint32_t i = (base + w) * 32 + lane;
      const std::uint32_t bits = __ballot_sync(kAll, i < s.row.count && keys[i] > low);
      if (lane == w) mine = bits;
    }
    if (base + lane < words) s.row.mask[base + lane] = mine;
    kept += static_cast<std::uint32_t>(__popc(static_cast<int>(mine)));
  }
  if (s.row.kept == nullptr) return;
  atomicAdd(&s.kept, kept);
  __syncthreads();
  if (threadIdx.x == 0) *s.row.kept = s.kept;
}

/// One thread block per row. `room`: keys that fit into dynamic shared memory.
__global__ void __launch_bounds__(kThreads)
    top_p_kernel(const __grid_constant__ TaskArray<TopPRow> rows, std::uint32_t room) {
  extern __shared__ std::uint32_t cache[];
  __shared__ Shared s;
  if (threadIdx.x == 0) {
    s.row = rows[blockIdx.x];
    s.kept = 0;
  }
  __syncthreads();
  std::uint32_t* const cached = s.row.count <= room ? cache : nullptr;
  const Keys keys{.values = s.row.values, .cached = cached};
  // The barrier lets all see the cache, too.
  const Found range = over_block(s, read_row(s.row, cached), 0);
  std::uint32_t low = range.above;  // If nothing counts, no key is above it.
  if (range.below != 0 && s.row.p < 1.f) low = search(s, keys, range.above, range.below);
  write_mask(s, keys, low);
}

/// Dynamic shared memory of one thread block at most, on the current device.
std::uint32_t largest_shared() {
  int device = 0;
  int bytes = 0;
  check(cudaGetDevice(&device), "ask for the current device");
  check(cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device), "ask for shared memory");
  return static_cast<std::uint32_t>(bytes) - static_cast<std::uint32_t>(sizeof(Shared));
}

}  // namespace

void launch_top_p(const TaskArray<TopPRow>& rows, cudaStream_t stream) {
  if (rows.count == 0) return;
  std::uint32_t longest = 0;
  for (std::uint32_t i = 0; i < rows.count; ++i) longest = std::max(longest, rows[i].count);
  const std::uint32_t room = std::min(longest, largest_shared() / static_cast<std::uint32_t>(sizeof(std::uint32_t)));
  top_p_kernel<<<rows.count, kThreads, room * sizeof(std::uint32_t), stream>>>(rows, room);
  check(cudaGetLastError(), "launch the top_p kernel");
}

void load_top_p_kernels() {
  cudaFuncAttributes attributes;
  check(cudaFuncGetAttributes(&attributes, top_p_kernel), "load the top_p kernel");
  check(cudaFuncSetAttribute(top_p_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                             static_cast<int>(largest_shared())),
        "give the top_p kernel shared memory");
}

}  // namespace sluice::gpu
