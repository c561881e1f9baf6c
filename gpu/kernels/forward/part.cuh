#pragma once

#include <cstdint>

#include "gpu/kernels/block_cluster.cuh"
#include "gpu/kernels/select/foresight.hpp"
#include "gpu/kernels/select/top_k.cuh"
#include "gpu/split_rule.hpp"

/// What the thread blocks of a cluster that look after one row and KV head have in common.
namespace sluice::gpu::forward {

inline constexpr std::uint32_t kWarp = 32;
inline constexpr std::uint32_t kAll = 0xffff'ffffu;
inline constexpr std::uint32_t kThreads = 512;
inline constexpr std::uint32_t kWarps = kThreads / kWarp;
inline constexpr std::uint32_t kMostBlocks = kMostSplitBlocks;  ///< of a cluster
inline constexpr std::uint32_t kHeads = 4;       ///< that are chosen for at once
inline constexpr std::uint32_t kQuarter = kThreads / kHeads;
inline constexpr std::uint32_t kInFlight = 8;  ///< loads of a thread for each head
inline constexpr std::uint32_t kChunk = 64;    ///< neighbouring tokens of a block

/// The tokens of a row that a block of a cluster looks after: every so many chunks one, for what is chosen is often
/// recent. They are numbered through.
class Part {
 public:
  __device__ explicit Part(std::uint32_t tokens) : tokens_(tokens), rank_(detail::cluster_rank()) {
    shift_ = static_cast<std::uint32_t>(__ffs(static_cast<int>(detail::cluster_blocks()))) - 1;  // A power of two.
  }
  [[nodiscard]] __device__ std::uint32_t rank() const { return rank_; }
  [[nodiscard]] __device__ std::uint32_t blocks() const { return 1u << shift_; }
  /// How many numbers there are; the last ones may be of no token.
  [[nodiscard]] __device__ std::uint32_t count() const {
    const std::uint32_t chunks = (tokens_ + kChunk - 1) / kChunk;
    return chunks <= rank_ ? 0 : ((chunks - rank_ - 1 >> shift_) + 1) * kChunk;
  }
  [[nodiscard]] __device__ std::uint32_t token_of(std::uint32_t number) const {
    return ((number / kChunk << shift_) + rank_) * kChunk + number % kChunk;
  }
  [[nodiscard]] __device__ bool has(std::uint32_t token) const {
    return (token / kChunk & (blocks() - 1)) == rank_ && token < tokens_;
  }
  [[nodiscard]] __device__ std::uint32_t number_of(std::uint32_t token) const {
    return (token / kChunk >> shift_) * kChunk + token % kChunk;
  }

 private:
  std::uint32_t tokens_;
  std::uint32_t rank_;
  std::uint32_t shift_ = 0;
};

/// What a head chooses: keys larger than `key`, and of those equal to it the tokens whose complement is larger than
/// `tie`.
struct Cut {
  std::uint32_t key = 0;
  std::uint32_t tie = 0;
  std::uint32_t ahead = kAll;  ///< of what is drawn: the least key that is taken
  std::uint32_t picks = 0;     ///< keys that it was looked for among: of what is drawn one more than are taken
  /// Of all tokens, numbers or not.
  [[nodiscard]] __device__ static Cut all() { return {}; }
  __device__ bool takes_all() const { return key == 0 && tie == 0; }
  __device__ bool takes(std::uint32_t k, std::uint32_t token) const { return k > key || (k == key && ~token > tie); }
  __device__ bool takes_nothing() const { return key == kAll && tie == kAll; }
};

}  // namespace sluice::gpu::forward
