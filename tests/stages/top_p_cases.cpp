// top-p, on any device.

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

TEST_CASE("top-p keeps the fewest that reach p, and all ties of the smallest", "[stages][top_p]") {
  const auto count = GENERATE(0u, 1u, 2u, 31u, 32u, 33u, 1'000u, 8'192u, 36'864u, 36'865u, 131'073u, 147'457u, 300'001u, 589'825u);
  const auto under_test = stages_under_test();
  Random random(count + 1);
  for (std::uint32_t round = 0; round < (count > 8'192 ? 6u : 40u); ++round) {
    const std::vector<float> row = count == 0 ? std::vector<float>{} : random_logits(count, random);
    const auto values = under_test->copy_of(row);
    const auto mask = under_test->array((count + 31) / 32 + 1, kUntouchedWord);
    const auto kept = under_test->array(2, kUntouchedWord);
    const float p = round % 5 == 4 ? 1.f : static_cast<float>(0.05 + 0.94 * random.uniform());
    const TopPTask task{.values = values, .p = p, .mask = mask.data(), .count = kept.data()};
    under_test->stages().top_p({&task, 1}, under_test->stream());
    under_test->finish();
    CAPTURE(count, round, p, kept[0]);
    REQUIRE(mask.back() == kUntouchedWord);
    REQUIRE(kept[1] == kUntouchedWord);
    REQUIRE(is_top_p(row, p, mask.first(mask.size() - 1), kept[0], 1e-5));
  }
}

TEST_CASE("top-p of one heavy value keeps it, of equal values p of them, and p = 1 keeps all", "[stages][top_p]") {
  const auto under_test = stages_under_test();
  constexpr std::uint32_t kCount = 1'000;
  std::vector<float> distinct(kCount);  // Equal weights but for the last bits: no ties.
  for (std::uint32_t i = 0; i < kCount; ++i) distinct[i] = 1.f + static_cast<float>(i * 7 % kCount) * 0x1p-23f;
  std::vector<float> one_hot(kCount, -60.f);
  one_hot[777] = 0.f;
  std::vector<float> infinite(kCount, 5.f);
  infinite[3] = infinite[4] = kInf;
  struct Case {
    std::vector<float> values;
    float p;
    std::uint32_t kept;
  };
  const Case cases[] = {{distinct, 0.9505f, 951},
                        {std::vector<float>(kCount, 2.f), 0.5f, kCount},
                        {one_hot, 0.95f, 1},
                        {one_hot, 1.f, kCount},
                        {infinite, 0.95f, 2},
                        {std::vector<float>(kCount, -kInf), 0.95f, 0},
                        {std::vector<float>(kCount, kNotANumber), 1.f, 0},
                        {std::vector<float>(1, -3e38f), 0.95f, 1}};
  std::vector<TopPTask> tasks;
  std::vector<std::span<std::uint32_t>> counts;
  for (const Case& one : cases) {
    counts.push_back(under_test->array(1, kUntouchedWord));
    tasks.push_back({.values = under_test->copy_of(one.values),
                     .p = one.p,
                     .mask = under_test->array((one.values.size() + 31) / 32, kUntouchedWord).data(),
                     .count = counts.back().data()});
  }
  under_test->stages().top_p(tasks, under_test->stream());
  under_test->finish();
  for (std::size_t i = 0; i < std::size(cases); ++i) {
    CAPTURE(i);
    REQUIRE(counts[i][0] == cases[i].kept);
    const std::span<const std::uint32_t> mask(tasks[i].mask, (cases[i].values.size() + 31) / 32);
    REQUIRE(is_top_p(cases[i].values, cases[i].p, mask, counts[i][0], 1e-5));
  }
}

TEST_CASE("top-p of soft-capped values weighs them capped, and orders them as they were", "[stages][top_p]") {
  const auto [count, softcap] =
      GENERATE(grid(std::array{1u, 33u, 1'000u, 36'865u, 300'001u, 589'825u}, std::array{2.f, 30.f}));
  const auto under_test = stages_under_test();
  Random random(count + 3);
  std::vector<float> row(count);
  for (float& value : row) value = static_cast<float>(4.0 * random.normal());
  row[count / 2] = -kInf;  // Of a row that is not there: it has no weight, cap or no cap.
  constexpr double kShare = 0.7;
  const auto mask = under_test->array((count + 31) / 32, kUntouchedWord);
  const auto kept = under_test->array(1, kUntouchedWord);
  const TopPTask task{.values = under_test->copy_of(row),
                      .p = static_cast<float>(kShare),
                      .softcap = softcap,
                      .mask = mask.data(),
                      .count = kept.data()};
  under_test->stages().top_p({&task, 1}, under_test->stream());
  under_test->finish();
  CAPTURE(count, softcap, kept[0]);
  const auto has = [&](std::uint32_t i) { return (mask[i / 32] >> i % 32 & 1u) != 0; };
  const auto weight = [&](float value) {
    return std::isinf(value) ? 0.0 : std::exp(softcap * std::tanh(double{value} / softcap));
  };
  double all = 0.0, held = 0.0;
  float least = kInf, left = -kInf;
  std::uint32_t marked = 0;
  for (std::uint32_t i = 0; i < count; ++i) {
    all += weight(row[i]);
    held += has(i) ? weight(row[i]) : 0.0;
    marked += has(i) ? 1 : 0;
    (has(i) ? least : left) = has(i) ? std::min(least, row[i]) : std::max(left, row[i]);
  }
  REQUIRE(marked == kept[0]);
  if (count == 1) REQUIRE(marked == 0);
  if (count == 1) return;
  REQUIRE(left < least);
  REQUIRE(held >= (kShare - 1e-5) * all);
  REQUIRE(held - weight(least) < (kShare + 1e-5) * all);
}

TEST_CASE("what is attended anyway counts first and is not marked", "[stages][top_p]") {
  const auto count = GENERATE(1u, 2u, 33u, 1'000u, 8'193u, 36'864u, 36'865u, 131'073u, 589'825u);
  const auto under_test = stages_under_test();
  Random random(count + 7);
  for (std::uint32_t round = 0; round < (count > 8'192 ? 8u : 60u); ++round) {
    std::vector<float> row = random_logits(count, random);
    std::uint32_t begin = random.below(count + 1);
    std::uint32_t end = begin + random.below(count + 1 - begin);
    if (round % 4 == 0) begin = std::min(count, 4u), end = std::max(begin, count - std::min(count, 17u));
    if (round % 4 == 1) begin = 0, end = count - std::min(count, 1u + random.below(64));
    if (round % 8 == 2) begin = end;
    const bool heavy = random.below(3) == 0;  // Sometimes most of the mass is there.
    for (std::uint32_t i = end; heavy && i < count; ++i) row[i] += 6.f;
    const auto values = under_test->copy_of(row);
    const auto mask = under_test->array((count + 31) / 32 + 1, kUntouchedWord);
    const auto kept = under_test->array(2, kUntouchedWord);
    const float p = round % 5 == 4 ? 1.f : static_cast<float>(0.05 + 0.94 * random.uniform());
    const TopPTask task{
        .values = values, .p = p, .begin = begin, .end = end, .mask = mask.data(), .count = kept.data()};
    under_test->stages().top_p({&task, 1}, under_test->stream());
    under_test->finish();
    CAPTURE(count, round, p, begin, end, heavy, kept[0]);
    REQUIRE(mask.back() == kUntouchedWord);
    REQUIRE(kept[1] == kUntouchedWord);
    REQUIRE(is_top_p(row, p, mask.first(mask.size() - 1), kept[0], 1e-5, {.begin = begin, .end = end}));
  }
}

TEST_CASE("top-p keeps no more than it may, the best of them, and of equal ones all or none", "[stages][top_p]") {
  const auto count = GENERATE(1u, 2u, 33u, 1'000u, 8'193u, 36'864u, 36'865u, 131'073u, 589'825u);
  const auto under_test = stages_under_test();
  Random random(count + 17);
  std::uint32_t cut = 0;
  for (std::uint32_t round = 0; round < (count > 8'192 ? 12u : 80u); ++round) {
    const std::vector<float> row = random_logits(count, random);
    std::uint32_t begin = random.below(count + 1);
    std::uint32_t end = begin + random.below(count + 1 - begin);
    if (round % 3 == 0) begin = 0, end = count;
    const auto values = under_test->copy_of(row);
    const auto mask = under_test->array((count + 31) / 32 + 1, kUntouchedWord);
    const auto kept = under_test->array(2, kUntouchedWord);
    const float p = round % 4 == 3 ? 1.f : static_cast<float>(0.3 + 0.69 * random.uniform());
    const std::uint32_t most = round % 5 == 0 ? random.below(3) : 1 + random.below(1 + count / (1 + random.below(40)));
    const TopPTask task{
        .values = values, .p = p, .begin = begin, .end = end, .most = most, .mask = mask.data(), .count = kept.data()};
    under_test->stages().top_p({&task, 1}, under_test->stream());
    under_test->finish();
    CAPTURE(count, round, p, begin, end, most, kept[0]);
    REQUIRE(mask.back() == kUntouchedWord);
    REQUIRE(kept[1] == kUntouchedWord);
    const auto marked = mask.first(mask.size() - 1);
    REQUIRE(is_top_p_of_most(row, p, most, marked, kept[0], 1e-5, {.begin = begin, .end = end}));
    cut += is_top_p(row, p, marked, kept[0], 1e-5, {.begin = begin, .end = end}) ? 0 : 1;
  }
  if (count >= 1'000) REQUIRE(cut != 0);
}

TEST_CASE("top-p beside what is attended anyway, case by case", "[stages][top_p]") {
  const auto count = GENERATE(1'000u, 39'000u, 600'000u);  // One thread block, a cluster, a row that neither holds.
  const auto under_test = stages_under_test();
  const std::uint32_t half = count / 2;
  const auto row_of = [&](float near, float far) {
    std::vector<float> row(count, far);
    std::fill(row.begin() + half, row.end(), near);
    return row;
  };
  std::vector<float> newest = row_of(0.f, 0.f);  // The last value has 90% of the mass.
  for (std::uint32_t i = 0; i < count; ++i) newest[i] = static_cast<float>(i * 7ull % count) * 0x1p-30f;
  newest.back() = static_cast<float>(std::log(9.0 * (count - 1)));
  std::vector<float> one_far = row_of(0.f, -kInf);
  one_far[3] = -200.f;
  struct Case {
    std::vector<float> values;
    float p;
    std::uint32_t begin, end;
    std::uint32_t least, most;  ///< kept
  };
  const auto share = [&](double s) { return static_cast<std::uint32_t>(s * (count - 1)); };
  const std::uint32_t slack = 2 + count / 1'000;
  const Case cases[] = {{row_of(1.f, 1.f), 0.499f, 0, half, 0, 0},         // Ties, near and far: near ones count first,
                        {row_of(1.f, 1.f), 0.502f, 0, half, half, half},   // far ones stay together.
                        {row_of(1.f, 1.f), 1.f, 0, half, half, half},
                        {row_of(1.f, 1.f), 0.99f, 0, 0, 0, 0},             // Everything is attended anyway.
                        {row_of(1.f, 1.f), 1.f, half, half, 0, 0},
                        {row_of(-kInf, 1.f), 0.5f, 0, half, half, half},   // What is attended anyway weighs nothing.
                        {row_of(kNotANumber, 1.f), 1.f, 0, half, half, half},
                        {row_of(1.f, -kInf), 0.999f, 0, half, 0, 0},       // Nothing else does.
                        {row_of(1.f, kNotANumber), 1.f, 0, half, 0, 0},
                        {row_of(kInf, 1.f), 0.999f, 0, half, 0, 0},
                        {row_of(1.f, kInf), 0.5f, 0, half, half, half},
                        {row_of(-150.f, 0.f), 0.5f, 0, half, half, half},
                        {row_of(0.f, -150.f), 1.f - 0x1p-24f, 0, half, 0, 0},
                        {one_far, 0.9f, 0, half, 0, 0},
                        {one_far, 1.f, 0, half, 1, 1},
                        {newest, 0.89f, 0, count - 1, 0, 0},
                        {newest, 0.95f, 0, count - 1, share(0.5) - slack, share(0.5) + slack},
                        {newest, 0.95f, 0, kNone, share(0.5) + 1 - slack, share(0.5) + 1 + slack}};
  std::vector<TopPTask> tasks;
  for (const Case& one : cases) {
    tasks.push_back({.values = under_test->copy_of(one.values),
                     .p = one.p,
                     .begin = one.begin,
                     .end = one.end,
                     .mask = under_test->array((count + 31) / 32, kUntouchedWord).data(),
                     .count = under_test->array(1, kUntouchedWord).data()});
  }
  under_test->stages().top_p(tasks, under_test->stream());
  under_test->finish();
  for (std::size_t i = 0; i < std::size(cases); ++i) {
    CAPTURE(count, i, *tasks[i].count);
    REQUIRE(*tasks[i].count >= cases[i].least);
    REQUIRE(*tasks[i].count <= cases[i].most);
    const std::span<const std::uint32_t> mask(tasks[i].mask, (count + 31) / 32);
    REQUIRE(is_top_p(cases[i].values, cases[i].p, mask, *tasks[i].count, 1e-5,
                     {.begin = cases[i].begin, .end = cases[i].end}));
  }
}

TEST_CASE("top-p of a row does not depend on the rows beside it", "[stages][top_p]") {
  const auto under_test = stages_under_test();
  Random random(23);
  std::vector<TopPTask> tasks;
  for (const std::uint32_t count : {7u, 8'210u, 0u, 36'864u, 140'000u, 36'865u, 1u, 70'000u}) {
    std::vector<float> row(count);
    for (float& x : row) x = static_cast<float>(3.0 * random.normal());
    tasks.push_back({.values = under_test->copy_of(row),
                     .p = 0.9f,
                     .begin = count / 100,
                     .mask = under_test->array((count + 31) / 32 + 1, kUntouchedWord).data(),
                     .count = under_test->array(1, kUntouchedWord).data()});
  }
  const auto masks = [&] {
    std::vector<std::vector<std::uint32_t>> all;
    for (const TopPTask& task : tasks) all.emplace_back(task.mask, task.mask + (task.values.size() + 31) / 32 + 1);
    return all;
  };
  under_test->stages().top_p(tasks, under_test->stream());
  under_test->finish();
  const auto together = masks();
  for (const TopPTask& task : tasks) {
    std::fill_n(task.mask, (task.values.size() + 31) / 32, 0u);
    under_test->stages().top_p({&task, 1}, under_test->stream());
    under_test->finish();
  }
  REQUIRE(masks() == together);
}

}  // namespace sluice::test
