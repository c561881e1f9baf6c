#pragma once

#include <cstdint>
#include <string_view>

#ifdef __CUDACC__
#define SLUICE_HOST_DEVICE __host__ __device__
#else
#define SLUICE_HOST_DEVICE
#endif

namespace sluice::tools {

/// Stream of one tensor: its name (FNV-1a) under the seed, so that no tensor depends on the order of drawing.
[[nodiscard]] constexpr std::uint64_t random_key(std::uint64_t seed, std::string_view name) noexcept {
  std::uint64_t hash = 0xcbf29ce484222325ull ^ (seed * 0x9e3779b97f4a7c15ull);
  for (const char c : name) hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3ull;
  return hash;
}

/// Element `index` of a stream: mean 0, standard deviation 1. The sum of four 16-bit uniforms is bell-shaped and
/// exact, so that the CPU and a GPU draw the same bits; 64 bits are mixed by the finaliser of SplitMix64.
[[nodiscard]] SLUICE_HOST_DEVICE constexpr float random_normal(std::uint64_t key, std::uint64_t index) noexcept {
  std::uint64_t z = key + (index + 1) * 0x9e3779b97f4a7c15ull;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
  z ^= z >> 31;
  const auto sum = static_cast<std::int32_t>((z & 0xffffu) + (z >> 16 & 0xffffu) + (z >> 32 & 0xffffu) + (z >> 48));
  constexpr float kDeviation = 37837.22f;  // sqrt(4 * (2^32 - 1) / 12)
  return static_cast<float>(sum - 131070) * (1.f / kDeviation);
}

}  // namespace sluice::tools
