// What the representative rows of a chunk attend, for FlexPrefill's choice.
#include <algorithm>
#include <cmath>
#include <limits>

#include "tests/support/flexprefill_reference.hpp"

namespace sluice::test::reference {
namespace {

constexpr std::uint32_t kBlock = kPrefillBlock;
using Vector = std::vector<double>;

std::uint32_t blocks_of(std::uint32_t tokens) { return (tokens + kBlock - 1) / kBlock; }

/// Softmax over the finite scores; empty if there is none.
std::vector<double> softmax(std::vector<double> scores) {
  double top = -std::numeric_limits<double>::infinity();
  for (const double score : scores) top = std::isfinite(score) ? std::max(top, score) : top;
  if (!std::isfinite(top)) return {};
  double sum = 0.0;
  for (double& score : scores) sum += score = std::isfinite(score) ? std::exp(score - top) : 0.0;
  for (double& score : scores) score /= sum;
  return scores;
}

Vector mean_query(const Prompt& prompt, std::uint32_t head, std::uint32_t begin, std::uint32_t end) {
  Vector mean(prompt.head_dim());
  for (std::uint32_t token = begin; token < end; ++token) {
    for (std::uint32_t c = 0; c < prompt.head_dim(); ++c) mean[c] += prompt.q(token, head, c) / (end - begin);
  }
  return mean;
}

/// Softmax of a mean query's scores with the mean keys of blocks 0 .. blocks - 1; `keys` are visible.
Vector pooled_attention(const Prompt& prompt, const Vector& query, std::uint32_t blocks, std::uint32_t keys) {
  Vector scores(blocks);
  for (std::uint32_t block = 0; block < blocks; ++block) {
    const std::uint32_t end = std::min(keys, (block + 1) * kBlock);
    for (std::uint32_t key = block * kBlock; key < end; ++key) {
      double dot = 0.0;
      for (std::uint32_t c = 0; c < prompt.head_dim(); ++c) dot += query[c] * prompt.kv().k(key, c);
      scores[block] += dot / (end - block * kBlock) / std::sqrt(static_cast<double>(prompt.head_dim()));
    }
  }
  Vector weights = softmax(std::move(scores));
  weights.resize(blocks);
  return weights;
}

Vector block_sums(const Vector& lines) {
  Vector sums(blocks_of(static_cast<std::uint32_t>(lines.size())));
  for (std::size_t i = 0; i < lines.size(); ++i) sums[i / kBlock] += lines[i];
  return sums;
}

}  // namespace

double jensen_shannon(std::span<const double> p, std::span<const double> q) {
  double sum = 0.0;
  for (std::size_t i = 0; i < p.size(); ++i) {
    const double middle = (p[i] + q[i]) / 2.0;
    if (p[i] > 0.0) sum += 0.5 * p[i] * std::log(p[i] / middle);
    if (q[i] > 0.0) sum += 0.5 * q[i] * std::log(q[i] / middle);
  }
  return std::sqrt(std::max(sum, 0.0));
}

Representative representative(const Prompt& prompt, std::uint32_t head, std::uint32_t first, std::uint32_t count,
                              std::uint32_t most_rows) {
  const std::uint32_t keys = first + count;
  const std::uint32_t begin = keys - std::min(most_rows, count);
  Representative result;
  result.columns.resize(keys);
  result.diagonals.resize(keys);
  std::uint32_t present = 0;
  for (std::uint32_t position = begin; position < keys; ++position) {
    Vector q(prompt.head_dim());
    for (std::uint32_t c = 0; c < q.size(); ++c) {
      q[c] = prompt.q(position, head, c) / std::sqrt(static_cast<double>(prompt.head_dim()));
    }
    Vector scores(position + 1);
    for (std::uint32_t key = 0; key <= position; ++key) {
      for (std::uint32_t c = 0; c < q.size(); ++c) scores[key] += q[c] * prompt.kv().k(key, c);
    }
    const Vector weights = softmax(std::move(scores));
    present += weights.empty() ? 0 : 1;
    for (std::uint32_t key = 0; key < weights.size(); ++key) {
      result.columns[key] += weights[key];
      result.diagonals[position - key] += weights[key];
    }
  }
  for (double& x : result.columns) x /= std::max(present, 1u);
  for (double& x : result.diagonals) x /= std::max(present, 1u);
  result.column_blocks = block_sums(result.columns);
  result.offset_blocks = block_sums(result.diagonals);
  result.pooled = pooled_attention(prompt, mean_query(prompt, head, begin, keys), blocks_of(keys), keys);
  result.divergence = jensen_shannon(result.pooled, result.column_blocks);
  return result;
}

std::vector<double> pooled_row(const Prompt& prompt, std::uint32_t head, std::uint32_t first, std::uint32_t count,
                               std::uint32_t block) {
  const std::uint32_t begin = std::max(first, block * kBlock);
  const std::uint32_t end = std::min(first + count, (block + 1) * kBlock);
  return pooled_attention(prompt, mean_query(prompt, head, begin, end), block + 1, first + count);
}

}  // namespace sluice::test::reference
