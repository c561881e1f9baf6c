#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "tests/support/int4_support.hpp"
#include "tests/support/stages_under_test.hpp"

/// Clusters of keys to choose among by a fitted curve, and the paper's choice in float64.
namespace sluice::test::choices {

inline constexpr std::uint32_t kUntouched = 0xabcd'1234u;

struct Options {
  ProblemOptions problem{
      .dtype = DType::bf16, .tokens = 900, .head_dim = 64, .group = 4, .page_tokens = 16, .scale = 0.5f};
  std::uint32_t clustered = 800;
  std::uint32_t clusters = 40;
  std::uint32_t sinks = 0;
  std::uint32_t recent = 0;  ///< newest tokens, at least those that are in no cluster
  float mass = 0.9f;
};

/// Clusters whose centroids and queries are eighths, so that products are exact and equal ones are equal; keys lie
/// around them. Every seventh cluster is empty and the second has a quarter of all tokens.
class ClusterProblem {
 public:
  explicit ClusterProblem(const Options& options);

  [[nodiscard]] const Options& options() const { return options_; }
  [[nodiscard]] Problem& problem() { return problem_; }
  [[nodiscard]] const Problem& problem() const { return problem_; }
  [[nodiscard]] std::uint32_t recent_begin() const {
    return std::min(options_.problem.tokens - options_.recent, options_.clustered);
  }
  /// The tokens of query head `h`'s list, in float64.
  [[nodiscard]] std::vector<std::uint32_t> list(std::uint32_t h) const;

  std::vector<float> centroids;
  std::vector<std::uint32_t> starts, members;
  FitSamples samples;

 private:
  Options options_;
  Problem problem_;
};

/// A task in the memory of a device.
struct Asked {
  ChooseClustersTask task;
  int4_copies::Copies copies;
};
[[nodiscard]] Asked ask(StagesUnderTest& under_test, ClusterProblem& of);

/// How many tokens of its list a query head keeps, by the definition: sums over all of the list, token by token.
[[nodiscard]] std::uint32_t reference_budget(const ClusterProblem& of, const Asked& asked,
                                             const std::vector<std::uint32_t>& list, std::uint32_t h);

}  // namespace sluice::test::choices
