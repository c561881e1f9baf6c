#pragma once

#include "gpu/kernels/forward/part.cuh"
#include "gpu/tuning.hpp"
#include "sluice/step/forward.hpp"

/// What the query heads of a row choose from, and draw by.
namespace sluice::gpu::forward {

/// What a list draws by and has drawn, in every block of a cluster.
struct DrawnShared {
  DrawThresholds thresholds[kMaxGroup];  ///< of its query heads
  HeadDraws draws;
  std::uint32_t least;       ///< tokens that each head draws, or at first
  float error;               ///< that a head is to have at most, if it may draw more
  std::uint32_t old_tokens;  ///< whose scores are there
  std::uint64_t sum;         ///< of a block

  __device__ void begin(const ForwardRow& row, const HeadDraws& of) {
    draws = of;
    least = row.draws.least;
    error = row.draws.error;
    old_tokens = row.old_tokens();
  }
};

/// Query heads of a row, each of which chooses `picks` of the tokens [begin, end).
struct Choices {
  const float* scores = nullptr;  ///< [heads, stride] of token 0 on
  std::uint32_t stride = 0;
  std::uint32_t heads = 0;
  std::uint32_t begin = 0;
  std::uint32_t end = 0;
  std::uint32_t picks = 0;
  std::uint32_t first = 0;  ///< head: the others are counted from it
  /// Shared memory of each block of the cluster; not null: tokens are drawn, one fewer than `picks` at most, and here
  /// is written by what.
  DrawnShared* drawn = nullptr;

  /// Scores that each head looks for at first, see cut_by_error.
  [[nodiscard]] __device__ std::uint32_t first_picks() const { return drawn == nullptr ? picks : drawn->least + 1; }
  [[nodiscard]] __device__ float score(std::uint32_t h, std::uint32_t token) const {
    return __ldg(scores + std::uint64_t{first + h} * stride + token);
  }
  [[nodiscard]] __device__ std::uint32_t key_of(std::uint32_t h, std::uint32_t token) const {
    return order_key(score(h, token));
  }
  [[nodiscard]] __device__ bool between(std::uint32_t token) const { return token >= begin && token < end; }
};

/// body(key, token) for every token of this block that a head may choose. Several are on their way at once: of a row of
/// 512K tokens a thread has 128, and one after the other they took about 50 us on an H200.
template <class Body>
__device__ __forceinline__ void for_each_key(const Part& part, const Choices& choices, std::uint32_t h,
                                             const Body& body) {
  constexpr std::uint32_t kAtOnce = 2 * kInFlight;
  // Copies, as the body may store: else they would be read again each time.
  const Part own = part;
  const std::uint32_t count = own.count();
  const std::uint32_t begin = choices.begin;
  const std::uint32_t end = choices.end;
  const float* const row = choices.scores + std::uint64_t{choices.first + h} * choices.stride;
#pragma unroll 1
  for (std::uint32_t base = threadIdx.x; base < count; base += kAtOnce * kThreads) {
    float scores[kAtOnce];
#pragma unroll
    for (std::uint32_t i = 0; i < kAtOnce; ++i) {
      const std::uint32_t token = own.token_of(base + i * kThreads);
      scores[i] = token >= begin && token < end ? __ldg(row + token) : 0.f;
    }
#pragma unroll
    for (std::uint32_t i = 0; i < kAtOnce; ++i) {
      const std::uint32_t token = own.token_of(base + i * kThreads);
      if (token >= begin && token < end) body(order_key(scores[i]), token);
    }
  }
}

}  // namespace sluice::gpu::forward
