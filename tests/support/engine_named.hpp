#pragma once

#include <initializer_list>
#include <span>
#include <utility>

#include "sluice/engine_options.hpp"

namespace sluice::test {

/// Policies that want at least as much as those which cases begin sequences with: engines of many cases are for these.
/// Tokens by 4-bit copies of keys beside a window, and the same by 3-bit ones.
inline constexpr const char* kManyTokens = "exact | int4 | top_k=2048 | near=0,sinks=4,recent=508";
inline constexpr const char* kManyTokensBy3 = "exact | int3 | top_k=2048 | near=0,sinks=4,recent=508";
/// Choices on the CPU, with 32 queries of a prompt.
inline constexpr const char* kOnCpu = "lfps";
/// Clusters of 4 tokens on the device.
inline constexpr const char* kManyClusters = "tactic:least=16,size=4,recluster=64 | int4";
/// 512 pages by digests of either kind.
[[nodiscard]] inline const char* many_pages(DigestKind digests) {
  return digests == DigestKind::box ? "pages:box,pages=512 | top_k=all | near=0,sinks=4,recent=508"
                                    : "pages:cuboid_mean,pages=512 | top_k=all | near=0,sinks=4,recent=508";
}

/// The same options, of an engine for these policies.
[[nodiscard]] inline EngineOptions named(EngineOptions options, std::span<const char* const> policies) {
  options.policies.clear();
  for (const char* const text : policies) options.policies.push_back(parse_policy(text));
  return options;
}
[[nodiscard]] inline EngineOptions named(EngineOptions options, std::initializer_list<const char*> policies) {
  return named(std::move(options), std::span(policies.begin(), policies.size()));
}

}  // namespace sluice::test
