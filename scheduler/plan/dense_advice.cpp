#include "scheduler/plan/dense_advice.hpp"

#include <algorithm>

#include "scheduler/layer_policy.hpp"
#include "scheduler/plan/cost_model.hpp"
#include "scheduler/plan/forward_rows.hpp"
#include "sluice/step/page.hpp"

namespace sluice::scheduler {
namespace {

/// Nanoseconds for a token and KV head, of one core of an AMD EPYC with AVX-512 that multiplies bytes; by eye to the
/// stages of one run of `taskset -c 1 sluice bench gpu --device host --sections attention --near 0 --threads 1 --layers
/// 8
/// --trace FILE`, with `--dense-tokens 0` and 256K, at 2K, 8K and 32K tokens of three shapes.
struct CoreCosts {
  double per_kv_byte = 0.027;   ///< attended page by page: its key and value are read
  double per_product = 0.02;    ///< and multiplied, by each channel and query head
  double scattered = 3.0;       ///< times what a row takes that is attended by itself
  double per_copy = 2.6;        ///< estimated: the 4-bit copy is read
  double per_estimate = 0.005;  ///< and multiplied
  double per_choice = 1.8;      ///< each query head looks at its score
  double per_head = 3300.0;     ///< a query head's choice, of however many
};

class Costs {
 public:
  Costs(const PolicySpec& policy, const AttentionShape& shape, DType kv_dtype) noexcept
      : policy_(policy), shape_(shape) {
    const CoreCosts core;
    const PageLayout layout{.head_dim = shape.head_dim, .dtype = kv_dtype};
    const double group = shape.group();
    const double products = group * shape.head_dim;
    attend_ = core.per_kv_byte * static_cast<double>(2 * layout.row_bytes()) + core.per_product * products;
    choose_ = core.per_copy + core.per_estimate * products + core.per_choice * group;
    scattered_ = core.scattered * attend_;
    fixed_ = core.per_head * group;
  }
  /// Whether attending all of so many tokens takes no longer.
  [[nodiscard]] bool dense_pays(std::uint32_t tokens) const noexcept {
    const RowShape row{.q_heads = shape_.q_heads, .kv_heads = shape_.kv_heads};
    const double window = 1.0 * policy_.near.sink_tokens + std::max(1u, policy_.near.recent_tokens);
    const double picks = 1.0 * shape_.group() * most_tokens_per_head(policy_, tokens, row);
    const double all = tokens;
    return attend_ * all <= fixed_ + choose_ * all + scattered_ * std::min(all, window + picks);
  }

 private:
  const PolicySpec& policy_;
  const AttentionShape& shape_;
  double attend_ = 0.0, choose_ = 0.0, scattered_ = 0.0, fixed_ = 0.0;
};

}  // namespace

std::uint32_t dense_tokens_of_device(const AttentionShape& shape, const PageLayout& near, double near_gbps,
                                     std::uint32_t rows) noexcept {
  // Measured on an H200. One sequence: scores, lists and an answer of the CPU, beyond what reading takes. Of more, each
  // KV head of each has a list of its own: with all near, 16 and 64 sequences of 8 KV heads choose in 160 and 519 us.
  constexpr double kChoosingUs = 40.0;
  constexpr double kListUs = 0.9;
  const double choosing_us = kChoosingUs + kListUs * shape.kv_heads * (rows - 1);
  const double bytes = 2.0 * static_cast<double>(near.row_bytes()) * shape.kv_heads * rows;
  return static_cast<std::uint32_t>(
      std::clamp(choosing_us * near_gbps * kBytesPerUs / bytes, 0.0, 1.0 * kMostDenseTokens));
}

std::uint32_t dense_tokens_of_cpu(const PolicySpec& policy, const AttentionShape& shape, DType kv_dtype) noexcept {
  const bool counts = policy.budget.kind == BudgetKind::top_k || policy.budget.kind == BudgetKind::drawn;
  const bool by_copies =
      policy.sources == static_cast<std::uint16_t>(Source::exact) && code_bits(policy) != 0 && counts;
  if (!by_copies || !may_be_dense(policy)) return 0;
  const Costs costs(policy, shape, kv_dtype);
  // A budget may be a number first and a share of the tokens then, so that the difference is no line: the longest
  // length at which dense attention pays is looked for from above, in steps of 1/16.
  std::uint32_t tokens = kMostDenseTokens;
  while (tokens > 16 && !costs.dense_pays(tokens)) tokens -= std::max(1u, tokens / 16);
  return tokens > 16 ? tokens : 0;
}

}  // namespace sluice::scheduler
