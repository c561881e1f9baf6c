#include "runtime/far/far_units.hpp"

#include <algorithm>
#include <atomic>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace sluice::runtime {

std::uint64_t unit_room(const ForwardMemory& memory) noexcept {
  if (memory.handover != Handover::device || memory.fetch_share == kWholeFetchShare || !stores_units()) return 0;
  // Teams have fewer lists, and no more units together.
  const std::uint64_t lists = std::uint64_t{memory.largest.decode_rows} * memory.shape.kv_heads;
  return std::min<std::uint64_t>(kMostFarUnits, lists * memory.list_units());
}

void renew_tags(const ForwardMemory& memory, std::uint64_t asked) noexcept {
  if (memory.far_units == nullptr) return;
  for (std::uint64_t i = 0; i < unit_room(memory); ++i)
    std::atomic_ref(memory.far_units[i].tag).store(static_cast<std::uint32_t>(asked), std::memory_order_relaxed);
}

#if defined(__x86_64__)

namespace {

/// Processors with AVX carry out an aligned store of 16 bytes at once, as the manuals of Intel and AMD have it; C++ has
/// no such store that does not lock, and compilers may take others apart.
void store(FarUnit& unit, __m128i words) noexcept { asm volatile("movaps %1, %0" : "=m"(unit) : "x"(words)); }

}  // namespace

bool stores_units() noexcept { return __builtin_cpu_supports("avx") != 0; }

void publish(const ForwardMemory& memory, std::uint64_t asked, std::uint32_t list) noexcept {
  constexpr std::uint32_t kFloats = FarUnit::kFloats;
  const std::uint32_t group = memory.shape.group();
  const std::uint32_t outs = group * memory.shape.head_dim;
  const std::uint32_t units = memory.list_units();
  const float* const out = memory.far_out + std::uint64_t{list} * outs;
  const float* const lse = memory.far_lse + std::uint64_t{list} * group;
  FarUnit* const to = memory.far_units + std::uint64_t{list} * units;
  const __m128i tag = _mm_set_epi32(static_cast<int>(asked), 0, 0, 0);
  const __m128i floats = _mm_set_epi32(0, -1, -1, -1);
  std::uint32_t unit = 0;
  for (; kFloats * unit + 4 <= outs; ++unit) {
    const __m128i four = _mm_loadu_si128(reinterpret_cast<const __m128i*>(out + kFloats * unit));
    store(to[unit], _mm_or_si128(_mm_and_si128(four, floats), tag));
  }
  for (; unit < units; ++unit) {
    FarUnit last{.tag = static_cast<std::uint32_t>(asked)};
    for (std::uint32_t i = 0; i < kFloats; ++i) {
      const std::uint32_t at = kFloats * unit + i;
      last.floats[i] = at < outs ? out[at] : at < outs + group ? lse[at - outs] : 0.f;
    }
    store(to[unit], _mm_load_si128(reinterpret_cast<const __m128i*>(&last)));
  }
}

#else

bool stores_units() noexcept { return false; }
void publish(const ForwardMemory&, std::uint64_t, std::uint32_t) noexcept {}

#endif

}  // namespace sluice::runtime
