#pragma once

#include "gpu/kernels/forward/list.cuh"

/// Near rows and far rows of a row that attends everything: there is nothing to mark, and to look up alone.
namespace sluice::gpu::forward {

/// Neighbouring tokens of a thread, of one page.
struct Octet {
  static constexpr std::uint32_t kTokens = 8;
  std::uint32_t entries[kTokens];  ///< of near_of
  std::uint32_t row = 0;           ///< far row of the first of them
  std::uint32_t count = 0;         ///< how many there are

  /// Those from `token` on, if `there`.
  __device__ Octet(const ForwardMemory& m, const Work& work, std::uint32_t token, bool there) {
    if (!there || token >= work.row.tokens) return;
    count = min(kTokens, work.row.tokens - token);
    row = m.row_of(work.row.list, token);
    if (m.near_pages == 0) {
      for (std::uint32_t i = 0; i < kTokens; ++i) entries[i] = 0;
      return;
    }
    const auto* const four = reinterpret_cast<const uint4*>(m.near_of + m.far_row(work.plane, 0) + row);
    const uint4 low = four[0];
    const uint4 high = four[1];
    const std::uint32_t read[kTokens] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
    for (std::uint32_t i = 0; i < kTokens; ++i) entries[i] = read[i];
  }
  [[nodiscard]] __device__ bool is_near(std::uint32_t i) const { return (entries[i] & kNearBit) != 0; }
  /// As Sums counts them.
  [[nodiscard]] __device__ std::uint32_t counts() const {
    std::uint32_t counts = 0;
    for (std::uint32_t i = 0; i < kTokens; ++i) counts += i >= count ? 0 : is_near(i) ? 1 : 1u << 16;
    return counts;
  }
};

/// Writes an octet behind what has been listed, see ForwardMemory::keeps_near.
__device__ inline void write(const ForwardMemory& m, const Work& work, const Octet& octet, std::uint32_t near,
                             std::uint32_t far) {
  const bool used = m.keeps_near(work.row);
  const auto forward = static_cast<std::uint32_t>(m.state->forward);
#pragma unroll
  for (std::uint32_t i = 0; i < Octet::kTokens; ++i) {
    if (i >= octet.count) break;
    if (octet.is_near(i)) {
      const std::uint32_t place = octet.entries[i] & ~kNearBit;
      work.near_rows[near++] = m.near_entry(work.plane, place);
      if (used) m.near_rows[m.near_row(work.plane, place)].used = forward;
    } else {
      work.far_rows[far++] = octet.row + i;
    }
  }
}

/// Lists all tokens, the blocks' parts one after the other; returns what all list. All threads of the cluster.
__device__ __noinline__ inline Listed list_all(const ForwardMemory& m, const Work& work, ListShared& s,
                                               const Part& part) {
  constexpr std::uint32_t kTurn = Octet::kTokens * kThreads;
  const auto octet_at = [&](std::uint32_t base) {
    const std::uint32_t number = base + Octet::kTokens * threadIdx.x;
    return Octet(m, work, part.token_of(number), number < part.count());
  };
  Listed own;
#pragma unroll 1
  for (std::uint32_t base = 0; base < part.count(); base += kTurn) own.add(sum(octet_at(base).counts(), s.sums));
  detail::cluster_sync();  // All blocks have begun: their memory is there to be written to.
  const auto [before, all] = exchange(s, part, own);
  Listed at = before;
#pragma unroll 1
  for (std::uint32_t base = 0; base < part.count(); base += kTurn) {
    const Octet octet = octet_at(base);
    const Sums sums = sum(octet.counts(), s.sums);
    write(m, work, octet, at.near + (sums.before & 0xffffu), at.far + (sums.before >> 16));
    at.add(sums);
  }
  send_far(m, work, before.far, at.far, all.far);
  return all;
}

}  // namespace sluice::gpu::forward
