#pragma once

#include <cstdint>

#include "sluice/policy.hpp"
#include "sluice/shape.hpp"
#include "sluice/tensor.hpp"

namespace sluice::scheduler {

/// As many as an engine may have room for in a window.
inline constexpr std::uint32_t kMostDenseTokens = 1u << 20;

/// Without a GPU: the length up to which attending everything takes the CPU no longer than choosing, PolicySpec's
/// dense_tokens; kMostDenseTokens where choosing never pays. A function of policy, shape and type: by
/// an estimate of what a core takes, not by this machine, so that the same tokens come out everywhere. 0 for policies
/// that choose otherwise than by all keys' 4-bit copies and a number of tokens. Whoever begins a sequence may write it
/// into a policy, see FarOptions for the other one.
[[nodiscard]] std::uint32_t advised_dense_tokens(const PolicySpec& policy, const AttentionShape& shape,
                                                 DType kv_dtype) noexcept;

}  // namespace sluice::scheduler
