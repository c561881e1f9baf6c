#pragma once

#include "gpu/kernels/forward/drawn.cuh"

/// Near rows and far rows of what is marked, one behind the other.
namespace sluice::gpu::forward {

struct ListShared {
  static constexpr std::uint32_t kMostWords = 2 * kThreads;  ///< of a turn, if there are several
  std::uint32_t sums[kWarps];
  std::uint32_t near[kMostBlocks];  ///< rows that each block lists, in each
  std::uint32_t far[kMostBlocks];
};

/// Of near tokens and, above them, far ones: 16 bits each.
struct Sums {
  std::uint32_t before;  ///< of this thread
  std::uint32_t all;
};
__device__ inline Sums sum(std::uint32_t counts, std::uint32_t (&sums)[kWarps]) {
  const std::uint32_t inclusive = top_k::inclusive_sum(counts);
  const std::uint32_t lane = threadIdx.x % kWarp;
  const std::uint32_t warp = threadIdx.x / kWarp;
  __syncthreads();  // The sums of the turn before have been read.
  if (lane == kWarp - 1) sums[warp] = inclusive;
  __syncthreads();
  const std::uint32_t theirs = lane < kWarps ? sums[lane] : 0;
  return {.before = __reduce_add_sync(kAll, lane < warp ? theirs : 0) + inclusive - counts,
          .all = __reduce_add_sync(kAll, theirs)};
}

/// Rows that lie near, and far.
struct Listed {
  std::uint32_t near = 0;
  std::uint32_t far = 0;
  __device__ void add(const Sums& sums) {
    near += sums.all & 0xffffu;
    far += sums.all >> 16;
  }
};

/// What the blocks before this one list, and all of them. All threads of the cluster.
struct Exchanged {
  Listed before;
  Listed all;
};
__device__ inline Exchanged exchange(ListShared& s, const Part& part, const Listed& own) {
  if (threadIdx.x < part.blocks()) {
    detail::store_in_cluster(detail::address_in(&s.near[part.rank()], threadIdx.x), own.near);
    detail::store_in_cluster(detail::address_in(&s.far[part.rank()], threadIdx.x), own.far);
  }
  detail::cluster_sync();
  Exchanged exchanged;
  for (std::uint32_t b = 0; b < part.blocks(); ++b) {
    const Listed theirs{.near = s.near[b], .far = s.far[b]};
    exchanged.all.near += theirs.near;
    exchanged.all.far += theirs.far;
    exchanged.before.near += b < part.rank() ? theirs.near : 0;
    exchanged.before.far += b < part.rank() ? theirs.far : 0;
  }
  return exchanged;
}

/// The marked tokens of some words of a block, in shared memory, and where they lie.
class Found {
 public:
  /// @param room  entries that there is room for, of as many tokens a turn
  /// @param tokens  and where these are kept, too; null: nobody wants to know
  /// @param drawn  not null: find() leaves there what is added to the tokens' logits, in place of them
  __device__ Found(ListShared& s, std::uint32_t* entries, std::uint32_t room, const Marks& marks,
                   std::uint32_t* tokens = nullptr, const Drawn* drawn = nullptr)
      : s_(s),
        entries_(entries),
        tokens_(tokens != nullptr ? tokens : entries),
        drawn_(drawn),
        marks_(marks),
        words_(min(ListShared::kMostWords, room / kWord)) {
    // Each turn is gone through twice, unless it is the only one; few of a long part's tokens are marked.
    const std::uint32_t words = marks.part().count() / kWord;
    if (words > words_ && marked(words) <= room) words_ = words;
  }
  /// Tokens of a turn.
  [[nodiscard]] __device__ std::uint32_t turn() const { return words_ * kWord; }

  /// What is marked from a number on. All threads.
  __device__ void gather(std::uint32_t number) {
    // Copies: after every store the compiler would read members again, from the caller's stack.
    const Marks marks = marks_;
    ListShared& s = s_;
    std::uint32_t* const tokens = tokens_;
    const std::uint32_t words = min(words_, (marks.part().count() - number) / kWord);
    constexpr int kFewBits = 8;
    const std::uint32_t lane = threadIdx.x % kWarp;
    std::uint32_t count = 0;
#pragma unroll 1
    for (std::uint32_t base = 0; base < words; base += kThreads) {
      const std::uint32_t own = number + kWord * (base + threadIdx.x);
      std::uint32_t bits = base + threadIdx.x < words ? marks.word(own) : 0;
      const Sums sums = sum(__popc(bits), s.sums);
      std::uint32_t at = count + sums.before;
      count += sums.all;
      // A thread takes a word of few tokens. Those that have many, all recent ones among them, take a warp: all would
      // wait for one thread.
      const bool many = __popc(bits) > kFewBits;
#pragma unroll 1
      for (std::uint32_t rest = __ballot_sync(kAll, many); rest != 0; rest &= rest - 1) {
        const int from = __ffs(static_cast<int>(rest)) - 1;
        const std::uint32_t word = __shfl_sync(kAll, bits, from);
        const std::uint32_t begin = __shfl_sync(kAll, at, from);
        const std::uint32_t first = marks.part().token_of(own - kWord * (lane - static_cast<std::uint32_t>(from)));
        if ((word >> lane & 1) != 0) tokens[begin + __popc(word & ((1u << lane) - 1))] = first + lane;
      }
      const std::uint32_t first = marks.part().token_of(own);
#pragma unroll 1
      for (; !many && bits != 0; bits &= bits - 1) tokens[at++] = first + __ffs(static_cast<int>(bits)) - 1;
    }
    count_ = count;
    __syncthreads();
  }

  /// The same, looked up: a near row | kNearBit each, or a far row. All threads.
  __device__ __noinline__ void find(const ForwardMemory& m, const Work& work, std::uint32_t number) {
    gather(number);
    const std::uint32_t count = count_;
    std::uint32_t* const tokens = tokens_;
    std::uint32_t* const entries = entries_;
    const Drawn* const drawn = drawn_;
    const std::uint32_t* const near_of = m.near_of + m.far_row(work.plane, 0);
    const std::uint32_t* const blocks = m.list_of(work.row.list);
    const std::uint32_t page_shift = m.page_shift;
    const std::uint32_t in_page = (1u << page_shift) - 1;
    const bool any_near = m.near_pages != 0;
    const ForwardRow row_of_list = work.row;
    const bool has_window = !work.row.whole();  // Else every token would be in it.
    for (std::uint32_t i = threadIdx.x; i < count; i += kThreads) {
      const std::uint32_t token = tokens[i];
      const std::uint32_t row = (blocks[token >> page_shift] << page_shift) | (token & in_page);
      const std::uint32_t entry = any_near ? near_of[row] : 0;
      const bool near = (entry & kNearBit) != 0;
      entries[i] = near ? entry : row;
      if (drawn != nullptr) tokens[i] = __float_as_uint(drawn->correction(token));
      if (!near && has_window && row_of_list.in_window(token)) m.far_windows[work.index] = 1;
    }
    __syncthreads();
  }

  /// What find() has found of each token that gather() has, count() of them.
  [[nodiscard]] __device__ const std::uint32_t* entries() const { return entries_; }
  [[nodiscard]] __device__ std::uint32_t count() const { return count_; }
  /// Whether find() leaves corrections, and that of what it has found i-th.
  [[nodiscard]] __device__ bool corrected() const { return drawn_ != nullptr; }
  [[nodiscard]] __device__ float correction(std::uint32_t i) const { return __uint_as_float(tokens_[i]); }

  /// body(entry, whether there is one, Sums, its number), as many entries as threads at a time.
  template <class Body>
  __device__ void for_each(const Body& body) const {
    const std::uint32_t count = count_;
    const std::uint32_t* const entries = entries_;
    ListShared& s = s_;
#pragma unroll 1
    for (std::uint32_t base = 0; base < count; base += kThreads) {
      const bool there = base + threadIdx.x < count;
      const std::uint32_t entry = there ? entries[base + threadIdx.x] : 0;
      const std::uint32_t counts = !there ? 0 : (entry & kNearBit) != 0 ? 1 : 1u << 16;
      body(entry, there, sum(counts, s.sums), base + threadIdx.x);
    }
  }

 private:
  /// Tokens that are marked in so many words. All threads.
  [[nodiscard]] __device__ std::uint32_t marked(std::uint32_t words) const {
    std::uint32_t own = 0;
    for (std::uint32_t i = threadIdx.x; i < words; i += kThreads) own += __popc(marks_.word(i * kWord));
    own = __reduce_add_sync(kAll, own);
    const std::uint32_t lane = threadIdx.x % kWarp;
    if (lane == 0) s_.sums[threadIdx.x / kWarp] = own;
    __syncthreads();
    return __reduce_add_sync(kAll, lane < kWarps ? s_.sums[lane] : 0);
  }

  ListShared& s_;
  std::uint32_t* entries_;
  std::uint32_t* tokens_;
  const Drawn* drawn_;
  Marks marks_;
  std::uint32_t words_;
  std::uint32_t count_ = 0;
};
static_assert(kThreads * kWord < 1u << 16, "what sum() adds has 16 bits");

/// Writes what was found behind what has been listed. Near ones are used, see ForwardMemory::keeps_near.
__device__ inline void write(const ForwardMemory& m, const Work& work, const Found& found, Listed& at) {
  const bool used = m.keeps_near(work.row);
  const auto forward = static_cast<std::uint32_t>(m.state->forward);
  found.for_each([&](std::uint32_t entry, bool there, const Sums& sums, std::uint32_t i) {
    const std::uint32_t near = at.near + (sums.before & 0xffffu);
    const std::uint32_t far = at.far + (sums.before >> 16);
    if ((entry & kNearBit) != 0) {
      const std::uint32_t place = entry & ~kNearBit;
      work.near_rows[near] = m.near_entry(work.plane, place);
      if (found.corrected()) work.near_corrections[near] = found.correction(i);
      if (used) m.near_rows[m.near_row(work.plane, place)].used = forward;
    } else if (there) {
      work.far_rows[far] = entry;
      if (found.corrected()) work.far_corrections[far] = found.correction(i);
    }
    at.add(sums);
  });
}

/// Of `far` far rows, the last ones that the device attends itself.
__device__ inline std::uint32_t fetched_of(const ForwardMemory& m, const Work& work, std::uint32_t far) {
  return work.fetched != nullptr ? m.fetched_of(far) : 0;
}

/// What a block has listed of far rows, [first, end) of `all`, to those who attend them. All threads.
__device__ inline void send_far(const ForwardMemory& m, const Work& work, std::uint32_t first, std::uint32_t end,
                                std::uint32_t all) {
  __syncthreads();
  // Whole lines: single words would each take their own way over the link.
  const std::uint32_t in_place = all - fetched_of(m, work, all);
  std::uint32_t* const over = m.far_rows + work.index * std::uint64_t{m.list_room()};
  for (std::uint32_t i = first + threadIdx.x; i < end; i += kThreads) {
    const std::uint32_t row = work.far_rows[i];
    if (i < in_place) {
      over[i] = row;
      if (work.far_corrections != nullptr) m.far_corrections_of(work.index)[i] = work.far_corrections[i];
    } else {
      work.fetched[i - in_place] = m.far_entry(row);
    }
  }
  __syncthreads();
}

/// Finds what is marked, and counts it. All threads.
__device__ inline Listed find_rows(const ForwardMemory& m, const Work& work, Found& found, const Part& part) {
  Listed own;
#pragma unroll 1
  for (std::uint32_t base = 0; base < part.count(); base += found.turn()) {
    found.find(m, work, base);
    found.for_each([&](std::uint32_t, bool, const Sums& sums, std::uint32_t) { own.add(sums); });
  }
  return own;
}

/// Lists what is marked, the blocks' parts one after the other; returns what all list. All threads of the cluster.
__device__ inline Listed list_rows(const ForwardMemory& m, const Work& work, ListShared& s, Found& found,
                                   const Part& part) {
  const auto [before, all] = exchange(s, part, find_rows(m, work, found, part));
  Listed at = before;
#pragma unroll 1
  for (std::uint32_t base = 0; base < part.count(); base += found.turn()) {
    if (part.count() > found.turn()) found.find(m, work, base);  // Else it is there still.
    write(m, work, found, at);
  }
  send_far(m, work, before.far, at.far, all.far);
  return all;
}

}  // namespace sluice::gpu::forward
