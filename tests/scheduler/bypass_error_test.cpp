// Which heads are bypassed, and how far off they are then, over independent keys.
#include <numeric>

#include "tests/scheduler/bypass_support.hpp"

using namespace sluice;
using namespace sluice::scheduler;
using namespace sluice::scheduler::test;

namespace {

/// One query head over independent normal keys: logits beyond the sinks have this variance, and the sinks hold exactly
/// this share of the softmax. The last prompt query points elsewhere. With a needle one key of the others outweighs
/// them a hundred times, which no estimate sees.
struct Independent {
  Independent(double variance, double share, std::uint32_t seed, bool needle = false)
      : kv(n, kDim, 1), q(random_queries(1, kDim, seed + 1000)), bypass(0.85f, kOne, kSinks, kLocal) {
    std::mt19937 rng(seed);
    std::normal_distribution<float> normal;
    for (float& x : kv.k) x = normal(rng);
    for (float& x : kv.v) x = normal(rng);
    const double size = std::sqrt(std::inner_product(q.begin(), q.end(), q.begin(), 0.0));
    for (float& x : q) x *= static_cast<float>(std::sqrt(variance * kDim) / size);
    if (needle) {
      const double others = attend(kv, q.data(), 0, positions(kSinks, n)).mass;
      aim(kv, q.data(), n / 2, n / 2 + 1, std::log(100.0 * others));
    }
    const double rest = attend(kv, q.data(), 0, positions(kSinks, n)).mass;
    aim_sinks(kv, q.data(), share > 0.0 ? std::log(share / (1.0 - share) * rest / kSinks) : -20.0);
    const std::vector<float> last = random_queries(1, kDim, seed + 2000, 2.f);
    bypass.begin({.kv_head = 0, .tokens = n - 1, .queries = 1, .last_q = last, .kv = &kv});
  }
  /// max(A_glob, A_loc)
  [[nodiscard]] double estimated_rest() const {
    const SinkBypass::Logits estimate = bypass.logits(0, q.data());
    return std::max((n - kSinks) * std::exp(estimate.mean + estimate.variance / 2),
                    attend(kv, q.data(), 0, positions(n - kLocal, n)).mass);
  }

  static constexpr std::uint32_t n = 2001;
  static constexpr AttentionShape kOne{.layers = 1, .q_heads = 1, .kv_heads = 1, .head_dim = kDim};
  FakeKv kv;
  std::vector<float> q;
  SinkBypass bypass;
};

constexpr std::uint32_t kTrials = 20;

std::uint32_t bypassed_heads(double variance, double share) {
  std::uint32_t bypassed = 0;
  for (std::uint32_t trial = 0; trial < kTrials; ++trial) {
    Independent head(variance, share, trial);
    const FakeNear near(head.n, kSinks, 0);
    bypassed += tested(head.bypass, head.kv, head.q, head.n, near).heads;
  }
  return bypassed;
}

}  // namespace

TEST_CASE("independent logits are not bypassed when the sinks hold next to nothing", "[bypass]") {
  const double variance = GENERATE(0.1, 0.5, 1.0, 2.0, 4.0, 5.9, 6.1, 8.0, 12.0, 20.0, 30.0);
  const double share = GENERATE(0.0, 0.001, 0.003, 0.006);
  CAPTURE(variance, share);
  REQUIRE(bypassed_heads(variance, share) == 0);
}

TEST_CASE("flat heads are bypassed when the sinks hold nearly all", "[bypass]") {
  const double variance = GENERATE(0.1, 0.5, 1.0, 2.0);
  const double share = GENERATE(0.95, 0.99);
  CAPTURE(variance, share);
  REQUIRE(bypassed_heads(variance, share) == kTrials);
}

TEST_CASE("the error of a bypassed head is below the bound that bypass.hpp states", "[bypass]") {
  const double variance = GENERATE(0.1, 1.0, 4.0, 5.9);
  const double share =
      GENERATE(0.5, 0.8, 0.9, 0.99);  // Below the threshold only an estimate that is too high bypasses.
  const std::uint32_t recent = GENERATE(0u, 64u);
  const bool needle = GENERATE(false, true);
  std::uint32_t bypassed = 0;
  for (std::uint32_t trial = 0; trial < kTrials; ++trial) {
    Independent head(variance, share, trial, needle);
    const FakeNear near(head.n, kSinks, recent);
    const Bypass out = tested(head.bypass, head.kv, head.q, head.n, near);
    if (out.heads == 0) continue;
    ++bypassed;
    const Attended dense = attend(head.kv, head.q.data(), 0, positions(0, head.n));
    const Attended seen = attend(head.kv, head.q.data(), 0, near_tokens(near.set, head.n));
    const double rest = head.estimated_rest();
    const double sinks = attend(head.kv, head.q.data(), 0, positions(0, kSinks)).mass;
    const MergeWeights weights = merge_weights(static_cast<float>(std::log(seen.mass)), out.lse[0]);
    std::vector<double> merged(kDim);
    for (std::uint32_t c = 0; c < kDim; ++c) merged[c] = weights.a * seen.out[c] + weights.b * out.out[c];
    const double certain = std::min(sinks / (sinks + rest), sinks / dense.mass);
    CAPTURE(variance, share, recent, needle, trial, certain);
    REQUIRE(distance(merged, dense.out) <= (1.0 - certain) * 2.0 * longest_value(head.kv, head.n) + 1e-5);
  }
  if (needle || share > 0.95) REQUIRE(bypassed > 0);
}
