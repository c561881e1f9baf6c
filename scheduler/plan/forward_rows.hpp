#pragma once

#include <cstdint>
#include <string>

#include "sluice/forward.hpp"
#include "sluice/policy.hpp"

namespace sluice::scheduler {

/// Who finds what the rows of a sequence attend beyond sinks and recent tokens.
enum class Chooser : std::uint8_t {
  device,   ///< by 4-bit copies; or nobody needs to
  cpu,      ///< its LayerPolicy, between a layer's question and its answer
  neither,  ///< such policies are not served
};
[[nodiscard]] Chooser chooser(const PolicySpec& spec) noexcept;

/// Queries of a prompt's newest tokens that a policy begins with.
[[nodiscard]] std::uint32_t prompt_queries(const PolicySpec& spec) noexcept;

/// Whether what a policy chooses depends on more than the tokens there are: on what it has chosen before, or on where
/// its prompt ended.
[[nodiscard]] bool remembers(const PolicySpec& spec) noexcept;

/// Why a forward of this bucket cannot serve a policy that parses; empty if it can. `max_window`: sinks and recent
/// tokens together, if the bucket is not unbounded.
[[nodiscard]] std::string forward_unserved(const PolicySpec& spec, const Bucket& bucket, std::uint32_t max_window);

/// What the row of a sequence's token chooses from, if `tokens` are visible to it: a function of policy and length
/// alone. List and packed row are the caller's.
[[nodiscard]] ForwardRow forward_row(const PolicySpec& spec, std::uint32_t tokens) noexcept;

}  // namespace sluice::scheduler
