// Digests and scores, on any device.

#include <cmath>
#include <vector>

#include "sluice/page_rules.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/derived_pages.hpp"
#include "tests/support/random.hpp"
#include "tests/support/reference.hpp"
#include "tests/support/sanitized.hpp"
#include "tests/support/stages_under_test.hpp"

namespace sluice::test {
namespace {

constexpr double kUntouched = 1234.0;

/// Digests of all pages, in the problem's frames; the frames between are NaN.
std::span<const std::byte> digests_of(StagesUnderTest& under_test, const Problem& problem, const Placed& placed,
                                      DigestKind kind) {
  const std::size_t digest_bytes = 2 * problem.layout().near().row_bytes();
  const auto digests = under_test.array((2 * problem.frames().size() + 1) * digest_bytes, std::byte{0xff});
  derive(under_test, {.kv = placed.kv, .tokens = problem.options().tokens, .digests = digests.data(), .kind = kind});
  return digests;
}

/// [group, pages]
std::vector<float> score_pages(StagesUnderTest& under_test, const Problem& problem, DigestKind kind) {
  const Placed placed = place(under_test, problem);
  const auto digests = digests_of(under_test, problem, placed, kind);
  const auto pages = static_cast<std::uint32_t>(problem.frames().size());
  const auto out = under_test.array(std::size_t{problem.options().group} * pages, kNotANumber);
  const ScorePagesTask task{
      .q = placed.q, .digests = digests.data(), .frames = placed.device_frames, .pages = pages, .out = out.data()};
  under_test.stages().score_pages({&task, 1}, problem.shape(), problem.options().dtype, under_test.stream());
  under_test.finish();
  return {out.begin(), out.end()};
}

/// Random digests hi >= lo in memory of the device.
struct Digests {
  Digests(StagesUnderTest& under_test, DType type, std::uint32_t dim, std::uint32_t frames)
      : dtype(type), head_dim(dim), data(under_test.array<std::byte>(std::size_t{2} * frames * dim * bytes_of(type))) {
    Random random(frames);
    for (std::size_t frame = 0; frame < frames; ++frame) {
      for (std::size_t c = 0; c < dim; ++c) {
        const double a = random.normal(), b = random.normal();
        store_element(data.data(), dtype, 2 * frame * dim + c, std::max(a, b));
        store_element(data.data(), dtype, (2 * frame + 1) * dim + c, std::min(a, b));
      }
    }
  }
  [[nodiscard]] double score(const float* q, std::size_t frame) const {
    double sum = 0.0;
    for (std::size_t c = 0; c < head_dim; ++c) {
      const double hi = load_element(data.data(), dtype, 2 * frame * head_dim + c);
      const double lo = load_element(data.data(), dtype, (2 * frame + 1) * head_dim + c);
      sum += std::max(q[c] * hi, q[c] * lo);
    }
    return sum;
  }
  DType dtype;
  std::uint32_t head_dim;
  std::span<std::byte> data;
};

/// One task over `pages` random frames with queries of its own. One float more than the output has is watched.
ScorePagesTask random_task(StagesUnderTest& under_test, const Digests& digests, std::uint32_t frames,
                           std::uint32_t group, std::uint32_t pages) {
  Random random(pages + group);
  const auto q = under_test.array<float>(std::size_t{group} * digests.head_dim);
  for (float& x : q) x = static_cast<float>(random.normal());
  const auto list = under_test.array<std::uint32_t>(pages);
  for (std::uint32_t& frame : list) frame = random.below(frames);
  const auto out = under_test.array(std::size_t{group} * pages + 1, static_cast<float>(kUntouched));
  return {.q = q.data(), .digests = digests.data.data(), .frames = list.data(), .pages = pages, .out = out.data()};
}

void check_scores(const Digests& digests, const ScorePagesTask& task, std::uint32_t group) {
  std::vector<double> expected;
  for (std::uint32_t head = 0; head < group; ++head) {
    for (std::uint32_t p = 0; p < task.pages; ++p) {
      expected.push_back(digests.score(task.q + std::size_t{head} * digests.head_dim, task.frames[p]));
    }
  }
  expected.push_back(kUntouched);
  // Sums of head_dim products of order 1.
  REQUIRE(max_abs_diff(std::span<const float>(task.out, expected.size()), expected) < 2e-4);
}

}  // namespace

TEST_CASE("digests are what their definition says, rounded", "[stages]") {
  const auto [kind, dtype, head_dim, page_tokens, outlier] =
      GENERATE(grid(std::array{DigestKind::box, DigestKind::cuboid_mean},
                    std::array{DType::f32, DType::f16, DType::bf16, DType::fp8_e4m3},
                    std::array{64u, 80u, 96u, 128u, 192u, 256u}, std::array{8u, 16u, 256u}, std::array{1.0, 1e3}));
  CAPTURE(static_cast<int>(kind), to_string(dtype), head_dim, page_tokens, outlier);
  const auto under_test = stages_under_test();
  const std::uint32_t pages = page_tokens == 8 ? 200 : 3;
  const Problem problem({.dtype = dtype,
                         .tokens = pages * page_tokens,
                         .head_dim = head_dim,
                         .group = 1,
                         .page_tokens = page_tokens,
                         .outlier = outlier});
  const DType made = problem.layout().near().dtype;
  if (!under_test->supports(problem.shape(), problem.layout().near())) return;
  const Placed placed = place(*under_test, problem);
  const auto digests = digests_of(*under_test, problem, placed, kind);
  under_test->finish();
  const double half_place = made == DType::bf16 ? 0x1.0p-9 : made == DType::f16 ? 0x1.0p-12 : 0x1.0p-24;
  const double rounding = kind == DigestKind::box ? 0.0 : 1e-5 * outlier;  // of float32 sums
  for (std::uint32_t page = 0; page < pages; ++page) {
    const auto expected = reference::digest(problem, page * page_tokens, (page + 1) * page_tokens, kind);
    std::size_t right = 0;
    for (std::size_t c = 0; c < 2 * head_dim; ++c) {
      const double stored = load_element(digests.data(), made, std::size_t{problem.frames()[page]} * 2 * head_dim + c);
      if (std::abs(stored - expected[c]) <= 2.0 * half_place * std::abs(expected[c]) + rounding) ++right;
    }
    CAPTURE(page);
    REQUIRE(right == expected.size());
  }
}

TEST_CASE("NaN in a page's first key makes its score NaN, in a later key it is ignored", "[stages]") {
  const auto kind = GENERATE(DigestKind::box, DigestKind::cuboid_mean);
  CAPTURE(static_cast<int>(kind));
  const auto under_test = stages_under_test();
  Problem problem({.tokens = 3 * 16, .group = 2});
  problem.set_k(0, 5, std::nan(""));
  problem.set_k(16 + 7, 5, std::nan(""));
  const std::vector<float> scores = score_pages(*under_test, problem, kind);
  for (std::uint32_t head = 0; head < 2; ++head) {
    REQUIRE(std::isnan(scores[head * 3]));
    REQUIRE(std::isfinite(scores[head * 3 + 1]));
    REQUIRE(std::isfinite(scores[head * 3 + 2]));
  }
}

TEST_CASE("a page's box bounds every key and its cuboid mean lies inside", "[stages]") {
  const auto [dtype, head_dim, outlier] =
      GENERATE(grid(std::array{DType::f32, DType::f16, DType::bf16}, std::array{64u, 80u, 96u, 128u, 192u, 256u}, std::array{1.0, 1e3}));
  CAPTURE(to_string(dtype), head_dim, outlier);
  const auto under_test = stages_under_test();
  const Problem problem({.dtype = dtype, .tokens = 40 * 16, .head_dim = head_dim, .group = 3, .outlier = outlier});
  if (!under_test->supports(problem.shape(), problem.layout())) return;
  const std::vector<float> box = score_pages(*under_test, problem, DigestKind::box);
  const std::vector<float> mean = score_pages(*under_test, problem, DigestKind::cuboid_mean);
  const double raw = std::sqrt(static_cast<double>(head_dim));
  for (std::uint32_t head = 0; head < 3; ++head) {
    for (std::uint32_t page = 0; page < 40; ++page) {
      const double bound = box[head * 40 + page];
      const double slack = 1e-5 * (1.0 + std::abs(bound));
      REQUIRE(mean[head * 40 + page] <= bound + slack);
      double largest = -std::numeric_limits<double>::infinity();
      for (std::uint32_t token = page * 16; token < (page + 1) * 16; ++token) {
        largest = std::max(largest, reference::score(problem, head, token) * raw);
      }
      REQUIRE(largest <= bound + slack);
    }
  }
}

TEST_CASE("a page of identical keys scores q.k, and the order of tokens does not matter", "[stages]") {
  const auto kind = GENERATE(DigestKind::box, DigestKind::cuboid_mean);
  const auto under_test = stages_under_test();
  Problem problem({.tokens = 32, .group = 2});
  Problem reversed = problem;
  for (std::uint32_t token = 0; token < 16; ++token) {
    for (std::uint32_t c = 0; c < 64; ++c) {
      problem.set_k(token, c, problem.k(0, c));
      reversed.set_k(16 + token, c, problem.k(31 - token, c));
    }
  }
  const std::vector<float> scores = score_pages(*under_test, problem, kind);
  for (std::uint32_t head = 0; head < 2; ++head) {
    REQUIRE(std::abs(scores[head * 2] - 8.0 * reference::score(problem, head, 3)) < 1e-4);
  }
  const std::vector<float> mirrored = score_pages(*under_test, reversed, kind);
  // A mean of bf16 rounds in the last place; an extreme does not.
  const float within = kind == DigestKind::box ? 0.f : 0.05f;
  for (std::uint32_t head = 0; head < 2; ++head) {
    REQUIRE(std::abs(mirrored[head * 2 + 1] - scores[head * 2 + 1]) <= within);
  }
}

TEST_CASE("page scores add up the larger products, for any group and any numbers of pages", "[stages]") {
  const auto [dtype, head_dim, group] =
      GENERATE(grid(std::array{DType::f32, DType::f16, DType::bf16}, std::array{64u, 80u, 96u, 128u, 192u, 256u},
                    std::array{1u, 3u, 4u, 8u, 32u}));
  CAPTURE(to_string(dtype), head_dim, group);
  const auto under_test = stages_under_test();
  const AttentionShape shape{.layers = 1, .q_heads = group, .kv_heads = 1, .head_dim = head_dim};
  if (!under_test->supports(shape, {.head_dim = head_dim, .dtype = dtype})) return;
  constexpr std::uint32_t kFrames = 999;
  const Digests digests(*under_test, dtype, head_dim, kFrames);
  std::vector<ScorePagesTask> tasks;
  for (const std::uint32_t pages : {1u, 2u, 0u, 31u, 33u, 500u}) {
    tasks.push_back(random_task(*under_test, digests, kFrames, group, pages));
  }
  under_test->stages().score_pages(tasks, shape, dtype, under_test->stream());
  under_test->finish();
  for (const ScorePagesTask& task : tasks) check_scores(digests, task, group);
}

TEST_CASE("page scores of many tasks and of one long task", "[stages]") {
  const auto many = GENERATE(true, false);
  const auto under_test = stages_under_test();
  const AttentionShape shape{.layers = 1, .q_heads = 4, .kv_heads = 1, .head_dim = 128};
  constexpr std::uint32_t kFrames = 3000;
  const Digests digests(*under_test, DType::bf16, shape.head_dim, kFrames);
  std::vector<ScorePagesTask> tasks;
  for (std::uint32_t i = 0; i < (many ? 300u : 1u); ++i) {
    tasks.push_back(random_task(*under_test, digests, kFrames, 4, many ? i % 50 : 30'000));
  }
  under_test->stages().score_pages(tasks, shape, DType::bf16, under_test->stream());
  under_test->finish();
  for (const ScorePagesTask& task : tasks) check_scores(digests, task, 4);
}

}  // namespace sluice::test
