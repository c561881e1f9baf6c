// top-p at its edges, on any device.

#include <algorithm>
#include <cmath>
#include <vector>

#include "tests/support/catch.hpp"
#include "tests/support/prune_reference.hpp"
#include "tests/support/random.hpp"
#include "tests/support/sanitized.hpp"
#include "tests/support/stages_under_test.hpp"

namespace sluice::test {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr std::uint32_t kUntouchedWord = 0xa5a5'5a5au;

}  // namespace

TEST_CASE("top-p of one value, attended anyway or not", "[stages][top_p]") {
  const auto under_test = stages_under_test();
  const auto p = GENERATE(0.5f, 1.f);
  std::vector<TopPTask> tasks;
  for (const std::uint32_t end : {0u, 1u}) {
    tasks.push_back({.values = under_test->copy_of(std::vector<float>{-7.f}),
                     .p = p,
                     .end = end,
                     .mask = under_test->array(1, kUntouchedWord).data(),
                     .count = under_test->array(1, kUntouchedWord).data()});
  }
  under_test->stages().top_p(tasks, under_test->stream());
  under_test->finish();
  for (const std::uint32_t end : {0u, 1u}) {
    REQUIRE(*tasks[end].count == end);
    REQUIRE(*tasks[end].mask == end);
  }
}

TEST_CASE("top-p of rows at the ends of float32", "[stages][top_p]") {
  const auto under_test = stages_under_test();
  const auto [count, p, anyway] =
      GENERATE(grid(std::array{2u, 300u, 9'000u, 80'000u}, std::array{0x1p-149f, 0.5f, 0.999f, 1.f - 0x1p-24f},
                    std::array{0u, 1u, 40u}));
  Random random(count);
  const Choice choice{.begin = std::min(anyway / 10, count),
                      .end = std::max(anyway / 10, count - std::min(anyway, count))};
  const std::vector<std::vector<float>> palettes{
      {0.f, -0.f, 0x1p-149f, -0x1p-149f, 0x1p-127f},
      {3.4e38f, -3.4e38f, 0.f, -kInf, kNotANumber},
      {kInf, 3.4e38f, 1.f},
      {1e-3f, 0.f, -20.f, -80.f, -90.f, -110.f},
  };
  std::vector<TopPTask> tasks;
  for (const std::vector<float>& palette : palettes) {
    std::vector<float> row(count);
    for (float& x : row) x = palette[static_cast<std::size_t>(random.uniform() * static_cast<double>(palette.size()))];
    row[count / 2] = palette.front();
    tasks.push_back({.values = under_test->copy_of(row),
                     .p = p,
                     .begin = static_cast<std::uint32_t>(choice.begin),
                     .end = static_cast<std::uint32_t>(choice.end),
                     .mask = under_test->array((count + 31) / 32, kUntouchedWord).data(),
                     .count = under_test->array(1, kUntouchedWord).data()});
  }
  under_test->stages().top_p(tasks, under_test->stream());
  under_test->finish();
  for (const TopPTask& task : tasks) {
    CAPTURE(count, p, anyway, &task - tasks.data(), *task.count);
    const std::span<const std::uint32_t> mask(task.mask, (count + 31) / 32);
    REQUIRE(is_top_p({task.values.begin(), task.values.end()}, p, mask, *task.count, 1e-5, choice));
  }
}

TEST_CASE("what top-p keeps grows with p", "[stages][top_p]") {
  const std::uint32_t anyway = GENERATE(0u, 1'500u);
  const auto under_test = stages_under_test();
  Random random(5);
  std::vector<float> row(3'000);
  for (float& x : row) x = static_cast<float>(2.0 * random.normal());
  const auto values = under_test->copy_of(row);
  std::vector<TopPTask> tasks;
  for (std::uint32_t i = 1; i <= 200; ++i) {
    tasks.push_back({.values = values,
                     .p = static_cast<float>(i) / 200.f,
                     .begin = anyway,
                     .mask = under_test->array<std::uint32_t>(94).data(),
                     .count = under_test->array<std::uint32_t>(1).data()});
  }
  under_test->stages().top_p(tasks, under_test->stream());
  under_test->finish();
  REQUIRE((*tasks.front().count >= 1) == (anyway == 0));
  REQUIRE(*tasks.back().count == 3'000 - anyway);
  for (std::size_t i = 1; i < tasks.size(); ++i) {
    REQUIRE(*tasks[i].count >= *tasks[i - 1].count);
    for (std::size_t w = 0; w < 94; ++w) REQUIRE((tasks[i - 1].mask[w] & ~tasks[i].mask[w]) == 0u);
  }
}

}  // namespace sluice::test
