#include "cpu/kernels/kernels.hpp"

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <memory>
#include <string>

#include "cpu/kernels/variants.hpp"
#include "sluice/error.hpp"
#include "sluice/units.hpp"

namespace sluice::cpu {
namespace {

/// A stand-in for attention over pages that are in the cache: there a variant shows its own speed, and what is
/// fast from the cache is never slower from memory.
class Race {
 public:
  Race() {
    std::uint32_t random = 1;
    for (std::uint16_t& element : kv_) {
      random = random * 1664525u + 1013904223u;
      element = static_cast<std::uint16_t>(0x3c00u | (random >> 16 & 0x81ffu));  // +-[2^-7, 2^-3] as bf16
    }
    for (std::size_t i = 0; i < q_.size(); ++i) q_[i] = 0.01f * static_cast<float>(i % 17) - 0.08f;
    for (std::uint32_t i = 0; i < kRows; ++i) rows_[i] = reinterpret_cast<const std::byte*>(&kv_[i * kHeadDim]);
  }

  /// Shortest of a few runs: everything that disturbs a run makes it longer.
  [[nodiscard]] Clock::duration time(const Kernels& kernels) {
    auto best = Clock::duration::max();
    for (int i = 0; i < kLaps; ++i) {
      const auto start = Clock::now();
      kernels.element[static_cast<int>(DType::bf16)].attend({.q = q_.data(),
                                                             .scale = 1.f,
                                                             .k = rows_.data(),
                                                             .v_offset = kRows * kHeadDim * sizeof(std::uint16_t),
                                                             .count = kRows,
                                                             .group = kGroup,
                                                             .head_dim = kHeadDim,
                                                             .out = out_.data(),
                                                             .lse = lse_.data()});
      best = std::min(best, Clock::now() - start);
    }
    return best;
  }

 private:
  static constexpr std::uint32_t kRows = 256;
  static constexpr std::uint32_t kHeadDim = 128;
  static constexpr std::uint32_t kGroup = 4;
  static constexpr int kLaps = 12;

  std::vector<std::uint16_t> kv_ = std::vector<std::uint16_t>(2 * kRows * kHeadDim);
  std::vector<float> q_ = std::vector<float>(kGroup * kHeadDim);
  std::vector<const std::byte*> rows_ = std::vector<const std::byte*>(kRows);
  std::vector<float> out_ = std::vector<float>(kGroup * kHeadDim);
  std::vector<float> lse_ = std::vector<float>(kGroup);
};

const Kernels& winner() {
  Race race;
  const Kernels* best = &kGenericKernels;
  auto best_time = Clock::duration::max();
  for (const Kernels* kernels : available_kernels()) {
    const auto time = race.time(*kernels);
    if (time < best_time) {
      best = kernels;
      best_time = time;
    }
  }
  return *best;
}

#ifdef SLUICE_CPU_X86
const Kernels& avx512_kernels() {
  static const Kernels kernels = [] {
    Kernels all = kAvx512Kernels;
    if (__builtin_cpu_supports("avx512vnni")) all.score_int4 = score_int4_vnni;
    return all;
  }();
  return kernels;
}
#endif

}  // namespace

std::vector<const Kernels*> available_kernels() {
  std::vector<const Kernels*> found{&kGenericKernels};
#ifdef SLUICE_CPU_X86
  // __builtin_cpu_supports also asks whether the operating system saves the registers.
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c")) {
    found.push_back(&kAvx2Kernels);
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
        __builtin_cpu_supports("avx512dq")) {
      found.push_back(&avx512_kernels());
    }
  }
#endif
  return found;
}

const Kernels& find_kernels(std::string_view name) {
  std::string have;
  for (const Kernels* kernels : available_kernels()) {
    if (name == kernels->name) return *kernels;
    have += (have.empty() ? "" : ", ") + std::string(kernels->name);
  }
  throw Error(Errc::unsupported,
              "CPU kernels '" + std::string(name) + "' are unknown or not for this CPU; have " + have);
}

const Kernels& fastest_kernels() {
  static const Kernels& chosen = []() -> const Kernels& {
    const char* const name = std::getenv("SLUICE_CPU_ISA");
    if (name == nullptr || *name == '\0') return winner();
    try {
      return find_kernels(name);
    } catch (const Error& error) {
      throw Error(error.code(), std::string(error.what()) + " (from the environment variable SLUICE_CPU_ISA)");
    }
  }();
  return chosen;
}

}  // namespace sluice::cpu
