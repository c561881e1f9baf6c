// The choice among clusters of keys by a fitted curve (Tactic, arXiv 2502.12216, sections 4.3 to 4.5): in float64 but
// for the scores, and as plainly as the paper says it.

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <vector>

#include "cpu/stages/score_tokens.hpp"
#include "cpu/stages/shapes.hpp"
#include "cpu/stages/stages.hpp"
#include "sluice/step/order_key.hpp"

namespace sluice::cpu {
namespace {

constexpr auto kLog = [](double x) noexcept { return std::log(x); };

/// One query head of a task.
class HeadChoice {
 public:
  HeadChoice(const Kernels& kernels, const ChooseClustersTask& task, const AttentionShape& shape,
             const PageLayout& layout, std::uint32_t head)
      : kernels_(kernels), task_(task), shape_(shape), layout_(layout), head_(head) {
    shape_.q_heads = shape_.kv_heads = 1;
  }

  void run() {
    rank();
    score();
    const std::uint32_t budget = fit();
    std::uint32_t* const mask = task_.masks + head_ * task_.mask_words;
    std::fill_n(mask, div_up(task_.tokens, 32), 0u);
    for (std::uint32_t i = 0; i < budget; ++i) mask[list_[i] / 32] |= 1u << list_[i] % 32;
    if (task_.counts != nullptr) task_.counts[head_] = budget;
  }

 private:
  [[nodiscard]] const float* q() const noexcept { return task_.q + std::size_t{head_} * shape_.head_dim; }

  /// The tokens of all clusters, in the order of these.
  void rank() {
    std::vector<std::uint32_t> keys(task_.clusters);
    for (std::uint32_t i = 0; i < task_.clusters; ++i) {
      const float* const centroid = task_.centroids + std::size_t{i} * shape_.head_dim;
      const float score = std::inner_product(centroid, centroid + shape_.head_dim, q(), 0.f);
      keys[i] = order_key(score);
    }
    std::vector<std::uint32_t> order(task_.clusters);
    std::iota(order.begin(), order.end(), 0u);
    std::ranges::stable_sort(order, [&](std::uint32_t a, std::uint32_t b) { return keys[a] > keys[b]; });
    for (const std::uint32_t i : order)
      list_.insert(list_.end(), task_.members + task_.starts[i], task_.members + task_.starts[i + 1]);
  }

  /// Of what is attended anyway, then of the samples.
  void score() {
    std::vector<std::uint32_t> tokens;
    for (std::uint32_t token = 0; token < task_.sinks; ++token) tokens.push_back(token);
    for (std::uint32_t token = task_.recent; token < task_.tokens; ++token) tokens.push_back(token);
    for (std::uint32_t i = 0; i < task_.samples.size(); ++i) tokens.push_back(list_[task_.samples.position(i)]);
    scores_.resize(tokens.size());
    estimate_tokens(kernels_,
                    {.q = q(),
                     .copies = task_.copies,
                     .mean = task_.mean,
                     .frames = task_.frames,
                     .tokens = tokens,
                     .out = scores_.data()},
                    shape_, layout_);
    for (std::size_t i = task_.anyway(); i < tokens.size(); ++i) {
      if (tokens[i] < task_.sinks || tokens[i] >= task_.recent) scores_[i] = -std::numeric_limits<float>::infinity();
    }
  }

  /// How many tokens of the list are kept.
  [[nodiscard]] std::uint32_t fit() const {
    const FitSamples& samples = task_.samples;
    float top = -std::numeric_limits<float>::infinity();
    for (const float score : scores_) top = score > top ? score : top;
    if (!std::isfinite(top) || task_.mass >= 1.f) return samples.tokens;
    std::vector<double> weights(scores_.size());
    std::ranges::transform(scores_, weights.begin(), [&](float score) {
      return score == score ? std::exp(static_cast<double>(score) - static_cast<double>(top)) : 0.0;
    });
    const auto sum = [&](std::uint32_t begin, std::uint32_t count) {
      return std::accumulate(weights.begin() + begin, weights.begin() + begin + count, 0.0);
    };
    const std::uint32_t first = task_.anyway();
    const double anyway = sum(0, first);
    const double head = sum(first, samples.head.size());
    const std::uint32_t near_at = first + samples.head.size();
    const double near = sum(near_at, samples.near.size()) / samples.near.size();
    const double far = sum(near_at + samples.near.size(), samples.far.size()) / samples.far.size();
    const FittedTail tail(curve_through(samples.near, near, samples.far, far, kLog), samples.head.size(),
                          samples.tokens, kLog);
    const double all = head + tail.mass(samples.tokens) + anyway;
    if (!(all > 0.0)) return samples.tokens;
    const double wanted = static_cast<double>(task_.mass) * all - anyway;  // Of the list.
    if (anyway > 0.0 && wanted <= 0.0) return 0;
    double before = 0.0;
    for (std::uint32_t i = 0; i < samples.head.size(); ++i) {
      before += weights[first + i];
      if (before >= wanted) return i + 1;
    }
    std::uint32_t low = samples.head.size() + 1;  // The mass of the first k never falls with k.
    std::uint32_t high = samples.tokens;
    while (low < high) {
      const std::uint32_t middle = low + (high - low) / 2;
      if (head + tail.mass(middle) >= wanted) {
        high = middle;
      } else {
        low = middle + 1;
      }
    }
    return high;
  }

  const Kernels& kernels_;
  const ChooseClustersTask& task_;
  AttentionShape shape_;  ///< of one query head
  const PageLayout& layout_;
  std::uint32_t head_;
  std::vector<std::uint32_t> list_;
  std::vector<float> scores_;
};

}  // namespace

void choose_clusters(const Host& host, std::span<const ChooseClustersTask> tasks, const AttentionShape& shape,
                     const PageLayout& layout) {
  if (tasks.empty()) return;
  check("choose_clusters", shape, layout);
  for (const ChooseClustersTask& task : tasks) {
    for (std::uint32_t head = 0; head < shape.group() && task.clusters != 0; ++head)
      HeadChoice(host.kernels, task, shape, layout, head).run();
  }
}

}  // namespace sluice::cpu
