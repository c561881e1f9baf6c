#pragma once

#include "gpu/kernels/forward/choice.cuh"
#include "gpu/kernels/forward/foreseen.cuh"
#include "gpu/kernels/forward/forward.hpp"

/// Which tokens some head of a group attends, as bits in shared memory.
namespace sluice::gpu::forward {

inline constexpr std::uint32_t kWord = 32;
inline constexpr std::uint32_t kPart = 8;  ///< neighbours in every page

/// One row and KV head, as a thread block of its cluster works on it.
struct Work {
  ForwardRow row;
  std::uint32_t* near_rows;
  std::uint32_t* far_rows;
  float* near_corrections;  ///< of a row that draws, by near_rows; null: it does not
  float* far_corrections;   ///< likewise, by far_rows
  std::uint32_t* fetched;  ///< far rows that are fetched, as an AttendJob wants them; null: the CPU is told of all
  std::uint32_t index;  ///< row * kv_heads + KV head
  std::uint32_t plane;
};

/// Which of a word's tokens, from `first` on, lie below `token`.
__device__ inline std::uint32_t below(std::uint32_t token, std::uint32_t first) {
  return token <= first ? 0u : token - first >= kWord ? kAll : (1u << (token - first)) - 1;
}
/// And which are sinks or recent ones.
__device__ inline std::uint32_t window_bits(const ForwardRow& row, std::uint32_t first) {
  return (below(row.sink_end, first) | ~below(row.recent_begin, first)) & below(row.tokens, first);
}

/// Bit per token of a block's part.
class Marks {
 public:
  __device__ Marks(std::uint32_t* words, const Part& part) : words_(words), part_(part) {}
  [[nodiscard]] __device__ const Part& part() const { return part_; }
  /// Tokens from `token` on whose bits are set, none across a word.
  __device__ void set(std::uint32_t token, std::uint32_t bits = 1) const {
    if (part_.has(token)) atomicOr(words_ + part_.number_of(token) / kWord, bits << token % kWord);
  }
  /// One token of any block's, after a cluster_sync.
  __device__ void set_in_cluster(std::uint32_t token) const {
    const std::uint32_t block = token / kChunk & (part_.blocks() - 1);
    detail::or_in_cluster(detail::address_in(words_ + part_.number_of(token) / kWord, block), 1u << token % kWord);
  }
  /// Every word of the part becomes what bits(first token) says.
  template <class Bits>
  __device__ void fill(const Bits& bits) const {
    for (std::uint32_t i = threadIdx.x; i < part_.count() / kWord; i += kThreads)
      words_[i] = bits(part_.token_of(i * kWord));
    __syncthreads();
  }
  /// From a number on, a multiple of kWord.
  [[nodiscard]] __device__ std::uint32_t word(std::uint32_t number) const {
    return number < part_.count() ? words_[number / kWord] : 0;
  }

 private:
  std::uint32_t* words_;
  Part part_;
};

/// What the heads of the group have chosen in their pages. A head's pages are laid end to end, and eight tokens of them
/// are neighbours.
__device__ __noinline__ inline void mark_in_pages(const ForwardMemory& m, const Work& work, const Marks& marks) {
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
    marks.set(token_of(h, m.picks[(first + h) * m.max_picks + i % row.picks]));
  }
  if (row.picks != 0) return;
  const std::uint32_t parts = row.page_picks << m.page_shift >> 3;
  for (std::uint32_t i = threadIdx.x; i < group * parts; i += kThreads) {
    const std::uint32_t h = i / parts;
    const std::uint32_t value = i % parts * kPart;
    const std::uint32_t kept =
        row.mass > 0.f ? m.masks[(first + h) * m.mask_words() + value / kWord] >> value % kWord & 0xffu : 0xffu;
    if (kept != 0) marks.set(token_of(h, value), kept);
  }
}

/// What its heads have chosen by top-p of all tokens. Words of a mask say nothing of what is attended anyway.
__device__ inline std::uint32_t masked(const ForwardMemory& m, const Work& work, std::uint32_t first) {
  if (work.row.mass <= 0.f || work.row.in_pages() || first >= work.row.tokens) return 0;
  const std::uint64_t head = std::uint64_t{work.index} * m.shape.group();
  std::uint32_t kept = 0;
  for (std::uint32_t h = 0; h < m.shape.group(); ++h) kept |= m.masks[(head + h) * m.mask_words() + first / kWord];
  return kept;
}

[[nodiscard]] __device__ inline Learner learner_of(const ForwardMemory& m, const Work& work,
                                                   const Foresight& foresight, std::uint32_t room) {
  const std::uint64_t head = std::uint64_t{work.index} * m.shape.group();
  return {foresight, work.index, head, m.q + head * m.shape.head_dim, room, !work.row.scored()};
}

/// Marks every token of this block's that some head of the group attends. Whether all of it was foreseen. All threads
/// of the cluster, which begins with a cluster_sync once all of its blocks have begun. `kProposes`: see ChoiceOf.
/// `drawn`: its thresholds are there when all threads of the block have met.
template <bool kProposes>
__device__ inline bool mark(const ForwardMemory& m, const Work& work, const Foresight& foresight, ChoiceShared& s,
                            DrawnShared& drawn, Candidate* lists, std::uint32_t room, const Marks& marks) {
  const ForwardRow& row = work.row;
  if (threadIdx.x == 0) drawn.begin(row, row.draws.of(work.index % m.shape.kv_heads, m.own_group()));
  const bool chosen = !kProposes || row.asks == 0;  // Else the CPU chooses, whatever the row has cut of its scores.
  marks.fill([&](std::uint32_t first) { return window_bits(row, first) | (chosen ? masked(m, work, first) : 0u); });
  detail::cluster_sync();  // All blocks have begun: their memory is there to be written to, and so are their marks.
  if (row.in_pages()) {
    mark_in_pages(m, work, marks);
  } else if (row.picks != 0 && chosen) {
    const std::uint64_t head = std::uint64_t{work.index} * m.shape.group();
    const Choices choices{.scores = m.scores + head * m.score_room(),
                          .stride = row.tokens,
                          .heads = m.shape.group(),
                          .begin = row.sink_end,
                          .end = row.recent_begin,
                          .picks = row.picks,
                          .drawn = row.draws.any() ? &drawn : nullptr};
    const Learner learner = learner_of(m, work, foresight, Choice::keys(room));
    Foreseen foreseen(s.foreseen, s.cut, reinterpret_cast<std::uint32_t*>(lists), learner, choices);
    // Keys were scored before anybody looked at what is proposed.
    const bool can = (!kProposes || row.proposed == 0) && foreseen.can();
    const std::uint32_t missed =
        can ? foreseen.run(marks.part(), [&](std::uint32_t token) { marks.set_in_cluster(token); }) : 0;
    if (can && missed == 0) {
      __syncthreads();
      return true;
    }
    if (missed != 0 && marks.part().rank() == 0 && threadIdx.x == 0)
      atomicAdd(reinterpret_cast<unsigned long long*>(&m.state->missed), missed);
    ChoiceOf<kProposes>(s, lists, room, marks.part(), choices, learner, row.proposed != 0)
        .run([&](std::uint32_t token) { marks.set(token); });
  }
  __syncthreads();
  return false;
}

/// What a choice that was foreseen lets expect of the next one, of the heads that this block chose for. One warp, while
/// others do what the layer waits for.
__device__ __noinline__ inline void learn_foreseen(const ForwardMemory& m, const Work& work,
                                                   const Foresight& foresight, const ForeseenShared& s) {
  const Learner learner = learner_of(m, work, foresight, s.room);
  for (std::uint32_t h = detail::cluster_rank(); h < m.shape.group(); h += detail::cluster_blocks())
    learner.learn(h, s.chosen[h], true);
}

}  // namespace sluice::gpu::forward
