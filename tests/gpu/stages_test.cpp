#include <cmath>
#include <string>

#include "sluice/error.hpp"
#include "sluice/page_rules.hpp"
#include "tests/gpu/gpu_support.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/derived_pages.hpp"
#include "tests/support/errors.hpp"
#include "tests/support/random.hpp"
#include "tests/support/reference.hpp"

namespace sluice::test {
namespace {

constexpr AttentionShape kShape{.layers = 1, .q_heads = 8, .kv_heads = 2, .head_dim = 128};
constexpr PageLayout kLayout{.page_tokens = 16, .head_dim = 128, .dtype = DType::bf16};

}  // namespace

TEST_CASE("the GPU serves the shapes that it has kernels for and names the others", "[gpu][stages]") {
  const auto stages = tools::cuda_stages_of(*gpu_device());
  for (const std::uint32_t head_dim : {64u, 96u, 128u, 192u, 256u}) {
    for (const DType dtype : {DType::f16, DType::bf16}) {
      for (const std::uint32_t page_tokens : {8u, 16u, 32u, 256u}) {
        const AttentionShape shape{.layers = 1, .q_heads = 64, .kv_heads = 2, .head_dim = head_dim};
        REQUIRE(stages->unsupported_reasons(shape, {.page_tokens = page_tokens, .head_dim = head_dim, .dtype = dtype})
                    .empty());
      }
    }
  }
  const AttentionShape odd{.layers = 1, .q_heads = 66, .kv_heads = 2, .head_dim = 80};
  const auto reasons = stages->unsupported_reasons(odd, {.page_tokens = 12, .head_dim = 80, .dtype = DType::f32});
  REQUIRE(reasons.size() == 4);
  REQUIRE(reasons[0].find("head_dim 80") != std::string::npos);
  REQUIRE(reasons[1].find("33 query heads") != std::string::npos);
  REQUIRE(reasons[2].find("pages of 12 tokens") != std::string::npos);
  REQUIRE(reasons[3].find("f32") != std::string::npos);
  REQUIRE(stages->unsupported_reasons(kShape, {.head_dim = 64})[0].find("pages of head_dim 64") != std::string::npos);
}

TEST_CASE("GPU stages refuse what they cannot do before anything is written", "[gpu][stages]") {
  GpuUnderTest under_test;
  const auto page = under_test.array(2 * kLayout.page_bytes(), std::byte{0x5a});
  const tools::AppendTask append{.k = page.data(), .v = page.data(), .page = page.data(), .count = 1};
  const PageLayout f32{.page_tokens = 16, .head_dim = 128, .dtype = DType::f32};
  const PageLayout odd{.page_tokens = 12, .head_dim = 128, .dtype = DType::bf16};
  for (const PageLayout& layout : {f32, odd}) {
    REQUIRE(code_of([&] {
              under_test.stages().append({&append, 1}, layout, under_test.stream());
            }) == Errc::unsupported);
  }
  const ScorePagesTask pages{};
  REQUIRE(code_of([&] {
            under_test.stages().score_pages({&pages, 1}, kShape, DType::f32, under_test.stream());
          }) == Errc::unsupported);
  ClusterTask cluster;
  cluster.kv.layout = f32;
  REQUIRE(code_of([&] { under_test.stages().cluster({&cluster, 1}, under_test.stream()); }) == Errc::unsupported);
  under_test.finish();
  REQUIRE(page.front() == std::byte{0x5a});
}

TEST_CASE("GPU stages refuse tensors of a type whose scales only pages have", "[gpu][stages]") {
  constexpr DType kScaled = DType::fp8_e4m3;
  GpuUnderTest under_test;
  const auto memory = under_test.array(2 * kLayout.page_bytes(), std::byte{0x5a});
  tools::Stages& stages = under_test.stages();
  Stream* const stream = under_test.stream();
  const tools::AppendTask append{
      .k = memory.data(), .v = memory.data(), .dtype = kScaled, .page = memory.data(), .count = 1};
  REQUIRE(code_of([&] { stages.append({&append, 1}, kLayout, stream); }) == Errc::unsupported);
  const tools::ToF32Task convert{.in = {.data = memory.data(), .dtype = kScaled}};
  REQUIRE(code_of([&] { stages.to_f32({&convert, 1}, stream); }) == Errc::unsupported);
  const tools::MergeTask merge{.parts = {}, .out = memory.data()};
  REQUIRE(code_of([&] { stages.merge({&merge, 1}, kShape, kScaled, stream); }) == Errc::unsupported);
  const PrefillTask prefill{.q = memory.data(), .kv = {.layout = kLayout}, .out = memory.data()};
  for (const PrefillShape& strides : {PrefillShape{.q_dtype = kScaled}, PrefillShape{.out_dtype = kScaled}})
    REQUIRE(code_of([&] { stages.prefill({&prefill, 1}, strides, kShape, stream); }) == Errc::unsupported);
  const SelectBlocksTask select{.q = memory.data(), .kv = {.layout = kLayout}};
  REQUIRE(code_of([&] {
            stages.select_blocks({&select, 1}, {}, {.q_dtype = kScaled}, kShape, stream);
          }) == Errc::unsupported);
  under_test.finish();
  REQUIRE(memory.front() == std::byte{0x5a});
}

TEST_CASE("GPU stages need a stream of the device, unless there is nothing to do", "[gpu][stages]") {
  const auto stages = tools::cuda_stages_of(*gpu_device());
  const tools::AppendTask append{};
  const TopKTask top_k{};
  REQUIRE(code_of([&] { stages->append({&append, 1}, kLayout, nullptr); }) == Errc::invalid_argument);
  REQUIRE(code_of([&] { stages->top_k({&top_k, 1}, nullptr); }) == Errc::invalid_argument);
  REQUIRE(code_of([&] { stages->to_f32(TensorView{}, nullptr, nullptr); }) == Errc::invalid_argument);
  stages->append({}, kLayout, nullptr);
  stages->score_pages({}, kShape, DType::bf16, nullptr);
  stages->top_k({}, nullptr);
  stages->cluster({}, nullptr);
}

TEST_CASE("digest, page scores and top-k work on device memory, one after the other", "[gpu][stages]") {
  GpuUnderTest under_test;
  const Problem problem({.tokens = 500 * 16, .head_dim = 128, .group = 4});
  const auto pages = static_cast<std::uint32_t>(problem.frames().size());
  const auto memory = under_test.on_device(problem.memory());
  const auto q = under_test.on_device(std::span(problem.q(), 4 * 128));
  const auto frames = under_test.on_device(std::span(problem.frames()));
  const std::uint64_t digest_bytes = 2 * problem.layout().row_bytes();
  const auto digests = under_test.on_device(std::span(problem.memory()).first((2 * pages + 1) * digest_bytes));
  const auto scores = under_test.on_device(std::span<const float>(std::vector<float>(4 * pages, kNotANumber)));
  const auto chosen = under_test.array<std::uint32_t>(4 * 20);

  KvView kv = problem.kv();
  kv.base = memory.data();
  derive(under_test, {.kv = kv, .tokens = problem.options().tokens, .digests = digests.data()});
  const ScorePagesTask score{
      .q = q.data(), .digests = digests.data(), .frames = frames.data(), .pages = pages, .out = scores.data()};
  under_test.stages().score_pages({&score, 1}, problem.shape(), DType::bf16, under_test.stream());
  std::vector<TopKTask> rows;
  for (std::size_t head = 0; head < 4; ++head) {
    rows.push_back({.values = scores.subspan(head * pages, pages), .k = 20, .out = chosen.data() + head * 20});
  }
  under_test.stages().top_k(rows, under_test.stream());

  const std::vector<float> values = under_test.from_device(std::span<const float>(scores));
  for (std::uint32_t head = 0; head < 4; ++head) {
    const std::span<const float> row(values.data() + head * pages, pages);
    for (std::uint32_t page = 0; page < pages; ++page) {
      const auto box = reference::digest(problem, page * 16, (page + 1) * 16, DigestKind::box);
      double expected = 0.0;
      for (std::uint32_t c = 0; c < 128; ++c) {
        expected += std::max(problem.q(head, c) * box[c], problem.q(head, c) * box[128 + c]);
      }
      REQUIRE(std::abs(row[page] - expected) < 1e-3);
    }
    const std::uint32_t* const from = chosen.data() + head * 20;
    REQUIRE(std::vector(from, from + 20) == reference::top_k(row, 20));
  }
}

}  // namespace sluice::test
