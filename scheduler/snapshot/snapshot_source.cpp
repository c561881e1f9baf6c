#include "scheduler/snapshot/snapshot_source.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <utility>

#include "scheduler/history/prompt_attention.hpp"

namespace sluice::scheduler {
namespace {

/// What a head may keep of which `own` are among the layer's highest scores.
std::uint64_t shared_tokens(std::uint32_t budget, std::uint64_t own, float floor) noexcept {
  const double part = static_cast<double>(floor);
  return static_cast<std::uint64_t>(part * budget) +
         static_cast<std::uint64_t>(std::llround((1.0 - part) * static_cast<double>(own)));
}

/// out[i] += weights around i as one. Positions beyond the ends hold nothing: less than any weight, or 0 of the mean.
void add_pooled(const float* weights, std::uint32_t count, const SnapshotOptions& options, std::vector<double>& out) {
  const std::uint32_t half = options.kernel / 2;
  for (std::uint32_t i = 0; i < count; ++i) {
    const float* const from = weights + (i < half ? 0 : i - half);
    const float* const to = weights + std::min(i + half + 1, count);
    out[i] += options.pooling == Pooling::max
                  ? static_cast<double>(*std::max_element(from, to))
                  : std::accumulate(from, to, 0.0, [](double sum, float x) { return sum + static_cast<double>(x); }) /
                        options.kernel;
  }
}

}  // namespace

std::uint32_t snapshot_budget(const SnapshotOptions& options, std::uint32_t layer, std::uint32_t layers,
                              std::uint32_t prefix) noexcept {
  const std::uint64_t mean = options.budget > options.window ? options.budget - options.window : 0;
  if (options.pyramid == 1 || layers < 2 || mean >= prefix)
    return static_cast<std::uint32_t>(std::min<std::uint64_t>(mean, prefix));
  const std::uint64_t most = std::min<std::uint64_t>(2 * mean - mean / options.pyramid, prefix);
  const std::uint64_t fall = 2 * (most - mean);  // From the first layer to the last.
  return static_cast<std::uint32_t>(most - (layer * fall + (layers - 1) / 2) / (layers - 1));
}

void SharedBudget::offer(std::uint32_t kv_head, std::shared_ptr<const std::vector<float>> highest) {
  const std::lock_guard lock(mutex_);
  scores_[kv_head] = std::move(highest);
}

std::uint32_t SharedBudget::tokens(std::uint32_t kv_head, std::uint32_t tokens, float floor) {
  const std::lock_guard lock(mutex_);
  if (counts_.empty()) count(std::uint64_t{tokens} * scores_.size());
  return static_cast<std::uint32_t>(shared_tokens(tokens, counts_[kv_head], floor));
}

/// Merges the heads' lists as far as the layer's budget goes.
void SharedBudget::count(std::uint64_t all) {
  std::vector<std::uint32_t> counts(scores_.size(), 0);
  for (; all != 0; --all) {
    std::size_t best = scores_.size();
    for (std::size_t head = 0; head < scores_.size(); ++head) {
      if (!scores_[head] || counts[head] == scores_[head]->size()) continue;
      if (best == scores_.size() || (*scores_[head])[counts[head]] > (*scores_[best])[counts[best]]) best = head;
    }
    if (best == scores_.size()) break;
    ++counts[best];
  }
  counts_ = std::move(counts);
  std::ranges::fill(scores_, nullptr);
}

SnapshotSource::SnapshotSource(const SnapshotOptions& options, const AttentionShape& shape, LayerId layer,
                               std::shared_ptr<SharedBudget> shared)
    : options_(options),
      group_(shape.group()),
      layers_(shape.layers),
      kv_heads_(shape.kv_heads),
      layer_(layer.value),
      shared_(std::move(shared)) {}

/// Of the tokens before the window.
std::vector<float> SnapshotSource::scores(const PromptContext& prompt) const {
  const PromptAttention attention = attend_prompt(prompt, group_, 0, options_.window);
  std::vector<double> sums(prefix_, 0.0);
  for (std::uint32_t h = 0; h < group_; ++h)
    add_pooled(attention.by_position.data() + std::size_t{h} * prompt.tokens, prefix_, options_, sums);
  return {sums.begin(), sums.end()};
}

void SnapshotSource::begin(const PromptContext& prompt) {
  kv_head_ = prompt.kv_head;
  prefix_ = 0;
  kept_.clear();
  scores_ = nullptr;
  const std::uint32_t before = prompt.tokens - std::min(options_.window, prompt.tokens);
  budget_ = snapshot_budget(options_, layer_, layers_, before);
  if (prompt.queries == 0 || budget_ >= before) return;
  prefix_ = before;
  const std::vector<float> score = scores(prompt);
  const bool shares = options_.floor < 1.f;
  const std::uint64_t of_layer = std::min<std::uint64_t>(std::uint64_t{budget_} * kv_heads_, prefix_);
  const std::uint64_t most =
      shares ? std::min<std::uint64_t>(shared_tokens(budget_, of_layer, options_.floor), prefix_) : budget_;

  std::vector<std::uint32_t> order(prefix_);
  std::iota(order.begin(), order.end(), 0u);
  const auto better = [&](std::uint32_t a, std::uint32_t b) {
    return score[a] != score[b] ? score[a] > score[b] : a < b;
  };
  const auto sorted = static_cast<std::ptrdiff_t>(shares ? std::max(of_layer, most) : most);
  std::partial_sort(order.begin(), order.begin() + sorted, order.end(), better);
  if (shares) {
    auto highest = std::make_shared<std::vector<float>>();
    highest->reserve(of_layer);
    for (std::uint64_t i = 0; i < of_layer; ++i) highest->push_back(score[order[i]]);
    scores_ = std::move(highest);
    shared_->offer(kv_head_, scores_);
  }
  kept_.assign(order.begin(), order.begin() + static_cast<std::ptrdiff_t>(most));
  if (!shares) std::sort(kept_.begin(), kept_.end());
}

void SnapshotSource::settle() {
  if (!scores_) return;
  const std::uint32_t count = shared_->tokens(kv_head_, budget_, options_.floor);
  kept_.resize(std::min<std::size_t>(count, kept_.size()));
  std::sort(kept_.begin(), kept_.end());
  scores_ = nullptr;
}

void SnapshotSource::propose(std::uint32_t sinks, std::uint32_t tokens, TokenSet& set) const {
  for (const std::uint32_t token : kept_) {
    if (token >= sinks) set.add(token);
  }
  set.add_range(std::max(prefix_, sinks), tokens);
}

std::uint64_t SnapshotSource::most_heap_bytes(const SnapshotOptions& options, const AttentionShape& shape,
                                              std::uint32_t tokens) noexcept {
  const std::uint32_t mean = snapshot_budget(options, 0, shape.layers, tokens);  // The first layer keeps most.
  if (options.floor >= 1.f) return std::uint64_t{mean} * sizeof(std::uint32_t);
  const std::uint64_t of_layer = std::min<std::uint64_t>(std::uint64_t{mean} * shape.kv_heads, tokens);
  const std::uint64_t most = std::min<std::uint64_t>(shared_tokens(mean, of_layer, options.floor) + 1, tokens);
  return most * sizeof(std::uint32_t) + of_layer * sizeof(float) + kScoresBytes;
}

}  // namespace sluice::scheduler
