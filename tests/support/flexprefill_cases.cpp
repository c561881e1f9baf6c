// FlexPrefill's choice of blocks, on any backend.

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <numbers>
#include <vector>

#include "tests/support/backend_under_test.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/flexprefill_reference.hpp"
#include "tests/support/random.hpp"

namespace sluice::test {
namespace {

constexpr std::uint32_t kUntouched = 0xabcd1234u;
constexpr double kDivergenceSlack = 3e-3;

struct Range {
  std::uint32_t first = 0;
  std::uint32_t count = 0;
};

struct Selection {
  BlockBits shape;
  std::vector<std::uint32_t> bits;
  std::vector<PrefillChoice> choices;
  [[nodiscard]] bool kept(std::uint32_t head, std::uint32_t row, std::uint32_t block) const {
    return shape.get(bits, head, row, block);
  }
};

/// A task with memory of its own.
struct OwnTask {
  OwnTask(BackendUnderTest& under_test, const PlacedPrompt& placed, Range range)
      : shape(range.first, range.count),
        bits(under_test.array(shape.size(placed.shape.group()) + 1, kUntouched)),
        choices(under_test.array<PrefillChoice>(placed.shape.group())) {
    const std::uint64_t scratch = under_test.backend().select_blocks_scratch_bytes(range.first, range.count, placed.shape);
    const auto at = reinterpret_cast<std::uintptr_t>(under_test.memory(scratch + 256));
    task = {.q = placed.row(range.first),
            .kv = placed.kv,
            .first = range.first,
            .count = range.count,
            .blocks = bits.data(),
            .choices = choices.data(),
            .scratch = reinterpret_cast<std::byte*>((at + 255) / 256 * 256)};
  }
  [[nodiscard]] Selection result() const {
    REQUIRE(bits.back() == kUntouched);
    return {.shape = shape, .bits = {bits.begin(), bits.end() - 1}, .choices = {choices.begin(), choices.end()}};
  }
  BlockBits shape;
  std::span<std::uint32_t> bits;
  std::span<PrefillChoice> choices;
  SelectBlocksTask task;
};

Selection select(BackendUnderTest& under_test, const PlacedPrompt& placed, Range range, const FlexPrefillSpec& spec) {
  const OwnTask own(under_test, placed, range);
  under_test.backend().select_blocks({&own.task, 1}, spec, placed.strides, placed.shape, under_test.stream());
  under_test.finish();
  return own.result();
}

/// What holds for every choice, whatever was rounded.
void require_sound(const Selection& found, Range range, const FlexPrefillSpec& spec) {
  const std::uint32_t blocks = found.shape.top + found.shape.rows;
  const std::uint32_t least = std::min((spec.min_budget + kPrefillBlock - 1) / kPrefillBlock, blocks);
  for (std::uint32_t head = 0; head < found.choices.size(); ++head) {
    CAPTURE(head, range.first, range.count);
    const PrefillChoice& choice = found.choices[head];
    std::uint64_t kept = 0;
    std::uint64_t causal = 0;
    std::uint32_t last_row = 0;
    for (std::uint32_t row = 0; row < found.shape.rows; ++row) {
      const std::uint32_t own = found.shape.top + row;
      REQUIRE(found.kept(head, row, 0));
      REQUIRE(found.kept(head, row, own));
      last_row = 0;
      for (std::uint32_t word = 0; word < found.shape.words; ++word) {
        last_row += static_cast<std::uint32_t>(std::popcount(found.bits[found.shape.word(head, row, word * 32)]));
      }
      for (std::uint32_t block = own + 1; block < found.shape.words * 32; ++block) {
        if (found.kept(head, row, block)) FAIL("row " << row << " keeps block " << block << ", which it cannot see");
      }
      kept += last_row;
      causal += own + 1;
    }
    REQUIRE(choice.kept == kept);
    REQUIRE(choice.causal == causal);
    REQUIRE(last_row >= least);
    REQUIRE(choice.divergence >= 0.f);
    REQUIRE(static_cast<double>(choice.divergence) <= std::sqrt(std::numbers::ln2) + 1e-6);
  }
}

/// The mask of a head that is not query-aware is a union of columns and of offsets, as many as its choice says at least.
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
  std::uint64_t open = 0;
  for (std::uint32_t row = 0; row < found.shape.rows; ++row) {
    for (std::uint32_t block = 0; block <= found.shape.top + row; ++block) {
      CAPTURE(row, block);
      const bool kept = found.kept(head, row, block);
      if (expected.sure[row][block] != 0 && !kept) FAIL("a sure pair is missing");
      if (expected.possible[row][block] == 0 && kept) FAIL("an impossible pair is kept");
      open += expected.sure[row][block] != expected.possible[row][block] ? 1u : 0u;
    }
  }
  return open;
}

std::uint64_t require_right(BackendUnderTest& under_test, const Prompt& prompt, const PlacedPrompt& placed, Range range,
                            const FlexPrefillSpec& spec) {
  const Selection found = select(under_test, placed, range, spec);
  require_sound(found, range, spec);
  std::uint64_t open = 0;
  for (std::uint32_t head = 0; head < prompt.group(); ++head) {
    open += require_like(reference::select_blocks(prompt, head, range.first, range.count, spec), found, head);
  }
  return open;
}

constexpr std::uint32_t kColumn = 700;
constexpr std::uint32_t kTopics = 4;
constexpr std::uint32_t kTopic = 1;  ///< of blocks 1, 5, 9, ...

/// Heads of every kind: 0 asks for key 700, 1 for the key 256 tokens ago, 2 for that 300 ago, 3 for all keys of the
/// blocks of one topic, 4 for nothing.
Prompt patterns(std::uint32_t tokens, std::uint32_t page_tokens, DType dtype) {
  Prompt prompt({.dtype = dtype, .tokens = tokens, .head_dim = 64, .group = 5, .page_tokens = page_tokens, .seed = 9});
  Random random(31);
  std::vector<double> topics(std::size_t{kTopics} * 64);
  for (double& x : topics) x = random.normal();
  for (std::uint32_t token = 0; token < tokens; ++token) {
    const double* const topic = &topics[token / kPrefillBlock % kTopics * 64];
    for (std::uint32_t c = 0; c < 64; ++c) prompt.kv().set_k(token, c, prompt.kv().k(token, c) + topic[c]);
  }
  for (std::uint32_t token = 0; token < tokens; ++token) {
    prompt.ask_for(token, 0, std::min(kColumn, tokens - 1), 30.0);
    prompt.ask_for(token, 1, token - std::min(token, 256u), 30.0);
    prompt.ask_for(token, 2, token - std::min(token, 300u), 30.0);
    for (std::uint32_t c = 0; c < 64; ++c) {
      prompt.set_q(token, 3, c, 1.2 * topics[kTopic * 64 + c]);
      prompt.set_q(token, 4, c, 0.0);
    }
  }
  return prompt;
}

/// Random queries, each head's sharper than the one's before.
Prompt noise(const ProblemOptions& options, DType q_dtype = DType::f32) {
  Prompt prompt(options, q_dtype);
  for (std::uint32_t token = 0; token < options.tokens; ++token) {
    for (std::uint32_t head = 0; head < options.group; ++head) {
      for (std::uint32_t c = 0; c < options.head_dim; ++c) {
        prompt.set_q(token, head, c, prompt.q(token, head, c) * 0.3 * (1 << head));
      }
    }
  }
  return prompt;
}

}  // namespace

TEST_CASE("columns, diagonals, topics and indifference are recognised", "[backend][flexprefill]") {
  const auto under_test = backend_under_test();
  const auto page_tokens = GENERATE(8u, 16u, 64u, 24u, 256u);
  const auto dtype = GENERATE(DType::bf16, DType::f16);
  const bool lines = GENERATE(false, true);
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

TEST_CASE("a head that asks for one key has its block, by columns", "[backend][flexprefill]") {
  const auto under_test = backend_under_test();
  const Prompt prompt = patterns(2'048, 16, DType::bf16);
  const PlacedPrompt placed(*under_test, prompt);
  // Two blocks of columns: the first, which is forced, and that of the key.
  const Selection found =
      select(*under_test, placed, {.count = 2'048}, {.gamma = 0.95f, .tau = 0.f, .min_budget = 256});
  for (std::uint32_t row = 5; row < 16; ++row) REQUIRE(found.kept(0, row, kColumn / kPrefillBlock));
  REQUIRE(found.choices[0].columns == 2);
  for (const PrefillChoice& choice : found.choices) REQUIRE(choice.query_aware == 0);
}

TEST_CASE("chunks of any length, anywhere, choose as the reference does", "[backend][flexprefill]") {
  const Range range = GENERATE(Range{0, 1}, Range{0, 100}, Range{0, 128}, Range{0, 129}, Range{0, 1'000}, Range{300, 700},
                               Range{1'000, 77}, Range{1'280, 1}, Range{1'100, 400}, Range{127, 2});
  const auto spec = GENERATE(FlexPrefillSpec{.min_budget = 0}, FlexPrefillSpec{.gamma = 0.8f, .min_budget = 256},
                             FlexPrefillSpec{.tau = 0.f, .min_budget = 130}, FlexPrefillSpec{.min_budget = 0, .lines = true},
                             FlexPrefillSpec{.gamma = 0.5f, .min_budget = 300, .lines = true},
                             FlexPrefillSpec{.gamma = 0.99f, .min_budget = 0, .max_budget = 384},
                             FlexPrefillSpec{.gamma = 0.9f, .tau = 1.f, .min_budget = 200});
  CAPTURE(range.first, range.count, spec.gamma, spec.tau, spec.min_budget, spec.max_budget, spec.lines);
  const auto under_test = backend_under_test();
  const Prompt prompt = noise({.tokens = range.first + range.count, .head_dim = 64, .group = 4, .seed = 3});
  const PlacedPrompt placed(*under_test, prompt);
  const std::uint64_t open = require_right(*under_test, prompt, placed, range, spec);
  // The comparison is worth something: the reference leaves few pairs open.
  REQUIRE(open * 4 <= 4 * reference::select_blocks(prompt, 0, range.first, range.count, spec).causal);
}

TEST_CASE("every dtype, head_dim, page size and group chooses as the reference does", "[backend][flexprefill]") {
  struct Case {
    DType dtype, q_dtype;
    std::uint32_t head_dim, page_tokens, group;
  };
  const auto c = GENERATE(Case{DType::bf16, DType::f32, 128, 16, 4}, Case{DType::f16, DType::f32, 128, 8, 2},
                          Case{DType::bf16, DType::bf16, 64, 40, 1}, Case{DType::f16, DType::f16, 128, 128, 8},
                          Case{DType::bf16, DType::f16, 64, 256, 3}, Case{DType::f32, DType::f32, 80, 24, 3},
                          Case{DType::f16, DType::bf16, 64, 32, 32});
  CAPTURE(to_string(c.dtype), to_string(c.q_dtype), c.head_dim, c.page_tokens, c.group);
  const auto under_test = backend_under_test();
  Prompt prompt({.dtype = c.dtype, .tokens = 900, .head_dim = c.head_dim, .group = c.group, .page_tokens = c.page_tokens},
                c.q_dtype);
  const PageLayout layout = prompt.kv().layout();
  if (!under_test->supports(prompt.kv().shape(), layout)) return;
  const PlacedPrompt placed(*under_test, prompt);
  require_right(*under_test, prompt, placed, {.first = 200, .count = 700}, {.gamma = 0.7f, .min_budget = 0});
}

TEST_CASE("an outlier and what is far below it", "[backend][flexprefill]") {
  const double outlier = GENERATE(10.0, 100.0);
  const auto gamma = GENERATE(0.9f, 1.f);
  CAPTURE(outlier, gamma);
  const auto under_test = backend_under_test();
  const Prompt prompt = noise({.tokens = 2'300, .head_dim = 128, .group = 4, .outlier = outlier});
  const PlacedPrompt placed(*under_test, prompt);
  require_right(*under_test, prompt, placed, {.count = 2'300}, {.gamma = gamma, .min_budget = 128});
}

TEST_CASE("keys that are not numbers weigh nothing in the choice", "[backend][flexprefill]") {
  const double bad = GENERATE(std::nan(""), std::numeric_limits<double>::infinity());
  const bool lines = GENERATE(false, true);
  CAPTURE(bad, lines);
  const auto under_test = backend_under_test();
  Prompt prompt = noise({.tokens = 1'000, .head_dim = 64, .group = 4});
  for (const std::uint32_t key : {3u, 130u, 131u, 999u}) prompt.kv().set_k(key, key % 64, bad);
  const PlacedPrompt placed(*under_test, prompt);
  const FlexPrefillSpec spec{.gamma = 0.9f, .min_budget = 0, .lines = lines};
  if (std::isnan(bad)) {
    require_right(*under_test, prompt, placed, {.first = 100, .count = 900}, spec);
  } else {
    // An infinite score has no softmax: any choice will do, if it is one.
    require_sound(select(*under_test, placed, {.first = 100, .count = 900}, spec), {.first = 100, .count = 900}, spec);
  }
}

TEST_CASE("a prompt of nothing but NaN still has its forced blocks", "[backend][flexprefill]") {
  const auto under_test = backend_under_test();
  Prompt prompt({.tokens = 600, .head_dim = 64, .group = 2});
  for (std::uint32_t key = 0; key < 600; ++key) prompt.kv().set_k(key, 5, std::nan(""));
  const PlacedPrompt placed(*under_test, prompt);
  for (const float tau : {0.f, 0.1f, 1.f}) {
    const FlexPrefillSpec spec{.tau = tau, .min_budget = 256};
    require_sound(select(*under_test, placed, {.count = 600}, spec), {.count = 600}, spec);
  }
}

TEST_CASE("a budget of the whole prompt keeps everything", "[backend][flexprefill]") {
  const auto tokens = GENERATE(1u, 128u, 1'000u);
  const auto lines = GENERATE(false, true);
  CAPTURE(tokens, lines);
  const auto under_test = backend_under_test();
  const Prompt prompt = noise({.tokens = tokens, .head_dim = 64, .group = 4});
  const PlacedPrompt placed(*under_test, prompt);
  const FlexPrefillSpec spec{.gamma = 1.f, .min_budget = tokens, .lines = lines};
  const Selection found = select(*under_test, placed, {.count = tokens}, spec);
  require_sound(found, {.count = tokens}, spec);
  for (const PrefillChoice& choice : found.choices) REQUIRE(choice.kept == choice.causal);
}

TEST_CASE("a larger share or budget keeps what a smaller one kept", "[backend][flexprefill]") {
  const auto tau = GENERATE(0.f, 0.1f, 1.f);
  CAPTURE(tau);
  const auto under_test = backend_under_test();
  const Prompt prompt = noise({.tokens = 1'500, .head_dim = 64, .group = 4});
  const PlacedPrompt placed(*under_test, prompt);
  const Range range{.first = 200, .count = 1'300};
  const std::vector<std::vector<FlexPrefillSpec>> rising{
      {{.gamma = 0.3f, .tau = tau, .min_budget = 0}, {.gamma = 0.6f, .tau = tau, .min_budget = 0},
       {.gamma = 0.9f, .tau = tau, .min_budget = 0}, {.gamma = 1.f, .tau = tau, .min_budget = 0}},
      {{.gamma = 0.5f, .tau = tau, .min_budget = 0}, {.gamma = 0.5f, .tau = tau, .min_budget = 256},
       {.gamma = 0.5f, .tau = tau, .min_budget = 700}, {.gamma = 0.5f, .tau = tau, .min_budget = 1'500}},
      {{.gamma = 0.2f, .tau = tau, .min_budget = 0, .lines = true}, {.gamma = 0.5f, .tau = tau, .min_budget = 0, .lines = true},
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

TEST_CASE("whole lines cover their share of what the representative rows attend", "[backend][flexprefill]") {
  const auto gamma = GENERATE(0.3f, 0.8f, 0.95f);
  const Range range = GENERATE(Range{0, 1'024}, Range{300, 650});
  CAPTURE(gamma, range.first, range.count);
  const auto under_test = backend_under_test();
  const Prompt prompt = noise({.tokens = range.first + range.count, .head_dim = 64, .group = 4});
  const PlacedPrompt placed(*under_test, prompt);
  const FlexPrefillSpec spec{.gamma = gamma, .tau = 0.f, .min_budget = 0, .lines = true};
  const Selection found = select(*under_test, placed, range, spec);
  const PrefillRange rows{.first = range.first, .count = range.count};
  const Attention dense = reference::prefill(prompt, rows);
  PrefillRange masked = rows;
  masked.blocks = found.bits;
  const Attention sparse = reference::prefill(prompt, masked);
  for (std::uint32_t head = 0; head < 4; ++head) {
    CAPTURE(head);
    double coverage = 0.0;
    for (std::uint32_t i = range.count - kPrefillBlock; i < range.count; ++i) {
      coverage += std::exp(sparse.lse[i * 4 + head] - dense.lse[i * 4 + head]) / kPrefillBlock;
    }
    REQUIRE(coverage >= static_cast<double>(gamma) - 1e-3);
  }
}

TEST_CASE("attention to the chosen blocks is off by no more than what they leave out", "[backend][flexprefill]") {
  const bool designed = GENERATE(false, true);
  CAPTURE(designed);
  const auto under_test = backend_under_test();
  const Prompt prompt = designed ? patterns(900, 16, DType::bf16) : noise({.tokens = 900, .head_dim = 64, .group = 5});
  const PlacedPrompt placed(*under_test, prompt);
  const PrefillRange range{.first = 190, .count = 710};
  const OwnTask own(*under_test, placed, {.first = range.first, .count = range.count});
  const auto out = under_test->array(std::size_t{range.count} * 5 * 64, kNotANumber);
  under_test->backend().select_blocks({&own.task, 1}, {.gamma = 0.8f, .min_budget = 128}, placed.strides, placed.shape,
                                      under_test->stream());
  const PrefillTask task{.q = placed.row(range.first),
                         .kv = placed.kv,
                         .first = range.first,
                         .count = range.count,
                         .out = reinterpret_cast<std::byte*>(out.data()),
                         .blocks = own.task.blocks};
  under_test->backend().prefill({&task, 1}, placed.strides, placed.shape, under_test->stream());
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

TEST_CASE("choices for several chunks at once are those of each alone, every time", "[backend][flexprefill]") {
  const auto under_test = backend_under_test();
  const Prompt prompt = noise({.tokens = 1'400, .head_dim = 128, .group = 4});
  const PlacedPrompt placed(*under_test, prompt);
  const FlexPrefillSpec spec{.gamma = 0.8f, .min_budget = 128};
  const std::vector<Range> ranges{{0, 1'400}, {700, 0}, {900, 500}, {1'399, 1}, {64, 64}};
  std::vector<OwnTask> own;
  std::vector<SelectBlocksTask> tasks;
  for (const Range& range : ranges) tasks.push_back(own.emplace_back(*under_test, placed, range).task);
  for (int again = 0; again < 3; ++again) {
    under_test->backend().select_blocks(tasks, spec, placed.strides, placed.shape, under_test->stream());
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
  under_test->backend().select_blocks({}, spec, placed.strides, placed.shape, under_test->stream());
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
    for (const std::vector<double>* part : {&from.columns, &from.diagonals, &from.column_blocks, &from.offset_blocks, &from.pooled}) {
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
