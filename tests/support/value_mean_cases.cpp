// Means of pages' values, on any backend.

#include <cmath>
#include <vector>

#include "tests/support/backend_under_test.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/random.hpp"
#include "tests/support/reference.hpp"
#include "tests/support/sanitized.hpp"

namespace sluice::test {
namespace {

constexpr std::uint32_t kPages = 67;  // More than one launch has room for.
constexpr std::byte kUntouched{0x5a};

/// A value of channel `c` of page `page`: of very different sizes, of both signs, and here and there no number.
double value_at(Random& random, std::uint32_t page, std::uint32_t c) {
  if (page % 4 == 1 && random.below(2000) == 0) return kNotANumber;
  const double large = c % 17 == 3 ? 300.0 : 1.0;
  return large * (random.normal() + (page % 3 == 0 ? 2.0 : 0.0));
}

void fill_values(std::byte* page, const PageLayout& layout, std::uint32_t number, Random& random) {
  std::vector<double> row(layout.head_dim);
  for (std::uint32_t r = 0; r < layout.page_tokens; ++r) {
    for (std::uint32_t c = 0; c < layout.head_dim; ++c) row[c] = value_at(random, number, c);
    auto* const scales = reinterpret_cast<float*>(page + layout.scales_offset()) + 2 * r;
    store_row(page + layout.half_bytes() + r * layout.row_bytes(), layout.scaled() ? scales + 1 : nullptr, layout.dtype,
              row);
  }
}

/// In float64, of what a reader of the page sees.
std::vector<double> mean_of(const std::byte* page, const PageLayout& layout) {
  std::vector<double> sum(layout.head_dim, 0.0);
  for (std::uint32_t r = 0; r < layout.page_tokens; ++r) {
    const auto* const scales = reinterpret_cast<const float*>(page + layout.scales_offset()) + 2 * r;
    const auto row = load_row(page + layout.half_bytes() + r * layout.row_bytes(),
                              layout.scaled() ? scales + 1 : nullptr, layout.dtype, layout.head_dim);
    for (std::uint32_t c = 0; c < layout.head_dim; ++c) sum[c] += row[c];
  }
  for (double& x : sum) x /= layout.page_tokens;
  return sum;
}

}  // namespace

TEST_CASE("the mean of a page's values, whatever their size, and of no number none", "[backend][values]") {
  const auto [dtype, head_dim, page_tokens] =
      GENERATE(grid(std::array{DType::f32, DType::f16, DType::bf16, DType::fp8_e4m3},
                    std::array{64u, 80u, 96u, 128u, 192u, 256u}, std::array{8u, 16u, 256u}));
  CAPTURE(to_string(dtype), head_dim, page_tokens);
  const auto under_test = backend_under_test();
  const PageLayout layout{.page_tokens = page_tokens, .head_dim = head_dim, .dtype = dtype};
  const AttentionShape shape{.layers = 1, .q_heads = 1, .kv_heads = 1, .head_dim = head_dim};
  if (!under_test->supports(shape, layout)) return;
  const PageLayout near = layout.near();
  Random random(head_dim + page_tokens);
  const auto pages = under_test->array(kPages * layout.page_bytes(), std::byte{0xff});  // Keys are no numbers.
  const auto means = under_test->array(std::uint64_t{2} * kPages * near.row_bytes(), kUntouched);
  std::vector<ValueMeanTask> tasks;
  for (std::uint32_t i = 0; i < kPages; ++i) {
    std::byte* const page = pages.data() + i * layout.page_bytes();
    fill_values(page, layout, i, random);
    tasks.push_back({.page = page, .out = means.data() + std::uint64_t{2} * i * near.row_bytes()});
  }
  under_test->backend().mean_values(tasks, layout, under_test->stream());
  under_test->finish();
  const double step = near.dtype == DType::f32 ? 4e-6 : near.dtype == DType::f16 ? 1.0 / 1024 : 1.0 / 128;
  for (const ValueMeanTask& task : tasks) {
    const std::vector<double> want = mean_of(task.page, layout);
    for (std::uint32_t c = 0; c < head_dim; ++c) {
      CAPTURE(c);
      const double got = load_element(task.out, near.dtype, c);
      REQUIRE(std::isnan(got) == std::isnan(want[c]));
      if (!std::isnan(got))
        REQUIRE(std::abs(got - want[c]) <= step * std::max(std::abs(want[c]), c % 17 == 3 ? 30.0 : 0.1));
    }
    for (std::uint64_t b = near.row_bytes(); b < 2 * near.row_bytes(); ++b) REQUIRE(task.out[b] == kUntouched);
  }
}

}  // namespace sluice::test
