#pragma once

#include <cstdint>
#include <limits>
#include <span>
#include <vector>

#include "cpu/kernels/kernels.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/reference.hpp"

/// Shapes and variants that kernels are tested with.
namespace sluice::test {

inline constexpr float kInf = std::numeric_limits<float>::infinity();
inline constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
inline constexpr DType kTypes[] = {DType::f32, DType::f16, DType::bf16, DType::fp8_e4m3};
inline constexpr std::uint32_t kHeadDims[] = {16, 64, 80, 128, 256};
inline constexpr std::uint32_t kGroups[] = {1, 3, 4, 8, 16};

/// Calls `body` with every variant that this CPU can run.
template <class Body>
void for_each_variant(const Body& body) {
  for (const cpu::Kernels* kernels : cpu::available_kernels()) {
    CAPTURE(kernels->name);
    body(*kernels);
  }
}

template <class Body>
void for_each_shape(const Body& body) {
  for (const DType dtype : kTypes) {
    for (const std::uint32_t head_dim : kHeadDims) {
      for (const std::uint32_t group : kGroups) {
        CAPTURE(to_string(dtype), head_dim, group);
        body(ProblemOptions{.dtype = dtype, .head_dim = head_dim, .group = group});
      }
    }
  }
}

/// Scores of all heads with these tokens, [token, head], by the reference.
inline std::vector<float> scores_of(const Problem& problem, std::span<const std::uint32_t> tokens) {
  std::vector<float> scores;
  for (const std::uint32_t token : tokens) {
    for (std::uint32_t head = 0; head < problem.options().group; ++head) {
      scores.push_back(static_cast<float>(reference::score(problem, head, token)));
    }
  }
  return scores;
}

}  // namespace sluice::test
