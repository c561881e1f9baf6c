// What holds for every choice of blocks by FlexPrefill, and for attention to them, on any device.

#include <algorithm>
#include <cmath>
#include <numbers>
#include <vector>

#include "sluice/step/prefill_choice.hpp"
#include "tests/support/flexprefill_reference.hpp"
#include "tests/support/flexprefill_support.hpp"
#include "tests/support/sanitized.hpp"

namespace sluice::test {
namespace {

/// The bits of the chunk's query blocks from `rows`, which ends it, on.
std::vector<std::uint32_t> last_rows(const Selection& found, const PrefillRange& rows, std::uint32_t group) {
  const BlockBits part(rows.first, rows.count);
  std::vector<std::uint32_t> bits;
  for (std::uint32_t head = 0; head < group; ++head) {
    const auto at = static_cast<std::ptrdiff_t>(found.shape.word(head, part.top - found.shape.top, 0));
    bits.insert(bits.end(), found.bits.begin() + at, found.bits.begin() + at + part.rows * part.words);
  }
  return bits;
}

}  // namespace

TEST_CASE("a prompt of nothing but NaN still has its forced blocks", "[stages][flexprefill]") {
  const auto under_test = stages_under_test();
  Prompt prompt({.tokens = 600, .head_dim = 64, .group = 2});
  for (std::uint32_t key = 0; key < 600; ++key) prompt.kv().set_k(key, 5, std::nan(""));
  const PlacedPrompt placed(*under_test, prompt);
  for (const float tau : {0.f, 0.1f, 1.f}) {
    const FlexPrefillSpec spec{.tau = tau, .min_budget = 256};
    require_sound(select(*under_test, placed, {.count = 600}, spec), {.count = 600}, spec);
  }
}

TEST_CASE("a budget of the whole prompt keeps everything", "[stages][flexprefill]") {
  const auto [tokens, lines] = GENERATE(grid(std::array{1u, 128u, 1'000u}, std::array{false, true}));
  CAPTURE(tokens, lines);
  const auto under_test = stages_under_test();
  const Prompt prompt = noise({.tokens = tokens, .head_dim = 64, .group = 4});
  const PlacedPrompt placed(*under_test, prompt);
  const FlexPrefillSpec spec{.gamma = 1.f, .min_budget = tokens, .lines = lines};
  const Selection found = select(*under_test, placed, {.count = tokens}, spec);
  require_sound(found, {.count = tokens}, spec);
  for (const PrefillChoice& choice : found.choices) REQUIRE(choice.kept == choice.causal);
}

TEST_CASE("a larger share or budget keeps what a smaller one kept", "[stages][flexprefill]") {
  const auto tau = GENERATE(0.f, 0.1f, 1.f);
  CAPTURE(tau);
  const auto under_test = stages_under_test();
  const Prompt prompt = noise({.tokens = 1'500, .head_dim = 64, .group = 4});
  const PlacedPrompt placed(*under_test, prompt);
  const Range range{.first = 200, .count = 1'300};
  const std::vector<std::vector<FlexPrefillSpec>> rising{{{.gamma = 0.3f, .tau = tau, .min_budget = 0},
                                                          {.gamma = 0.6f, .tau = tau, .min_budget = 0},
                                                          {.gamma = 0.9f, .tau = tau, .min_budget = 0},
                                                          {.gamma = 1.f, .tau = tau, .min_budget = 0}},
                                                         {{.gamma = 0.5f, .tau = tau, .min_budget = 0},
                                                          {.gamma = 0.5f, .tau = tau, .min_budget = 256},
                                                          {.gamma = 0.5f, .tau = tau, .min_budget = 700},
                                                          {.gamma = 0.5f, .tau = tau, .min_budget = 1'500}},
                                                         {{.gamma = 0.2f, .tau = tau, .min_budget = 0, .lines = true},
                                                          {.gamma = 0.5f, .tau = tau, .min_budget = 0, .lines = true},
                                                          {.gamma = 0.9f, .tau = tau, .min_budget = 0, .lines = true}}};
  for (const std::vector<FlexPrefillSpec>& specs : rising) {
    std::vector<std::uint32_t> before;
    for (const FlexPrefillSpec& spec : specs) {
      CAPTURE(spec.gamma, spec.min_budget, spec.lines);
      const Selection found = select(*under_test, placed, range, spec);
      for (std::size_t i = 0; i < before.size(); ++i) REQUIRE((before[i] & ~found.bits[i]) == 0);
      before = found.bits;
    }
  }
}

TEST_CASE("whole lines cover their share of what the representative rows attend", "[stages][flexprefill]") {
  const auto [gamma, range] =
      GENERATE(grid(std::array{0.3f, 0.8f, 0.95f}, std::array{Range{0, 1'024}, Range{300, 650}}));
  CAPTURE(gamma, range.first, range.count);
  const auto under_test = stages_under_test();
  const Prompt prompt = noise({.tokens = range.first + range.count, .head_dim = 64, .group = 4});
  const PlacedPrompt placed(*under_test, prompt);
  const FlexPrefillSpec spec{.gamma = gamma, .tau = 0.f, .min_budget = 0, .lines = true};
  const Selection found = select(*under_test, placed, range, spec);
  // The representative rows, the last block's worth of the chunk.
  PrefillRange rows{.first = range.first + range.count - kPrefillBlock, .count = kPrefillBlock};
  const Attention dense = reference::prefill(prompt, rows);
  const std::vector<std::uint32_t> bits = last_rows(found, rows, 4);
  rows.blocks = bits;
  const Attention sparse = reference::prefill(prompt, rows);
  for (std::uint32_t head = 0; head < 4; ++head) {
    CAPTURE(head);
    double coverage = 0.0;
    for (std::uint32_t i = 0; i < kPrefillBlock; ++i) {
      coverage += std::exp(sparse.lse[i * 4 + head] - dense.lse[i * 4 + head]) / kPrefillBlock;
    }
    REQUIRE(coverage >= static_cast<double>(gamma) - 1e-3);
  }
}

TEST_CASE("attention to the chosen blocks is off by no more than what they leave out", "[stages][flexprefill]") {
  const bool designed = GENERATE(false, true);
  CAPTURE(designed);
  const auto under_test = stages_under_test();
  const Prompt prompt = designed ? patterns(900, 16, DType::bf16) : noise({.tokens = 900, .head_dim = 64, .group = 5});
  const PlacedPrompt placed(*under_test, prompt);
  const PrefillRange range{.first = 190, .count = 710};
  const OwnTask own(*under_test, placed, {.first = range.first, .count = range.count});
  const auto out = under_test->array(std::size_t{range.count} * 5 * 64, kNotANumber);
  under_test->stages().select_blocks({&own.task, 1}, flexprefill({.gamma = 0.8f, .min_budget = 128}), placed.strides,
                                     placed.shape, under_test->stream());
  const PrefillTask task{.q = placed.row(range.first),
                         .kv = placed.kv,
                         .first = range.first,
                         .count = range.count,
                         .out = reinterpret_cast<std::byte*>(out.data()),
                         .blocks = own.task.blocks};
  under_test->stages().prefill({&task, 1}, placed.strides, placed.shape, under_test->stream());
  under_test->finish();
  const Selection found = own.result();
  PrefillRange masked = range;
  masked.blocks = found.bits;
  const Attention dense = reference::prefill(prompt, range);
  const Attention sparse = reference::prefill(prompt, masked);
  double longest = 0.0;
  for (std::uint32_t token = 0; token < 900; ++token) {
    double norm = 0.0;
    for (std::uint32_t c = 0; c < 64; ++c) norm += prompt.kv().v(token, c) * prompt.kv().v(token, c);
    longest = std::max(longest, std::sqrt(norm));
  }
  for (std::size_t row = 0; row < dense.lse.size(); ++row) {
    CAPTURE(row);
    const double coverage = std::exp(sparse.lse[row] - dense.lse[row]);
    double error = 0.0;
    for (std::size_t i = row * 64; i < (row + 1) * 64; ++i) error += (out[i] - dense.out[i]) * (out[i] - dense.out[i]);
    REQUIRE(std::sqrt(error) <= 2.0 * (1.0 - coverage) * longest + 1e-3 * longest);
  }
}

TEST_CASE("choices for several chunks at once are those of each alone, every time", "[stages][flexprefill][threads]") {
  const auto under_test = stages_under_test();
  const Prompt prompt = noise({.tokens = 1'400, .head_dim = 128, .group = 4});
  const PlacedPrompt placed(*under_test, prompt);
  const FlexPrefillSpec spec{.gamma = 0.8f, .min_budget = 128};
  const std::vector<Range> ranges{{0, 1'400}, {700, 0}, {900, 500}, {1'399, 1}, {64, 64}};
  std::vector<OwnTask> own;
  std::vector<SelectBlocksTask> tasks;
  for (const Range& range : ranges) tasks.push_back(own.emplace_back(*under_test, placed, range).task);
  for (int again = 0; again < 3; ++again) {
    under_test->stages().select_blocks(tasks, flexprefill(spec), placed.strides, placed.shape, under_test->stream());
    under_test->finish();
    for (std::size_t i = 0; i < ranges.size(); ++i) {
      CAPTURE(i, again);
      const Selection found = own[i].result();
      if (ranges[i].count == 0) continue;
      const Selection alone = select(*under_test, placed, ranges[i], spec);
      REQUIRE(found.bits == alone.bits);
      for (std::uint32_t head = 0; head < 4; ++head) {
        REQUIRE(found.choices[head].divergence == alone.choices[head].divergence);
        REQUIRE(found.choices[head].kept == alone.choices[head].kept);
        REQUIRE(found.choices[head].query_aware == alone.choices[head].query_aware);
      }
    }
  }
  REQUIRE(own[1].task.choices[0].causal == 0);
  under_test->stages().select_blocks({}, flexprefill(spec), placed.strides, placed.shape, under_test->stream());
}

TEST_CASE("the reference's Jensen-Shannon distance is one", "[flexprefill]") {
  Random random(2);
  const auto weights = [&] {
    std::vector<double> all(50);
    double sum = 0.0;
    for (double& x : all) sum += x = random.below(3) == 0 ? 0.0 : random.uniform();
    for (double& x : all) x /= sum;
    return all;
  };
  for (int i = 0; i < 20; ++i) {
    const std::vector<double> p = weights();
    const std::vector<double> q = weights();
    REQUIRE(reference::jensen_shannon(p, p) == 0.0);
    REQUIRE(reference::jensen_shannon(p, q) == Approx(reference::jensen_shannon(q, p)));
    REQUIRE(reference::jensen_shannon(p, q) <= std::sqrt(std::numbers::ln2) + 1e-12);
  }
  const std::vector<double> left{1.0, 0.0};
  const std::vector<double> right{0.0, 1.0};
  REQUIRE(reference::jensen_shannon(left, right) == Approx(std::sqrt(std::numbers::ln2)));
}

TEST_CASE("the reference's columns and diagonals each hold all attention", "[flexprefill]") {
  const Range range = GENERATE(Range{0, 500}, Range{200, 77});
  const Prompt prompt = noise({.tokens = range.first + range.count, .head_dim = 64, .group = 3});
  for (std::uint32_t head = 0; head < 3; ++head) {
    const Representative from = reference::representative(prompt, head, range.first, range.count);
    for (const std::vector<double>* part :
         {&from.columns, &from.diagonals, &from.column_blocks, &from.offset_blocks, &from.pooled}) {
      double sum = 0.0;
      for (const double x : *part) sum += x;
      REQUIRE(sum == Approx(1.0));
    }
    // Distance 0 is the mean of the causal diagonal.
    double own = 0.0;
    const std::uint32_t rows = std::min(kPrefillBlock, range.count);
    for (std::uint32_t token = range.first + range.count - rows; token < range.first + range.count; ++token) {
      double sum = 0.0;
      for (std::uint32_t key = 0; key <= token; ++key) sum += std::exp(prompt.score(token, head, key));
      own += std::exp(prompt.score(token, head, token)) / sum / rows;
    }
    REQUIRE(from.diagonals[0] == Approx(own));
  }
}

}  // namespace sluice::test
