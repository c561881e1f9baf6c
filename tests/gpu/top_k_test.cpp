#include <algorithm>
#include <vector>

#include "tests/gpu/gpu_support.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/random.hpp"
#include "tests/support/reference.hpp"

namespace sluice::test {
namespace {

/// top_k of rows in device memory, each checked against a sort.
void check_rows(GpuUnderTest& under_test, const std::vector<std::vector<float>>& rows, std::uint32_t k) {
  std::vector<TopKTask> tasks;
  std::vector<std::span<std::uint32_t>> outs;
  for (const std::vector<float>& row : rows) {
    const std::size_t found = std::min<std::size_t>(k, row.size());
    outs.push_back(under_test.array(found + 1, 777'777u));
    tasks.push_back({.values = under_test.on_device(std::span<const float>(row)), .k = k, .out = outs.back().data()});
  }
  under_test.stages().top_k(tasks, under_test.stream());
  under_test.finish();
  for (std::size_t i = 0; i < rows.size(); ++i) {
    CAPTURE(i, k);
    const std::vector<std::uint32_t> expected = reference::top_k(rows[i], k);
    REQUIRE(std::equal(expected.begin(), expected.end(), outs[i].begin()));
    REQUIRE(outs[i].back() == 777'777u);
  }
}

std::vector<float> normal_row(std::uint32_t count, std::uint64_t seed) {
  Random random(seed);
  std::vector<float> row(count);
  for (float& x : row) x = static_cast<float>(random.normal());
  return row;
}

}  // namespace

TEST_CASE("GPU top-k of 32 rows of page scores", "[gpu][top_k]") {
  const auto k = GENERATE(16u, 64u, 250u, 3'000u);  // 3,000: more than are collected before they are written
  GpuUnderTest under_test;
  std::vector<std::vector<float>> rows;
  for (std::uint64_t seed = 0; seed < 32; ++seed) rows.push_back(normal_row(8'192, seed));
  check_rows(under_test, rows, k);
}

TEST_CASE("GPU top-k of rows that shared memory does not hold", "[gpu][top_k]") {
  // One launch each, since the longest row decides: clusters of 4, 8 and 16 blocks, their edges, and what none holds.
  const auto count = GENERATE(57'345u, 70'000u, 131'072u, 147'456u, 147'457u, 294'912u, 294'913u, 589'824u, 600'001u);
  GpuUnderTest under_test;
  std::vector<float> ties = normal_row(count, 2);
  for (std::size_t i = 0; i < ties.size(); i += 3) ties[i] = 1.5f;
  std::vector<float> odd = normal_row(count, 3);
  for (std::size_t i = 7; i < odd.size(); i += 1'000) odd[i] = kNotANumber;
  for (const std::uint32_t k : {1u, 1'000u, 50'000u, count - 1, count})
    check_rows(under_test, {normal_row(count, 1), ties, odd, normal_row(5, 4), normal_row(count / 2, 5)}, k);
}

TEST_CASE("GPU top-k of values that differ only in their last bits", "[gpu][top_k]") {
  GpuUnderTest under_test;
  std::vector<float> row(20'000);
  Random random(3);
  for (float& x : row) x = 1.f + static_cast<float>(random.below(3'000)) * 0x1.0p-23f;
  std::vector<float> negative = row;
  for (float& x : negative) x = -x;
  check_rows(under_test, {row, negative}, 777);
}

TEST_CASE("GPU top-k of rows without order", "[gpu][top_k]") {
  const auto value = GENERATE(kNotANumber, -kNotANumber, 0.f, 3.5f);
  GpuUnderTest under_test;
  std::vector<std::vector<float>> rows;
  for (const std::size_t count : {1u, 31u, 32u, 33u, 1'024u, 5'000u, 20'000u, 140'001u})
    rows.emplace_back(count, value);
  for (const std::uint32_t k : {1u, 33u, 5'000u, 139'999u}) check_rows(under_test, rows, k);
}

TEST_CASE("GPU top-k of rows that begin anywhere", "[gpu][top_k]") {
  GpuUnderTest under_test;
  const auto all = under_test.on_device(std::span<const float>(normal_row(4'000, 9)));
  const std::vector<float> host = under_test.from_device(std::span<const float>(all));
  for (const std::size_t begin : {1u, 2u, 3u, 777u}) {
    const auto out = under_test.array<std::uint32_t>(100);
    const TopKTask task{.values = all.subspan(begin), .k = 100, .out = out.data()};
    under_test.stages().top_k({&task, 1}, under_test.stream());
    under_test.finish();
    REQUIRE(std::vector(out.begin(), out.end()) == reference::top_k(std::span(host).subspan(begin), 100));
  }
}

}  // namespace sluice::test
