#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "sluice/page_rules.hpp"
#include "tests/support/stages_under_test.hpp"

/// Pages to choose among by a progressive share, and the paper's choice in float64.
namespace sluice::test::page_choices {

inline constexpr std::uint32_t kUntouched = 0xabcd'1234u;

struct Options {
  std::uint32_t pages = 200;
  std::uint32_t newest = 5;  ///< tokens behind them
  std::uint32_t page_tokens = 32;
  std::uint32_t group = 4;
  std::uint32_t sinks = 0;
  std::uint32_t recent = 0;  ///< newest tokens, at least those behind all pages
  float mass = 0.9f;
  std::uint32_t microbatch = 4;
  ProgressRule rule = ProgressRule::least;
  float softcap = 0.f;
  float spread = 2.f;  ///< of the logits of pages
  std::uint32_t seed = 1;
};

/// Pages whose scores say more or less what they weigh: eighths, so that sums are exact and some are equal.
struct PageProblem {
  explicit PageProblem(const Options& of);
  [[nodiscard]] std::uint32_t tokens() const { return o.pages * o.page_tokens + o.newest; }
  [[nodiscard]] std::uint32_t recent_begin() const {
    return std::max(std::min(tokens() - o.recent, o.pages * o.page_tokens), o.sinks);
  }
  [[nodiscard]] AttentionShape shape() const {
    return {.layers = 1, .q_heads = o.group, .kv_heads = 1, .head_dim = 64, .softcap = o.softcap};
  }
  [[nodiscard]] PageLayout layout() const {
    return {.page_tokens = o.page_tokens, .head_dim = 64, .dtype = DType::bf16};
  }
  float& page_score(std::uint32_t h, std::uint32_t page) { return page_scores[std::size_t{h} * o.pages + page]; }
  float& score(std::uint32_t h, std::uint32_t token) { return scores[std::size_t{h} * tokens() + token]; }
  [[nodiscard]] double logit(std::uint32_t h, std::uint32_t token) const {
    const double x = static_cast<double>(scores[std::size_t{h} * tokens() + token]);
    const double cap = static_cast<double>(o.softcap);
    return cap == 0.0 || x == -std::numeric_limits<double>::infinity() ? x : cap * std::tanh(x / cap);
  }

  Options o;
  std::vector<float> page_scores, scores;
};

/// The paper's algorithm, by the definition.
class Reference {
 public:
  explicit Reference(const PageProblem& of);
  /// Pages in the order in which they are taken.
  [[nodiscard]] const std::vector<std::uint32_t>& order() const { return order_; }
  /// Whether a device may take as many: a share that is `within` the one wanted is and is not enough.
  [[nodiscard]] bool may_take(std::uint32_t taken, double within) const;

 private:
  [[nodiscard]] std::vector<std::uint32_t> far(std::uint32_t page) const;
  [[nodiscard]] double sum(std::uint32_t page) const;
  [[nodiscard]] double mass(std::uint32_t h, const std::vector<std::uint32_t>& tokens) const;
  /// Of all heads the least, as after microbatch `batch`.
  [[nodiscard]] double least_share(std::uint32_t batch) const;
  void walk(std::uint32_t h);

  const PageProblem& of_;
  const Options& o_;
  std::vector<std::uint32_t> order_;
  std::vector<std::vector<double>> shares_;  ///< [group, microbatches]
};

/// A task in the memory of a device.
[[nodiscard]] ChoosePagesTask ask(StagesUnderTest& under_test, const PageProblem& of);

}  // namespace sluice::test::page_choices
