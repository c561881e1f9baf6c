#pragma once

#include "gpu/kernels/forward/cut.cuh"
#include "gpu/kernels/forward/foreseen.cuh"
#include "gpu/kernels/forward/search.cuh"

/// The k largest scores of each query head of a group, found by a cluster of thread blocks that share their rows: a
/// sample says where the k-th lies at least, what reaches that is listed while the row is read once, and one block
/// finds the k-th among these. Should too few or too many reach it, all blocks count over the whole row instead.
namespace sluice::gpu::forward {

inline constexpr std::uint32_t kSamples = 1024;  ///< of a head

struct ChoiceShared {
  std::uint32_t counts[kHeads];  ///< candidates that this block has found; it lists as many as there is room for
  std::uint32_t found[kHeads][kMostBlocks];  ///< and all blocks, in each
  Cut cuts[kHeads];                          ///< in each
  std::uint32_t least[kHeads];               ///< keys from here on are candidates
  ReachShared reach;
  CutShared cut;
  ForeseenShared foreseen;
};

/// Little code, most of it in loops: a launch runs it once, and instructions that are not in a multiprocessor's cache
/// come at a few hundred cycles for every eight of them.
/// `kProposes`: some rows choose of what was proposed to them alone; what has no number for a score was not. Of engines
/// whose histories propose: to know so takes every other layer two microseconds.
template <bool kProposes>
class ChoiceOf {
 public:
  /// Candidates that `kHeads` lists of `room` and what is gathered of them take.
  [[nodiscard]] static constexpr std::uint32_t memory(std::uint32_t room) { return 2 * kHeads * room; }
  /// Keys for which all of it has room.
  [[nodiscard]] static constexpr std::uint32_t keys(std::uint32_t room) { return 2 * memory(room); }

  /// Of these the half that keys are gathered in must hold samples.
  static constexpr std::uint32_t kLeastBytes = 2 * kHeads * kSamples * sizeof(std::uint32_t);

  /// @param lists  shared memory for memory(room) candidates
  __device__ ChoiceOf(ChoiceShared& s, Candidate* lists, std::uint32_t room, const Part& part, const Choices& choices,
                      const Learner& learner, bool proposed)
      : s_(s),
        lists_(lists),
        gathered_(reinterpret_cast<std::uint32_t*>(lists + kHeads * room)),
        room_(room),
        part_(part),
        c_(choices),
        learner_(learner),
        proposed_(kProposes && proposed) {}

  /// set(token) for every token of this block that a head chooses. All threads of all blocks, after a cluster_sync.
  template <class Set>
  __device__ void run(const Set& set) {
    if (c_.end - c_.begin <= c_.first_picks() && !proposed()) {
      for (std::uint32_t i = threadIdx.x; i < part_.count(); i += kThreads) {
        if (const std::uint32_t token = part_.token_of(i); c_.between(token)) set(token);
      }
      return;
    }
    for (; c_.first < c_.heads; c_.first += kHeads) {
      heads_ = min(kHeads, c_.heads - c_.first);
      find_least();
      list();
      publish();
      cut();
      learn();
      for (std::uint32_t h = 0; h < heads_; ++h) take(h, set);
      // The next heads' candidates are told to blocks that have read these.
      if (c_.first + kHeads < c_.heads) detail::cluster_sync();
    }
  }

 private:
  /// A key that with all likelihood `picks` reach, and not many more: some standard deviations below where the k-th
  /// would be in a sample. A quarter of the threads for each head.
  __device__ void find_least() {
    constexpr std::uint32_t kOwn = kSamples / kQuarter;
    constexpr std::uint32_t kLastBit = 16;  // Of a key; the others say little.
    const std::uint32_t count = c_.end - c_.begin;
    const std::uint32_t h = threadIdx.x / kQuarter;
    const bool samples = count > room_;  // For all blocks.
    if (samples) sample(h);
    std::uint32_t least = 0;
    if (samples && h < heads_) {
      std::uint32_t keys[kOwn];
#pragma unroll
      for (std::uint32_t i = 0; i < kOwn; ++i) keys[i] = sampled(h, i * kQuarter + threadIdx.x % kQuarter);
      const float rank = static_cast<float>(c_.picks) / static_cast<float>(count) * kSamples;
      const float wanted = rank + 3.f * sqrtf(rank * (1.f - rank / kSamples)) + 2.f;
#pragma unroll 1
      for (std::uint32_t shift = 30; shift >= kLastBit && wanted < kSamples; shift -= 2) {
        Reach own;
        const std::uint32_t pivots[kPivots] = {least | 1u << shift, least | 2u << shift, least | 3u << shift};
#pragma unroll
        for (std::uint32_t i = 0; i < kOwn; ++i) own.add(keys[i], pivots);
        const Reach reach = sum_of_quarter(h, shift / 2 % 2, own);
        std::uint32_t reached = 0;
#pragma unroll
        for (std::uint32_t p = 0; p < kPivots; ++p) reached += static_cast<float>(reach.of[p]) >= wanted ? 1 : 0;
        least |= reached << shift;
      }
      if (least < order_key(-INFINITY)) least = 0;  // Of no number.
    }
    if (threadIdx.x % kQuarter == 0) {
      s_.least[h] = least;
      s_.counts[h] = 0;
    }
    __syncthreads();
  }
  /// Where candidates will be gathered.
  [[nodiscard]] __device__ std::uint32_t& sampled(std::uint32_t h, std::uint32_t i) const {
    return gathered_[h * kSamples + i];
  }
  /// Every block reads its share, for all: single words far apart take long.
  __device__ void sample(std::uint32_t h) {
    const std::uint32_t share = kSamples / part_.blocks();
    const std::uint64_t count = c_.end - c_.begin;
#pragma unroll 1
    for (std::uint32_t i = threadIdx.x % kQuarter; h < heads_ && i < share; i += kQuarter) {
      const std::uint64_t place = std::uint64_t{i} * part_.blocks() + part_.rank();
      const std::uint32_t key = c_.key_of(h, c_.begin + static_cast<std::uint32_t>(place * count / kSamples));
      const std::uint32_t at = part_.rank() * share + i;  // Neighbours of one block: stored as whole lines.
      for (std::uint32_t b = 0; b < part_.blocks(); ++b)
        detail::store_in_cluster(detail::address_in(&sampled(h, at), b), key);
    }
    detail::cluster_sync();
  }
  __device__ Reach sum_of_quarter(std::uint32_t h, std::uint32_t turn, const Reach& own) {
#pragma unroll
    for (std::uint32_t p = 0; p < kPivots; ++p) {
      const std::uint32_t sum = __reduce_add_sync(kAll, own.of[p]);
      if (threadIdx.x % kWarp == 0) s_.reach.warps[turn][p][threadIdx.x / kWarp] = sum;
    }
    asm volatile("bar.sync %0, %1;" ::"r"(h + 1), "n"(kQuarter) : "memory");
    Reach all;
#pragma unroll
    for (std::uint32_t p = 0; p < kPivots; ++p) {
      const uint4 sums = reinterpret_cast<const uint4*>(s_.reach.warps[turn][p])[h];
      all.of[p] = sums.x + sums.y + sums.z + sums.w;
    }
    return all;
  }
  static_assert(kWarps == 4 * kHeads);

  /// Reads this block's tokens once, for all heads.
  __device__ void list() {
    // In registers: what its loads wait for must not come from the stack.
    const Part part = part_;
    const std::uint32_t begin = c_.begin;
    const std::uint32_t end = c_.end;
    const std::uint32_t count = part.count();
    const float* rows[kHeads];
    float least[kHeads];  // Not a number where there is no such head.
    std::uint32_t all_heads = 0;  // For which every token is a candidate, numbers or not.
#pragma unroll
    for (std::uint32_t h = 0; h < kHeads; ++h) {
      const bool there = h < heads_;
      const std::uint32_t key = s_.least[h];
      rows[h] = c_.scores + std::uint64_t{c_.first + (there ? h : 0)} * c_.stride;
      least[h] = __uint_as_float(!there ? 0x7fc0'0000u : (key >> 31) != 0 ? key & 0x7fff'ffffu : ~key);
      all_heads |= key == 0 && there ? 1u << h : 0;
    }
#pragma unroll 1
    for (std::uint32_t base = threadIdx.x; base < count; base += kInFlight * kThreads) {
      float scores[kInFlight][kHeads];
      std::uint32_t inside = 0;
#pragma unroll
      for (std::uint32_t i = 0; i < kInFlight; ++i) {
        const std::uint32_t token = part.token_of(base + i * kThreads);
        const bool in = token >= begin && token < end;
        inside |= in ? 1u << i : 0;
#pragma unroll
        for (std::uint32_t h = 0; h < kHeads; ++h)
          scores[i][h] = in ? __ldg(rows[h] + token) : __int_as_float(0x7fc0'0000);
      }
      std::uint32_t hits = 0;
#pragma unroll
      for (std::uint32_t i = 0; i < kInFlight; ++i) {
#pragma unroll
        for (std::uint32_t h = 0; h < kHeads; ++h) hits |= scores[i][h] >= least[h] ? 1u << (i * kHeads + h) : 0;
        if ((inside >> i & 1) != 0) hits |= all_heads << i * kHeads;
      }
#pragma unroll 1
      for (; hits != 0; hits &= hits - 1) {
        const auto bit = static_cast<std::uint32_t>(__ffs(static_cast<int>(hits))) - 1;
        add(bit % kHeads, part_.token_of(base + bit / kHeads * kThreads));
      }
    }
    __syncthreads();
  }
  static_assert(kInFlight * kHeads <= 32);
  __device__ void add(std::uint32_t h, std::uint32_t token) {
    const std::uint32_t at = atomicAdd(&s_.counts[h], 1u);
    if (at < room_) lists_[h * room_ + at] = {.key = c_.key_of(h, token), .token = token};
  }

  /// Every block knows how many candidates every other has found, and so which heads' are all listed, enough of them,
  /// and no more than can be gathered.
  __device__ void publish() {
    const std::uint32_t blocks = part_.blocks();
    if (threadIdx.x < kHeads * blocks) {
      const std::uint32_t h = threadIdx.x / blocks;
      detail::store_in_cluster(detail::address_in(&s_.found[h][part_.rank()], threadIdx.x % blocks), s_.counts[h]);
    }
    detail::cluster_sync();
    const std::uint32_t lane = threadIdx.x % kWarp;
    const std::uint32_t found = lane % kMostBlocks < blocks ? s_.found[lane / kMostBlocks][lane % kMostBlocks] : 0;
    std::uint32_t sum = found;
#pragma unroll
    for (std::uint32_t step = 1; step < kMostBlocks; step *= 2) sum += __shfl_xor_sync(kAll, sum, step);
    found_ = sum;  // In the lanes of a head.
    missing_ = __ballot_sync(kAll, found > room_ || sum < c_.picks || sum > 2 * kHeads * room_);
  }
  static_assert(kHeads * kMostBlocks == kWarp);
  [[nodiscard]] __device__ bool listed(std::uint32_t h) const {
    return (missing_ >> h * kMostBlocks & ((1u << kMostBlocks) - 1)) == 0;
  }

  /// Finds the heads' cuts: of those whose candidates are listed the blocks in turn, of others all blocks together.
  __device__ void cut() {
    for (std::uint32_t h = part_.rank(); h < heads_; h += part_.blocks()) {
      if (!listed(h)) continue;
      const std::uint32_t found = gather(h);
      const auto token_of = [counts = s_.found[h], list = lists_ + h * room_](std::uint32_t i) {
        return detail::load_in_cluster(candidate(counts, list, i) + sizeof(std::uint32_t));
      };
      give(h, cut_by_error(c_, h, GatheredTokens{s_.cut, c_.drawn, gathered_, found, s_.least[h], token_of}));
    }
    detail::cluster_sync();
    bool others = false;
#pragma unroll 1
    for (std::uint32_t h = 0; h < heads_; ++h) {
      if (listed(h) && !s_.cuts[h].takes_nothing()) continue;
      const std::uint32_t least = found(h) < c_.picks ? 0 : s_.least[h];
      const Cut cut = RowSearch(s_.cut, gathered_, part_, c_).cut_of(h, least);
      if (part_.rank() == 0) give(h, cut);
      others = true;
    }
    if (others) detail::cluster_sync();
  }

  /// Tokens that reach a head's least key, listed or not. All lanes of a warp.
  [[nodiscard]] __device__ std::uint32_t found(std::uint32_t h) const {
    return __shfl_sync(kAll, found_, static_cast<int>(h * kMostBlocks));
  }
  /// Where a head's candidate `i` of all blocks' lies, their lists, of so many each, one behind the other.
  [[nodiscard]] __device__ static std::uint32_t candidate(const std::uint32_t* counts, const Candidate* list,
                                                          std::uint32_t i) {
    std::uint32_t block = 0;
    for (; i >= counts[block]; ++block) i -= counts[block];
    return detail::address_in(list + i, block);
  }
  /// The keys of these; how many.
  __device__ std::uint32_t gather(std::uint32_t h) {
    const std::uint32_t all = found(h);
#pragma unroll 2
    for (std::uint32_t i = threadIdx.x; i < all; i += kThreads)
      gathered_[i] = detail::load_in_cluster(candidate(s_.found[h], lists_ + h * room_, i));
    return all;
  }

  /// Threads below the number of blocks tell one each.
  __device__ void give(std::uint32_t h, const Cut& cut) {
    if (threadIdx.x >= part_.blocks()) return;
    const std::uint32_t there = detail::address_in(&s_.cuts[h], threadIdx.x);
    detail::store_in_cluster(there, cut.key);
    detail::store_in_cluster(there + sizeof(std::uint32_t), cut.tie);
    if (c_.drawn != nullptr) tell_thresholds(c_.drawn->thresholds + c_.first + h, threadIdx.x, cut);
  }

  /// What is known of a head's scores now, for the next step: a warp each, of one block.
  __device__ void learn() const {
    const std::uint32_t h = threadIdx.x / kWarp;
    if (part_.rank() != 0 || h >= heads_ || proposed()) return;
    const std::uint32_t reached = found(h);
    const std::uint32_t rank = c_.drawn == nullptr ? c_.picks : c_.drawn->thresholds[c_.first + h].drawn + 1;
    learner_.learn(c_.first + h, {.kth = foresight::score_of(s_.cuts[h].key),
                                  .rank = rank,
                                  .least = foresight::score_of(s_.least[h]),
                                  .found = reached < c_.picks ? 0 : reached,
                                  .picks = c_.picks});
  }

  template <class Set>
  __device__ void take(std::uint32_t h, const Set& set) const {
    Cut cut = s_.cuts[h];
    if (proposed() && cut.key == 0) cut.tie = kAll;  // Fewer are proposed.
    if (!listed(h)) {
      for_each_key(part_, c_, h, [&](std::uint32_t key, std::uint32_t token) {
        if (cut.takes(key, token)) set(token);
      });
      return;
    }
#pragma unroll 1
    for (std::uint32_t i = threadIdx.x; i < s_.counts[h]; i += kThreads) {
      const Candidate candidate = lists_[h * room_ + i];
      if (cut.takes(candidate.key, candidate.token)) set(candidate.token);
    }
  }

  [[nodiscard]] __device__ bool proposed() const {
    if constexpr (kProposes) return proposed_;
    return false;
  }

  ChoiceShared& s_;
  Candidate* lists_;
  std::uint32_t* gathered_;  ///< keys
  std::uint32_t room_;
  Part part_;
  Choices c_;
  Learner learner_;
  std::uint32_t heads_ = 0;    ///< that are chosen for now, from c_.first on
  std::uint32_t found_ = 0;    ///< in lanes [h * kMostBlocks, (h + 1) * kMostBlocks): candidates of head h
  std::uint32_t missing_ = 0;  ///< bits likewise, see listed
  bool proposed_;
};
using Choice = ChoiceOf<false>;

}  // namespace sluice::gpu::forward
