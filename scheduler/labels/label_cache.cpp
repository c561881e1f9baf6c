#include "scheduler/labels/label_cache.hpp"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <numeric>

#include "scheduler/labels/bf16.hpp"
#include "scheduler/labels/key_blocks.hpp"
#include "sluice/step/top_k.hpp"
#include "sluice/units.hpp"

namespace sluice::scheduler {
namespace {

constexpr std::uint32_t kMostChannels = 256;  ///< LabelOptions::channels, at most

/// Rows with anything that is not finite say nothing about any channel.
void add_absolutes(const float* row, std::vector<double>& sums) {
  if (!is_finite(row, sums.size())) return;
  for (std::size_t c = 0; c < sums.size(); ++c) sums[c] += std::abs(static_cast<double>(row[c]));
}

/// Tokens that one thread scores at a time, and that are too few to share.
constexpr std::uint32_t kBlock = 4'096;

/// What one proposal needs and nothing after it.
struct LabelScratch {
  struct Best {
    std::vector<float> values;
    std::vector<std::uint32_t> places;
  };
  std::vector<float> scores;          ///< [tokens, group]
  std::vector<std::uint32_t> tokens;  ///< scored by their keys: there are no labels
  std::vector<Best> best;             ///< [group]
};

LabelScratch& label_scratch() {
  thread_local LabelScratch scratch;
  return scratch;
}

std::uint32_t lowest(std::uint32_t heads) noexcept { return static_cast<std::uint32_t>(std::countr_zero(heads)); }

}  // namespace

LabelCache::LabelCache(std::uint32_t channels, const AttentionShape& shape)
    : wanted_(std::min({channels, shape.head_dim, kMostChannels})), group_(shape.group()), head_dim_(shape.head_dim) {}

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

void LabelCache::score(const float* q, std::uint32_t begin, std::uint32_t end, float* out) const {
  const std::size_t size = channels_.size();
  thread_local std::vector<float> queries;  // [group, channels]
  queries.resize(group_ * size);
  for (std::uint32_t h = 0; h < group_; ++h) {
    for (std::size_t c = 0; c < size; ++c) queries[h * size + c] = q[h * head_dim_ + channels_[c]];
  }
  std::array<float, kMostChannels> label;
  for (std::uint32_t token = begin; token < end; ++token) {
    const std::uint16_t* const bits = labels_.data() + token * size;
    for (std::size_t c = 0; c < size; ++c) label[c] = from_bf16(bits[c]);
    for (std::uint32_t h = 0; h < group_; ++h) {
      const float* const query = queries.data() + h * size;
      float sum = 0.f;
#pragma omp simd reduction(+ : sum)
      for (std::size_t c = 0; c < size; ++c) sum += query[c] * label[c];
      *out++ = sum;
    }
  }
}

/// To the scratch's scores.
void LabelCache::score_all(const LabelQuery& query, KvReader& kv) const {
  LabelScratch& scratch = label_scratch();
  const std::uint32_t count = query.end - query.begin;
  scratch.scores.resize(std::size_t{count} * group_);
  if (channels_.empty()) {
    scratch.tokens.resize(count);
    std::iota(scratch.tokens.begin(), scratch.tokens.end(), query.begin);
    return kv.score(query.q, scratch.tokens, scratch.scores.data());
  }
  const auto block = [&](std::uint32_t b) {
    const std::uint32_t first = query.begin + b * kBlock;
    score(query.q, first, std::min(first + kBlock, query.end),
          scratch.scores.data() + std::size_t{b} * kBlock * group_);
  };
  const auto blocks = static_cast<std::uint32_t>(div_up(count, kBlock));
  if (blocks == 1) return block(0);
  kv.each(blocks, block);
}

void LabelCache::propose(const LabelQuery& query, KvReader& kv, std::span<TokenSet> sets,
                         SelectCounters& counters) const {
  const std::uint32_t count = query.end - query.begin;
  const auto set_of = [sets](std::uint32_t h) -> TokenSet& { return sets[sets.size() == 1 ? 0 : h]; };
  if (count <= query.most) {
    for (std::uint32_t heads = query.heads; heads != 0; heads &= heads - 1)
      set_of(lowest(heads)).add_range(query.begin, query.end);
    return;
  }
  score_all(query, kv);
  (channels_.empty() ? counters.scored : counters.estimated) += count;
  counters.index_bytes += count * bytes_per_token();

  LabelScratch& scratch = label_scratch();
  scratch.best.resize(group_);
  const auto find = [&](std::uint32_t h) {
    if (((query.heads >> h) & 1) == 0) return;
    LabelScratch::Best& best = scratch.best[h];
    best.values.resize(count);
    best.places.resize(query.most);
    for (std::uint32_t i = 0; i < count; ++i) best.values[i] = scratch.scores[std::size_t{i} * group_ + h];
    (void)select_top_k(best.values.data(), count, query.most, best.places.data());
  };
  if (count <= kBlock) {
    for (std::uint32_t h = 0; h < group_; ++h) find(h);
  } else {
    kv.each(group_, find);
  }
  for (std::uint32_t heads = query.heads; heads != 0; heads &= heads - 1) {
    TokenSet& set = set_of(lowest(heads));
    for (const std::uint32_t place : scratch.best[lowest(heads)].places) set.add(query.begin + place);
  }
}

std::uint64_t LabelCache::most_heap_bytes(std::uint32_t channels, const AttentionShape& shape,
                                          std::uint32_t tokens) noexcept {
  const std::uint64_t size = std::min({channels, shape.head_dim, kMostChannels});
  return size * sizeof(std::uint32_t) + room_of(tokens) * size * sizeof(std::uint16_t);
}

}  // namespace sluice::scheduler
