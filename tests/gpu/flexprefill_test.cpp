// FlexPrefill's choice over as many keys as fill a GPU, in device memory, against the CPU's.

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdlib>
#include <limits>
#include <vector>

#include "cpu/machine/topology.hpp"
#include "cpu/stages/stages.hpp"
#include "sluice/error.hpp"
#include "sluice/step/prefill_choice.hpp"
#include "tests/gpu/gpu_support.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/prompt.hpp"

namespace sluice::test {
namespace {

struct Range {
  std::uint32_t first = 0;
  std::uint32_t count = 0;
};

struct Choice {
  std::vector<std::uint32_t> bits;
  std::vector<PrefillChoice> heads;
};

/// Four heads: two that attend everywhere, one a column and one a diagonal.
Prompt long_prompt(std::uint32_t tokens, DType dtype, std::uint32_t head_dim, std::uint32_t page_tokens) {
  Prompt prompt({.dtype = dtype, .tokens = tokens, .head_dim = head_dim, .group = 4, .page_tokens = page_tokens},
                dtype);
  for (std::uint32_t token = 0; token < tokens; ++token) {
    for (std::uint32_t c = 0; c < head_dim; ++c) prompt.set_q(token, 3, c, prompt.q(token, 3, c) * 2.0);
    prompt.ask_for(token, 1, std::min(token, 777u), 12.0);
    prompt.ask_for(token, 2, token - std::min(token, 1'000u), 12.0);
  }
  return prompt;
}

SelectBlocksTask task_over(const Prompt& prompt, const std::byte* q, Range range) {
  return {.q = q + range.first * prompt.token_stride() * bytes_of(prompt.q_dtype()),
          .kv = prompt.kv().kv(),
          .first = range.first,
          .count = range.count};
}

PrefillShape strides_of(const Prompt& prompt) {
  return {.q_dtype = prompt.q_dtype(), .q_token_stride = prompt.token_stride(), .q_head_stride = prompt.head_stride()};
}

/// All ranges in one call. Scratch memory is full of `garbage`.
std::vector<Choice> on_gpu(const Prompt& prompt, const std::vector<Range>& ranges, const PrefillSpec& spec,
                           std::byte garbage) {
  GpuUnderTest under_test;
  const AttentionShape shape = prompt.kv().shape();
  const std::byte* const q = under_test.on_device(prompt.queries()).data();
  std::byte* const base = under_test.on_device(prompt.kv().memory()).data();
  std::vector<std::span<std::uint32_t>> bits;
  std::vector<std::span<PrefillChoice>> heads;
  std::vector<SelectBlocksTask> tasks;
  for (const Range& range : ranges) {
    const std::vector<std::byte> scratch(
        under_test.stages().select_blocks_scratch_bytes(range.first, range.count, shape), garbage);
    const std::vector<std::uint32_t> unwritten(BlockBits(range.first, range.count).size(shape.group()), 0xa5a5'a5a5u);
    bits.push_back(under_test.on_device(std::span(unwritten)));
    heads.push_back(under_test.on_device(std::span<const PrefillChoice>(std::vector<PrefillChoice>(shape.group()))));
    SelectBlocksTask& task = tasks.emplace_back(task_over(prompt, q, range));
    task.kv.base = base;
    task.blocks = bits.back().data();
    task.choices = heads.back().data();
    task.scratch = under_test.on_device(std::span(scratch)).data();
  }
  under_test.stages().select_blocks(tasks, spec, strides_of(prompt), shape, under_test.stream());
  std::vector<Choice> choices;
  for (std::size_t i = 0; i < ranges.size(); ++i) {
    choices.push_back({.bits = under_test.from_device(std::span<const std::uint32_t>(bits[i])),
                       .heads = under_test.from_device(std::span<const PrefillChoice>(heads[i]))});
  }
  return choices;
}

Choice on_cpu(const Prompt& prompt, Range range, const PrefillSpec& spec) {
  static const cpu::Topology topology;
  static const cpu::Workers workers(topology, {});
  const AttentionShape shape = prompt.kv().shape();
  Choice choice{.bits = std::vector<std::uint32_t>(BlockBits(range.first, range.count).size(shape.group())),
                .heads = std::vector<PrefillChoice>(shape.group())};
  SelectBlocksTask task = task_over(prompt, prompt.queries().data(), range);
  task.blocks = choice.bits.data();
  task.choices = choice.heads.data();
  cpu::select_blocks({.workers = workers}, {&task, 1}, spec, strides_of(prompt), shape);
  return choice;
}

PrefillSpec flexprefill(const FlexPrefillSpec& flex) { return {.mode = PrefillMode::flexprefill, .flex = flex}; }

PrefillSpec minference(HeadPattern pattern) {
  return {.mode = PrefillMode::minference,
          .minference = {.pattern = pattern, .columns = 700, .diagonals = 1'500, .blocks = 3'000}};
}

std::uint64_t differing(const std::vector<std::uint32_t>& a, const std::vector<std::uint32_t>& b) {
  std::uint64_t bits = 0;
  for (std::size_t i = 0; i < a.size(); ++i) bits += static_cast<std::uint64_t>(std::popcount(a[i] ^ b[i]));
  return bits;
}

std::int64_t gap(std::uint32_t a, std::uint32_t b) { return std::abs(std::int64_t{a} - std::int64_t{b}); }

}  // namespace

TEST_CASE("the GPU chooses blocks of a long prompt as the CPU does", "[gpu][flexprefill]") {
  const auto spec = GENERATE(
      flexprefill({.gamma = 0.9f, .min_budget = 512}), flexprefill({.gamma = 0.7f, .tau = 1.f}),
      flexprefill({.gamma = 0.5f, .tau = 0.f, .min_budget = 0, .max_budget = 4'096}),
      flexprefill({.gamma = 0.3f, .tau = 0.f, .min_budget = 0, .lines = true}),
      PrefillSpec{.mode = PrefillMode::streaming, .streaming = {.sinks = 1'000, .window = 5'000}},
      minference(HeadPattern::vertical_slash), minference(HeadPattern::block_sparse), minference(HeadPattern::best));
  const auto dtype = GENERATE(DType::bf16, DType::f16);
  const auto page_tokens = GENERATE(24u, 32u);  // Without and with tensor copies, where there are these.
  CAPTURE(static_cast<int>(spec.mode), static_cast<int>(spec.minference.pattern), spec.flex.gamma, spec.flex.tau,
          spec.flex.lines, to_string(dtype), page_tokens);
  const Prompt prompt = long_prompt(20'000, dtype, dtype == DType::bf16 ? 128 : 64, page_tokens);
  const std::vector<Range> ranges{{11'900, 8'100}, {0, 3'000}};
  const std::vector<Choice> found = on_gpu(prompt, ranges, spec, std::byte{0xff});
  for (std::size_t i = 0; i < ranges.size(); ++i) {
    const Choice expected = on_cpu(prompt, ranges[i], spec);
    std::uint64_t causal = 0;
    for (std::uint32_t head = 0; head < 4; ++head) {
      CAPTURE(i, head);
      const PrefillChoice& a = found[i].heads[head];
      const PrefillChoice& b = expected.heads[head];
      CHECK(std::abs(a.divergence - b.divergence) <= 1e-3f);
      CHECK(a.query_aware == b.query_aware);
      CHECK(a.pattern == b.pattern);
      CHECK(gap(a.columns, b.columns) <= 1);
      CHECK(gap(a.diagonals, b.diagonals) <= 1);
      CHECK(a.causal == b.causal);
      causal += a.causal;
    }
    CAPTURE(i, causal);
    // Equal but for blocks whose sums are nearly equal, of which the last one chosen may be another.
    CHECK(differing(found[i].bits, expected.bits) <= causal / 50);
  }
}

TEST_CASE("the GPU's choice of blocks is the same bits every time, whatever its scratch memory held",
          "[gpu][flexprefill]") {
  const bool lines = GENERATE(false, true);
  const auto page_tokens = GENERATE(24u, 32u);
  const Prompt prompt = long_prompt(9'001, DType::bf16, 128, page_tokens);
  const std::vector<Range> ranges{{4'000, 5'001}, {9'000, 1}, {100, 300}};
  const PrefillSpec spec = flexprefill({.gamma = 0.8f, .min_budget = 256, .lines = lines});
  const std::vector<Choice> once = on_gpu(prompt, ranges, spec, std::byte{0xff});
  const std::vector<Choice> again = on_gpu(prompt, {ranges.rbegin(), ranges.rend()}, spec, std::byte{0x3f});
  for (std::size_t i = 0; i < ranges.size(); ++i) {
    CAPTURE(i, lines);
    const Choice& other = again[ranges.size() - 1 - i];
    REQUIRE(once[i].bits == other.bits);
    for (std::uint32_t head = 0; head < 4; ++head) {
      REQUIRE(once[i].heads[head].divergence == other.heads[head].divergence);
      REQUIRE(once[i].heads[head].columns == other.heads[head].columns);
      REQUIRE(once[i].heads[head].diagonals == other.heads[head].diagonals);
      REQUIRE(once[i].heads[head].kept == other.heads[head].kept);
    }
  }
}

TEST_CASE("the GPU's choice of blocks counts equal weights, the lower index first", "[gpu][flexprefill]") {
  // Queries of zero weigh every key alike; the keys before the representative rows are exactly tied.
  const bool lines = GENERATE(false, true);
  constexpr std::uint32_t kTokens = 4'096;
  Prompt prompt({.tokens = kTokens, .head_dim = 64, .group = 1}, DType::bf16);
  for (std::uint32_t token = 0; token < kTokens; ++token) {
    for (std::uint32_t c = 0; c < 64; ++c) prompt.set_q(token, 0, c, 0.0);
  }
  const std::vector<Range> ranges{{0, kTokens}};
  const PrefillSpec spec = flexprefill({.gamma = 0.5f, .tau = 0.f, .min_budget = 0, .lines = lines});
  const Choice found = on_gpu(prompt, ranges, spec, std::byte{0xff}).front();
  // Half of the keys weigh half, up to those that only some of the 128 rows see.
  const std::uint32_t half = kTokens / kPrefillBlock / 2;
  CHECK(gap(found.heads[0].columns, half) <= 1);
  const BlockBits shape(0, kTokens);
  for (std::uint32_t block = 0; block + 2 < half; ++block) CHECK(shape.get(found.bits, 0, shape.rows - 1, block));
}

TEST_CASE("the GPU refuses to choose among more keys than it can count", "[gpu][flexprefill]") {
  GpuUnderTest under_test;
  const Prompt prompt({.tokens = 16, .head_dim = 64, .group = 1});
  const PlacedPrompt placed(under_test, prompt);
  const SelectBlocksTask task{.q = placed.q, .kv = placed.kv, .first = 1u << 20, .count = 1};
  try {
    under_test.stages().select_blocks({&task, 1}, {}, placed.strides, placed.shape, under_test.stream());
    FAIL("was accepted");
  } catch (const Error& error) {
    REQUIRE(error.code() == Errc::unsupported);
  }
}

}  // namespace sluice::test
