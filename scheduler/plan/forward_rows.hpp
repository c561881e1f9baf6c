#pragma once

#include <cstdint>
#include <string>

#include "sluice/forward.hpp"
#include "sluice/policy.hpp"

namespace sluice::scheduler {

/// Why a forward of this bucket cannot serve a policy that parses; empty if it can. `max_window`: sinks and recent
/// tokens together, if the bucket is not unbounded.
[[nodiscard]] std::string forward_unserved(const PolicySpec& spec, const Bucket& bucket, std::uint32_t max_window);

/// What the row of a sequence's token chooses from, if `tokens` are visible to it: a function of policy and length
/// alone. List and packed row are the caller's.
[[nodiscard]] ForwardRow forward_row(const PolicySpec& spec, std::uint32_t tokens) noexcept;

}  // namespace sluice::scheduler
