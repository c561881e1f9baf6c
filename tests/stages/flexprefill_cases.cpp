// FlexPrefill's choice of blocks against the reference's, on any device.

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "sluice/error.hpp"
#include "sluice/step/prefill_choice.hpp"
#include "tests/support/flexprefill_reference.hpp"
#include "tests/support/flexprefill_support.hpp"
#include "tests/support/sanitized.hpp"

namespace sluice::test {
namespace {

constexpr double kDivergenceSlack = 3e-3;

/// The mask of a head that is not query-aware is a union of columns and of offsets, as many as its choice says at
/// least.
void require_lines(const Selection& found, std::uint32_t head) {
  const std::uint32_t blocks = found.shape.top + found.shape.rows;
  std::vector<char> column(blocks, 1);
  std::vector<char> offset(blocks, 1);
  for (std::uint32_t row = 0; row < found.shape.rows; ++row) {
    for (std::uint32_t block = 0; block <= found.shape.top + row; ++block) {
      if (found.kept(head, row, block)) continue;
      column[block] = offset[found.shape.top + row - block] = 0;
    }
  }
  for (std::uint32_t row = 0; row < found.shape.rows; ++row) {
    for (std::uint32_t block = 0; block <= found.shape.top + row; ++block) {
      if (!found.kept(head, row, block)) continue;
      CAPTURE(row, block);
      REQUIRE((column[block] | offset[found.shape.top + row - block]) != 0);
    }
  }
  REQUIRE(std::count(column.begin(), column.end(), 1) >= found.choices[head].columns);
  REQUIRE(std::count(offset.begin(), offset.end(), 1) >= found.choices[head].diagonals);
}

/// Returns how many pairs the reference left open.
std::uint64_t require_like(const ReferenceChoice& expected, const Selection& found, std::uint32_t head) {
  CAPTURE(head);
  const PrefillChoice& choice = found.choices[head];
  if (!expected.everything) {
    REQUIRE(std::abs(choice.divergence - expected.from.divergence) <= kDivergenceSlack);
    REQUIRE((choice.query_aware != 0 ? expected.may_be_query_aware : expected.may_be_vertical_slash));
  }
  if (choice.query_aware == 0 && !expected.everything) {
    CAPTURE(expected.columns.least, expected.columns.most, expected.diagonals.least, expected.diagonals.most);
    REQUIRE(expected.columns.contains(choice.columns));
    REQUIRE(expected.diagonals.contains(choice.diagonals));
    require_lines(found, head);
  }
  REQUIRE(choice.causal == expected.causal);
  return require_pairs(expected.sure, expected.possible, found, head);
}

/// Pairs of a query and a key block, of all heads.
struct Pairs {
  std::uint64_t open = 0;  ///< that the reference left open
  std::uint64_t all = 0;
};

Pairs require_right(StagesUnderTest& under_test, const Prompt& prompt, const PlacedPrompt& placed, Range range,
                    const FlexPrefillSpec& spec) {
  const Selection found = select(under_test, placed, range, spec);
  require_sound(found, range, spec);
  Pairs pairs;
  for (std::uint32_t head = 0; head < prompt.group(); ++head) {
    const ReferenceChoice expected = reference::select_blocks(prompt, head, range.first, range.count, spec);
    pairs.open += require_like(expected, found, head);
    pairs.all += expected.causal;
  }
  return pairs;
}

/// Whether the device has query blocks that choose together; if not, it says so.
bool flattens(StagesUnderTest& under_test, const PlacedPrompt& placed, const FlexPrefillSpec& spec) {
  try {
    (void)select(under_test, placed, {.count = 1}, spec);
    return true;
  } catch (const Error& error) {
    REQUIRE(error.code() == Errc::unsupported);
    return false;
  }
}

}  // namespace

TEST_CASE("columns, diagonals, topics and indifference are recognised", "[stages][flexprefill]") {
  const auto under_test = stages_under_test();
  const auto [page_tokens, dtype, lines] =
      GENERATE(grid(std::array{8u, 16u, 64u, 24u, 256u}, std::array{DType::bf16, DType::f16}, std::array{false, true}));
  CAPTURE(page_tokens, to_string(dtype), lines);
  const Prompt prompt = patterns(2'048, page_tokens, dtype);
  const PlacedPrompt placed(*under_test, prompt);
  // Two blocks of each: the forced one, and the one that holds the attention.
  const FlexPrefillSpec spec{.gamma = 0.95f, .tau = 0.1f, .min_budget = lines ? 0u : 256u, .lines = lines};
  const Selection found = select(*under_test, placed, {.count = 2'048}, spec);
  require_sound(found, {.count = 2'048}, spec);
  std::uint64_t open = 0;
  for (std::uint32_t head = 0; head < 4; ++head) {
    open += require_like(reference::select_blocks(prompt, head, 0, 2'048, spec), found, head);
  }
  REQUIRE(open <= 40);  // The first three leave the reference no doubt.
  for (std::uint32_t head = 0; head < 3; ++head) REQUIRE(found.choices[head].query_aware == 0);
  for (std::uint32_t head = 3; head < 5; ++head) REQUIRE(found.choices[head].query_aware == 1);
  for (std::uint32_t row = 6; row < 16; ++row) {
    CAPTURE(row);
    REQUIRE(found.kept(0, row, kColumn / kPrefillBlock));
    REQUIRE(found.kept(1, row, row - 2));
    REQUIRE(found.kept(2, row, row - 2));
    if (!lines) continue;
    REQUIRE(found.kept(2, row, row - 3));
    for (std::uint32_t block = 1; block < row; ++block) {
      CAPTURE(block);
      if (block % kTopics != kTopic) REQUIRE_FALSE(found.kept(3, row, block));
    }
  }
  // All blocks of the topic weigh about the same; most of them make up the share.
  std::uint32_t of_topic = 0;
  for (std::uint32_t block = kTopic; block < 15; block += kTopics) of_topic += found.kept(3, 15, block) ? 1u : 0u;
  REQUIRE(of_topic >= 3);
}

TEST_CASE("a head that asks for one key has its block, by columns", "[stages][flexprefill]") {
  const auto under_test = stages_under_test();
  const Prompt prompt = patterns(2'048, 16, DType::bf16);
  const PlacedPrompt placed(*under_test, prompt);
  // Two blocks of columns: the first, which is forced, and that of the key.
  const Selection found =
      select(*under_test, placed, {.count = 2'048}, {.gamma = 0.95f, .tau = 0.f, .min_budget = 256});
  for (std::uint32_t row = 5; row < 16; ++row) REQUIRE(found.kept(0, row, kColumn / kPrefillBlock));
  REQUIRE(found.choices[0].columns == 2);
  for (const PrefillChoice& choice : found.choices) REQUIRE(choice.query_aware == 0);
}

TEST_CASE("chunks of any length, anywhere, choose as the reference does", "[stages][flexprefill]") {
  constexpr auto kRanges = std::to_array<Range>({{0, 1},
                                                 {0, 100},
                                                 {0, 128},
                                                 {0, 129},
                                                 {0, 1'000},
                                                 {300, 700},
                                                 {1'000, 77},
                                                 {1'280, 1},
                                                 {1'100, 400},
                                                 {127, 2}});
  constexpr auto kSpecs =
      std::to_array<FlexPrefillSpec>({{.min_budget = 0},
                                      {.gamma = 0.8f, .min_budget = 256},
                                      {.tau = 0.f, .min_budget = 130},
                                      {.min_budget = 0, .lines = true},
                                      {.gamma = 0.5f, .min_budget = 300, .lines = true},
                                      {.gamma = 0.99f, .min_budget = 0, .max_budget = 384},
                                      {.gamma = 0.99f, .min_budget = 0, .max_budget = 384, .lines = true},
                                      {.gamma = 0.99f, .tau = 1.f, .min_budget = 0, .max_budget = 300},
                                      {.gamma = 1.f, .tau = 1.f, .min_budget = 0, .max_budget = 130},
                                      {.gamma = 0.9f, .tau = 1.f, .min_budget = 200},
                                      {.gamma = 0.9f, .tau = 1.f, .min_budget = 0, .flattened = true},
                                      {.gamma = 0.5f, .tau = 1.f, .min_budget = 200, .flattened = true},
                                      {.gamma = 1.f, .tau = 1.f, .min_budget = 0, .flattened = true}});
  const auto [range, spec] = GENERATE_COPY(grid(kRanges, kSpecs));
  CAPTURE(range.first, range.count, spec.gamma, spec.tau, spec.min_budget, spec.max_budget, spec.lines, spec.flattened);
  const auto under_test = stages_under_test();
  const Prompt prompt = noise({.tokens = range.first + range.count, .head_dim = 64, .group = 4, .seed = 3});
  const PlacedPrompt placed(*under_test, prompt);
  if (spec.flattened && !flattens(*under_test, placed, spec)) return;
  const Pairs pairs = require_right(*under_test, prompt, placed, range, spec);
  REQUIRE(4 * pairs.open <= pairs.all);  // So that the comparison is worth something.
}

TEST_CASE("every dtype, head_dim, page size and group chooses as the reference does", "[stages][flexprefill]") {
  struct Case {
    DType dtype, q_dtype;
    std::uint32_t head_dim, page_tokens, group;
  };
  const auto c = GENERATE(Case{DType::bf16, DType::f32, 128, 16, 4}, Case{DType::f16, DType::f32, 128, 8, 2},
                          Case{DType::bf16, DType::bf16, 64, 40, 1}, Case{DType::f16, DType::f16, 128, 128, 8},
                          Case{DType::bf16, DType::f16, 64, 256, 3}, Case{DType::f32, DType::f32, 80, 24, 3},
                          Case{DType::f16, DType::bf16, 64, 32, 32});
  CAPTURE(to_string(c.dtype), to_string(c.q_dtype), c.head_dim, c.page_tokens, c.group);
  const auto under_test = stages_under_test();
  Prompt prompt(
      {.dtype = c.dtype, .tokens = 900, .head_dim = c.head_dim, .group = c.group, .page_tokens = c.page_tokens},
      c.q_dtype);
  const PageLayout layout = prompt.kv().layout();
  if (!under_test->supports(prompt.kv().shape(), layout)) return;
  const PlacedPrompt placed(*under_test, prompt);
  (void)require_right(*under_test, prompt, placed, {.first = 200, .count = 700}, {.gamma = 0.7f, .min_budget = 0});
}

TEST_CASE("every head of a group chooses for itself, whatever the others attend", "[stages][flexprefill]") {
  // Heads of four kinds in turns: the first key has nearly all, a column, a diagonal, noise.
  constexpr std::uint32_t kTokens = 1'429;
  const auto group = GENERATE(1u, 3u, 4u, 8u);
  const auto head_dim = GENERATE(64u, 128u);
  CAPTURE(group, head_dim);
  const auto under_test = stages_under_test();
  Prompt prompt({.tokens = kTokens, .head_dim = head_dim, .group = group, .page_tokens = 32, .seed = 17}, DType::bf16);
  for (std::uint32_t token = 0; token < kTokens; ++token) {
    for (std::uint32_t head = 0; head < group; ++head) {
      if (head % 4 == 0) prompt.ask_for(token, head, 0, 40.0);
      if (head % 4 == 1) prompt.ask_for(token, head, std::min(token, kColumn), 12.0);
      if (head % 4 == 2) prompt.ask_for(token, head, token - std::min(token, 300u), 12.0);
    }
  }
  const PlacedPrompt placed(*under_test, prompt);
  const FlexPrefillSpec spec{.gamma = 0.8f, .min_budget = 0};
  const std::vector<Range> ranges{{0, 1}, {640, 789}, {0, 77}, {1'000, 0}, {512, 129}, {1'428, 1}};
  std::vector<OwnTask> own;
  std::vector<SelectBlocksTask> tasks;
  for (const Range& range : ranges) tasks.push_back(own.emplace_back(*under_test, placed, range).task);
  under_test->stages().select_blocks(tasks, flexprefill(spec), placed.strides, placed.shape, under_test->stream());
  under_test->finish();
  Pairs pairs;
  for (std::size_t i = 0; i < ranges.size(); ++i) {
    if (ranges[i].count == 0) continue;
    CAPTURE(i);
    const Selection found = own[i].result();
    require_sound(found, ranges[i], spec);
    for (std::uint32_t head = 0; head < group; ++head) {
      const auto expected = reference::select_blocks(prompt, head, ranges[i].first, ranges[i].count, spec);
      pairs.open += require_like(expected, found, head);
      pairs.all += expected.causal;
    }
  }
  REQUIRE(4 * pairs.open <= pairs.all);
}

TEST_CASE("an outlier and what is far below it", "[stages][flexprefill]") {
  const auto [outlier, gamma] = GENERATE(grid(std::array{10.0, 100.0}, std::array{0.9f, 1.f}));
  CAPTURE(outlier, gamma);
  const auto under_test = stages_under_test();
  const Prompt prompt = noise({.tokens = 2'300, .head_dim = 128, .group = 4, .outlier = outlier});
  const PlacedPrompt placed(*under_test, prompt);
  (void)require_right(*under_test, prompt, placed, {.count = 2'300}, {.gamma = gamma, .min_budget = 128});
}

TEST_CASE("keys that are not numbers weigh nothing in the choice", "[stages][flexprefill]") {
  const auto [bad, lines] =
      GENERATE(grid(std::array{std::nan(""), std::numeric_limits<double>::infinity()}, std::array{false, true}));
  CAPTURE(bad, lines);
  const auto under_test = stages_under_test();
  Prompt prompt = noise({.tokens = 1'000, .head_dim = 64, .group = 4});
  for (const std::uint32_t key : {3u, 130u, 131u, 999u}) prompt.kv().set_k(key, key % 64, bad);
  const PlacedPrompt placed(*under_test, prompt);
  const FlexPrefillSpec spec{.gamma = 0.9f, .min_budget = 0, .lines = lines};
  if (std::isnan(bad)) {
    (void)require_right(*under_test, prompt, placed, {.first = 100, .count = 900}, spec);
  } else {
    // An infinite score has no softmax: any choice will do, if it is one.
    require_sound(select(*under_test, placed, {.first = 100, .count = 900}, spec), {.first = 100, .count = 900}, spec);
  }
}

}  // namespace sluice::test
