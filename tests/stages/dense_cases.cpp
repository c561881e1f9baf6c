// Stages that move, convert and select, on any device.

#include <cmath>
#include <vector>

#include "tests/support/catch.hpp"
#include "tests/support/random.hpp"
#include "tests/support/reference.hpp"
#include "tests/support/sanitized.hpp"
#include "tests/support/stages_under_test.hpp"

namespace sluice::test {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr std::uint32_t kUntouched = 777'777;

/// Numbers with many ties, mixed with everything that is hard to order. `distinct` 1: nothing but ties.
void fill_with_hard_values(std::span<float> values, std::uint32_t distinct, std::uint64_t seed) {
  Random random(seed);
  for (float& value : values) {
    const float special[] = {kNotANumber, -kNotANumber, kInf, -kInf, 0.f, -0.f, 1e-45f, -1e-45f};
    const float plain = static_cast<float>(random.below(distinct)) - 2.f;
    value = random.below(10) == 0 ? special[random.below(8)] : plain;
  }
}

/// Rows of a caller's K and V tensors with an odd stride.
struct Rows {
  Rows(StagesUnderTest& under_test, DType dtype, std::uint32_t count, std::uint64_t row_stride, std::uint64_t seed)
      : stride(row_stride),
        k(under_test.array<std::byte>(count * row_stride * bytes_of(dtype))),
        v(under_test.array<std::byte>(k.size())) {
    Random random(seed);
    for (std::size_t i = 0; i < count * stride; ++i) {
      store_element(k.data(), dtype, i, random.normal() * 100.0);
      store_element(v.data(), dtype, i, random.normal() * 1e-6);
    }
  }
  std::uint64_t stride;
  std::span<std::byte> k;
  std::span<std::byte> v;
};

/// Half 0 or 1 of a token of a page: its key, its value.
void store_half(std::byte* page, const PageLayout& layout, std::uint32_t row, std::uint32_t half, const std::byte* from,
                DType dtype) {
  auto* const scales = reinterpret_cast<float*>(page + layout.scales_offset()) + 2 * row;
  store_row(page + half * layout.half_bytes() + row * layout.row_bytes(), layout.scaled() ? scales + half : nullptr,
            layout.dtype, load_row(from, nullptr, dtype, layout.head_dim));
}

}  // namespace

TEST_CASE("appending converts rows and touches no others", "[stages]") {
  const auto [from, to, head_dim, odd, tasks] = GENERATE(grid(
      std::array{DType::f32, DType::f16, DType::bf16}, std::array{DType::f32, DType::f16, DType::bf16, DType::fp8_e4m3},
      std::array{64u, 80u, 96u, 128u, 192u, 256u}, std::array{0u, 7u}, std::array{1u, 70u}));  // odd == 0: aligned rows
  CAPTURE(to_string(from), to_string(to), head_dim, odd, tasks);
  const auto under_test = stages_under_test();
  const PageLayout layout{.page_tokens = 16, .head_dim = head_dim, .dtype = to};
  if (!under_test->supports({.layers = 1, .q_heads = 1, .kv_heads = 1, .head_dim = head_dim}, layout)) return;
  constexpr std::uint32_t kMost = 5;
  const Rows rows(*under_test, from, kMost, 2 * head_dim + odd, 8);
  const std::size_t row_bytes = rows.stride * bytes_of(from);

  const auto pages = under_test->array(tasks * layout.page_bytes(), std::byte{0x5a});
  std::vector<std::byte> expected(pages.begin(), pages.end());
  std::vector<tools::AppendTask> list;
  for (std::uint32_t i = 0; i < tasks; ++i) {
    const std::size_t page = i * layout.page_bytes();
    const std::uint32_t first = i % 11;
    const std::uint32_t count = kMost - i % (kMost + 1);  // 0 too
    for (std::uint32_t row = 0; row < count; ++row) {
      store_half(&expected[page], layout, first + row, 0, rows.k.data() + row * row_bytes, from);
      store_half(&expected[page], layout, first + row, 1, rows.v.data() + row * row_bytes, from);
    }
    list.push_back({.k = rows.k.data(),
                    .v = rows.v.data(),
                    .dtype = from,
                    .token_stride = rows.stride,
                    .page = pages.data() + page,
                    .first_row = first,
                    .count = count});
  }
  under_test->stages().append(list, layout, under_test->stream());
  under_test->finish();
  REQUIRE(std::equal(pages.begin(), pages.end(), expected.begin()));
}

TEST_CASE("to_f32 widens strided rows of any length", "[stages]") {
  const auto [dtype, head_dim, offset] =
      GENERATE(grid(std::array{DType::f32, DType::f16, DType::bf16}, std::array{1u, 16u, 77u, 88u},
                    std::array{0u, 3u}));  // offset == 3: unaligned
  CAPTURE(to_string(dtype), head_dim, offset);
  const auto under_test = stages_under_test();
  const auto data = under_test->array<std::byte>(4096 * bytes_of(dtype));
  Random random(2);
  for (std::size_t i = 0; i < 4096; ++i) store_element(data.data(), dtype, i, random.normal());
  const std::uint32_t head_stride = offset == 0 ? 88 : 91;
  const TensorView in{.data = data.data() + offset * bytes_of(dtype),
                      .dtype = dtype,
                      .tokens = 4,
                      .heads = 3,
                      .head_dim = head_dim,
                      .token_stride = 704,
                      .head_stride = head_stride};
  const auto out = under_test->array(std::size_t{12} * head_dim + 1, 1234.f);
  under_test->stages().to_f32(in, out.data(), under_test->stream());
  under_test->finish();
  REQUIRE(out.back() == 1234.f);
  for (std::size_t row = 0; row < 12; ++row) {
    for (std::size_t c = 0; c < head_dim; ++c) {
      const std::size_t at = offset + row / 3 * 704 + row % 3 * head_stride + c;
      REQUIRE(out[row * head_dim + c] == load_element(data.data(), dtype, at));
    }
  }
}

TEST_CASE("an empty tensor converts to nothing", "[stages]") {
  const auto under_test = stages_under_test();
  const auto out = under_test->array(1, 1234.f);
  under_test->stages().to_f32(TensorView{.heads = 2, .head_dim = 64}, out.data(), under_test->stream());
  under_test->finish();
  REQUIRE(out[0] == 1234.f);
}

TEST_CASE("top-k equals a sort, ties by lowest index, NaN last", "[stages]") {
  const auto [count, distinct] =
      GENERATE(grid(std::array{0u, 1u, 7u, 100u, 1'500u, 8'192u, 60'000u}, std::array{1u, 5u, 1'000'000u}));
  CAPTURE(count, distinct);
  const auto under_test = stages_under_test();
  const auto values = under_test->array<float>(count);
  fill_with_hard_values(values, distinct, count + distinct);
  for (const std::uint32_t k : {0u, 1u, 3u, count / 3, count, count + 5}) {
    CAPTURE(k);
    const std::vector<std::uint32_t> expected = reference::top_k(values, k);
    const auto out = under_test->array(std::min(k, count) + 1, kUntouched);
    const TopKTask task{.values = values, .k = k, .out = out.data()};
    under_test->stages().top_k({&task, 1}, under_test->stream());
    under_test->finish();
    REQUIRE(out.back() == kUntouched);
    REQUIRE(std::vector(out.begin(), out.end() - 1) == expected);
  }
}

TEST_CASE("top-k of many rows of different lengths", "[stages]") {
  const auto under_test = stages_under_test();
  std::vector<TopKTask> tasks;
  std::vector<std::vector<std::uint32_t>> expected;
  for (std::uint32_t row = 0; row < 250; ++row) {
    const auto values = under_test->array<float>(1 + row * row % 997);
    fill_with_hard_values(values, 50, row);
    const std::uint32_t k = row % 40;
    expected.push_back(reference::top_k(values, k));
    tasks.push_back(
        {.values = values, .k = k, .out = under_test->array(expected.back().size() + 1, kUntouched).data()});
  }
  under_test->stages().top_k(tasks, under_test->stream());
  under_test->finish();
  for (std::size_t row = 0; row < tasks.size(); ++row) {
    CAPTURE(row);
    const std::size_t found = expected[row].size();
    REQUIRE(std::vector(tasks[row].out, tasks[row].out + found) == expected[row]);
    REQUIRE(tasks[row].out[found] == kUntouched);
  }
}

}  // namespace sluice::test
