#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <numbers>
#include <vector>

#include "sluice/step/prefill_choice.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/prompt.hpp"
#include "tests/support/random.hpp"
#include "tests/support/stages_under_test.hpp"

/// What the cases of FlexPrefill's choice of blocks share.
namespace sluice::test {

inline constexpr std::uint32_t kUntouched = 0xabcd1234u;

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
  OwnTask(StagesUnderTest& under_test, const PlacedPrompt& placed, Range range)
      : shape(range.first, range.count),
        bits(under_test.array(shape.size(placed.shape.group()) + 1, kUntouched)),
        choices(under_test.array<PrefillChoice>(placed.shape.group())) {
    const std::uint64_t scratch =
        under_test.stages().select_blocks_scratch_bytes(range.first, range.count, placed.shape);
    task = {.q = placed.row(range.first),
            .kv = placed.kv,
            .first = range.first,
            .count = range.count,
            .blocks = bits.data(),
            .choices = choices.data(),
            .scratch = under_test.scratch(scratch)};
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

inline PrefillSpec flexprefill(const FlexPrefillSpec& flex) { return {.mode = PrefillMode::flexprefill, .flex = flex}; }

inline Selection select(StagesUnderTest& under_test, const PlacedPrompt& placed, Range range, const PrefillSpec& spec) {
  const OwnTask own(under_test, placed, range);
  under_test.stages().select_blocks({&own.task, 1}, spec, placed.strides, placed.shape, under_test.stream());
  under_test.finish();
  return own.result();
}

inline Selection select(StagesUnderTest& under_test, const PlacedPrompt& placed, Range range,
                        const FlexPrefillSpec& flex) {
  return select(under_test, placed, range, flexprefill(flex));
}

/// A head keeps the pairs of a query and a key block that are sure, and only possible ones: [row][block]. Returns how
/// many the reference left open.
template <class Mask>
std::uint64_t require_pairs(const Mask& sure, const Mask& possible, const Selection& found, std::uint32_t head) {
  std::uint64_t open = 0;
  for (std::uint32_t row = 0; row < found.shape.rows; ++row) {
    for (std::uint32_t block = 0; block <= found.shape.top + row; ++block) {
      CAPTURE(row, block);
      const bool kept = found.kept(head, row, block);
      if (sure[row][block] != 0 && !kept) FAIL("a sure pair is missing");
      if (possible[row][block] == 0 && kept) FAIL("an impossible pair is kept");
      open += sure[row][block] != possible[row][block] ? 1u : 0u;
    }
  }
  return open;
}

/// What holds for every choice, whatever was rounded.
inline void require_sound(const Selection& found, Range range, const FlexPrefillSpec& spec) {
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

inline constexpr std::uint32_t kColumn = 700;
inline constexpr std::uint32_t kTopics = 4;
inline constexpr std::uint32_t kTopic = 1;  ///< of blocks 1, 5, 9, ...

/// Heads of every kind: 0 asks for key 700, 1 for the key 256 tokens ago, 2 for that 300 ago, 3 for all keys of the
/// blocks of one topic, 4 for nothing.
inline Prompt patterns(std::uint32_t tokens, std::uint32_t page_tokens, DType dtype) {
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
inline Prompt noise(const ProblemOptions& options, DType q_dtype = DType::f32) {
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

}  // namespace sluice::test
