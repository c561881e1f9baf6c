#include "scheduler/lsh/lsh_source.hpp"

#include <algorithm>
#include <cmath>
#include <numbers>
#include <utility>

namespace sluice::scheduler {
namespace {

float dot(const float* a, const float* b, std::uint32_t count) noexcept {
  float sum = 0.f;
#pragma omp simd reduction(+ : sum)
  for (std::uint32_t c = 0; c < count; ++c) sum += a[c] * b[c];
  return sum;
}

}  // namespace

float collision_probability(const LshOptions& options, float cosine) noexcept {
  const float clamped = cosine > -1.f ? std::min(cosine, 1.f) : -1.f;
  const float bit = 1.f - std::acos(clamped) * std::numbers::inv_pi_v<float>;
  const float code = std::pow(bit, static_cast<float>(options.bits));
  const auto tables = static_cast<float>(options.tables);
  const float others = std::pow(1.f - code, tables - 1.f);  // No collision in all tables but one.
  const float none = others * (1.f - code);
  return std::max(options.min_collisions == 1 ? 1.f - none : 1.f - none - tables * code * others, 0.f);
}

LshSource::LshSource(const LshOptions& options, const AttentionShape& shape, std::uint32_t sinks)
    : options_(options),
      group_(shape.group()),
      head_dim_(shape.head_dim),
      sinks_(sinks),
      scale_(shape.score_scale()),
      softcap_(shape.softcap),
      projections_(shared_projections(shape.head_dim, options)),
      mean_(shape.head_dim, 0.f),
      queries_(shape.group()) {}

void LshSource::begin(const PromptContext& prompt) {
  if (prompt.tokens <= std::uint64_t{sinks_} + options_.recent_prompt) return;
  first_ = sinks_;
  const std::uint32_t count = prompt.tokens - sinks_ - options_.recent_prompt;
  find_mean(count, *prompt.kv);
  hash_keys(count, *prompt.kv);
}

/// Keys that are not finite have no part in the mean.
void LshSource::find_mean(std::uint32_t count, KvReader& kv) {
  std::vector<double> sums(head_dim_, 0.0);
  keys_.resize(std::size_t{kBlock} * head_dim_);
  std::uint32_t counted = 0;
  for (std::uint32_t at = 0; at < count; at += kBlock) {
    const std::uint32_t rows = std::min(kBlock, count - at);
    kv.keys(first_ + at, rows, keys_.data());
    for (std::uint32_t r = 0; r < rows; ++r) {
      const float* const key = keys_.data() + std::size_t{r} * head_dim_;
      if (!std::all_of(key, key + head_dim_, [](float x) { return std::isfinite(x); })) continue;
      ++counted;
#pragma omp simd
      for (std::uint32_t c = 0; c < head_dim_; ++c) sums[c] += static_cast<double>(key[c]);
    }
  }
  for (std::uint32_t c = 0; c < head_dim_ && counted != 0; ++c) mean_[c] = static_cast<float>(sums[c] / counted);
}

void LshSource::hash_keys(std::uint32_t count, KvReader& kv) {
  std::vector<std::uint16_t> codes(std::size_t{projections_->tables()} * count);
  norms_.resize(count);
  for (std::uint32_t at = 0; at < count; at += kBlock) {
    const std::uint32_t rows = std::min(kBlock, count - at);
    kv.keys(first_ + at, rows, keys_.data());
    for (std::uint32_t r = 0; r < rows; ++r) {
      float* const key = keys_.data() + std::size_t{r} * head_dim_;
#pragma omp simd
      for (std::uint32_t c = 0; c < head_dim_; ++c) key[c] -= mean_[c];
      norms_[at + r] = std::sqrt(dot(key, key, head_dim_));
    }
    products_.resize(std::size_t{projections_->count()} * rows);
    kv.score_rows(keys_.data(), rows, projections_->rows(), projections_->count(), products_.data());
    projections_->encode(products_.data(), rows, codes.data() + at, count);
  }
  HashTables tables;
  tables.build(codes, count, projections_->bits());
  tables_ = std::make_shared<const HashTables>(std::move(tables));
  keys_ = std::vector<float>();
  products_ = std::vector<float>();
}

void LshSource::hash(const float* q, KvReader& kv) {
  for (std::uint32_t h = 0; h < group_; ++h) {
    const float* const query = q + std::size_t{h} * head_dim_;
    queries_[h] = {.norm = std::sqrt(dot(query, query, head_dim_)), .with_mean = dot(query, mean_.data(), head_dim_)};
  }
  products_.resize(std::size_t{projections_->count()} * group_);
  kv.score_rows(q, group_, projections_->rows(), projections_->count(), products_.data());
  codes_.resize(std::size_t{projections_->tables()} * group_);
  projections_->encode(products_.data(), group_, codes_.data(), group_);
}

void LshSource::add_collisions(std::uint32_t h, TokenSet& set) {
  tables_->for_each_collision(codes_.data() + h, group_, options_.min_collisions,
                              [&](std::uint32_t item) { set.add(first_ + item); });
}

std::uint64_t LshSource::most_heap_bytes(const LshOptions& options, const AttentionShape& shape,
                                         std::uint32_t tokens) noexcept {
  const std::uint64_t query = sizeof(Query) + options.tables * (sizeof(std::uint16_t) + options.bits * sizeof(float));
  return HashTables::most_heap_bytes(options.tables, options.bits, tokens) +
         (std::uint64_t{shape.head_dim} + tokens) * sizeof(float) + shape.group() * query;
}

/// A cap is taken back as far as float32 tells scores near it apart.
float LshSource::uncapped(float score) const noexcept {
  if (softcap_ == 0.f) return score;
  constexpr float kMost = 1.f - 0x1p-23f;
  return softcap_ * std::atanh(std::clamp(score / softcap_, -kMost, kMost));
}

float LshSource::probability(std::uint32_t h, std::uint32_t token, float score) const noexcept {
  const Query& query = queries_[h];
  const float product = uncapped(score) / scale_ - query.with_mean;
  return collision_probability(options_, product / (query.norm * norms_[token - first_]));
}

}  // namespace sluice::scheduler
