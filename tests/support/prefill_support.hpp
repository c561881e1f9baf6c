#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <span>
#include <vector>

#include "tests/support/catch.hpp"
#include "tests/support/prompt.hpp"
#include "tests/support/random.hpp"
#include "tests/support/stages_under_test.hpp"

/// What cases of a chunk's attention share.
namespace sluice::test::prefills {

struct Outputs {
  Outputs(StagesUnderTest& under_test, const Prompt& prompt, std::uint32_t count)
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

inline PrefillTask task_of(StagesUnderTest& under_test, const PlacedPrompt& placed, const PrefillRange& range,
                           Outputs& to) {
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

inline void run(StagesUnderTest& under_test, const PlacedPrompt& placed, std::span<const PrefillTask> tasks) {
  under_test.stages().prefill(tasks, placed.strides, placed.shape, under_test.stream());
  under_test.finish();
}

/// The range cut at `cuts`, one window after the other.
inline void run_windows(StagesUnderTest& under_test, const PlacedPrompt& placed, const PrefillRange& range,
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
inline double within(const Prompt& prompt) {
  const DType dtype = prompt.kv().options().dtype;
  return prompt.q_dtype() != dtype ? 2e-4 : dtype == DType::f16 ? 1e-3 : 5e-3;
}

inline void require_close(const Outputs& found, const Attention& expected, double limit) {
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
    if (lse == -INFINITY) {
      REQUIRE(found.lse[row] == -INFINITY);
    } else {
      REQUIRE(std::abs(found.lse[row] - lse) <= limit * std::max(1.0, std::abs(lse)));
    }
  }
  REQUIRE(std::isnan(found.out.back()));
  REQUIRE(std::isnan(found.lse.back()));
}

enum class Bits { none, diagonal, random, column };

inline std::vector<std::uint32_t> block_bits(const Prompt& prompt, std::uint32_t first, Bits kind) {
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

}  // namespace sluice::test::prefills
