#include "runtime/background/audit_group.hpp"

#include <algorithm>
#include <cmath>

#include "cpu/stages/rows.hpp"
#include "sluice/step/top_k.hpp"

namespace sluice::runtime {
namespace {

/// Outputs pass through bf16 on a device; an error below this share of the largest value is rounding.
constexpr double kRounding = 1e-2;
/// Watched tokens count in steps that want them.
constexpr double kWanted = 0.01;

double norm(const float* values, std::uint32_t count) {
  double sum = 0.0;
  for (std::uint32_t i = 0; i < count; ++i) sum += static_cast<double>(values[i]) * values[i];
  return std::sqrt(sum);
}

/// Running mean: `count` samples, this one included.
void average(double& mean, double sample, std::uint64_t count) { mean += (sample - mean) / static_cast<double>(count); }

/// One query head of a group.
class Head {
 public:
  Head(const AuditedGroup& of, std::uint32_t head) : of_(of), head_(head) {}

  [[nodiscard]] bool attended(std::uint32_t token) const { return (of_.heads[token] >> head_ & 1u) != 0; }
  [[nodiscard]] double weight(std::uint32_t token) const {
    return std::exp(static_cast<double>(of_.scores[std::size_t{token} * of_.group + head_]) - of_.lse[head_]);
  }

  /// What the output says of itself is the stronger witness, where it is a plain softmax over a subset.
  [[nodiscard]] double coverage() const {
    if ((of_.estimated >> head_ & 1u) == 0)
      return std::exp(static_cast<double>(of_.attended_lse[head_]) - of_.lse[head_]);
    double sum = 0.0;
    for (std::uint32_t t = 0; t < of_.tokens; ++t) sum += attended(t) ? weight(t) : 0.0;
    return sum;
  }

  [[nodiscard]] double overlap() const {
    std::vector<float> row(of_.tokens);
    for (std::uint32_t t = 0; t < of_.tokens; ++t) row[t] = of_.scores[std::size_t{t} * of_.group + head_];
    std::vector<std::uint32_t> best(std::min(AuditReport::top_k, of_.tokens));
    best.resize(select_top_k(row.data(), of_.tokens, AuditReport::top_k, best.data()));
    const auto hits = std::ranges::count_if(best, [&](std::uint32_t t) { return attended(t); });
    return best.empty() ? 1.0 : static_cast<double>(hits) / static_cast<double>(best.size());
  }

 private:
  const AuditedGroup& of_;
  std::uint32_t head_;
};

}  // namespace

HeadFinding find(const AuditedGroup& group, std::uint32_t head, std::span<const std::uint32_t> watched) {
  const Head of(group, head);
  HeadFinding found{.coverage = of.coverage(), .overlap = of.overlap()};
  const float* const want = group.out.data() + std::size_t{head} * group.head_dim;
  const float* const got = group.attended_out + std::size_t{head} * group.head_dim;
  std::vector<float> difference(group.head_dim);
  for (std::uint32_t c = 0; c < group.head_dim; ++c) difference[c] = got[c] - want[c];
  const double size = norm(want, group.head_dim);
  found.error = norm(difference.data(), group.head_dim);
  found.relative_error = size > 0.0 ? found.error / size : found.error;
  found.error_bound = 2.0 * std::max(0.0, 1.0 - found.coverage) * group.largest_value;
  found.bound_broken = !(found.error <= found.error_bound + kRounding * group.largest_value);
  double kept = 0.0;
  for (const std::uint32_t number : watched) {
    if (number < group.first || number - group.first >= group.tokens) continue;
    const std::uint32_t token = number - group.first;
    found.watched_mass += of.weight(token);
    if (of.attended(token)) kept += of.weight(token);
  }
  found.watched = found.watched_mass >= kWanted;
  found.watched_kept = found.watched ? kept / found.watched_mass : 0.0;
  return found;
}

void add(const HeadFinding& finding, HeadAudit& audit) {
  ++audit.steps;
  average(audit.coverage, finding.coverage, audit.steps);
  audit.coverage_min = std::min(audit.coverage_min, finding.coverage);
  average(audit.overlap, finding.overlap, audit.steps);
  average(audit.error, finding.error, audit.steps);
  average(audit.relative_error, finding.relative_error, audit.steps);
  average(audit.error_bound, finding.error_bound, audit.steps);
  audit.bound_broken += finding.bound_broken ? 1 : 0;
  if (!finding.watched) return;
  ++audit.watched_steps;
  average(audit.watched_mass, finding.watched_mass, audit.watched_steps);
  average(audit.watched_kept, finding.watched_kept, audit.watched_steps);
}

}  // namespace sluice::runtime
