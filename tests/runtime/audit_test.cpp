// What audits report, against the same sums in float64.
#include <algorithm>
#include <cmath>
#include <numeric>

#include "sluice/error.hpp"
#include "tests/runtime/toy.hpp"
#include "tests/support/catch.hpp"

using namespace sluice;
using namespace sluice::test;

namespace {

constexpr AttentionShape kShape{.layers = 2, .q_heads = 4, .kv_heads = 2, .head_dim = 64};
constexpr std::uint32_t kPrompt = 300;
constexpr std::uint32_t kSinks = 4;
constexpr std::uint32_t kRecent = 20;

/// Exact softmax of the step in which `token` is the newest, for one (layer, head).
std::vector<double> weights(const Toy& toy, std::uint32_t layer, std::uint32_t head, std::uint32_t token) {
  const std::uint32_t d = kShape.head_dim;
  const auto* q = reinterpret_cast<const float*>(toy.q(layer, token, 1).row(0, head));
  std::vector<double> w(token + 1);
  for (std::uint32_t j = 0; j <= token; ++j) {
    const auto* k = reinterpret_cast<const float*>(toy.k(layer, j, 1).row(0, head / kShape.group()));
    double dot = 0.0;
    for (std::uint32_t c = 0; c < d; ++c) dot += double{q[c]} * k[c];
    w[j] = dot / std::sqrt(static_cast<double>(d));
  }
  const double top = *std::max_element(w.begin(), w.end());
  double sum = 0.0;
  for (double& x : w) sum += x = std::exp(x - top);
  for (double& x : w) x /= sum;
  return w;
}

bool attended(std::uint32_t j, std::uint32_t token) { return j < kSinks || j + kRecent > token; }

}  // namespace

TEST_CASE("an audit's coverage, overlap and watched tokens are those of float64 attention", "[audit]") {
  const Toy toy(kShape, kPrompt + 1, 31);
  RuntimeOptions options = toy_options(kShape, 350);
  options.audit_every = 1;
  Runtime runtime(options);
  const SequenceId id = runtime.begin(parse_policy("streaming:recent=20"));
  prefill(runtime, id, toy, kPrompt, 64);
  const std::vector<std::uint32_t> watched = {290, 37, 74, 290, 111, 999};  // In any order, twice, and one too far.
  runtime.watch(id, watched);
  step(runtime, id, toy, kPrompt);

  const AuditReport report = runtime.audit(id);
  REQUIRE(report.layers == kShape.layers);
  REQUIRE(report.q_heads == kShape.q_heads);
  REQUIRE(report.heads.size() == kShape.layers * kShape.q_heads);
  std::uint64_t wanted = 0;
  for (std::uint32_t layer = 0; layer < kShape.layers; ++layer) {
    for (std::uint32_t head = 0; head < kShape.q_heads; ++head) {
      CAPTURE(layer, head);
      const std::vector<double> w = weights(toy, layer, head, kPrompt);
      std::vector<std::uint32_t> order(w.size());
      std::iota(order.begin(), order.end(), 0u);
      std::stable_sort(order.begin(), order.end(), [&](auto a, auto b) { return w[a] > w[b]; });
      double covered = 0.0, hits = 0.0, mass = 0.0, kept = 0.0;
      for (std::uint32_t j = 0; j < w.size(); ++j) covered += attended(j, kPrompt) ? w[j] : 0.0;
      for (std::uint32_t i = 0; i < AuditReport::top_k; ++i) hits += attended(order[i], kPrompt) ? 1.0 : 0.0;
      for (const std::uint32_t j : {37u, 74u, 111u, 290u}) {
        mass += w[j];
        kept += attended(j, kPrompt) ? w[j] : 0.0;
      }
      const HeadAudit& audit = report.at(layer, head);
      REQUIRE(audit.steps == 1);
      REQUIRE(audit.coverage == Approx(covered).epsilon(1e-4));
      REQUIRE(audit.coverage_min == audit.coverage);
      REQUIRE(audit.overlap == Approx(hits / AuditReport::top_k));
      REQUIRE(audit.bound_broken == 0);
      REQUIRE(audit.error > 0.0);
      REQUIRE(audit.error <= audit.error_bound);
      REQUIRE(audit.watched_steps == (mass >= 0.01 ? 1 : 0));
      if (mass < 0.01) continue;
      ++wanted;
      REQUIRE(audit.watched_mass == Approx(mass).epsilon(1e-4));
      REQUIRE(audit.watched_kept == Approx(kept / mass).epsilon(1e-3).margin(1e-6));
    }
  }
  REQUIRE(wanted > 0);
  const Stats stats = runtime.stats(id);
  REQUIRE(stats.watched.count() == wanted);
  REQUIRE(stats.overlap.count() == stats.coverage.count());
}

TEST_CASE("dense attention overlaps wholly and errs by rounding only, whatever is near", "[audit]") {
  const std::string policy = GENERATE("full:near=0%", "full:near=30%", "topk:budget=100%", "history+pages:pages=100% | int4 | top_k=100% | near=3%");
  CAPTURE(policy);
  const Toy toy(kShape, kPrompt + 4, 32);
  RuntimeOptions options = toy_options(kShape, 350);
  options.audit_every = 2;
  Runtime runtime(options);
  const SequenceId id = runtime.begin(parse_policy(policy));
  prefill(runtime, id, toy, kPrompt, 64);
  for (std::uint32_t t = 0; t < 4; ++t) step(runtime, id, toy, kPrompt + t);
  for (const HeadAudit& audit : runtime.audit(id).heads) {
    REQUIRE(audit.steps == 2);
    REQUIRE(audit.coverage == Approx(1.0).margin(1e-5));
    REQUIRE(audit.overlap == 1.0);
    REQUIRE(audit.relative_error < 1e-5);
    REQUIRE(audit.bound_broken == 0);
  }
}

TEST_CASE("without audits nothing is reported, and unknown sequences are told", "[audit]") {
  const Toy toy(kShape, 40, 33);
  Runtime runtime(toy_options(kShape, 350));
  const SequenceId id = runtime.begin(parse_policy("full"));
  prefill(runtime, id, toy, 30, 30);
  step(runtime, id, toy, 30);
  REQUIRE(runtime.audit(id).heads.empty());
  runtime.end(id);
  REQUIRE_THROWS_AS(runtime.audit(id), Error);
  REQUIRE_THROWS_AS(runtime.watch(id, {}), Error);
}

TEST_CASE("an audit knows what was near when it was attended, though its slots were given away in the same step", "[audit]") {
  const Toy toy(kShape, kPrompt + 4, 34);
  RuntimeOptions options = toy_options(kShape, 700);
  options.placement = PlacementMode::stream;
  options.audit_every = 1;
  Runtime runtime(options);
  const SequenceId id = runtime.begin(parse_policy("pages:quest | progressive=1,microbatch=2 | near=30%,sinks=4,recent=20"));
  prefill(runtime, id, toy, kPrompt, 64);
  const std::vector<std::uint32_t> watched = {37, 74, 111, 148, 185, 222, 259};
  runtime.watch(id, watched);
  for (std::uint32_t t = 0; t < 4; ++t) step(runtime, id, toy, kPrompt + t);
  REQUIRE(runtime.stats(id).evictions > 0);
  REQUIRE(runtime.stats(id).watched.count() > 0);
  for (const HeadAudit& audit : runtime.audit(id).heads) {
    REQUIRE(audit.coverage == Approx(1.0).margin(1e-5));
    REQUIRE(audit.overlap == 1.0);
    if (audit.watched_steps != 0) REQUIRE(audit.watched_kept == Approx(1.0));
  }
}
