#include "scheduler/labels/skewed_cache.hpp"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "scheduler/labels/bf16.hpp"
#include "scheduler/labels/key_blocks.hpp"
#include "scheduler/labels/skewing.hpp"

namespace sluice::scheduler {
namespace {

float dot(const float* a, const float* b, std::size_t size) noexcept {
  float sum = 0.f;
#pragma omp simd reduction(+ : sum)
  for (std::size_t i = 0; i < size; ++i) sum += a[i] * b[i];
  return sum;
}

bool any_finite(std::span<const float> rows, std::size_t d) {
  for (std::size_t first = 0; first < rows.size(); first += d)
    if (is_finite(rows.data() + first, d)) return true;
  return false;
}

/// Of each row of the matrix, the sum over all queries of how long they are along it.
std::vector<double> column_sums(std::span<const float> queries, const std::vector<double>& matrix, std::size_t d) {
  std::vector<double> sums(d, 0.0);
  for (std::size_t first = 0; first < queries.size(); first += d) {
    const float* const query = queries.data() + first;
    if (!is_finite(query, d)) continue;
    for (std::size_t c = 0; c < d; ++c)
      sums[c] +=
          std::abs(std::inner_product(query, query + d, matrix.begin() + static_cast<std::ptrdiff_t>(c * d), 0.0));
  }
  return sums;
}

}  // namespace

std::uint32_t SkewedCache::wanted(float share, const AttentionShape& shape) noexcept {
  // 0.2f is a little more than 0.2, and 0.1f * 10 must not be 0.
  constexpr double kRoundOff = 1e-6;
  const double channels = static_cast<double>(share) * shape.head_dim + kRoundOff;
  return std::clamp(static_cast<std::uint32_t>(channels), 1u, shape.head_dim);
}

SkewedCache::SkewedCache(float share, const AttentionShape& shape)
    : wanted_(wanted(share, shape)), group_(shape.group()), head_dim_(shape.head_dim), scale_(shape.score_scale()) {}

void SkewedCache::begin(const PromptContext& prompt) {
  if (prompt.tokens == 0) return;
  const std::size_t most = std::size_t{kSkewQueries} * group_ * head_dim_;
  const std::span<const float> queries = prompt.last_q.last(std::min(most, prompt.last_q.size()));
  if (any_finite(queries, head_dim_)) {
    choose_rows(queries);
  } else {
    // Of imported tokens no queries are known.
    const std::uint32_t count = std::min(prompt.tokens, kSkewQueries * group_);
    std::vector<float> keys(std::size_t{count} * head_dim_);
    prompt.kv->keys(prompt.tokens - count, count, keys.data());
    choose_rows(keys);
  }
  follow(prompt.tokens, *prompt.kv);
}

void SkewedCache::choose_rows(std::span<const float> queries) {
  const std::vector<double> matrix = skewing_matrix(queries, head_dim_);
  const std::vector<double> sums = column_sums(queries, matrix, head_dim_);
  std::vector<std::uint32_t> order(head_dim_);
  std::iota(order.begin(), order.end(), 0u);
  std::ranges::stable_sort(order, [&](std::uint32_t a, std::uint32_t b) { return sums[a] > sums[b]; });
  order.resize(wanted_);
  std::ranges::sort(order);
  rows_.clear();
  rows_.reserve(std::size_t{wanted_} * head_dim_);
  for (const std::uint32_t c : order) {
    const double* const row = matrix.data() + std::size_t{c} * head_dim_;
    std::transform(row, row + head_dim_, std::back_inserter(rows_), [](double x) { return static_cast<float>(x); });
  }
}

void SkewedCache::follow(std::uint32_t tokens, KvReader& kv) {
  if (rows_.empty() || tokens == 0) return;
  const std::size_t size = channels();
  truncate(tokens - 1);
  make_room(keys_, tokens, size);
  for_each_key(kv, head_dim_, this->tokens(), tokens, [&](const float* key) {
    for (std::size_t c = 0; c < size; ++c) keys_.push_back(to_bf16(dot(key, rows_.data() + c * head_dim_, head_dim_)));
  });
}

void SkewedCache::truncate(std::uint32_t tokens) noexcept { cut(keys_, tokens, channels()); }

void SkewedCache::estimate(const float* q, std::uint32_t tokens, KvReader& kv, float* out) const {
  if (tokens == 0) return;
  if (rows_.empty()) {
    std::vector<std::uint32_t> all(tokens);
    std::iota(all.begin(), all.end(), 0u);
    return kv.score(q, all, out);
  }
  const std::size_t size = channels();
  thread_local std::vector<float> queries, key;  // [group, channels], [channels]
  queries.resize(group_ * size);
  key.resize(size);
  for (std::uint32_t h = 0; h < group_; ++h) {
    for (std::size_t c = 0; c < size; ++c)
      queries[h * size + c] = scale_ * dot(q + h * head_dim_, rows_.data() + c * head_dim_, head_dim_);
  }
  for (std::size_t i = 0; i < tokens; ++i) {
    const std::uint16_t* const bits = keys_.data() + i * size;
    for (std::size_t c = 0; c < size; ++c) key[c] = from_bf16(bits[c]);
    for (std::uint32_t h = 0; h < group_; ++h) out[i * group_ + h] = dot(queries.data() + h * size, key.data(), size);
  }
}

std::uint64_t SkewedCache::most_heap_bytes(float share, const AttentionShape& shape, std::uint32_t tokens) noexcept {
  const std::uint64_t size = wanted(share, shape);
  return size * shape.head_dim * sizeof(float) + room_of(tokens) * size * sizeof(std::uint16_t);
}

}  // namespace sluice::scheduler
