// Adamas: the transform, and that tokens are ranked by the distances of 2-bit codes, against the definition.

#include <bit>
#include <limits>

#include "scheduler/labels/hadamard_codes.hpp"
#include "tests/scheduler/policy_step.hpp"

using namespace sluice;
using namespace sluice::scheduler;
using namespace sluice::scheduler::test;

namespace {

/// Row times the Hadamard matrix, whose element (i, j) is 1 or -1 by the parity of the bits that i and j share.
std::vector<double> transformed(const float* row, std::uint32_t size) {
  const std::uint32_t block = size & (~size + 1);
  std::vector<double> out(size, 0.0);
  for (std::uint32_t i = 0; i < size; ++i) {
    for (std::uint32_t j = 0; j < block; ++j) {
      const double sign = std::popcount(i % block & j) % 2 == 0 ? 1.0 : -1.0;
      out[i] += sign * double{row[i / block * block + j]};
    }
    out[i] /= std::sqrt(static_cast<double>(block));
  }
  return out;
}

double deviation(const std::vector<double>& values) {
  double sum = 0.0, squares = 0.0;
  for (const double x : values) sum += x;
  const double mean = sum / static_cast<double>(values.size());
  for (const double x : values) squares += (x - mean) * (x - mean);
  return std::sqrt(squares / static_cast<double>(values.size()));
}

int bucket_of(double x, double s) { return (x > -s) + (x > 0.0) + (x > s); }

double distance(const std::vector<double>& q, const std::vector<double>& k, double of_keys) {
  const double of_query = deviation(q);
  int sum = 0;
  for (std::size_t c = 0; c < q.size(); ++c) sum += std::abs(bucket_of(q[c], of_query) - bucket_of(k[c], of_keys));
  return sum;
}

}  // namespace

TEST_CASE("the transform is that by the matrix, in blocks where the size is no power of two", "[adamas]") {
  const std::uint32_t size = GENERATE(1u, 2u, 16u, 96u, 128u, 192u);
  const std::vector<float> row = random_queries(1, size, 3);
  std::vector<float> out = row;
  hadamard_transform(out);
  const std::vector<double> want = transformed(row.data(), size);
  for (std::uint32_t i = 0; i < size; ++i) REQUIRE(std::abs(out[i] - want[i]) < 1e-5);
  hadamard_transform(out);  // It is its own inverse.
  for (std::uint32_t i = 0; i < size; ++i) REQUIRE(std::abs(out[i] - row[i]) < 1e-5);
}

TEST_CASE("each query head keeps the nearest codes, ties to the earlier", "[adamas]") {
  const std::uint32_t prompt = GENERATE(1u, 70u, 600u);
  const std::uint32_t generated = GENERATE(1u, 40u);
  CAPTURE(prompt, generated);
  const std::uint32_t n = prompt + generated;
  FakeKv kv = FakeKv::random(n, kDim, kGroup, 21);
  const auto policy = make("exact | hadamard | top_k=24 | near=0,sinks=4,recent=3");
  policy->begin({.kv_head = 0, .tokens = prompt, .queries = 0, .last_q = {}, .kv = &kv});
  std::vector<double> all;
  for (std::uint32_t t = 0; t < prompt; ++t) {
    const std::vector<double> key = transformed(kv.k.data() + std::size_t{t} * kDim, kDim);
    all.insert(all.end(), key.begin(), key.end());
  }
  const double of_keys = deviation(all);
  const std::vector<float> q = random_queries(kGroup, kDim, 22);
  const FakeNear near(n, 4, 3);
  const auto [row, bypass, counters] = select(*policy, kv, n, q, near.set);
  if (n > 7) {
    for (std::uint32_t h = 0; h < kGroup; ++h) {
      const std::vector<double> query = transformed(q.data() + h * kDim, kDim);
      REQUIRE(attended_by(row, h) == best(positions(4, n - 3), 24, [&](std::uint32_t token) {
                return -distance(query, transformed(kv.k.data() + std::size_t{token} * kDim, kDim), of_keys);
              }));
    }
  }
  REQUIRE(kv.rows_scored == 0);
  REQUIRE(counters.index_bytes == counters.estimated * kDim / 4);
}

TEST_CASE("a key like the query is found among others, however channels are scaled", "[adamas]") {
  const std::uint32_t n = 1000, needle = 333;
  FakeKv kv = FakeKv::random(n, kDim, kGroup, 23);
  for (std::size_t i = 0; i < kv.k.size(); i += kDim)
    kv.k[i + 2] *= 20.f;  // What a few buckets could not hold as it is.
  std::vector<float> q = random_queries(kGroup, kDim, 24, 2.f);
  for (std::uint32_t h = 1; h < kGroup; ++h) std::copy_n(q.begin(), kDim, q.begin() + h * kDim);
  std::copy_n(q.begin(), kDim, kv.k.begin() + needle * kDim);
  const auto policy = make("exact | hadamard | top_k=50 | near=0,sinks=4,recent=0");
  policy->begin({.kv_head = 0, .tokens = n - 1, .queries = 0, .last_q = {}, .kv = &kv});
  const FakeNear near(n, 4, 0);
  const SelectionRow row = select(*policy, kv, n, q, near.set).row;
  REQUIRE(std::ranges::count(attended_by(row, 0), needle) == 1);
}

TEST_CASE("keys that are no numbers have no say in the buckets; without a prompt keys are scored whole", "[adamas]") {
  FakeKv kv = FakeKv::random(50, kDim, kGroup, 25);
  FakeKv spoilt = kv;
  std::fill_n(spoilt.k.begin() + 10 * kDim, kDim, std::numeric_limits<float>::quiet_NaN());
  std::fill_n(kv.k.begin() + 10 * kDim, kDim, 0.f);
  HadamardCodes codes(kShape);
  codes.begin({.kv_head = 0, .tokens = 50, .queries = 0, .last_q = {}, .kv = &spoilt});
  REQUIRE(codes.coded() == 50);
  FakeKv others(49, kDim, kGroup);
  std::copy_n(kv.k.begin(), 10 * kDim, others.k.begin());
  std::copy(kv.k.begin() + 11 * kDim, kv.k.end(), others.k.begin() + 10 * kDim);
  HadamardCodes without(kShape);
  without.begin({.kv_head = 0, .tokens = 49, .queries = 0, .last_q = {}, .kv = &others});
  const std::vector<float> q = random_queries(kGroup, kDim, 26);
  std::vector<float> out(50 * kGroup);
  codes.estimate(q.data(), positions(0, 50), spoilt, out.data());
  std::vector<float> want(49 * kGroup);
  without.estimate(q.data(), positions(0, 49), others, want.data());
  for (std::uint32_t i = 0; i < want.size(); ++i) REQUIRE(out[i < 10 * kGroup ? i : i + kGroup] == want[i]);
  HadamardCodes none(kShape);
  none.begin({.kv_head = 0, .tokens = 0, .queries = 0, .last_q = {}, .kv = &kv});
  none.follow(5, kv);
  none.estimate(q.data(), positions(0, 5), kv, out.data());
  for (std::uint32_t i = 0; i < 5 * kGroup; ++i)
    REQUIRE(out[i] == static_cast<float>(kv.logit(q.data(), i % kGroup, i / kGroup)));
  REQUIRE(none.heap_bytes() == 0);
}
