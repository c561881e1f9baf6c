#pragma once

#include <cstdint>

namespace sluice {

/// SplitMix64's finaliser: every bit of `x` moves every bit of the result.
[[nodiscard]] constexpr std::uint64_t mixed_bits(std::uint64_t x) noexcept {
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

/// A pseudo-random permutation of [0, count): the image of `index` < count, in constant time and memory, the same on
/// every device. The first k images are k distinct samples.
[[nodiscard]] constexpr std::uint32_t permuted(std::uint32_t index, std::uint32_t count, std::uint64_t seed) noexcept {
  // A Feistel network over the fewest bits, an even number, that hold count; what falls outside goes through it again.
  constexpr std::uint32_t kRounds = 4;
  std::uint32_t half = 1;
  while ((std::uint64_t{1} << (2 * half)) < count) ++half;
  const std::uint32_t mask = (1u << half) - 1;
  do {
    std::uint32_t left = index >> half;
    std::uint32_t right = index & mask;
    for (std::uint32_t round = 0; round < kRounds; ++round) {
      const std::uint64_t key = mixed_bits(seed + (round + 1) * 0x9e3779b97f4a7c15u);
      const std::uint32_t next = left ^ (static_cast<std::uint32_t>(mixed_bits(key ^ right) >> 32) & mask);
      left = right;
      right = next;
    }
    index = left << half | right;
  } while (index >= count);
  return index;
}

}  // namespace sluice
