#pragma once

#include <cstdint>
#include <span>

#include "sluice/policy.hpp"
#include "sluice/step/curve_fit.hpp"

namespace sluice::scheduler {

/// How far down an approximately sorted list of tokens to go for a share of the mass (Tactic, arXiv 2502.12216, section
/// 4.4 and algorithm 1). The list's weights w(i), i from 1, are known exactly at its head and sampled in two windows;
/// in between, and behind, they are taken to follow a / i + b.

/// The samples of a list of n tokens; of none (tokens = 0), if the list is too short for the machinery: attend it all.
[[nodiscard]] FitSamples fit_samples(const ClusterOptions& options, std::uint32_t n) noexcept;

/// The curve through the means of two windows. Where the list is not sorted, so that it would rise, it is flat.
[[nodiscard]] FittedCurve fit_curve(ListRange near, double near_mean, ListRange far, double far_mean) noexcept;

/// The smallest k <= n such that the first k, with what is attended anyway, have at least `share` of the mass of all n
/// and that; 0 if it suffices alone. `head` are the exact weights of the first tokens, `anyway` is the weight of what
/// is attended anyway and not counted in the list. n, if share is 1 or there is no mass.
[[nodiscard]] std::uint32_t fitted_budget(std::span<const float> head, const FittedCurve& curve, std::uint32_t n,
                                          double share, double anyway = 0.0) noexcept;

/// All of it: the budget for the scaled scores of the samples, head, near and far one after the other, and for those
/// of what is attended anyway, a sample of which has -infinity. Scores that are NaN or -infinity weigh nothing.
[[nodiscard]] std::uint32_t fitted_budget(std::span<float> scores, const FitSamples& samples, double share,
                                          std::span<float> anyway = {}) noexcept;

}  // namespace sluice::scheduler
