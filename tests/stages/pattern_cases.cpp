// StreamingLLM's mask and MInference's patterns of prompts against the reference's, on any device.

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "sluice/error.hpp"
#include "sluice/step/prefill_choice.hpp"
#include "tests/support/flexprefill_support.hpp"
#include "tests/support/pattern_reference.hpp"
#include "tests/support/sanitized.hpp"

namespace sluice::test {
namespace {

constexpr auto kRanges = std::to_array<Range>({{0, 1},
                                               {0, 63},
                                               {0, 64},
                                               {0, 128},
                                               {0, 129},
                                               {0, 1'000},
                                               {300, 700},
                                               {1'000, 77},
                                               {1'280, 1},
                                               {1'100, 400},
                                               {127, 2}});

PrefillSpec streaming(std::uint32_t sinks, std::uint32_t window) {
  return {.mode = PrefillMode::streaming, .streaming = {.sinks = sinks, .window = window}};
}
PrefillSpec minference(const MInferenceSpec& spec) { return {.mode = PrefillMode::minference, .minference = spec}; }

/// What holds for any of them.
void require_masks(const Selection& found, Range range) { require_sound(found, range, {.min_budget = 0}); }

/// Returns how many pairs the reference left open.
std::uint64_t require_like(const PatternChoice& expected, const Selection& found, std::uint32_t head) {
  const PrefillChoice& choice = found.choices[head];
  CAPTURE(head, static_cast<int>(choice.pattern));
  REQUIRE(std::ranges::count(expected.may_be, choice.pattern) == 1);
  REQUIRE(choice.query_aware == (choice.pattern == HeadPattern::block_sparse ? 1u : 0u));
  REQUIRE(choice.causal == expected.causal);
  return require_pairs(expected.sure, expected.possible, found, head);
}

}  // namespace

TEST_CASE("a window of a prompt is what its definition says, for chunks of any length anywhere", "[stages][patterns]") {
  constexpr auto kSizes = std::to_array<StreamingPrefillSpec>(
      {{0, 1}, {1, 2}, {4, 128}, {128, 129}, {129, 130}, {200, 300}, {0, 1'000}, {5'000, 1}, {1'024, 8'192}});
  const auto [range, sizes] = GENERATE_COPY(grid(kRanges, kSizes));
  CAPTURE(range.first, range.count, sizes.sinks, sizes.window);
  const auto under_test = stages_under_test();
  // Whatever it says.
  Prompt prompt = noise({.tokens = range.first + range.count, .head_dim = 64, .group = 2});
  prompt.kv().set_k(0, 3, std::nan(""));
  const PlacedPrompt placed(*under_test, prompt);
  const Selection found = select(*under_test, placed, range, streaming(sizes.sinks, sizes.window));
  const Selection a_shape =
      select(*under_test, placed, range, minference({.pattern = HeadPattern::a_shape, .a_shape = sizes}));
  require_masks(found, range);
  const BlockMask expected = reference::streaming(range.first, range.count, sizes);
  for (std::uint32_t head = 0; head < 2; ++head) {
    REQUIRE(found.choices[head].pattern == HeadPattern::a_shape);
    REQUIRE(found.choices[head].query_aware == 0);
    for (std::uint32_t row = 0; row < found.shape.rows; ++row) {
      for (std::uint32_t block = 0; block <= found.shape.top + row; ++block) {
        CAPTURE(head, row, block);
        REQUIRE(found.kept(head, row, block) == (expected[row][block] != 0));
      }
    }
  }
  REQUIRE(a_shape.bits == found.bits);
}

TEST_CASE("a window, and pooled blocks of whole query blocks, are the same in chunks and at once",
          "[stages][patterns]") {
  const auto spec = GENERATE(streaming(100, 300), minference({.pattern = HeadPattern::a_shape, .a_shape = {1, 200}}),
                             minference({.pattern = HeadPattern::block_sparse, .blocks = 384}));
  const std::uint32_t cut = GENERATE(384u, 640u, 500u);
  if (cut % kPrefillBlock != 0 && spec.minference.pattern == HeadPattern::block_sparse) return;
  CAPTURE(static_cast<int>(spec.mode), cut);
  const auto under_test = stages_under_test();
  const Prompt prompt = noise({.tokens = 1'100, .head_dim = 64, .group = 3});
  const PlacedPrompt placed(*under_test, prompt);
  const Selection whole = select(*under_test, placed, {.count = 1'100}, spec);
  const Range parts[] = {{.count = cut}, {.first = cut, .count = 1'100 - cut}};
  for (const Range& part : parts) {
    const Selection found = select(*under_test, placed, part, spec);
    for (std::uint32_t head = 0; head < 3; ++head) {
      for (std::uint32_t row = 0; row < found.shape.rows; ++row) {
        for (std::uint32_t block = 0; block <= found.shape.top + row; ++block) {
          CAPTURE(part.first, head, row, block);
          REQUIRE(found.kept(head, row, block) == whole.kept(head, found.shape.top + row, block));
        }
      }
    }
  }
}

TEST_CASE("patterns of chunks of any length, anywhere, are the reference's", "[stages][patterns]") {
  const auto spec = GENERATE(values<MInferenceSpec>({{.columns = 0, .diagonals = 0},
                                                     {.columns = 128, .diagonals = 300},
                                                     {.columns = 500, .diagonals = 1},
                                                     {.pattern = HeadPattern::block_sparse, .blocks = 1},
                                                     {.pattern = HeadPattern::block_sparse, .blocks = 300},
                                                     {.pattern = HeadPattern::block_sparse, .blocks = 100'000},
                                                     {.pattern = HeadPattern::best,
                                                      .columns = 128,
                                                      .diagonals = 256,
                                                      .blocks = 384,
                                                      .a_shape = {.sinks = 128, .window = 129}},
                                                     {.pattern = HeadPattern::best,
                                                      .columns = 256,
                                                      .diagonals = 128,
                                                      .blocks = 128,
                                                      .a_shape = {.sinks = 1, .window = 200}}}));
  const auto range = GENERATE(from_range(kRanges));
  CAPTURE(range.first, range.count, static_cast<int>(spec.pattern), spec.columns, spec.diagonals, spec.blocks);
  const auto under_test = stages_under_test();
  const Prompt prompt = noise({.tokens = range.first + range.count, .head_dim = 64, .group = 4, .seed = 3});
  const PlacedPrompt placed(*under_test, prompt);
  const Selection found = select(*under_test, placed, range, minference(spec));
  require_masks(found, range);
  std::uint64_t open = 0, all = 0;
  for (std::uint32_t head = 0; head < 4; ++head) {
    const PatternChoice expected = reference::minference(prompt, head, range.first, range.count, spec);
    open += require_like(expected, found, head);
    all += expected.causal;
  }
  if (all > 200) REQUIRE(4 * open <= all);  // So that the comparison is worth something.
}

TEST_CASE("each head has the pattern that holds what it attends", "[stages][patterns]") {
  const auto [page_tokens, dtype] = GENERATE(grid(std::array{16u, 24u, 256u}, std::array{DType::bf16, DType::f16}));
  CAPTURE(page_tokens, to_string(dtype));
  constexpr std::uint32_t kTokens = 2'048;
  const auto under_test = stages_under_test();
  const MInferenceSpec spec{.pattern = HeadPattern::best,
                            .columns = 256,
                            .diagonals = 256,
                            .blocks = 512,
                            .a_shape = {.sinks = 128, .window = 129}};
  const auto choose = [&](const Prompt& prompt) {
    const PlacedPrompt placed(*under_test, prompt);
    const Selection found = select(*under_test, placed, {.count = kTokens}, minference(spec));
    require_masks(found, {.count = kTokens});
    for (std::uint32_t head = 0; head < prompt.group(); ++head)
      (void)require_like(reference::minference(prompt, head, 0, kTokens, spec), found, head);
    return found;
  };
  // A column, two diagonals, and the first or its own key.
  Prompt prompt({.dtype = dtype, .tokens = kTokens, .head_dim = 64, .group = 4, .page_tokens = page_tokens, .seed = 9});
  for (std::uint32_t token = 0; token < kTokens; ++token) {
    prompt.ask_for(token, 0, std::min(kColumn, token), 40.0);
    prompt.ask_for(token, 1, token - std::min(token, 256u), 40.0);
    prompt.ask_for(token, 2, token - std::min(token, 300u), 40.0);
    prompt.ask_for(token, 3, token % 3 == 0 ? 0 : token, 40.0);
  }
  const Selection found = choose(prompt);
  for (std::uint32_t head = 0; head < 3; ++head) {
    CAPTURE(head);
    REQUIRE(found.choices[head].pattern == HeadPattern::vertical_slash);
  }
  REQUIRE(found.choices[3].pattern == HeadPattern::a_shape);
  // Topics whose blocks are every fourth.
  const Selection topics = choose(patterns(kTokens, page_tokens, dtype));
  REQUIRE(topics.choices[3].pattern == HeadPattern::block_sparse);
  for (std::uint32_t row = 6; row < 16; ++row) {
    CAPTURE(row);
    REQUIRE(found.kept(0, row, kColumn / kPrefillBlock));
    REQUIRE(found.kept(1, row, row - 2));
    REQUIRE(found.kept(2, row, row - 2));
    for (std::uint32_t block = kTopic; block < row; block += kTopics) REQUIRE(topics.kept(3, row, block));
  }
}

TEST_CASE("patterns of every dtype, head_dim, page size and group are the reference's", "[stages][patterns]") {
  struct Case {
    DType dtype, q_dtype;
    std::uint32_t head_dim, page_tokens, group;
  };
  const auto c = GENERATE(Case{DType::bf16, DType::f32, 128, 16, 4}, Case{DType::f16, DType::f32, 128, 8, 2},
                          Case{DType::bf16, DType::bf16, 64, 40, 1}, Case{DType::f16, DType::f16, 128, 128, 8},
                          Case{DType::f32, DType::f32, 80, 24, 3}, Case{DType::f16, DType::bf16, 64, 32, 32});
  CAPTURE(to_string(c.dtype), to_string(c.q_dtype), c.head_dim, c.page_tokens, c.group);
  const auto under_test = stages_under_test();
  const Prompt prompt(
      {.dtype = c.dtype, .tokens = 900, .head_dim = c.head_dim, .group = c.group, .page_tokens = c.page_tokens},
      c.q_dtype);
  if (!under_test->supports(prompt.kv().shape(), prompt.kv().layout())) return;
  const PlacedPrompt placed(*under_test, prompt);
  const MInferenceSpec spec{.pattern = HeadPattern::best,
                            .columns = 128,
                            .diagonals = 256,
                            .blocks = 256,
                            .a_shape = {.sinks = 1, .window = 129}};
  const Range range{.first = 200, .count = 700};
  const Selection found = select(*under_test, placed, range, minference(spec));
  require_masks(found, range);
  for (std::uint32_t head = 0; head < c.group; ++head)
    (void)require_like(reference::minference(prompt, head, range.first, range.count, spec), found, head);
}

TEST_CASE("sizes of the whole prompt keep everything", "[stages][patterns]") {
  const auto spec = GENERATE(streaming(0, 1'000), streaming(1'000, 1), minference({.columns = 1'000, .diagonals = 0}),
                             minference({.columns = 0, .diagonals = 1'000}),
                             minference({.pattern = HeadPattern::block_sparse, .blocks = 1'000}),
                             minference({.pattern = HeadPattern::best, .columns = 1'000, .a_shape = {1, 1}}));
  const auto tokens = GENERATE(1u, 128u, 1'000u);
  CAPTURE(static_cast<int>(spec.mode), static_cast<int>(spec.minference.pattern), tokens);
  const auto under_test = stages_under_test();
  const Prompt prompt = noise({.tokens = tokens, .head_dim = 64, .group = 4});
  const PlacedPrompt placed(*under_test, prompt);
  const Selection found = select(*under_test, placed, {.count = tokens}, spec);
  require_masks(found, {.count = tokens});
  for (const PrefillChoice& choice : found.choices) {
    const bool all = spec.minference.pattern != HeadPattern::best || choice.pattern != HeadPattern::a_shape;
    if (all) REQUIRE(choice.kept == choice.causal);
  }
}

TEST_CASE("patterns of keys that are not numbers, and of equal weights", "[stages][patterns]") {
  const auto under_test = stages_under_test();
  const auto pattern = GENERATE(HeadPattern::vertical_slash, HeadPattern::block_sparse, HeadPattern::best);
  const MInferenceSpec spec{
      .pattern = pattern, .columns = 256, .diagonals = 256, .blocks = 256, .a_shape = {.sinks = 1, .window = 129}};
  CAPTURE(static_cast<int>(pattern));
  const Range range{.first = 100, .count = 900};
  Prompt prompt = noise({.tokens = 1'000, .head_dim = 64, .group = 4});
  SECTION("some keys") {
    for (const std::uint32_t key : {3u, 130u, 131u, 999u}) prompt.kv().set_k(key, key % 64, std::nan(""));
    const PlacedPrompt placed(*under_test, prompt);
    const Selection found = select(*under_test, placed, range, minference(spec));
    require_masks(found, range);
    for (std::uint32_t head = 0; head < 4; ++head)
      (void)require_like(reference::minference(prompt, head, range.first, range.count, spec), found, head);
  }
  SECTION("all keys") {
    for (std::uint32_t key = 0; key < 1'000; ++key) prompt.kv().set_k(key, 5, std::nan(""));
    const PlacedPrompt placed(*under_test, prompt);
    require_masks(select(*under_test, placed, range, minference(spec)), range);
  }
  SECTION("queries of zero: the first blocks are taken") {
    for (std::uint32_t token = 0; token < 1'000; ++token) {
      for (std::uint32_t c = 0; c < 64; ++c) prompt.set_q(token, 0, c, 0.0);
    }
    const PlacedPrompt placed(*under_test, prompt);
    const Selection found = select(*under_test, placed, range, minference(spec));
    require_masks(found, range);
    if (pattern != HeadPattern::block_sparse) return;
    for (std::uint32_t row = 3; row < found.shape.rows; ++row) {
      for (std::uint32_t block = 0; block < row; ++block) REQUIRE(found.kept(0, row, block) == (block < 2));
    }
  }
}

TEST_CASE("patterns of several chunks at once are those of each alone, every time", "[stages][patterns][threads]") {
  const auto under_test = stages_under_test();
  const Prompt prompt = noise({.tokens = 1'400, .head_dim = 128, .group = 4});
  const PlacedPrompt placed(*under_test, prompt);
  const PrefillSpec spec = GENERATE(streaming(1, 300), minference({.pattern = HeadPattern::best,
                                                                   .columns = 128,
                                                                   .diagonals = 256,
                                                                   .blocks = 256,
                                                                   .a_shape = {.sinks = 1, .window = 129}}));
  const std::vector<Range> ranges{{0, 1'400}, {700, 0}, {900, 500}, {1'399, 1}, {64, 64}};
  std::vector<OwnTask> own;
  std::vector<SelectBlocksTask> tasks;
  for (const Range& range : ranges) tasks.push_back(own.emplace_back(*under_test, placed, range).task);
  for (int again = 0; again < 3; ++again) {
    under_test->stages().select_blocks(tasks, spec, placed.strides, placed.shape, under_test->stream());
    under_test->finish();
    for (std::size_t i = 0; i < ranges.size(); ++i) {
      CAPTURE(i, again);
      const Selection found = own[i].result();
      if (ranges[i].count == 0) continue;
      const Selection alone = select(*under_test, placed, ranges[i], spec);
      REQUIRE(found.bits == alone.bits);
      for (std::uint32_t head = 0; head < 4; ++head) {
        REQUIRE(found.choices[head].kept == alone.choices[head].kept);
        REQUIRE(found.choices[head].pattern == alone.choices[head].pattern);
      }
    }
  }
}

TEST_CASE("a choice of blocks is refused where nothing is to be chosen", "[stages][patterns]") {
  const auto under_test = stages_under_test();
  const Prompt prompt = noise({.tokens = 16, .head_dim = 64, .group = 1});
  const PlacedPrompt placed(*under_test, prompt);
  try {
    (void)select(*under_test, placed, {.count = 16}, PrefillSpec{});
    FAIL("was accepted");
  } catch (const Error& error) {
    REQUIRE(error.code() == Errc::invalid_argument);
  }
}

}  // namespace sluice::test
