#include "cpu/backend.hpp"

#include <algorithm>
#include <cmath>
#include <limits>

#include "cpu/rates.hpp"
#include "sluice/error.hpp"
#include "tests/cpu/backend_cases.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/random.hpp"

namespace sluice::test {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();

std::vector<std::byte> digests_of(cpu::Backend& backend, const Problem& problem, DigestKind kind) {
  const std::size_t digest_bytes = 2 * problem.layout().row_bytes();
  std::vector<std::byte> digests((2 * problem.frames().size() + 1) * digest_bytes);
  std::vector<DigestTask> tasks;
  for (std::uint32_t page = 0; page < problem.frames().size(); ++page) {
    tasks.push_back({.page = problem.kv().page(page), .out = digests.data() + problem.frames()[page] * digest_bytes});
  }
  backend.digest(tasks, kind, problem.layout(), nullptr);
  return digests;
}

std::vector<float> score_pages(cpu::Backend& backend, const Problem& problem, DigestKind kind) {
  const std::vector<std::byte> digests = digests_of(backend, problem, kind);
  const auto pages = static_cast<std::uint32_t>(problem.frames().size());
  std::vector<float> out(std::size_t{problem.options().group} * pages, kNan);
  const ScorePagesTask task{
      .q = problem.q(), .digests = digests.data(), .frames = problem.frames().data(), .pages = pages, .out = out.data()};
  backend.score_pages({&task, 1}, problem.shape(), problem.options().dtype, nullptr);
  return out;
}

}  // namespace

TEST_CASE("a page's box bounds every key and its cuboid mean lies inside", "[cpu][backend]") {
  const auto dtype = GENERATE(DType::f32, DType::f16, DType::bf16);
  const auto head_dim = GENERATE(80u, 128u);
  const auto outlier = GENERATE(1.0, 1e3);
  CAPTURE(to_string(dtype), head_dim, outlier);
  cpu::Backend backend(workers(3));
  const Problem problem({.dtype = dtype, .tokens = 40 * 16, .head_dim = head_dim, .group = 3, .outlier = outlier});
  const std::vector<float> box = score_pages(backend, problem, DigestKind::box);
  const std::vector<float> mean = score_pages(backend, problem, DigestKind::cuboid_mean);
  const double raw = std::sqrt(static_cast<double>(head_dim));
  for (std::uint32_t head = 0; head < 3; ++head) {
    for (std::uint32_t page = 0; page < 40; ++page) {
      const double bound = box[head * 40 + page];
      const double slack = 1e-5 * (1.0 + std::abs(bound));
      REQUIRE(mean[head * 40 + page] <= bound + slack);
      for (std::uint32_t token = page * 16; token < (page + 1) * 16; ++token) {
        REQUIRE(reference::score(problem, head, token) * raw <= bound + slack);
      }
    }
  }
}

TEST_CASE("a page of identical keys scores q.k, and the order of tokens does not matter", "[cpu][backend]") {
  const auto kind = GENERATE(DigestKind::box, DigestKind::cuboid_mean);
  cpu::Backend backend(workers(1));
  Problem problem({.tokens = 32, .group = 2});
  Problem reversed = problem;
  for (std::uint32_t token = 0; token < 16; ++token) {
    for (std::uint32_t c = 0; c < 64; ++c) {
      problem.set_k(token, c, problem.k(0, c));
      reversed.set_k(16 + token, c, problem.k(31 - token, c));
    }
  }
  const std::vector<float> scores = score_pages(backend, problem, kind);
  for (std::uint32_t head = 0; head < 2; ++head) {
    REQUIRE(std::abs(scores[head * 2] - 8.0 * reference::score(problem, head, 3)) < 1e-4);
  }
  const std::vector<float> mirrored = score_pages(backend, reversed, kind);
  // A mean of bf16 rounds in the last place; an extreme does not.
  const float within = kind == DigestKind::box ? 0.f : 0.05f;
  for (std::uint32_t head = 0; head < 2; ++head) {
    REQUIRE(std::abs(mirrored[head * 2 + 1] - scores[head * 2 + 1]) <= within);
  }
}

TEST_CASE("top-k equals a sort, ties by lowest index, NaN last", "[cpu][backend]") {
  const auto count = GENERATE(0u, 1u, 7u, 100u, 1'500u, 60'000u);
  const auto distinct = GENERATE(1u, 5u, 1'000'000u);  // 1: nothing but ties
  CAPTURE(count, distinct);
  Random random(count + distinct);
  std::vector<float> values;
  for (std::uint32_t i = 0; i < count; ++i) {
    const float special[] = {kNan, -kNan, kInf, -kInf, 0.f, -0.f, 1e-45f};
    const float plain = static_cast<float>(random.below(distinct)) - 2.f;
    values.push_back(random.below(10) == 0 ? special[random.below(7)] : plain);
  }
  cpu::Backend backend(workers(3));
  for (const std::uint32_t k : {0u, 1u, 3u, count / 3, count, count + 5}) {
    CAPTURE(k);
    const std::vector<std::uint32_t> expected = reference::top_k(values, k);
    std::vector<std::uint32_t> out(std::min(k, count) + 1, 777'777u);
    const TopKTask task{.values = values, .k = k, .out = out.data()};
    backend.top_k({&task, 1}, nullptr);
    REQUIRE(out.back() == 777'777u);
    out.pop_back();
    REQUIRE(out == expected);
  }
}

TEST_CASE("appending converts rows and touches no others", "[cpu][backend]") {
  const auto from = GENERATE(DType::f32, DType::f16, DType::bf16);
  const auto to = GENERATE(DType::f32, DType::f16, DType::bf16);
  CAPTURE(to_string(from), to_string(to));
  constexpr std::uint32_t kDim = 80, kRows = 5, kFirst = 3;
  constexpr std::uint64_t kStride = 2 * kDim + 7;
  const PageLayout layout{.page_tokens = 16, .head_dim = kDim, .dtype = to};
  std::vector<std::byte> k(kRows * kStride * 4), v(k.size());
  Random random(8);
  for (std::size_t i = 0; i < kRows * kStride; ++i) {
    store_element(k.data(), from, i, random.normal() * 100.0);
    store_element(v.data(), from, i, random.normal() * 1e-6);
  }
  std::vector<std::byte> page(layout.page_bytes(), std::byte{0x5a});
  std::vector<std::byte> expected = page;
  for (std::size_t row = 0; row < kRows; ++row) {
    for (std::size_t c = 0; c < kDim; ++c) {
      const std::size_t at = (kFirst + row) * kDim + c;
      store_element(expected.data(), to, at, load_element(k.data(), from, row * kStride + c));
      store_element(expected.data() + layout.half_bytes(), to, at, load_element(v.data(), from, row * kStride + c));
    }
  }
  cpu::Backend backend(workers(1));
  const AppendTask task{.k = k.data(),
                        .v = v.data(),
                        .dtype = from,
                        .token_stride = kStride,
                        .page = page.data(),
                        .first_row = kFirst,
                        .count = kRows};
  backend.append({&task, 1}, layout, nullptr);
  REQUIRE(page == expected);
}

TEST_CASE("to_f32 widens strided rows of any length", "[cpu][backend]") {
  const auto dtype = GENERATE(DType::f32, DType::f16, DType::bf16);
  const auto head_dim = GENERATE(1u, 16u, 77u);
  std::vector<std::byte> data(4096 * bytes_of(dtype));
  Random random(2);
  for (std::size_t i = 0; i < 4096; ++i) store_element(data.data(), dtype, i, random.normal());
  const TensorView in{.data = data.data(), .dtype = dtype, .tokens = 4, .heads = 3, .head_dim = head_dim, .token_stride = 700, .head_stride = 90};
  std::vector<float> out(std::size_t{12} * head_dim + 1, 1234.f);
  cpu::Backend backend(workers(1));
  backend.to_f32(in, out.data(), nullptr);
  REQUIRE(out.back() == 1234.f);
  for (std::size_t row = 0; row < 12; ++row) {
    for (std::size_t c = 0; c < head_dim; ++c) {
      REQUIRE(out[row * head_dim + c] == load_element(data.data(), dtype, row / 3 * 700 + row % 3 * 90 + c));
    }
  }
}

TEST_CASE("shapes without kernels are named and refused before anything is written", "[cpu][backend]") {
  cpu::Backend backend(workers(1));
  const Problem problem({.tokens = 20});
  REQUIRE(backend.unsupported_reasons(problem.shape(), problem.layout()).empty());
  const AttentionShape odd{.layers = 1, .q_heads = 66, .kv_heads = 2, .head_dim = 72};
  const auto reasons = backend.unsupported_reasons(odd, problem.layout());
  REQUIRE(reasons.size() == 3);
  REQUIRE(reasons[0].find("head_dim 72") != std::string::npos);
  REQUIRE(reasons[1].find("33 query heads") != std::string::npos);
  REQUIRE(reasons[2].find("pages of head_dim 64") != std::string::npos);

  OwnPartial out(problem);
  AttendTask task = attend_task(problem, out);
  try {
    backend.attend({&task, 1}, odd, nullptr);
    FAIL("odd shape was accepted");
  } catch (const Error& error) {
    REQUIRE(error.code() == Errc::unsupported);
  }
  REQUIRE(std::isnan(out.lse[0]));
  backend.attend({}, odd, nullptr);
}

TEST_CASE("measured rates are usable rates", "[cpu][backend]") {
  cpu::Backend backend(workers(1));
  const AttentionShape shape{.layers = 1, .q_heads = 4, .kv_heads = 1, .head_dim = 128};
  const CostRates rates = cpu::measure_rates(workers(1), backend, shape, {.page_tokens = 32, .head_dim = 128, .dtype = DType::bf16});
  for (const double rate : {rates.far_runs_gbps, rates.far_tokens_gbps, rates.link_gbps, rates.near_gbps,
                            cpu::measure_read_gbps(workers(1), 8 * MiB)}) {
    REQUIRE(std::isfinite(rate));
    REQUIRE(rate > 0.0);
  }
}

}  // namespace sluice::test
