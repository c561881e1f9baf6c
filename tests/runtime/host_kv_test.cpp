// What policies ask of a KV head's keys.

#include "runtime/far/host_kv.hpp"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <memory>
#include <thread>
#include <vector>

#include "tests/support/catch.hpp"
#include "tests/support/problem.hpp"
#include "tests/support/random.hpp"

using namespace sluice;
using namespace sluice::runtime;
using namespace sluice::test;

namespace {

struct Clusters {
  std::vector<float> centroids;
  std::vector<std::uint32_t> assignment;
};

Clusters cluster(HostKv& kv, const scheduler::ClusterRequest& request, std::uint32_t head_dim) {
  Clusters result{.centroids = std::vector<float>(std::size_t{request.clusters} * head_dim),
                  .assignment = std::vector<std::uint32_t>(request.count)};
  kv.cluster(request, result.centroids.data(), result.assignment.data());
  return result;
}

}  // namespace

TEST_CASE("a host reader hands out ranges of keys across pages", "[host_kv]") {
  const auto dtype = GENERATE(DType::f32, DType::f16, DType::bf16);
  const Problem problem({.dtype = dtype, .tokens = 100, .head_dim = 80, .page_tokens = 16});
  HostKv kv(problem.shape(), problem.kv());
  for (const auto& [first, count] : {std::pair{0u, 100u}, {15u, 1u}, {15u, 2u}, {40u, 0u}, {47u, 53u}}) {
    std::vector<float> keys(std::size_t{count} * 80 + 1, 7.f);
    kv.keys(first, count, keys.data());
    REQUIRE(keys.back() == 7.f);
    for (std::uint32_t i = 0; i < count * 80; ++i) REQUIRE(keys[i] == problem.k(first + i / 80, i % 80));
  }
}

TEST_CASE("a host reader scores rows that are no keys, for any number of columns", "[host_kv]") {
  const auto columns = GENERATE(1u, 4u, 7u, 32u);
  const auto count = GENERATE(0u, 1u, 1'500u);
  const Problem problem({.tokens = 20, .head_dim = 64});
  HostKv kv(problem.shape(), problem.kv());
  Random random(columns + count);
  std::vector<float> x(std::size_t{columns} * 64), rows(std::size_t{count} * 64);
  for (float& value : x) value = static_cast<float>(random.normal());
  for (float& value : rows) value = static_cast<float>(random.normal());
  std::vector<float> out(std::size_t{count} * columns + 1, 7.f);
  kv.score_rows(x.data(), columns, rows.data(), count, out.data());
  REQUIRE(out.back() == 7.f);
  for (std::size_t i = 0; i + 1 < out.size(); ++i) {
    double dot = 0.0;
    const float* const row = rows.data() + i / columns * 64;
    for (std::size_t c = 0; c < 64; ++c) dot += static_cast<double>(row[c]) * x[i % columns * 64 + c];
    REQUIRE(std::abs(out[i] - dot / 8.0) < 1e-4);
  }
}

TEST_CASE("scores that threads share are those of one", "[host_kv][shared_calls]") {
  const auto dtype = GENERATE(DType::f32, DType::bf16, DType::fp8_e4m3);
  const auto group = GENERATE(1u, 3u, 4u);
  constexpr std::uint32_t kTokens = 2'600;
  const Problem problem({.dtype = dtype, .tokens = kTokens, .head_dim = 64, .group = group});
  SharedCalls calls(2);
  std::atomic<bool> over{false};
  const std::jthread helper([&] {
    while (!over) {
      if (const SharedCalls::Claim claim = calls.claim(1)) {
        claim.run();
        claim.finish();
      }
    }
  });
  for (const std::uint32_t count : {0u, 1u, 511u, 512u, 513u, 1'024u, 1'025u, 2'500u}) {
    CAPTURE(to_string(dtype), group, count);
    std::vector<std::uint32_t> tokens(count);
    for (std::uint32_t i = 0; i < count; ++i) tokens[i] = i * kTokens / count;
    HostKv alone(problem.shape(), problem.kv());
    HostKv shared(problem.shape(), problem.kv());
    shared.share({.calls = &calls, .caller = 1});
    const std::uint64_t before = calls.shared();
    std::vector<float> want(std::size_t{count} * group + 1, 7.f), got = want;
    alone.score(problem.q(), tokens, want.data());
    shared.score(problem.q(), tokens, got.data());
    REQUIRE(got == want);
    REQUIRE(calls.shared() - before == (count > 512 ? 1 : 0));
  }
  over = true;
}

TEST_CASE("a host reader clusters keys the same however they lie in pages", "[host_kv]") {
  constexpr std::uint32_t kTokens = 300, kDim = 64;
  const scheduler::ClusterRequest request{
      .first = 20, .count = kTokens - 20, .clusters = 14, .iterations = 5, .seed = 3};
  const Problem problem({.dtype = DType::bf16, .tokens = kTokens, .head_dim = kDim, .page_tokens = 16});
  const KvView scattered = problem.kv();
  // The same in one page.
  const PageLayout layout{.page_tokens = 512, .head_dim = kDim, .dtype = DType::bf16};
  std::vector<std::byte> page(layout.page_bytes());
  const std::uint32_t frame = 0;
  const KvView together{.base = page.data(), .frames = &frame, .layout = layout};
  for (std::uint32_t t = 0; t < kTokens; ++t) {
    std::memcpy(page.data() + t * layout.row_bytes(), scattered.k_row(t), layout.row_bytes());
  }
  HostKv from_pages(problem.shape(), scattered);
  HostKv from_one(problem.shape(), together);
  const Clusters want = cluster(from_one, request, kDim);
  const Clusters got = cluster(from_pages, request, kDim);
  REQUIRE(got.centroids == want.centroids);
  REQUIRE(got.assignment == want.assignment);
  REQUIRE(*std::ranges::max_element(want.assignment) == 13);
  REQUIRE(std::ranges::any_of(want.centroids, [](float x) { return x != 0.f; }));
}
