#include "tools/cli/synthetic/prompt_pattern.hpp"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <vector>

#include "sluice/prefill.hpp"
#include "tests/support/catch.hpp"

using namespace sluice;
using namespace sluice::tools;

namespace {

constexpr AttentionShape kShape{.layers = 1, .q_heads = 8, .kv_heads = 2, .head_dim = 128};
constexpr std::uint32_t kTokens = 16384;

std::vector<float> query_of(const PromptPattern& pattern, std::uint32_t q_head, std::uint32_t position) {
  std::vector<float> rotation(pattern.rotation_size());
  std::vector<float> q(kShape.head_dim);
  pattern.rotation(position, rotation.data());
  pattern.query(q_head, position, rotation.data(), q.data());
  return q;
}

/// The attention of one row, per block of keys.
std::vector<double> block_masses(const PromptPattern& pattern, std::uint32_t q_head, std::uint32_t position) {
  const std::vector<float> q = query_of(pattern, q_head, position);
  std::vector<float> rotation(pattern.rotation_size());
  std::vector<float> k(kShape.head_dim);
  std::vector<double> scores;
  for (std::uint32_t j = 0; j <= position; ++j) {
    pattern.rotation(j, rotation.data());
    pattern.key(q_head / kShape.group(), j, rotation.data(), k.data());
    scores.push_back(std::inner_product(q.begin(), q.end(), k.begin(), 0.0) / std::sqrt(double{kShape.head_dim}));
  }
  const double most = *std::max_element(scores.begin(), scores.end());
  std::vector<double> masses(position / kPrefillBlock + 1);
  double sum = 0.0;
  for (std::uint32_t j = 0; j <= position; ++j) {
    const double weight = std::exp(scores[j] - most);
    masses[j / kPrefillBlock] += weight;
    sum += weight;
  }
  for (double& mass : masses) mass /= sum;
  return masses;
}

/// What the best 15% of the row's blocks hold.
double best_blocks(const PromptPattern& pattern, std::uint32_t q_head, std::uint32_t position) {
  std::vector<double> masses = block_masses(pattern, q_head, position);
  std::sort(masses.rbegin(), masses.rend());
  const auto kept = static_cast<std::ptrdiff_t>(0.15 * static_cast<double>(masses.size()));
  return std::accumulate(masses.begin(), masses.begin() + kept, 0.0);
}

}  // namespace

TEST_CASE("a few blocks hold nearly all attention of a structured prompt, and little of a uniform one", "[cli]") {
  const PromptPattern columns(PromptStructure::vertical_slash, kShape, 3);
  const PromptPattern narrow(PromptStructure::narrow_slash, kShape, 3);
  const PromptPattern topics(PromptStructure::query_aware, kShape, 3);
  const PromptPattern uniform(PromptStructure::uniform, kShape, 3);
  for (const std::uint32_t position : {kTokens - 1, kTokens / 2 + 77}) {
    for (std::uint32_t head = 0; head < kShape.q_heads; ++head) {
      CAPTURE(position, head);
      CHECK(best_blocks(columns, head, position) > 0.85);
      CHECK(best_blocks(narrow, head, position) > 0.85);
      CHECK(best_blocks(topics, head, position) > 0.85);
      CHECK(best_blocks(uniform, head, position) < 0.3);
    }
  }
}

TEST_CASE("columns and bands are wanted by all rows, topics by one block of queries", "[cli]") {
  const PromptPattern columns(PromptStructure::vertical_slash, kShape, 3);
  for (std::uint32_t head = 0; head < kShape.q_heads; ++head) {
    const std::vector<double> masses = block_masses(columns, head, kTokens - 1);
    CAPTURE(head);
    CHECK(masses.front() > 0.005);  // Sinks.
    CHECK(masses.back() > 0.005);   // The band nearby.
  }
  const PromptPattern topics(PromptStructure::query_aware, kShape, 3);
  const auto overlap = [&](std::uint32_t a, std::uint32_t b) {
    const std::vector<double> first = block_masses(topics, 0, a);
    const std::vector<double> second = block_masses(topics, 0, b);
    double common = 0.0;
    for (std::size_t i = 0; i < first.size(); ++i) common += std::min(first[i], second[i]);
    return common;
  };
  CHECK(overlap(kTokens - 128, kTokens - 1) > 0.7);
  double next = 1.0;  // The next block may happen to want the same topic, five in a row do not.
  for (std::uint32_t block = 1; block <= 5; ++block) {
    next = std::min(next, overlap(kTokens - 1 - block * kPrefillBlock, kTokens - 1));
  }
  CHECK(next < 0.3);
}

TEST_CASE("rows follow from the seed and their place alone", "[cli]") {
  for (const PromptStructure structure : {PromptStructure::vertical_slash, PromptStructure::narrow_slash,
                                          PromptStructure::query_aware, PromptStructure::uniform}) {
    CAPTURE(to_string(structure));
    CHECK(parse_prompt_structure(to_string(structure), "--structure") == structure);
    const PromptPattern pattern(structure, kShape, 7);
    const PromptPattern other(structure, kShape, 8);
    const std::vector<float> q = query_of(pattern, 5, 1000);
    CHECK(q == query_of(PromptPattern(structure, kShape, 7), 5, 1000));
    CHECK(q != query_of(other, 5, 1000));
    CHECK(q != query_of(pattern, 5, 1001));
    CHECK(q != query_of(pattern, 4, 1000));
  }
}
