#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "sluice/audit.hpp"

namespace sluice::runtime {

/// What one KV head's group attended in a layer, beside exact attention.
struct AuditedGroup {
  std::uint32_t first = 0;   ///< token that is visible
  std::uint32_t tokens = 0;  ///< from there on
  std::uint32_t group = 0;
  std::uint32_t head_dim = 0;
  // Exact attention.
  std::vector<float> scores{};  ///< [tokens, group]
  std::vector<float> out{};     ///< [group, head_dim]
  std::vector<float> lse{};     ///< [group]
  double largest_value = 0.0;   ///< norm
  // What was attended.
  std::vector<std::uint32_t> heads{};   ///< [tokens] bit h: query head h attended the token
  const float* attended_out = nullptr;  ///< [group, head_dim]
  const float* attended_lse = nullptr;  ///< [group]
  std::uint32_t estimated = 0;  ///< bit h: query head h has values or weights that no softmax over a subset gives
};

/// What that says of one query head.
struct HeadFinding {
  double coverage = 0.0;
  double overlap = 0.0;
  double error = 0.0;
  double relative_error = 0.0;
  double error_bound = 0.0;
  bool bound_broken = false;
  bool watched = false;  ///< watched tokens held 1% of the softmax
  double watched_mass = 0.0;
  double watched_kept = 0.0;
};
/// `watched`: tokens, ascending; those that are not there are left out.
[[nodiscard]] HeadFinding find(const AuditedGroup& group, std::uint32_t head, std::span<const std::uint32_t> watched);
void add(const HeadFinding& finding, HeadAudit& audit);

}  // namespace sluice::runtime
