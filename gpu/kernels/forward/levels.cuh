#pragma once

#include "gpu/kernels/forward/choices.cuh"
#include "gpu/kernels/forward/cut.cuh"
#include "gpu/kernels/select/draw.cuh"
#include "gpu/kernels/select/foresight.cuh"

/// How many tokens a query head draws, see sample.hpp. Sums are of whole numbers: whichever order they are added up in,
/// and whoever adds them up, as many are drawn.
namespace sluice::gpu::forward {

/// Of all threads of a block, to all of them.
__device__ inline std::uint64_t sum_of_block(std::uint64_t& shared, std::uint64_t own) {
  unsigned long long sum = own;
#pragma unroll
  for (std::uint32_t step = 1; step < kWarp; step *= 2) sum += __shfl_xor_sync(kAll, sum, step);
  __syncthreads();  // The sum before this one has been read.
  if (threadIdx.x == 0) shared = 0;
  __syncthreads();
  if (threadIdx.x % kWarp == 0) atomicAdd(reinterpret_cast<unsigned long long*>(&shared), sum);
  __syncthreads();
  return shared;
}

/// Candidates of a head that one block has gathered, `count` keys from `low` on. `TokenOf` has copies of what it looks
/// at, see draw_more.
template <class TokenOf>
struct GatheredTokens {
  CutShared& shared;
  DrawnShared* drawn;
  const std::uint32_t* keys;
  std::uint32_t count;
  std::uint32_t low;
  TokenOf token_of;

  /// What the k largest are, or nothing if too many tie.
  [[nodiscard]] __device__ __forceinline__ Cut cut_at(std::uint32_t k) const {
    return cut_of(shared, keys, count, low, k, drawn != nullptr, token_of);
  }
  /// This thread's number, and of how many.
  [[nodiscard]] __device__ std::uint32_t thread() const { return threadIdx.x; }
  [[nodiscard]] __device__ std::uint32_t threads() const { return kThreads; }
  [[nodiscard]] __device__ std::uint64_t sum(std::uint64_t own) const { return sum_of_block(drawn->sum, own); }
  /// body(score, token) for those of this thread that a cut takes and that are numbers.
  template <class Body>
  __device__ void for_each(const Cut& cut, const Body& body) const {
#pragma unroll 1
    for (std::uint32_t i = threadIdx.x; i < count; i += kThreads) {
      const std::uint32_t key = keys[i];
      if (key == 0 || key < cut.key) continue;
      if (const std::uint32_t token = token_of(i); cut.takes(key, token)) body(foresight::score_of(key), token);
    }
  }
};

/// All tokens of a row, of a head that all blocks of the cluster look at together. `Search` finds the cut of the k
/// largest, of which at least as many reach `least`.
template <class Search>
struct RowTokens {
  Search& search;
  Part part;
  Choices choices;
  std::uint32_t head;
  std::uint32_t least;

  [[nodiscard]] __device__ __forceinline__ Cut cut_at(std::uint32_t k) const { return search.cut_at(head, least, k); }
  [[nodiscard]] __device__ std::uint32_t thread() const { return part.rank() * kThreads + threadIdx.x; }
  [[nodiscard]] __device__ std::uint32_t threads() const { return part.blocks() * kThreads; }
  [[nodiscard]] __device__ std::uint64_t sum(std::uint64_t own) const {
    std::uint64_t& shared = choices.drawn->sum;
    (void)sum_of_block(shared, own);
    detail::cluster_sync();
    std::uint64_t all = 0;
    for (std::uint32_t b = 0; b < part.blocks(); ++b) {
      const std::uint32_t there = detail::address_in(&shared, b);
      const std::uint64_t low = detail::load_in_cluster(there);
      const std::uint64_t high = detail::load_in_cluster(there + sizeof(std::uint32_t));
      all += high << 32 | low;
    }
    detail::cluster_sync();  // All have read what the next sum is added up in.
    return all;
  }
  template <class Body>
  __device__ void for_each(const Cut& cut, const Body& body) const {
    for_each_key(part, choices, head, [&](std::uint32_t key, std::uint32_t token) {
      if (key != 0 && cut.takes(key, token)) body(foresight::score_of(key), token);
    });
  }
};

/// A number of at most `most` with so many bits behind the point.
template <std::uint32_t kBits>
__device__ __forceinline__ std::uint64_t fixed(float value, float most) {
  return __float2ull_rz(fminf(value, most) * static_cast<float>(1ull << kBits));
}

/// How many tokens a head draws: `bound` takes the most, and scores are looked at relative to `reference`.
template <class Tokens>
__device__ __forceinline__ std::uint32_t drawn_by_error(const Choices& c, std::uint32_t h, const Tokens& tokens,
                                                        const Cut& bound, float reference) {
  constexpr std::uint32_t kSumBits = 20;  // Of weights, of which those below the reference are small.
  constexpr float kMostWeight = 0x1p22f;  // What weighs more is enough.
  constexpr std::uint32_t kCountBits = 32;
  const DrawnShared& s = *c.drawn;
  const std::uint32_t key = s.draws.key_of(c.first + h);
  const std::uint32_t most = c.picks - 1;
  const float last = foresight::score_of(bound.key);
  const float threshold = last > -INFINITY ? last : -INFINITY;  // Of fewer numbers each is drawn.
  // Differences are rounded by themselves: as part of a product they would not be the same in all kernels.
  const auto estimate = [&](float score, std::uint32_t token) { return __fsub_rn(score, draw::gumbel(key, token)); };
  const auto chance = [&](float of, float at) { return draw::chance(__expf(__fsub_rn(of, at))); };
  std::uint64_t own = 0;
  const auto add_window = [&](std::uint32_t begin, std::uint32_t end) {
#pragma unroll 1
    for (std::uint32_t token = begin + tokens.thread(); token < end; token += tokens.threads()) {
      const float score = c.score(h, token);
      if (score == score) own += fixed<kSumBits>(__expf(__fsub_rn(estimate(score, token), reference)), kMostWeight);
    }
  };
  add_window(0, c.begin);
  add_window(c.end, s.old_tokens);
  tokens.for_each(bound, [&](float score, std::uint32_t token) {
    const float of = estimate(score, token);
    if (of > -INFINITY)
      own += fixed<kSumBits>(__fdividef(__expf(__fsub_rn(of, reference)), chance(of, threshold)), kMostWeight);
  });
  const float sum = static_cast<float>(tokens.sum(own)) * (1.f / static_cast<float>(1u << kSumBits));
  std::uint32_t drawn = s.least;
#pragma unroll 1
  for (; drawn != most; drawn = more_draws(drawn, most)) {
    const float enough = __fadd_rn(reference, __logf(s.error * sum * rsqrtf(static_cast<float>(drawn))));
    if (!(enough >= threshold)) continue;  // By which more than the most are drawn.
    own = 0;
    tokens.for_each(bound, [&](float score, std::uint32_t token) {
      const float of = estimate(score, token);
      if (of > -INFINITY) own += fixed<kCountBits>(__fdividef(chance(of, enough), chance(of, threshold)), 2.f);
    });
    if (tokens.sum(own) <= std::uint64_t{drawn} << kCountBits) break;
  }
  return drawn;
}

/// What a head draws that draws `first`, unless its error bar is too large. A function of its own, which is given
/// copies: rows without an error would pay for its registers, and for what lay on the stack.
template <class Tokens>
__device__ __noinline__ Cut draw_more(Choices c, std::uint32_t h, Tokens tokens, Cut first) {
  const float reference = foresight::score_of(first.key);
  if (first.takes_nothing() || !(reference > -INFINITY)) return first;  // Of fewer numbers all are drawn.
  bool judged = false;
  std::uint32_t k = c.picks;
#pragma unroll 1
  while (true) {
    Cut cut = k == c.end - c.begin ? Cut::all() : tokens.cut_at(k);  // If one would be left, it is drawn, too.
    cut.picks = k;
    if (judged || cut.takes_nothing()) return cut;
    const std::uint32_t drawn = drawn_by_error(c, h, tokens, cut, reference);
    if (drawn + 1 == k) return cut;
    if (drawn + 1 == first.picks) return first;
    k = drawn + 1;
    judged = true;
  }
}

/// What a head chooses, its `picks` largest, or draws: as few as its error bar allows. Takes nothing if that cannot be
/// told of such tokens. All threads that they are shared by.
template <class Tokens>
__device__ __forceinline__ Cut cut_by_error(const Choices& c, std::uint32_t h, const Tokens& tokens) {
  const std::uint32_t first = c.first_picks();
  Cut cut = tokens.cut_at(first);
  cut.picks = first;
  return first == c.picks ? cut : draw_more(c, h, tokens, cut);
}

}  // namespace sluice::gpu::forward
