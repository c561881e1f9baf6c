// What the last queries of a prompt attend, summed by position and by distance, on any backend.

#include <cmath>
#include <vector>

#include "tests/support/catch.hpp"
#include "tests/support/prompt.hpp"

namespace sluice::test {
namespace {

struct Sums {
  std::vector<double> by_position, by_distance;  ///< [tokens - sinks]
};

/// In float64, row by row; rows without a finite score are left out.
Sums reference_sums(const Prompt& prompt, std::uint32_t head, std::uint32_t rows, std::uint32_t sinks) {
  const std::uint32_t n = prompt.tokens();
  Sums sums{std::vector<double>(n - sinks), std::vector<double>(n - sinks)};
  std::uint32_t present = 0;
  for (std::uint32_t row = n - rows; row < n; ++row) {
    double top = -INFINITY;
    double mass = 0.0;
    for (std::uint32_t key = sinks; key <= row; ++key) top = std::fmax(top, prompt.score(row, head, key));
    if (!std::isfinite(top)) continue;
    ++present;
    const auto weight = [&](std::uint32_t key) {
      const double score = prompt.score(row, head, key);
      return std::isnan(score) ? 0.0 : std::exp(score - top);
    };
    for (std::uint32_t key = sinks; key <= row; ++key) mass += weight(key);
    for (std::uint32_t key = sinks; key <= row; ++key) {
      sums.by_position[key - sinks] += weight(key) / mass;
      sums.by_distance[row - key] += weight(key) / mass;
    }
  }
  for (double& x : sums.by_position) x /= present == 0 ? 1 : present;
  for (double& x : sums.by_distance) x /= present == 0 ? 1 : present;
  return sums;
}

}  // namespace

TEST_CASE("sums of the last queries' attention leave the sinks out", "[backend][flexprefill][threads]") {
  struct Case {
    std::uint32_t tokens, count, rows, sinks, page_tokens, group, head_dim;
    DType dtype;
  };
  const auto c = GENERATE(Case{1, 1, 1, 0, 16, 1, 64, DType::bf16}, Case{70, 70, 32, 4, 16, 4, 64, DType::bf16},
                          Case{300, 33, 32, 4, 8, 2, 128, DType::f16}, Case{900, 200, 128, 100, 32, 4, 128, DType::bf16},
                          Case{1400, 1400, 64, 1, 256, 3, 64, DType::f16}, Case{40, 40, 40, 39, 16, 2, 64, DType::bf16},
                          Case{200, 130, 7, 150, 16, 8, 128, DType::bf16});
  CAPTURE(c.tokens, c.count, c.rows, c.sinks, c.page_tokens, c.group, c.head_dim, to_string(c.dtype));
  const auto under_test = backend_under_test();
  Prompt prompt({.dtype = c.dtype,
                 .tokens = c.tokens,
                 .head_dim = c.head_dim,
                 .group = c.group,
                 .page_tokens = c.page_tokens,
                 .seed = 31});
  if (c.tokens > 100) prompt.ask_for(c.tokens - 3, 0, c.tokens / 2, 30.0);  // One row that wants one key only.
  const PlacedPrompt placed(*under_test, prompt);
  if (!under_test->supports(placed.shape, placed.kv.layout)) return;
  const std::uint32_t first = c.tokens - c.count;
  const std::uint64_t scratch = under_test->backend().select_blocks_scratch_bytes(first, c.count, placed.shape);
  constexpr std::uint64_t kAlignment = 256;
  std::byte* memory = under_test->memory(2 * (scratch + kAlignment) + kAlignment);
  memory += (kAlignment - reinterpret_cast<std::uintptr_t>(memory) % kAlignment) % kAlignment;
  const std::uint32_t length = c.tokens - c.sinks;
  const auto sums = under_test->array<float>(std::size_t{4} * c.group * length, kNotANumber);
  std::vector<SumAttentionTask> tasks;
  for (std::uint32_t i = 0; i < 2; ++i) {  // Twice: what lies in one call must not disturb each other.
    float* const out = sums.data() + std::size_t{2} * i * c.group * length;
    tasks.push_back({.q = placed.row(first),
                     .kv = placed.kv,
                     .first = first,
                     .count = c.count,
                     .rows = c.rows,
                     .sinks = c.sinks,
                     .by_position = out,
                     .by_distance = out + std::size_t{c.group} * length,
                     .scratch = memory + i * div_up(scratch, kAlignment) * kAlignment});
  }
  under_test->backend().sum_attention(tasks, placed.strides, placed.shape, under_test->stream());
  under_test->finish();
  for (std::uint32_t head = 0; head < c.group; ++head) {
    const Sums expected = reference_sums(prompt, head, c.rows, c.sinks);
    double position_sum = 0.0;
    for (std::uint32_t i = 0; i < length; ++i) {
      CAPTURE(head, i);
      for (std::size_t task = 0; task < tasks.size(); ++task) {
        const double position = tasks[task].by_position[std::size_t{head} * length + i];
        const double distance = tasks[task].by_distance[std::size_t{head} * length + i];
        REQUIRE(std::abs(position - expected.by_position[i]) <= 1e-5 + 2e-3 * expected.by_position[i]);
        REQUIRE(std::abs(distance - expected.by_distance[i]) <= 1e-5 + 2e-3 * expected.by_distance[i]);
        if (task == 0) position_sum += position;
      }
    }
    REQUIRE(std::abs(position_sum - 1.0) < 1e-3);
  }
}

}  // namespace sluice::test
