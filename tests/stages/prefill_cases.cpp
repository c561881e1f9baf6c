// Attention of a prompt's chunk: windows of keys and masks of blocks, on any device.

#include <ostream>
#include <vector>

#include "tests/support/prefill_support.hpp"
#include "tests/support/sanitized.hpp"

namespace sluice::test {
namespace {

using namespace prefills;

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

TEST_CASE("prefill of a chunk that begins anywhere, and its log-sum-exp", "[stages][prefill][threads]") {
  const Case c = GENERATE(from_range(kCases), Case{333, 70, 3, 96, 16, DType::fp8_e4m3, DType::f32},
                          Case{290, 129, 8, 128, 8, DType::fp8_e4m3, DType::bf16});
  CAPTURE(c);
  const auto under_test = stages_under_test();
  const Prompt prompt = prompt_of(c);
  if (!under_test->supports(prompt.kv().shape(), prompt.kv().layout())) return;
  const PlacedPrompt placed(*under_test, prompt);
  const PrefillRange range{.first = c.first, .count = c.tokens - c.first};
  Outputs found(*under_test, prompt, range.count);
  const PrefillTask task = task_of(*under_test, placed, range, found);
  run(*under_test, placed, {&task, 1});
  require_close(found, reference::prefill(prompt, range), within(prompt));
}

TEST_CASE("prefill attends a window of keys that begins late and ends early", "[stages][prefill]") {
  // Parts: a tail, a middle part, and one that ends inside a page.
  const auto [c, part] = GENERATE(grid(kCases, std::array{0, 1, 2}));
  CAPTURE(c, part);
  const auto under_test = stages_under_test();
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

TEST_CASE("prefill over windows equals prefill in one piece", "[stages][prefill]") {
  const auto [c, masked] = GENERATE(grid(kCases, std::array{false, true}));
  CAPTURE(c, masked);
  const auto under_test = stages_under_test();
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

TEST_CASE("prefill attends the newest keys within reach, in one piece or over windows", "[stages][prefill]") {
  const auto [c, reach] = GENERATE(grid(kCases, std::array{1u, 40u, 128u, 211u, 5'000u}));
  CAPTURE(c, reach);
  const auto under_test = stages_under_test();
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

TEST_CASE("prefill with a scale and a soft-cap, with and without a reach", "[stages][prefill]") {
  const auto [c, softcap, reach] = GENERATE(grid(kCases, std::array{0.f, 0.7f, 30.f}, std::array{0u, 77u}));
  CAPTURE(c, softcap, reach);
  const auto under_test = stages_under_test();
  const Prompt prompt = prompt_of(c, 0.3f, softcap);
  const PlacedPrompt placed(*under_test, prompt);
  const PrefillRange range{.first = c.first, .count = c.tokens - c.first, .reach = reach};
  Outputs found(*under_test, prompt, range.count);
  const PrefillTask task = task_of(*under_test, placed, range, found);
  run(*under_test, placed, {&task, 1});
  // Scores of the first are longer than others are tested with.
  require_close(found, reference::prefill(prompt, range), 4 * within(prompt));
}

TEST_CASE("prefill attends the blocks that are named and no others", "[stages][prefill]") {
  const auto [c, kind] = GENERATE(grid(kCases, std::array{Bits::none, Bits::diagonal, Bits::random, Bits::column}));
  CAPTURE(c, static_cast<int>(kind));
  const auto under_test = stages_under_test();
  const Prompt prompt = prompt_of(c);
  const PlacedPrompt placed(*under_test, prompt);
  const std::vector<std::uint32_t> bits = block_bits(prompt, c.first, kind);
  const PrefillRange range{.first = c.first, .count = c.tokens - c.first, .blocks = bits};
  Outputs found(*under_test, prompt, range.count);
  const PrefillTask task = task_of(*under_test, placed, range, found);
  run(*under_test, placed, {&task, 1});
  require_close(found, reference::prefill(prompt, range), within(prompt));
}

}  // namespace sluice::test
