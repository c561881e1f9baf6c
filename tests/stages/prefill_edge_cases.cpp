// Attention of a prompt's chunk at its edges, and of several chunks in one call, on any device.

#include <cmath>
#include <vector>

#include "tests/support/prefill_support.hpp"
#include "tests/support/sanitized.hpp"

namespace sluice::test {

using namespace prefills;

TEST_CASE("bits beyond a query block's own and beyond the keys mean nothing", "[stages][prefill]") {
  const auto under_test = stages_under_test();
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

TEST_CASE("keys of blocks that are not named are not looked at", "[stages][prefill]") {
  const auto under_test = stages_under_test();
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

TEST_CASE("prefill with a key that outweighs all others", "[stages][prefill]") {
  const auto [outlier, windows] = GENERATE(grid(std::array{8.0, 60.0}, std::array{false, true}));
  CAPTURE(outlier, windows);
  const auto under_test = stages_under_test();
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
          "[stages][prefill][threads]") {
  const auto under_test = stages_under_test();
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

TEST_CASE("prefill without a log-sum-exp, of no task and of no token", "[stages][prefill]") {
  const auto under_test = stages_under_test();
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
