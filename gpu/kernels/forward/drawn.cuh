#pragma once

#include "gpu/kernels/forward/marks.cuh"
#include "gpu/kernels/select/draw.cuh"

/// What is added to the logits of tokens that were drawn, see sample.hpp.
namespace sluice::gpu::forward {

/// What a list has drawn, once its thresholds are known.
class Drawn {
 public:
  __device__ Drawn(const ForwardMemory& m, const Work& work, const DrawnShared& s)
      : row_(work.row),
        draws_(work.row.draws.of(work.index % m.shape.kv_heads, m.own_group())),
        scores_(m.scores + std::uint64_t{work.index} * m.shape.group() * m.score_room()),
        group_(m.shape.group()),
        s_(s) {}
  [[nodiscard]] __device__ bool any() const { return draws_.any(); }

  /// 0 for tokens that are attended whatever is drawn.
  [[nodiscard]] __device__ float correction(std::uint32_t token) const {
    if (row_.in_window(token)) return 0.f;
    float sum = 0.f;
#pragma unroll 1
    for (std::uint32_t draw = 0; draw < draws_.heads; draw += kAtOnce) {
      float largest[kAtOnce] = {};  // Of the heads that share a draw.
#pragma unroll 1
      for (std::uint32_t first = draw; first < group_; first += draws_.heads) {
        float scores[kAtOnce];  // On their way together: one after the other they took longer than all else here.
#pragma unroll
        for (std::uint32_t i = 0; i < kAtOnce; ++i) {
          if (draw + i < draws_.heads) scores[i] = __ldcg(scores_ + std::uint64_t{first + i} * row_.tokens + token);
        }
#pragma unroll
        for (std::uint32_t i = 0; i < kAtOnce; ++i) {
          if (draw + i >= draws_.heads) continue;
          const float exponential = draw::exponential(draws_.key_of(draw + i), token);
          largest[i] = fmaxf(largest[i], draw::rate(scores[i], exponential, s_.thresholds[first + i]));
        }
      }
#pragma unroll
      for (std::uint32_t i = 0; i < kAtOnce; ++i) sum += largest[i];
    }
    return draw::correction(sum);
  }

 private:
  static constexpr std::uint32_t kAtOnce = 4;

  const ForwardRow& row_;
  HeadDraws draws_;
  const float* scores_;  ///< [group, tokens]
  std::uint32_t group_;
  const DrawnShared& s_;
};

/// The thresholds of a list, for who says how large its errors may be. A block of each cluster.
__device__ inline void put_thresholds(const ForwardMemory& m, const Work& work, const DrawnShared& s) {
  for (std::uint32_t h = threadIdx.x; h < m.shape.group(); h += kThreads)
    m.thresholds[std::uint64_t{work.index} * m.shape.group() + h] = s.thresholds[h];
}

}  // namespace sluice::gpu::forward
