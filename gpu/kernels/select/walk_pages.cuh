#pragma once

#include <cmath>
#include <cub/block/block_radix_sort.cuh>

#include "gpu/kernels/select/choose_pages.hpp"
#include "gpu/kernels/select/power_sum.cuh"
#include "gpu/kernels/select/sorted_run.cuh"
#include "sluice/page_rules.hpp"
#include "sluice/step/order_key.hpp"

/// How far a KV head goes down the order of its pages, see choose_pages.cu. Masses are logarithms to base 2.
namespace sluice::gpu::choose_pages {

inline constexpr std::uint32_t kWarp = 32;
inline constexpr std::uint32_t kAll = 0xffff'ffffu;
inline constexpr std::uint32_t kThreads = 1024;
inline constexpr std::uint32_t kWarps = kThreads / kWarp;
inline constexpr std::uint32_t kFew = 1;   ///< pages of a thread, at most
inline constexpr std::uint32_t kSome = 4;  ///< likewise
inline constexpr std::uint32_t kMany = 16;
inline constexpr std::uint32_t kRun = kMany * kThreads;  ///< pages that are sorted at once
inline constexpr std::uint32_t kAtOnce = 4;              ///< query heads

/// Tokens of a page that are not attended anyway.
struct Far {
  std::uint32_t begin, end;
  __device__ Far(const ChoosePagesTask& task, std::uint32_t page, std::uint32_t page_tokens)
      : begin(max(page * page_tokens, task.sinks)), end(min((page + 1) * page_tokens, task.recent)) {}
};

/// The memory of a task, see ChoosePagesTask::scratch_words.
struct PageMemory {
  float* masses;         ///< [group, pages]
  std::uint32_t* order;  ///< [pages]
  // Runs that are sorted, before they are merged:
  std::uint32_t* keys;    ///< [pages]
  std::uint32_t* sorted;  ///< [pages]
  __device__ PageMemory(const ChoosePagesTask& task, std::uint32_t group)
      : masses(reinterpret_cast<float*>(task.scratch)),
        order(task.scratch + std::uint64_t{group} * task.pages),
        keys(order + task.pages),
        sorted(keys + task.pages) {}
};

/// Of a sum whose largest terms are infinite, or that has none, that.
__device__ __forceinline__ float log_of(const detail::PowerSum& sum) {
  return isinf(sum.top) ? sum.top : sum.top + __log2f(sum.mass);
}

/// Of the sum of two powers of 2. Neither is NaN.
__device__ __forceinline__ float add_logs(float a, float b) {
  const float most = fmaxf(a, b);
  return isinf(most) ? most : most + __log2f(1.f + detail::exp2_fast(fminf(a, b) - most));
}

template <std::uint32_t kItems>
using Sort = cub::BlockRadixSort<std::uint32_t, kThreads, kItems, std::uint32_t>;

union SortStorage {
  Sort<kFew>::TempStorage few;
  Sort<kSome>::TempStorage some;
  Sort<kMany>::TempStorage many;
};

/// What a query head has attended, and what it takes a page that it has not seen to weigh, of one part of the pages
/// after the other. NaN: the part says nothing of that, where the rule is not the least of all parts.
struct Walked {
  float mass = -INFINITY;
  float unseen = INFINITY;
};

struct WalkShared {
  ChoosePagesTask task;  ///< here, so that registers are left
  Walked warps[kAtOnce][kWarps];
  Walked before[kMostGroup];  ///< this turn
  std::uint32_t found;
};

/// One task, by a thread block.
class Walk {
 public:
  __device__ Walk(WalkShared& s, std::uint32_t group, std::uint32_t page_tokens)
      : s_(s),
        task_(s.task),
        group_(group),
        page_tokens_(page_tokens),
        last_((task_.recent + page_tokens - 1) / page_tokens),
        count_(task_.sinks < task_.recent ? last_ - task_.sinks / page_tokens : 0),
        batches_((count_ + task_.microbatch - 1) / task_.microbatch) {}

  /// Those with tokens that are not attended anyway, in order.
  __device__ void rank(SortStorage& storage) const {
    const PageMemory memory = this->memory();
    if (count_ <= kFew * kThreads) return sort<kFew>(0, storage.few, nullptr, memory.order);
    if (count_ <= kSome * kThreads) return sort<kSome>(0, storage.some, nullptr, memory.order);
    if (count_ <= kRun) return sort<kMany>(0, storage.many, nullptr, memory.order);
    for (std::uint32_t begin = 0; begin < count_; begin += kRun)
      sort<kMany>(begin, storage.many, memory.keys, memory.sorted);
    for (std::uint32_t i = threadIdx.x; i < count_; i += kThreads)
      memory.order[sorted_run::place_of<kRun>(memory.keys, count_, i)] = memory.sorted[i];
    __syncthreads();
  }

  /// How many pages of the order are taken, in all threads.
  [[nodiscard]] __device__ std::uint32_t taken(float softcap) {
    attend_anyway(softcap);
    for (std::uint32_t first = 0; first < batches_; first += kThreads) {
      const std::uint32_t batch = first + threadIdx.x;
      bool enough = batch < batches_;
      for (std::uint32_t h = 0; h < group_; h += kAtOnce) enough = enough_for(h, batch) && enough;
      const std::uint32_t own = __reduce_min_sync(kAll, enough ? batch : kAll);
      if (threadIdx.x % kWarp == 0 && own != kAll) atomicMin(&s_.found, own);
      __syncthreads();
      if (s_.found != kAll) return min(count_, (s_.found + 1) * task_.microbatch);
    }
    return count_;
  }

  /// The first `taken` pages of the order as bits, for each query head.
  __device__ void mark(std::uint32_t taken) const {
    const std::uint32_t words = (task_.tokens + 31) / 32;
    for (std::uint32_t i = threadIdx.x; i < words; i += kThreads) task_.masks[i] = 0;
    __syncthreads();
    const std::uint32_t unit = page_tokens_ % 32 == 0 ? 32 : 8;
    const std::uint32_t units = page_tokens_ / unit;
    const std::uint32_t* const order = memory().order;
    for (std::uint32_t i = threadIdx.x; i < taken * units; i += kThreads) {
      const std::uint32_t token = order[i / units] * page_tokens_ + i % units * unit;
      atomicOr(task_.masks + token / 32, (unit == 32 ? kAll : 0xffu) << token % 32);
    }
    __syncthreads();
    for (std::uint32_t i = threadIdx.x; i < words; i += kThreads) {
      const std::uint32_t word = __ldcg(task_.masks + i);
      for (std::uint32_t h = 1; h < group_; ++h) task_.masks[h * task_.mask_words + i] = word;
    }
  }

 private:
  [[nodiscard]] __device__ PageMemory memory() const { return {task_, group_}; }

  /// Of the pages from the newest on, `begin` left out. The sort is stable: of equal ones the newest comes first.
  template <std::uint32_t kItems>
  __device__ void sort(std::uint32_t begin, typename Sort<kItems>::TempStorage& storage, std::uint32_t* keys_out,
                       std::uint32_t* pages_out) const {
    std::uint32_t keys[kItems];
    std::uint32_t pages[kItems];
    const std::uint32_t first = begin + threadIdx.x * kItems;
#pragma unroll
    for (std::uint32_t i = 0; i < kItems; ++i) {
      pages[i] = last_ - 1 - (first + i);
      float sum = 0.f;
      for (std::uint32_t h = 0; h < group_ && first + i < count_; ++h)
        sum += task_.page_scores[std::uint64_t{h} * task_.pages + pages[i]];
      // What there is not comes last, behind what is no number, whose key is the same.
      keys[i] = first + i < count_ ? ~order_key(sum) : ~0u;
    }
    Sort<kItems>(storage).Sort(keys, pages);
#pragma unroll
    for (std::uint32_t i = 0; i < kItems; ++i) {
      if (first + i >= count_) continue;
      if (keys_out != nullptr) keys_out[first + i] = keys[i];
      pages_out[first + i] = pages[i];
    }
    __syncthreads();
  }

  /// What counts first. A warp for each query head.
  __device__ void attend_anyway(float softcap) {
    const std::uint32_t h = threadIdx.x / kWarp;
    const std::uint32_t lane = threadIdx.x % kWarp;
    if (h < group_) {
      const float* const scores = task_.scores + std::uint64_t{h} * task_.tokens;
      detail::PowerSum sum;
      for (std::uint32_t i = lane; i < task_.sinks + (task_.tokens - task_.recent); i += kWarp) {
        const std::uint32_t token = i < task_.sinks ? i : task_.recent + (i - task_.sinks);
        const float x[1] = {detail::exponent_of(scores[token], softcap)};
        sum.add(x);
      }
      __syncwarp();
      sum.add_lanes();
      if (lane == 0) s_.before[h] = {.mass = log_of(sum), .unseen = INFINITY};
    }
    if (threadIdx.x == 0) s_.found = kAll;
    __syncthreads();
  }

  [[nodiscard]] __device__ bool least() const { return task_.rule == ProgressRule::least; }
  [[nodiscard]] __device__ Walked nothing() const {
    return {.mass = -INFINITY, .unseen = least() ? INFINITY : __int_as_float(0x7fc0'0000)};
  }
  [[nodiscard]] __device__ Walked both(const Walked& first, const Walked& then) const {
    const float last = isnan(then.unseen) ? first.unseen : then.unseen;
    return {.mass = add_logs(first.mass, then.mass), .unseen = least() ? fminf(first.unseen, then.unseen) : last};
  }

  [[nodiscard]] __device__ bool whole(std::uint32_t page) const {
    const Far far(task_, page, page_tokens_);
    return far.end - far.begin == page_tokens_;
  }

  /// A microbatch to query heads [h, h + kAtOnce), by itself; where there are fewer, to the last one again.
  __device__ void take(std::uint32_t h, std::uint32_t batch, Walked (&own)[kAtOnce]) const {
#pragma unroll
    for (std::uint32_t n = 0; n < kAtOnce; ++n) own[n] = nothing();
    if (batch >= batches_) return;
    const PageMemory memory = this->memory();
    const std::uint32_t begin = batch * task_.microbatch;
    const std::uint32_t end = min(count_, begin + task_.microbatch);
    const bool is_least = least();
    std::uint32_t wholes = 0;
    for (std::uint32_t i = begin; i < end; ++i) {
      const std::uint32_t page = memory.order[i];
      const bool counts = whole(page);
      wholes += counts ? 1 : 0;
#pragma unroll
      for (std::uint32_t n = 0; n < kAtOnce; ++n) {
        const float x = memory.masses[min(h + n, group_ - 1) * task_.pages + page];
        own[n].mass = add_logs(own[n].mass, x);
        if (!counts) continue;
        // Until all are there the sum of whole ones, where that is wanted.
        own[n].unseen = is_least ? fminf(own[n].unseen, x) : wholes == 1 ? x : add_logs(own[n].unseen, x);
      }
    }
    if (wholes == 0 || is_least) return;
    const float log_wholes = __log2f(static_cast<float>(wholes));
#pragma unroll
    for (std::uint32_t n = 0; n < kAtOnce; ++n) {
      own[n].unseen = task_.rule == ProgressRule::mean ? own[n].unseen - log_wholes
                                                       : median_of(min(h + n, group_ - 1), begin, end, wholes / 2);
    }
  }
  /// Of the masses of whole pages in [begin, end) that which `below` others come before, bit by bit from the top.
  [[nodiscard]] __device__ float median_of(std::uint32_t h, std::uint32_t begin, std::uint32_t end,
                                           std::uint32_t below) const {
    const PageMemory memory = this->memory();
    std::uint32_t key = 0;
    for (std::uint32_t bit = 1u << 31; bit != 0; bit /= 2) {
      std::uint32_t less = 0;
      for (std::uint32_t i = begin; i < end; ++i) {
        const std::uint32_t page = memory.order[i];
        less += whole(page) && order_key(memory.masses[h * task_.pages + page]) < (key | bit) ? 1 : 0;
      }
      if (less <= below) key |= bit;
    }
    return __uint_as_float((key >> 31) != 0 ? key ^ 0x8000'0000u : ~key);
  }

  /// Whether query heads [h, h + kAtOnce), those of them that there are, have enough when they have attended this
  /// thread's microbatch and all before it. All threads.
  [[nodiscard]] __device__ bool enough_for(std::uint32_t h, std::uint32_t batch) {
    const std::uint32_t lane = threadIdx.x % kWarp;
    const std::uint32_t warp = threadIdx.x / kWarp;
    Walked own[kAtOnce];
    take(h, batch, own);
#pragma unroll
    for (std::uint32_t n = 0; n < kAtOnce; ++n) own[n] = over_lanes(own[n]);
#pragma unroll
    for (std::uint32_t n = 0; n < kAtOnce; ++n) {
      if (lane == kWarp - 1) s_.warps[n][warp] = own[n];
    }
    __syncthreads();
    bool enough = true;
    Walked all[kAtOnce];
#pragma unroll
    for (std::uint32_t n = 0; n < kAtOnce; ++n) {
      const Walked before = s_.before[min(h + n, group_ - 1)];
      const Walked warps = over_lanes(s_.warps[n][lane]);
      const Walked others = from_lane(warps, warp == 0 ? 0 : warp - 1);
      all[n] = both(before, from_lane(warps, kWarp - 1));
      own[n] = both(before, warp == 0 ? own[n] : both(others, own[n]));
      enough = enough && (h + n >= group_ || passes(own[n], batch));
    }
    __syncthreads();  // All have read.
#pragma unroll
    for (std::uint32_t n = 0; n < kAtOnce; ++n) {
      if (threadIdx.x == 0 && h + n < group_) s_.before[h + n] = all[n];
    }
    return enough;
  }
  [[nodiscard]] static __device__ Walked from_lane(const Walked& walked, std::uint32_t lane) {
    return {.mass = __shfl_sync(kAll, walked.mass, static_cast<int>(lane)),
            .unseen = __shfl_sync(kAll, walked.unseen, static_cast<int>(lane))};
  }
  /// What this lane's and those of all lanes before it come to.
  [[nodiscard]] __device__ Walked over_lanes(Walked walked) const {
#pragma unroll
    for (std::uint32_t step = 1; step < kWarp; step *= 2) {
      const Walked before{.mass = __shfl_up_sync(kAll, walked.mass, step),
                          .unseen = __shfl_up_sync(kAll, walked.unseen, step)};
      if (threadIdx.x % kWarp >= step) walked = both(before, walked);
    }
    return walked;
  }
  /// See progress_share.
  [[nodiscard]] __device__ bool passes(const Walked& walked, std::uint32_t batch) const {
    const std::uint32_t done = (batch + 1) * task_.microbatch;
    if (done >= count_) return true;
    if (!(walked.mass > -INFINITY)) return false;
    const float rest = walked.unseen + __log2f(static_cast<float>(count_ - done));
    return 1.f / (1.f + detail::exp2_fast(rest - walked.mass)) >= task_.mass && task_.mass < 1.f;
  }

  WalkShared& s_;
  const ChoosePagesTask& task_;
  std::uint32_t group_;
  std::uint32_t page_tokens_;
  std::uint32_t last_;     ///< behind the newest page with such tokens
  std::uint32_t count_;    ///< pages with such tokens
  std::uint32_t batches_;  ///< of them
};

}  // namespace sluice::gpu::choose_pages
