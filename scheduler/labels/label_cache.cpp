#include "scheduler/labels/label_cache.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <numeric>

#include "scheduler/labels/bf16.hpp"
#include "scheduler/labels/key_blocks.hpp"

namespace sluice::scheduler {
namespace {

constexpr std::uint32_t kMostChannels = 256;  ///< PolicySpec::label_channels, at most

/// Rows with anything that is not finite say nothing about any channel.
void add_absolutes(const float* row, std::vector<double>& sums) {
  if (!is_finite(row, sums.size())) return;
  for (std::size_t c = 0; c < sums.size(); ++c) sums[c] += std::abs(static_cast<double>(row[c]));
}

}  // namespace

LabelCache::LabelCache(std::uint32_t channels, const AttentionShape& shape)
    : wanted_(std::min({channels, shape.head_dim, kMostChannels})),
      group_(shape.group()),
      head_dim_(shape.head_dim),
      scale_(shape.score_scale()) {}

void LabelCache::begin(const PromptContext& prompt) {
  if (prompt.tokens == 0) return;
  choose_channels(prompt);
  follow(prompt.tokens, *prompt.kv);
}

/// The mean of |q * k| over all pairs is the product of the means, so one pass over either will do.
void LabelCache::choose_channels(const PromptContext& prompt) {
  std::vector<double> keys(head_dim_, 0.0), queries(head_dim_, 0.0);
  for_each_key(*prompt.kv, head_dim_, 0, prompt.tokens, [&](const float* key) { add_absolutes(key, keys); });
  const std::uint32_t rows = std::min(prompt.queries, kLabelQueries) * group_;
  for (std::uint32_t row = 0; row < rows; ++row)
    add_absolutes(prompt.last_q.data() + prompt.last_q.size() - std::size_t{row + 1} * head_dim_, queries);
  // Of imported tokens no queries are known.
  const bool known = std::any_of(queries.begin(), queries.end(), [](double sum) { return sum > 0.0; });
  std::vector<double> products(head_dim_);
  for (std::uint32_t c = 0; c < head_dim_; ++c) products[c] = keys[c] * (known ? queries[c] : 1.0);

  channels_.resize(head_dim_);
  std::iota(channels_.begin(), channels_.end(), 0u);
  std::stable_sort(channels_.begin(), channels_.end(),
                   [&](std::uint32_t a, std::uint32_t b) { return products[a] > products[b]; });
  channels_.resize(wanted_);
  std::sort(channels_.begin(), channels_.end());
  channels_.shrink_to_fit();
}

void LabelCache::follow(std::uint32_t tokens, KvReader& kv) {
  if (channels_.empty() || tokens == 0) return;
  const std::size_t size = channels_.size();
  truncate(tokens - 1);
  make_room(labels_, tokens, size);
  for_each_key(kv, head_dim_, labelled(), tokens, [&](const float* key) {
    for (const std::uint32_t channel : channels_) labels_.push_back(to_bf16(key[channel]));
  });
}

void LabelCache::truncate(std::uint32_t tokens) noexcept { cut(labels_, tokens, channels_.size()); }

void LabelCache::estimate(const float* q, std::span<const std::uint32_t> tokens, KvReader& kv, float* out) const {
  if (tokens.empty()) return;
  if (channels_.empty()) return kv.score(q, tokens, out);
  const std::size_t size = channels_.size();
  thread_local std::vector<float> queries;  // [group, channels]
  queries.resize(group_ * size);
  for (std::uint32_t h = 0; h < group_; ++h) {
    for (std::size_t c = 0; c < size; ++c) queries[h * size + c] = scale_ * q[h * head_dim_ + channels_[c]];
  }
  std::array<float, kMostChannels> label;
  for (std::size_t i = 0; i < tokens.size(); ++i) {
    const std::uint16_t* const bits = labels_.data() + tokens[i] * size;
    for (std::size_t c = 0; c < size; ++c) label[c] = from_bf16(bits[c]);
    for (std::uint32_t h = 0; h < group_; ++h) {
      const float* const query = queries.data() + h * size;
      float sum = 0.f;
#pragma omp simd reduction(+ : sum)
      for (std::size_t c = 0; c < size; ++c) sum += query[c] * label[c];
      out[i * group_ + h] = sum;
    }
  }
}

std::uint64_t LabelCache::most_heap_bytes(std::uint32_t channels, const AttentionShape& shape,
                                          std::uint32_t tokens) noexcept {
  const std::uint64_t size = std::min({channels, shape.head_dim, kMostChannels});
  return size * sizeof(std::uint32_t) + room_of(tokens) * size * sizeof(std::uint16_t);
}

}  // namespace sluice::scheduler
