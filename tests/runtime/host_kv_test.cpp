// What policies ask of a KV head's keys, and the device's clustering of a prompt.

#include "runtime/host_kv.hpp"

#include <algorithm>
#include <cmath>
#include <memory>
#include <vector>

#include "cpu/host_device.hpp"
#include "runtime/prompt_clusters.hpp"
#include "sluice/error.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/problem.hpp"
#include "tests/support/random.hpp"
#include "tests/support/reference.hpp"

using namespace sluice;
using namespace sluice::runtime;
using namespace sluice::test;

namespace {

const cpu::Topology& topology() {
  static const cpu::Topology machine;
  return machine;
}

std::shared_ptr<const cpu::Workers> workers() {
  static const auto two =
      std::make_shared<const cpu::Workers>(topology(), cpu::WorkersOptions{.threads = 2, .pin = false});
  return two;
}

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
  cpu::Backend backend(*workers());
  HostKv kv(backend, problem.shape(), problem.kv());
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
  cpu::Backend backend(*workers());
  HostKv kv(backend, problem.shape(), problem.kv());
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

TEST_CASE("a device clusters a prompt like the host, head by head, and again with other sizes", "[host_kv]") {
  constexpr std::uint32_t kTokens = 600, kDim = 64, kHeads = 3;
  cpu::HostDevice device(workers(), {.misbehaviour = {.max_delay = std::chrono::microseconds(200)}});
  const PageLayout layout{.page_tokens = 16, .head_dim = kDim, .dtype = DType::bf16};
  cpu::HostPool pool({.layout = layout, .bytes = 200 * layout.page_bytes()}, topology(), *workers(), device);
  Random random(3);
  std::vector<HeadPages> heads(kHeads);
  for (HeadPages& head : heads) {
    for (const PageRef ref : pool.allocate((kTokens + 15) / 16)) {
      head.make_room(1);
      head.push(ref);
      for (std::size_t i = 0; i < layout.page_bytes() / 2; ++i) {
        store_element(pool.frame(ref.frame), layout.dtype, i, random.normal());
      }
    }
  }
  const auto stream = device.create_stream("test");
  cpu::Backend backend(*workers());
  const AttentionShape shape{.layers = 1, .q_heads = kHeads, .kv_heads = kHeads, .head_dim = kDim};
  PromptClusters clusters(device, pool);
  for (const std::uint32_t count : {300u, 600u, 40u}) {
    const scheduler::ClusterRequest request{
        .first = 0, .count = count, .clusters = count / 20, .iterations = 5, .seed = count};
    const auto found = clusters.make(request, heads, *stream, deadline_after(std::chrono::seconds(60)));
    REQUIRE(found.size() == kHeads);
    for (std::uint32_t head = 0; head < kHeads; ++head) {
      HostKv kv(backend, shape, pool, heads[head]);
      const Clusters expected = cluster(kv, request, kDim);
      REQUIRE(std::equal(found[head].centroids.begin(), found[head].centroids.end(), expected.centroids.begin(),
                         expected.centroids.end()));
      REQUIRE(std::equal(found[head].assignment.begin(), found[head].assignment.end(), expected.assignment.begin(),
                         expected.assignment.end()));
    }
  }
  device.misbehave({.fail_verb = 1.0});
  try {
    (void)clusters.make({.first = 0, .count = 40, .clusters = 2, .iterations = 1}, heads, *stream,
                        deadline_after(std::chrono::seconds(60)));
    FAIL("a failed verb went unnoticed");
  } catch (const Error& error) {
    REQUIRE(error.code() == Errc::device);
  }
  device.misbehave({});
  for (HeadPages& head : heads) {
    while (head.pages() != 0) pool.release(head.pop());
  }
}
