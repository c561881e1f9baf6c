// Attention of a prompt's chunk: windows of keys and masks of blocks, on any backend.

#include <cmath>
#include <limits>
#include <vector>

#include "tests/support/backend_under_test.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/prompt.hpp"
#include "tests/support/random.hpp"
#include "tests/support/sanitized.hpp"

namespace sluice::test {
namespace {

constexpr double kInf = std::numeric_limits<double>::infinity();

struct Case {
  std::uint32_t tokens, first, group, head_dim, page_tokens;
  DType dtype, q_dtype;
};

std::ostream& operator<<(std::ostream& out, const Case& c) {
  return out << c.tokens << " tokens from " << c.first << ", group " << c.group << ", head_dim " << c.head_dim
             << ", pages of " << c.page_tokens << ", " << to_string(c.dtype) << ", queries " << to_string(c.q_dtype);
}

/// One token; inside a page; across blocks; the first block, a later one, and a chunk behind a prefix.
constexpr auto kCases = std::to_array<Case>({
    {1, 0, 1, 64, 16, DType::bf16, DType::f32},     {37, 36, 3, 128, 8, DType::f16, DType::f32},
    {130, 0, 8, 128, 16, DType::bf16, DType::f32},  {300, 127, 2, 64, 32, DType::bf16, DType::bf16},
    {330, 29, 4, 128, 256, DType::f16, DType::f16}, {420, 256, 1, 128, 24, DType::bf16, DType::f16},
    {290, 129, 32, 64, 16, DType::f16, DType::f32}, {700, 383, 4, 64, 64, DType::bf16, DType::f32},
    {270, 3, 5, 128, 40, DType::bf16, DType::bf16}, {333, 70, 3, 96, 16, DType::bf16, DType::bf16},
    {290, 129, 32, 96, 8, DType::f16, DType::f32},  {301, 40, 4, 192, 24, DType::f16, DType::f16},
    {270, 3, 5, 192, 40, DType::bf16, DType::f32},  {420, 256, 1, 256, 256, DType::bf16, DType::bf16},
    {333, 70, 8, 256, 16, DType::f16, DType::f32},  {130, 0, 3, 256, 8, DType::f16, DType::f16}});

struct Outputs {
  Outputs(BackendUnderTest& under_test, const Prompt& prompt, std::uint32_t count)
      : rows(std::size_t{count} * prompt.group()),
        head_dim(prompt.head_dim()),
        out(under_test.array(rows * head_dim + 1, kNotANumber)),
        lse(under_test.array(rows + 1, kNotANumber)),
        so_far(under_test.array(rows * head_dim + 1, kNotANumber)) {}
  std::size_t rows;
  std::uint32_t head_dim;
  std::span<float> out;
  std::span<float> lse;
  std::span<float> so_far;
};

PrefillTask task_of(BackendUnderTest& under_test, const PlacedPrompt& placed, const PrefillRange& range, Outputs& to) {
  PrefillTask task{.q = placed.row(range.first),
                   .kv = placed.kv,
                   .first = range.first,
                   .count = range.count,
                   .out = reinterpret_cast<std::byte*>(to.out.data()),
                   .key_begin = range.key_begin,
                   .key_end = range.key_end,
                   .reach = range.reach,
                   .lse = to.lse.data()};
  task.kv.frames += range.key_begin / task.kv.layout.page_tokens;
  if (!range.blocks.empty()) task.blocks = under_test.copy_of(range.blocks).data();
  return task;
}

void run(BackendUnderTest& under_test, const PlacedPrompt& placed, std::span<const PrefillTask> tasks) {
  under_test.backend().prefill(tasks, placed.strides, placed.shape, under_test.stream());
  under_test.finish();
}

/// The range cut at `cuts`, one window after the other.
void run_windows(BackendUnderTest& under_test, const PlacedPrompt& placed, const PrefillRange& range,
                 const std::vector<std::uint32_t>& cuts, Outputs& to) {
  for (std::size_t i = 0; i <= cuts.size(); ++i) {
    PrefillRange window = range;
    if (i != 0) window.key_begin = cuts[i - 1];
    if (i != cuts.size()) window.key_end = cuts[i];
    PrefillTask task = task_of(under_test, placed, window, to);
    task.so_far = to.so_far.data();
    task.first_window = i == 0;
    task.last_window = i == cuts.size();
    run(under_test, placed, {&task, 1});
    if (i != cuts.size()) REQUIRE(std::isnan(to.out[0]));
  }
  REQUIRE(std::isnan(to.so_far.back()));
}

/// A device multiplies in the KV dtype: with queries of that dtype it rounds the weights to it, otherwise it keeps the
/// order of float32.
double within(const Prompt& prompt) {
  const DType dtype = prompt.kv().options().dtype;
  return prompt.q_dtype() != dtype ? 2e-4 : dtype == DType::f16 ? 1e-3 : 5e-3;
}

void require_close(const Outputs& found, const Attention& expected, double limit) {
  REQUIRE(found.lse.size() == expected.lse.size() + 1);
  for (std::size_t row = 0; row < found.rows; ++row) {
    CAPTURE(row);
    double error = 0.0;
    double norm = 0.0;
    for (std::size_t i = row * found.head_dim; i < (row + 1) * found.head_dim; ++i) {
      error += (found.out[i] - expected.out[i]) * (found.out[i] - expected.out[i]);
      norm += expected.out[i] * expected.out[i];
    }
    REQUIRE(std::sqrt(error) <= limit * std::sqrt(norm));  // Exact where no key is attended.
    const double lse = expected.lse[row];
    if (lse == -kInf) {
      REQUIRE(static_cast<double>(found.lse[row]) == -kInf);
    } else {
      REQUIRE(std::abs(found.lse[row] - lse) <= limit * std::max(1.0, std::abs(lse)));
    }
  }
  REQUIRE(std::isnan(found.out.back()));
  REQUIRE(std::isnan(found.lse.back()));
}

enum class Bits { none, diagonal, random, column };

std::vector<std::uint32_t> block_bits(const Prompt& prompt, std::uint32_t first, Bits kind) {
  const BlockBits shape(first, prompt.tokens() - first);
  std::vector<std::uint32_t> bits(shape.size(prompt.group()));
  Random random(17);
  for (std::uint32_t head = 0; head < prompt.group(); ++head) {
    for (std::uint32_t row = 0; row < shape.rows; ++row) {
      const std::uint32_t own = shape.top + row;
      if (kind == Bits::diagonal || (kind == Bits::random && random.below(3) != 0)) shape.set(bits, head, row, own);
      if (kind == Bits::column) shape.set(bits, head, row, 0);
      for (std::uint32_t block = 0; kind == Bits::random && block < own; ++block) {
        if (random.below(2) == 0) shape.set(bits, head, row, block);
      }
    }
  }
  return bits;
}

Prompt prompt_of(const Case& c, float scale = 0.f, float softcap = 0.f) {
  return Prompt({.dtype = c.dtype,
                 .tokens = c.tokens,
                 .head_dim = c.head_dim,
                 .group = c.group,
                 .page_tokens = c.page_tokens,
                 .seed = 40 + c.tokens,
                 .scale = scale,
                 .softcap = softcap},
                c.q_dtype);
}

}  // namespace

TEST_CASE("prefill of a chunk that begins anywhere, and its log-sum-exp", "[backend][prefill][threads]") {
  const Case c = GENERATE(from_range(kCases), Case{333, 70, 3, 96, 16, DType::fp8_e4m3, DType::f32},
                          Case{290, 129, 8, 128, 8, DType::fp8_e4m3, DType::bf16});
  CAPTURE(c);
  const auto under_test = backend_under_test();
  const Prompt prompt = prompt_of(c);
  if (!under_test->supports(prompt.kv().shape(), prompt.kv().layout())) return;
  const PlacedPrompt placed(*under_test, prompt);
  const PrefillRange range{.first = c.first, .count = c.tokens - c.first};
  Outputs found(*under_test, prompt, range.count);
  const PrefillTask task = task_of(*under_test, placed, range, found);
  run(*under_test, placed, {&task, 1});
  require_close(found, reference::prefill(prompt, range), within(prompt));
}

TEST_CASE("prefill attends a window of keys that begins late and ends early", "[backend][prefill]") {
  // Parts: a tail, a middle part, and one that ends inside a page.
  const auto [c, part] = GENERATE(grid(kCases, std::array{0, 1, 2}));
  CAPTURE(c, part);
  const auto under_test = backend_under_test();
  const Prompt prompt = prompt_of(c);
  const PlacedPrompt placed(*under_test, prompt);
  const std::uint32_t third = c.tokens / 3 / c.page_tokens * c.page_tokens;
  const PrefillRange range{.first = c.first,
                           .count = c.tokens - c.first,
                           .key_begin = part == 2 ? 0 : third,
                           .key_end = part == 0 ? kNone : std::max(third, c.tokens - c.tokens / 4)};
  Outputs found(*under_test, prompt, range.count);
  const PrefillTask task = task_of(*under_test, placed, range, found);
  run(*under_test, placed, {&task, 1});
  require_close(found, reference::prefill(prompt, range), within(prompt));
}

TEST_CASE("prefill over windows equals prefill in one piece", "[backend][prefill]") {
  const auto [c, masked] = GENERATE(grid(kCases, std::array{false, true}));
  CAPTURE(c, masked);
  const auto under_test = backend_under_test();
  const Prompt prompt = prompt_of(c);
  const PlacedPrompt placed(*under_test, prompt);
  const std::vector<std::uint32_t> bits =
      masked ? block_bits(prompt, c.first, Bits::random) : std::vector<std::uint32_t>{};
  const PrefillRange range{.first = c.first, .count = c.tokens - c.first, .blocks = bits};
  const Attention expected = reference::prefill(prompt, range);
  const std::uint32_t pages = c.tokens / c.page_tokens;
  for (const std::vector<std::uint32_t>& cuts :
       {std::vector<std::uint32_t>{},
        {pages / 2 * c.page_tokens},
        {pages / 5 * c.page_tokens, pages / 3 * c.page_tokens, pages * 3 / 4 * c.page_tokens, pages * c.page_tokens}}) {
    CAPTURE(cuts);
    Outputs found(*under_test, prompt, range.count);
    run_windows(*under_test, placed, range, cuts, found);
    require_close(found, expected, within(prompt));
  }
}

TEST_CASE("prefill attends the newest keys within reach, in one piece or over windows", "[backend][prefill]") {
  const auto [c, reach] = GENERATE(grid(kCases, std::array{1u, 40u, 128u, 211u, 5'000u}));
  CAPTURE(c, reach);
  const auto under_test = backend_under_test();
  const Prompt prompt = prompt_of(c);
  const PlacedPrompt placed(*under_test, prompt);
  const PrefillRange range{.first = c.first, .count = c.tokens - c.first, .reach = reach};
  const Attention expected = reference::prefill(prompt, range);
  const std::uint32_t pages = c.tokens / c.page_tokens;
  for (const std::vector<std::uint32_t>& cuts :
       {std::vector<std::uint32_t>{},
        {pages / 5 * c.page_tokens, pages / 3 * c.page_tokens, pages * 3 / 4 * c.page_tokens}}) {
    CAPTURE(cuts);
    Outputs found(*under_test, prompt, range.count);
    run_windows(*under_test, placed, range, cuts, found);
    require_close(found, expected, within(prompt));
  }
}

TEST_CASE("prefill with a scale and a soft-cap, with and without a reach", "[backend][prefill]") {
  const auto [c, softcap, reach] = GENERATE(grid(kCases, std::array{0.f, 0.7f, 30.f}, std::array{0u, 77u}));
  CAPTURE(c, softcap, reach);
  const auto under_test = backend_under_test();
  const Prompt prompt = prompt_of(c, 0.3f, softcap);
  const PlacedPrompt placed(*under_test, prompt);
  const PrefillRange range{.first = c.first, .count = c.tokens - c.first, .reach = reach};
  Outputs found(*under_test, prompt, range.count);
  const PrefillTask task = task_of(*under_test, placed, range, found);
  run(*under_test, placed, {&task, 1});
  // Scores of the first are longer than others are tested with.
  require_close(found, reference::prefill(prompt, range), 4 * within(prompt));
}

TEST_CASE("prefill attends the blocks that are named and no others", "[backend][prefill]") {
  const auto [c, kind] = GENERATE(grid(kCases, std::array{Bits::none, Bits::diagonal, Bits::random, Bits::column}));
  CAPTURE(c, static_cast<int>(kind));
  const auto under_test = backend_under_test();
  const Prompt prompt = prompt_of(c);
  const PlacedPrompt placed(*under_test, prompt);
  const std::vector<std::uint32_t> bits = block_bits(prompt, c.first, kind);
  const PrefillRange range{.first = c.first, .count = c.tokens - c.first, .blocks = bits};
  Outputs found(*under_test, prompt, range.count);
  const PrefillTask task = task_of(*under_test, placed, range, found);
  run(*under_test, placed, {&task, 1});
  require_close(found, reference::prefill(prompt, range), within(prompt));
}

TEST_CASE("bits beyond a query block's own and beyond the keys mean nothing", "[backend][prefill]") {
  const auto under_test = backend_under_test();
  const Prompt prompt({.tokens = 300, .head_dim = 64, .group = 2});
  const PlacedPrompt placed(*under_test, prompt);
  const PrefillRange range{.first = 70, .count = 230};
  const std::vector<std::uint32_t> all(BlockBits(range.first, range.count).size(2), ~0u);
  Outputs found(*under_test, prompt, range.count);
  PrefillTask task = task_of(*under_test, placed, range, found);
  task.blocks = under_test->copy_of(all).data();
  run(*under_test, placed, {&task, 1});
  require_close(found, reference::prefill(prompt, range), within(prompt));
}

TEST_CASE("keys of blocks that are not named are not looked at", "[backend][prefill]") {
  const auto under_test = backend_under_test();
  Prompt prompt({.tokens = 400, .head_dim = 64, .group = 4});
  for (std::uint32_t key = 128; key < 256; ++key) prompt.kv().set_k(key, key % 64, std::nan(""));
  const PlacedPrompt placed(*under_test, prompt);
  const PrefillRange all{.first = 256, .count = 144};
  const BlockBits shape(all.first, all.count);
  std::vector<std::uint32_t> bits(shape.size(4));
  for (std::uint32_t head = 0; head < 4; ++head) {
    for (std::uint32_t row = 0; row < shape.rows; ++row) {
      for (const std::uint32_t block : {0u, 2u, 3u}) shape.set(bits, head, row, block);
    }
  }
  PrefillRange range = all;
  range.blocks = bits;
  Outputs found(*under_test, prompt, range.count);
  const PrefillTask task = task_of(*under_test, placed, range, found);
  run(*under_test, placed, {&task, 1});
  require_close(found, reference::prefill(prompt, range), within(prompt));
}

TEST_CASE("prefill with a key that outweighs all others", "[backend][prefill]") {
  const auto [outlier, windows] = GENERATE(grid(std::array{8.0, 60.0}, std::array{false, true}));
  CAPTURE(outlier, windows);
  const auto under_test = backend_under_test();
  const Prompt prompt({.tokens = 320, .head_dim = 128, .group = 4, .outlier = outlier}, DType::f32);
  const PlacedPrompt placed(*under_test, prompt);
  const PrefillRange range{.first = 150, .count = 170};
  Outputs found(*under_test, prompt, range.count);
  run_windows(*under_test, placed, range, windows ? std::vector<std::uint32_t>{112, 208} : std::vector<std::uint32_t>{},
              found);
  // A weight is off by as much as its score: hundreds, where the outlier rules.
  require_close(found, reference::prefill(prompt, range), outlier * 2e-4);
}

TEST_CASE("prefill of several tasks, of unequal length and with masks of their own, in one call",
          "[backend][prefill][threads]") {
  const auto under_test = backend_under_test();
  const DType dtype = GENERATE(DType::bf16, DType::f16);
  CAPTURE(to_string(dtype));
  const Prompt prompt({.dtype = dtype, .tokens = 410, .head_dim = 64, .group = 4});
  const PlacedPrompt placed(*under_test, prompt);
  std::vector<PrefillRange> ranges{
      {.first = 21, .count = 389}, {.first = 21},
      {.first = 300, .count = 1},  {.first = 130, .count = 280},
      {.first = 0, .count = 140},  {.first = 200, .count = 90, .key_begin = 64, .key_end = 160}};
  const std::vector<std::uint32_t> random = block_bits(prompt, 130, Bits::random);
  ranges[3].blocks = random;
  std::vector<Outputs> outputs;
  std::vector<PrefillTask> tasks;
  for (const PrefillRange& range : ranges) {
    outputs.emplace_back(*under_test, prompt, range.count);
    tasks.push_back(task_of(*under_test, placed, range, outputs.back()));
  }
  run(*under_test, placed, tasks);
  for (std::size_t i = 0; i < ranges.size(); ++i) {
    CAPTURE(i);
    require_close(outputs[i], reference::prefill(prompt, ranges[i]), within(prompt));
  }
}

TEST_CASE("prefill without a log-sum-exp, of no task and of no token", "[backend][prefill]") {
  const auto under_test = backend_under_test();
  const Prompt prompt({.tokens = 140, .head_dim = 64, .group = 2});
  const PlacedPrompt placed(*under_test, prompt);
  run(*under_test, placed, {});
  for (const std::uint32_t count : {0u, 40u}) {
    Outputs found(*under_test, prompt, count);
    PrefillTask task = task_of(*under_test, placed, {.first = 100, .count = count}, found);
    task.lse = nullptr;
    run(*under_test, placed, {&task, 1});
    REQUIRE(std::isnan(found.lse[0]));
    REQUIRE(std::isnan(found.out[0]) == (count == 0));
    REQUIRE(std::isnan(found.out.back()));
  }
}

}  // namespace sluice::test
