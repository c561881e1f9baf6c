#pragma once

#include <cstdint>

#include "sluice/policy.hpp"
#include "sluice/shape.hpp"
#include "sluice/step/page.hpp"

/// Up to which length a sequence should attend everything, see EngineOptions::dense_tokens: by what a machine of its
/// kind is known to take, not by what this one takes today.
namespace sluice::scheduler {

/// The longest length that is ever advised.
inline constexpr std::uint32_t kMostDenseTokens = 1u << 20;

/// Each of `rows` sequences, at least one, on a device that reads near rows at `near_gbps`: attending all takes what
/// choosing takes. 0 if the rate is not known. 1 GB = 1e9 bytes.
[[nodiscard]] std::uint32_t dense_tokens_of_device(const AttentionShape& shape, const PageLayout& near,
                                                   double near_gbps, std::uint32_t rows) noexcept;

/// Without a GPU: attending everything takes the CPU no longer than choosing; kMostDenseTokens where choosing never
/// pays. 0 for policies that choose otherwise than by all keys' copies and a number of tokens.
[[nodiscard]] std::uint32_t dense_tokens_of_cpu(const PolicySpec& policy, const AttentionShape& shape,
                                                DType kv_dtype) noexcept;

}  // namespace sluice::scheduler
