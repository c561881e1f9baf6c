#include <algorithm>

#include "gpu/device/cuda_error.hpp"
#include "gpu/kernels/select/top_p.cuh"

namespace sluice::gpu {
namespace {

using namespace top_p;

/// Values of a row that a thread holds in registers; a longer row lies in shared memory or is read again and again.
constexpr std::uint32_t kHeld = 8;
constexpr std::uint32_t kShort = kHeld * kThreads;

struct Shared {
  TopPRow row;
  /// By warp. Passes take turns, so that one barrier each is enough: the next but one writes after the next one's,
  /// when all have read.
  Found warps[2][kWarps];
  std::uint32_t mask[kShort / 32];
  std::uint32_t kept;
};

/// The same for all threads, in an order that does not depend on timing; ends with all of them knowing the result.
__device__ __forceinline__ Found over_block(Shared& s, Found found, std::uint32_t turn) {
  found = over_lanes(found);
  if (threadIdx.x % kWarp == 0) s.warps[turn % 2][threadIdx.x / kWarp] = found;
  __syncthreads();
  return over_lanes(s.warps[turn % 2][threadIdx.x % kWarp]);
}

/// A row that one thread block has.
struct BlockRow {
  [[nodiscard]] __device__ std::uint32_t thread() const { return threadIdx.x; }
  [[nodiscard]] __device__ std::uint32_t threads() const { return kThreads; }
};

/// A row of up to kShort values: thread t holds values t, t + kThreads ...
class HeldRow : public BlockRow {
 public:
  __device__ HeldRow(Shared& s, std::uint32_t*, std::uint32_t) : s_(s) {
    const float* const values = s.row.values;
    float value[kHeld];
#pragma unroll
    for (std::uint32_t i = 0; i < kHeld; ++i) {
      const std::uint32_t at = threadIdx.x + i * kThreads;
      value[i] = is_choice(s.row, at) ? __ldg(values + at) : __int_as_float(0xff80'0000);
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
    for (std::uint32_t i = 0; i < kHeld; ++i) weights_[i] = weight_of(keys_[i], top, s_.row.softcap);
  }
  __device__ Found reduce(const Found& found, std::uint32_t turn) { return over_block(s_, found, turn); }
  __device__ Found pass(std::uint32_t middle) const {
    Found found;
#pragma unroll
    for (std::uint32_t i = 0; i < kHeld; ++i) found.add(keys_[i], weights_[i], middle);
    return found;
  }
  __device__ Found count(std::uint32_t middle) const {
    Found found;
#pragma unroll
    for (std::uint32_t i = 0; i < kHeld; ++i) found.add(keys_[i], 1.f, middle);
    return found;
  }
  /// Through shared memory, so that the mask leaves in whole lines.
  __device__ void write_mask(std::uint32_t low) {
#pragma unroll
    for (std::uint32_t i = 0; i < kHeld; ++i) {
      const std::uint32_t bits = __ballot_sync(kAll, keys_[i] > low);
      if (threadIdx.x % kWarp == 0) s_.mask[i * kWarps + threadIdx.x / kWarp] = bits;
    }
    __syncthreads();
    const std::uint32_t word = threadIdx.x;
    if (word >= (s_.row.count + 31) / 32) return;
    s_.row.mask[word] = s_.mask[word];
    atomicAdd(&s_.kept, static_cast<std::uint32_t>(__popc(static_cast<int>(s_.mask[word]))));
  }

 private:
  Shared& s_;
  std::uint32_t keys_[kHeld];
  float weights_[kHeld];
};
static_assert(kShort / 32 <= kThreads, "one thread per word of the mask");

/// A row of any length: its keys lie in shared memory if there is room, else they are made again from the values.
class LongRow : public BlockRow {
 public:
  __device__ LongRow(Shared& s, std::uint32_t* cache, std::uint32_t room)
      : s_(s), values_(s.row.values), count_(s.row.count), cache_(s.row.count <= room ? cache : nullptr) {}

  /// Fills the cache on the way; the barrier of the reduction that follows lets all threads see it.
  __device__ Found range() const {
    Found found;
    for (std::uint32_t base = threadIdx.x; base < count_; base += kHeld * kThreads) {
      float value[kHeld];
#pragma unroll
      for (std::uint32_t i = 0; i < kHeld; ++i) {
        const std::uint32_t at = base + i * kThreads;
        value[i] = is_choice(s_.row, at) ? __ldg(values_ + at) : __int_as_float(0xff80'0000);
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
  __device__ Found reduce(const Found& found, std::uint32_t turn) { return over_block(s_, found, turn); }
  __device__ Found pass(std::uint32_t middle) const {
    const float softcap = s_.row.softcap;
    if (softcap == 0.f) return pass(middle, [this](std::uint32_t key) { return weight_of(key, top_); });
    return pass(middle, [this, softcap](std::uint32_t key) { return weight_of(key, top_, softcap); });
  }
  __device__ Found count(std::uint32_t middle) const {
    return pass(middle, [](std::uint32_t) { return 1.f; });
  }
  /// Each warp looks at 32 words at a time and writes them as one line.
  __device__ void write_mask(std::uint32_t low) {
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
      if (base + lane < words) s_.row.mask[base + lane] = mine;
      kept += static_cast<std::uint32_t>(__popc(static_cast<int>(mine)));
    }
    atomicAdd(&s_.kept, kept);
  }

 private:
  template <class Weight>
  __device__ __forceinline__ Found pass(std::uint32_t middle, const Weight& weight) const {
    Found found;
    for (std::uint32_t i = threadIdx.x; i < count_; i += kThreads) {
      const std::uint32_t key = key_at(i);
      found.add(key, key > middle ? weight(key) : 0.f, middle);
    }
    return found;
  }
  __device__ __forceinline__ std::uint32_t key_at(std::uint32_t i) const {
    if (cache_ != nullptr) return cache_[i];
    return is_choice(s_.row, i) ? order_key(__ldg(values_ + i)) : 0;
  }

  Shared& s_;
  const float* values_;
  std::uint32_t count_;
  std::uint32_t* cache_;
  std::uint32_t top_ = 0;
};

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
  if (s.row.count == 0) {
    if (threadIdx.x == 0 && s.row.kept != nullptr) *s.row.kept = 0;
    return;
  }
  Row row(s, cache, room);
  row.write_mask(cut(row, s.row));
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

void launch_rows(const TaskArray<TopPRow>& rows, std::uint32_t longest, std::uint32_t most_of_clusters,
                 cudaStream_t stream) {
  if (longest <= kShort) {
    top_p_kernel<HeldRow><<<rows.count, kThreads, 0, stream>>>(rows, 0);
  } else if (longest <= most_of_clusters) {
    return launch_top_p_clusters(rows, longest, stream);
  } else {
    const std::uint32_t room = std::min(longest, largest_shared() / static_cast<std::uint32_t>(sizeof(std::uint32_t)));
    top_p_kernel<LongRow><<<rows.count, kThreads, room * sizeof(std::uint32_t), stream>>>(rows, room);
  }
  check(cudaGetLastError(), "launch the top_p kernel");
}

}  // namespace

void launch_top_p(const TaskArray<TopPRow>& rows, std::uint32_t most_of_clusters, cudaStream_t stream) {
  if (rows.count == 0) return;
  std::uint32_t longest = 0;
  for (std::uint32_t i = 0; i < rows.count; ++i) longest = std::max(longest, rows[i].count);
  launch_rows(rows, longest, most_of_clusters, stream);
}

void launch_top_p(const TopPRow* rows, std::uint32_t count, std::uint32_t longest, std::uint32_t most_of_clusters,
                  cudaStream_t stream) {
  TaskArray<TopPRow> array;
  array.queued = rows;
  array.count = count;
  launch_rows(array, longest, most_of_clusters, stream);
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
