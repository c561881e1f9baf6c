#pragma once

#include "gpu/kernels/select/draw.cuh"
#include "gpu/kernels/select/foresight.cuh"
#include "gpu/kernels/select/score_int4_fragments.cuh"

/// What a thread block scores of a row. Scores that will be candidates for top-k are put aside on the way.
namespace sluice::gpu::score_int4 {

/// Of a list whose pages have no visible tokens: there may be no copies to read.
__device__ inline void fill_nothing(const ScoreInt4Task& task, const Part& part) {
  float* const out = task.out + std::uint64_t{part.first_head} * part.stride;
  for (std::uint32_t token = part.block * kThreads + threadIdx.x; token < part.count; token += part.blocks * kThreads)
    out[token] = __int_as_float(0xff80'0000);
}

/// Tokens that may be candidates: what is attended anyway is none, as recent tokens score high, and would take the
/// place of others.
struct Eligible {
  std::uint32_t begin, end;
};

/// A score becomes what its head draws by. `softcap` as in AttentionShape.
__device__ __forceinline__ float perturbed(float score, float softcap, std::uint32_t key, std::uint32_t token) {
  const float capped = softcap != 0.f ? softcap * tanhf(score / softcap) : score;
  return capped + draw::gumbel(key, token);
}

/// Scores of a warp's tokens from `at` on, of which a lane has four, for one fragment's heads: written out. Bit i of
/// what it returns: score i is a candidate. `kWhole`: all tokens are there, and eligible.
template <bool kWhole, std::uint32_t kHeadDim, std::uint32_t kBits, std::uint32_t kFragments, bool kForesees>
__device__ __forceinline__ std::uint32_t score_turn(const Shared<kHeadDim>& s,
                                                    const Products<kHeadDim, kBits, kFragments>& products,
                                                    const float2 (&params)[kWarpOctets], std::uint32_t fragment,
                                                    const LaneHead& head, const Part& part, std::uint32_t at,
                                                    std::uint32_t number, const Eligible& eligible, bool draws,
                                                    float softcap, float (&scores)[kWarpOctets]) {
  std::uint32_t hits = 0;
  float* const out = head.out + at;
#pragma unroll
  for (std::uint32_t o = 0; o < kWarpOctets; ++o) {
    const std::uint32_t behind = kRows * o;  // Of the lane's first one.
    scores[o] = params[o].x * (products.of(fragment, o) * head.unit) + (params[o].y * head.sum + head.shift);
    if (draws) scores[o] = perturbed(scores[o], softcap, head.draw, at + lane_row() + behind);
    bool candidate = kForesees && scores[o] >= head.least;
    if constexpr (kWhole) {
      if (head.there) out[behind] = scores[o];
    } else {
      const std::uint32_t token = at + lane_row() + behind;
      const bool visible = there(s, number, o) && token < part.count;
      if (!visible) scores[o] = -INFINITY;
      if (head.there && token < part.count) out[behind] = scores[o];
      candidate &= visible && token >= eligible.begin && token < eligible.end;
    }
    hits |= candidate ? 1u << o : 0;
  }
  return hits;
}

/// The part of task `list`, which is s.task, for all threads to see. `kFragments` of queries are multiplied with what
/// is read, codes of kBits. `queries`: see QueryRows.
template <std::uint32_t kHeadDim, std::uint32_t kBits, std::uint32_t kFragments, bool kForesees, class Queries>
__device__ __forceinline__ void score_part(Shared<kHeadDim>& s, const Part& part, std::uint32_t list,
                                           const Queries& queries, const Foresight& foresight,
                                           const ScoreInt4Shape& shape, const Cut& cut) {
  constexpr std::uint32_t kAtOnce = kFragments * kTileHeads;
  __shared__ foresight::Staged<kWarps, kAtOnce, kForesees ? 256 / kAtOnce : 1> staged;
  const std::uint32_t group = shape.group;
  if (part.chunk(0) * kBlockTokens >= part.count) return;
  if (s.task.tokens == 0) return fill_nothing(s.task, part);
  // Queries are on their way while it is found out where rows lie, and rows while queries are staged and the rows
  // before them are multiplied, if there are registers for both.
  constexpr bool kAhead = kHeadDim * kFragments <= 128;
  constexpr bool kTellsWhole = kHeadDim <= 128;  // Likewise.
  QueryRow<kHeadDim> query;
  MeanRow<kHeadDim> mean;                 // Of all heads, as is:
  CenterRow<kHeadDim, kForesees> center;
  if (kAhead) query.load(queries, part.first_head, min(kAtOnce, part.heads));
  if (kAhead) mean.load(s.task.mean);
  if (kForesees) center.load(foresight.centers + std::uint64_t{list} * kHeadDim);
  CodeLayout layout = shape.layout;
  layout.bits = kBits;  // As it is: known to the compiler.
  stage_octets(s, part, layout, cut.chunks);
  __syncthreads();
  const LaneRow<kHeadDim, kBits> row(s.task.copies);
  const Eligible eligible{s.task.sinks, s.task.recent};
  for (std::uint32_t first = 0; first < part.heads; first += kAtOnce) {
    const std::uint32_t heads = min(kAtOnce, part.heads - first);
    if (!kAhead || first != 0) {
      query.load(queries, part.first_head + first, heads);
      mean.load(s.task.mean);  // Again: it is not kept over the loop.
    }
    if (first != 0) __syncthreads();  // The queries before these have been read.
    WarpRows<kHeadDim, kBits> next;
    if (kAhead) next.load(s, row, part.octet(0), part.first(0) < part.count);
    const foresight::Finder finder(foresight, std::uint64_t{list} * group + first);
    const foresight::QueryMeasure measure = stage_query(s, query, mean, center, shape.scale);
    if (kForesees && threadIdx.x % kWarp == 0) {
      const std::uint32_t head = threadIdx.x / kWarp;
      s.least[head] = head < heads ? finder.least(head, measure) : INFINITY;
    }
    const bool draws = s.task.draws.any();
    if (draws && threadIdx.x < kHeads) s.draw[threadIdx.x] = s.task.draws.key_of(part.first_head + first + threadIdx.x);
    __syncthreads();
    QueryFragments<kHeadDim, kBits, kFragments> q;
    q.load(s);
    LaneHead lane_heads[kFragments];  // In registers: in the loop the compiler would read them again and again.
#pragma unroll
    for (std::uint32_t f = 0; f < kFragments; ++f) {
      const std::uint32_t head = f * kTileHeads + lane_head();
      lane_heads[f] = {.there = head < heads,
                       .unit = s.unit[head],
                       .sum = s.sum[head],
                       .shift = s.shift[head],
                       .least = kForesees ? s.least[head] : 0.f,
                       .draw = s.draw[head],
                       .out = s.task.out + std::uint64_t{part.first_head + first + head} * part.stride + lane_row()};
    }
    std::uint32_t found[kFragments] = {};
#pragma unroll 1
    for (std::uint32_t turn = 0; turn < cut.chunks; ++turn) {
      const std::uint32_t at = part.first(turn);
      const std::uint32_t number = part.octet(turn);
      if (at >= part.count) break;
      if (!kAhead) next.load(s, row, number, true);
      const KeyFragments<kHeadDim, kBits> keys(next);
      if (kAhead) {
        const bool more = turn + 1 < cut.chunks && part.first(turn + 1) < part.count;
        next.load(s, row, part.octet(more ? turn + 1 : turn), more);
      }
      const Products<kHeadDim, kBits, kFragments> products(keys, q);
      float2 params[kWarpOctets];
#pragma unroll
      for (std::uint32_t o = 0; o < kWarpOctets; ++o) params[o] = keys.scale_and_zero(o);
      const bool all =
          kTellsWhole && whole(s, number) && (!kForesees || (at >= eligible.begin && at + kWarpTokens <= eligible.end));
#pragma unroll
      for (std::uint32_t f = 0; f < kFragments; ++f) {
        const LaneHead& head = lane_heads[f];
        float scores[kWarpOctets];
        const std::uint32_t hits =
            all ? score_turn<true, kHeadDim, kBits, kFragments, kForesees>(
                      s, products, params, f, head, part, at, number, eligible, draws, shape.softcap, scores)
                : score_turn<false, kHeadDim, kBits, kFragments, kForesees>(
                      s, products, params, f, head, part, at, number, eligible, draws, shape.softcap, scores);
        if constexpr (kForesees) {
          // What is chosen is often close together: most turns have nothing to add, or of one octet.
#pragma unroll 1
          for (std::uint32_t some = __reduce_or_sync(detail::kAllLanes, hits); some != 0; some &= some - 1) {
            const std::uint32_t o = __ffs(static_cast<int>(some)) - 1;
            const float score = o < 2 ? (o == 0 ? scores[0] : scores[1]) : (o == 2 ? scores[2] : scores[3]);
            finder.add(staged, f * kTileHeads + lane_head(), lanes_of_head(), (hits >> o & 1) != 0,
                       {.key = order_key(score), .token = at + lane_row() + o * kRows}, found[f]);
          }
        }
      }
    }
    if constexpr (kForesees) {
#pragma unroll
      for (std::uint32_t f = 0; f < kFragments; ++f)
        staged.counts[threadIdx.x / kWarp][f * kTileHeads + lane_head()] = found[f];  // The same from all of its lanes.
      __syncthreads();
      finder.write(staged, heads);
    }
  }
}

}  // namespace sluice::gpu::score_int4
