// 4-bit copies, estimates and top-p on the GPU, beyond the cases that every device passes.

#include <algorithm>
#include <bit>
#include <cmath>
#include <vector>

#include "cpu/forward/forward_verbs.hpp"
#include "cpu/machine/topology.hpp"
#include "cpu/stages/stages.hpp"
#include "tests/gpu/gpu_support.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/derived_pages.hpp"
#include "tests/support/int4_support.hpp"

namespace sluice::test {
namespace {

const cpu::Workers& host_workers() {
  static const cpu::Topology topology;
  static const cpu::Workers workers(topology, {.threads = 2, .pin = false});
  return workers;
}

/// Copies of all pages, in the problem's frames, by the host.
std::vector<std::byte> host_copies(const Problem& problem, const float* mean = nullptr, std::uint32_t bits = 4) {
  std::vector<std::byte> copies((2 * problem.frames().size() + 1) * CodeLayout(problem.layout(), bits).page_bytes());
  const DerivedPages derived{
      .kv = problem.kv(), .tokens = problem.options().tokens, .codes = copies.data(), .bits = bits, .mean = mean};
  cpu::ForwardVerbs verbs(host_workers());
  derive(verbs, derived, far_pages(derived), nullptr);
  return copies;
}

/// top_p of rows in device memory, each checked against its definition.
void check_rows(GpuUnderTest& under_test, const std::vector<std::vector<float>>& rows, float p) {
  std::vector<TopPTask> tasks;
  std::vector<std::span<std::uint32_t>> masks;
  for (const std::vector<float>& row : rows) {
    masks.push_back(under_test.array((row.size() + 31) / 32 + 1, 0xa5a5'5a5au));
    tasks.push_back({.values = under_test.on_device(std::span<const float>(row)),
                     .p = p,
                     .mask = masks.back().data(),
                     .count = under_test.array<std::uint32_t>(1).data()});
  }
  under_test.stages().top_p(tasks, under_test.stream());
  under_test.finish();
  for (std::size_t i = 0; i < rows.size(); ++i) {
    CAPTURE(i, p, rows[i].size(), *tasks[i].count);
    REQUIRE(masks[i].back() == 0xa5a5'5a5au);
    REQUIRE(is_top_p(rows[i], p, masks[i].first(masks[i].size() - 1), *tasks[i].count, 1e-5));
  }
}

}  // namespace

TEST_CASE("the GPU's copies in codes are the CPU's, bit by bit", "[gpu][int4]") {
  const auto bits = GENERATE(4u, 3u);
  const auto dtype = GENERATE(DType::f16, DType::bf16, DType::fp8_e4m3);
  const auto head_dim = GENERATE(64u, 96u, 128u, 192u, 256u);
  const auto outlier = GENERATE(1.0, 1e3, 1e-5);
  CAPTURE(bits, to_string(dtype), head_dim, outlier);
  GpuUnderTest under_test;
  Problem problem({.dtype = dtype, .tokens = 64 * 16, .head_dim = head_dim, .outlier = outlier});
  for (std::uint32_t c = 0; c < head_dim; ++c) {
    problem.set_k(5, c, 0.0);
    problem.set_k(6, c, c % 2 == 0 ? 0.0 : -0.0);
    problem.set_k(7, c, -3.25);
    problem.set_k(8, c, INFINITY);
    problem.set_k(9, c, c % 3 == 0 ? -INFINITY : 1.0);
    problem.set_k(10, c, c == 3 ? std::nan("") : 1.0);
    problem.set_k(11, c, c * 1e-7);
  }
  const std::vector<float> mean = int4_copies::mean_key(problem);
  const std::vector<std::byte> expected = host_copies(problem, mean.data(), bits);
  const auto device_mean = under_test.on_device(std::span<const float>(mean));
  const auto memory = under_test.on_device(problem.memory());
  const auto copies = under_test.on_device(std::span<const std::byte>(std::vector<std::byte>(expected.size())));
  KvView kv = problem.kv();
  kv.base = memory.data();
  derive(
      under_test,
      {.kv = kv, .tokens = problem.options().tokens, .codes = copies.data(), .bits = bits, .mean = device_mean.data()});
  REQUIRE(under_test.from_device(std::span<const std::byte>(copies)) == expected);
}

TEST_CASE("page ranking, estimates of the ranked pages and top-p follow each other in device memory", "[gpu][int4]") {
  GpuUnderTest under_test;
  constexpr std::uint32_t kGroup = 4, kRanked = 200;
  const Problem problem({.tokens = 900 * 16, .head_dim = 128, .group = kGroup});
  const auto pages = static_cast<std::uint32_t>(problem.frames().size());
  const auto q = under_test.on_device(std::span(problem.q(), kGroup * 128));
  const auto frames = under_test.on_device(std::span(problem.frames()));
  const auto copies = under_test.on_device(std::span<const std::byte>(host_copies(problem)));
  const auto memory = under_test.on_device(problem.memory());
  Random random(2);
  std::vector<float> page_scores(kGroup * pages);
  for (float& score : page_scores) score = static_cast<float>(random.normal());
  const auto scores = under_test.on_device(std::span<const float>(page_scores));
  const auto lists = under_test.array<std::uint32_t>(kGroup * kRanked);
  // Sinks and 40 recent tokens are attended anyway, and the last page, which no list names, is the tail.
  const std::uint32_t newest = problem.options().tokens - 16;
  ScoreInt4Task estimate{.q = q.data(),
                         .copies = copies.data(),
                         .frames = frames.data(),
                         .tokens = newest,
                         .lists = lists.data(),
                         .listed = kRanked,
                         .sinks = 4,
                         .recent = newest - 40,
                         .tail = memory.data() + problem.frames().back() * problem.layout().page_bytes(),
                         .tail_rows = 9};
  const std::uint32_t row = estimate.row(16), words = (row + 31) / 32;
  const auto logits = under_test.on_device(std::span<const float>(std::vector<float>(kGroup * row)));
  estimate.out = logits.data();
  const auto masks = under_test.array<std::uint32_t>(kGroup * words);
  const auto counts = under_test.array<std::uint32_t>(kGroup);

  std::vector<TopKTask> ranks;
  std::vector<TopPTask> cuts;
  for (std::uint32_t h = 0; h < kGroup; ++h) {
    ranks.push_back({.values = scores.subspan(h * pages, pages - 1), .k = kRanked, .out = lists.data() + h * kRanked});
    cuts.push_back({.values = logits.subspan(h * row, row),
                    .p = 0.9f,
                    .end = kRanked * 16,
                    .mask = masks.data() + h * words,
                    .count = counts.data() + h});
  }
  under_test.stages().top_k(ranks, under_test.stream());
  under_test.stages().score_int4({&estimate, 1}, problem.shape(), problem.layout(), under_test.stream());
  under_test.stages().top_p(cuts, under_test.stream());
  const std::vector<float> got = under_test.from_device(std::span<const float>(logits));

  std::vector<float> expected(got.size());
  const std::vector<std::byte> host_side = host_copies(problem);
  ScoreInt4Task same = estimate;
  same.q = problem.q();
  same.copies = host_side.data();
  same.frames = problem.frames().data();
  same.tail = problem.kv().page(pages - 1);
  same.out = expected.data();
  cpu::score_int4({.workers = host_workers()}, {&same, 1}, problem.shape(), problem.layout());
  for (std::size_t i = 0; i < got.size(); ++i) {
    CAPTURE(i, got[i], expected[i]);
    REQUIRE((got[i] == expected[i] || std::abs(got[i] - expected[i]) < 1e-4f));  // Infinite where a page has no row.
  }
  for (std::uint32_t h = 0; h < kGroup; ++h) {
    REQUIRE(is_top_p(std::span<const float>(got).subspan(h * row, row), 0.9, masks.subspan(h * words, words), counts[h],
                     1e-5, {.end = kRanked * 16}));
    std::vector<std::uint32_t> same_mask(words);
    const TopPTask again{.values = std::span<const float>(got).subspan(h * row, row),
                         .p = 0.9f,
                         .end = kRanked * 16,
                         .mask = same_mask.data()};
    cpu::top_p({.workers = host_workers()}, {&again, 1});
    std::uint32_t differ = 0;
    for (std::uint32_t w = 0; w < words; ++w) {
      differ += static_cast<std::uint32_t>(std::popcount(same_mask[w] ^ masks[h * words + w]));
    }
    REQUIRE(differ <= 1);  // The last one kept, where a sum in float32 and one in float64 disagree.
  }
}

TEST_CASE("GPU top-p of many random rows", "[gpu][top_p]") {
  const auto p = GENERATE(0.3f, 0.85f, 0.95f, 0.999f, 1.f);
  GpuUnderTest under_test;
  Random random(7);
  std::vector<std::vector<float>> rows;
  for (std::uint32_t i = 0; i < 500; ++i) {
    rows.push_back(random_logits(i % 50 == 0 ? 8'192 : random.below(i % 10 == 0 ? 3'000 : 300), random));
  }
  check_rows(under_test, rows, p);
}

TEST_CASE("GPU top-p of rows that shared memory does not hold", "[gpu][top_p]") {
  const auto p = GENERATE(0.5f, 0.95f);
  GpuUnderTest under_test;
  Random random(8);
  std::vector<std::vector<float>> rows;
  for (const std::uint32_t count : {56'000u, 58'113u, 70'000u, 131'072u, 300'001u, 5u}) {
    rows.push_back(random_logits(count, random));
  }
  check_rows(under_test, rows, p);
}

TEST_CASE("GPU top-p gives the same bits again and again", "[gpu][top_p]") {
  GpuUnderTest under_test;
  Random random(9);
  std::vector<float> row(20'000);
  for (float& x : row) x = static_cast<float>(random.normal());
  const auto values = under_test.on_device(std::span<const float>(row));
  std::vector<TopPTask> tasks;
  for (int i = 0; i < 50; ++i) {
    tasks.push_back({.values = values, .p = 0.9f, .mask = under_test.array<std::uint32_t>(625).data()});
  }
  under_test.stages().top_p(tasks, under_test.stream());
  under_test.finish();
  for (const TopPTask& task : tasks) REQUIRE(std::equal(task.mask, task.mask + 625, tasks.front().mask));
}

}  // namespace sluice::test
