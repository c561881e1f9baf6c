// What audits of forwards report, on every device: against float64, against what policies say by themselves, and when
// there is none.
#include <cmath>

#include "sluice/error.hpp"
#include "sluice/page_rules.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/engine_policies.hpp"
#include "tests/support/sanitized.hpp"

using namespace sluice;
using namespace sluice::test;
using namespace sluice::test::policies;

namespace {

constexpr std::uint32_t kPrompt = 290;

EngineOptions audited(const EngineRig& rig, std::uint32_t rows, std::uint32_t near) {
  EngineOptions options = paged_options(rig, rows, near, DigestKind::box);
  options.largest.audit = true;
  return options;
}

/// The exact softmax of a token's query head.
std::vector<double> weights(const Story& story, std::uint32_t layer, std::uint32_t head, std::uint32_t token) {
  std::vector<double> weights(token + 1);
  double sum = 0.0;
  for (std::uint32_t j = 0; j <= token; ++j) {
    double dot = 0.0;
    for (std::uint32_t c = 0; c < kShape.head_dim; ++c) {
      dot += double{story.q(layer, token)[head * kShape.head_dim + c]} *
             story.k(layer, j)[head / kShape.group() * kShape.head_dim + c];
    }
    sum += weights[j] = std::exp(dot / std::sqrt(double{kShape.head_dim}));
  }
  for (double& weight : weights) weight /= sum;
  return weights;
}

double norm(std::span<const double> values) {
  double sum = 0.0;
  for (const double value : values) sum += value * value;
  return std::sqrt(sum);
}

/// `margin`: of what is computed from 16-bit outputs.
void require_alike(const AuditReport& found, const AuditReport& want, double margin) {
  REQUIRE(found.heads.size() == want.heads.size());
  for (std::size_t i = 0; i < want.heads.size(); ++i) {
    CAPTURE(i);
    const HeadAudit& a = found.heads[i];
    const HeadAudit& b = want.heads[i];
    REQUIRE(a.steps == b.steps);
    REQUIRE(a.coverage == Approx(b.coverage).margin(margin));
    REQUIRE(a.coverage_min == Approx(b.coverage_min).margin(margin));
    REQUIRE(a.overlap == Approx(b.overlap).margin(1e-9));
    REQUIRE(a.error == Approx(b.error).margin(10 * margin));
    REQUIRE(a.error_bound == Approx(b.error_bound).margin(100 * margin));
    REQUIRE(a.watched_steps == b.watched_steps);
    REQUIRE(a.watched_mass == Approx(b.watched_mass).margin(1e-4));
    REQUIRE(a.watched_kept == Approx(b.watched_kept).margin(1e-4));
  }
}

double margin(const EngineRig& rig) { return rig.kv_dtype == DType::f32 ? 1e-4 : 2e-3; }

}  // namespace

TEST_CASE("coverage and error of an audit are those of float64, wherever a token is attended", "[engine]") {
  struct Case {
    const char* text;
    std::uint32_t sinks, recent, picks;
  };
  constexpr auto kCases = std::to_array<Case>({{"none | near=0,sinks=4,recent=20", 4, 20, 0},
                                               {"exact | int4 | top_k=24 | near=0,sinks=3,recent=9", 3, 9, 24},
                                               {"full:near=0", 1000, 1, 0}});
  const auto [policy, near] = GENERATE_COPY(grid(kCases, std::array{0u, 7u, 90u}));
  const auto& [text, sinks, recent, picks] = policy;
  CAPTURE(text, near);
  const EngineRig rig = engine_rig();
  const Story story(kShape, kPrompt + 12, 81);
  Engine engine(audited(rig, 1, near), rig.device);
  Teller teller{.story = &story, .id = engine.begin(parse_policy(text))};
  prefill(engine, rig, teller, kPrompt);
  REQUIRE(engine.audit(teller.id).heads.empty());
  std::vector<double> coverage(kShape.layers * kShape.q_heads), error(coverage);
  while (teller.at < story.tokens()) {
    for (std::uint32_t layer = 0; layer < kShape.layers; ++layer) {
      std::vector<double> sums, all;
      const auto out = story.attended(layer, teller.at, std::min(sinks, teller.at + 1), recent, picks, &sums);
      const auto exact = story.attended(layer, teller.at, teller.at + 1, 1, 0, &all);
      for (std::uint32_t h = 0; h < kShape.q_heads; ++h) {
        std::vector<double> off;
        for (std::uint32_t c = 0; c < kShape.head_dim; ++c)
          off.push_back(out[h * kShape.head_dim + c] - exact[h * kShape.head_dim + c]);
        coverage[layer * kShape.q_heads + h] += std::exp(sums[h] - all[h]) / 12;
        error[layer * kShape.q_heads + h] += norm(off) / 12;
      }
    }
    (void)decode(engine, rig, teller);
  }
  const AuditReport report = engine.audit(teller.id);
  REQUIRE(report.layers == kShape.layers);
  REQUIRE(report.q_heads == kShape.q_heads);
  REQUIRE(report.heads.size() == coverage.size());
  for (std::size_t i = 0; i < coverage.size(); ++i) {
    CAPTURE(i);
    REQUIRE(report.heads[i].steps == 12);
    REQUIRE(report.heads[i].coverage == Approx(coverage[i]).margin(margin(rig)));
    REQUIRE(report.heads[i].error == Approx(error[i]).margin(20 * margin(rig)));
    REQUIRE(report.heads[i].bound_broken == 0);
    if (sinks == 1000) REQUIRE(report.heads[i].overlap == 1.0);
  }
  REQUIRE(report.tokens == 12);
  REQUIRE(report.coverage.count() == 12 * coverage.size());
  REQUIRE(report.bypassed_heads == 0);
  std::uint64_t visible = 0;
  for (std::uint32_t t = kPrompt; t < story.tokens(); ++t)
    visible += std::uint64_t{t + 1} * kShape.layers * kShape.kv_heads;
  REQUIRE(report.dense_tokens == visible);
  if (sinks == 1000) REQUIRE(report.attended_tokens == visible);
  REQUIRE(engine.stats().estimated == (picks == 0 ? 0 : visible));
  REQUIRE(engine.stats().ranked_pages == 0);
  if (picks == 0 && sinks == 4) REQUIRE(report.attended_tokens == 12 * 24 * kShape.layers * kShape.kv_heads);
}

TEST_CASE("watched tokens are found in what was attended, near or far", "[engine]") {
  const std::uint32_t near = GENERATE(0u, 90u);
  const EngineRig rig = engine_rig();
  const Story story(kShape, kPrompt + 1, 31);
  Engine engine(audited(rig, 1, near), rig.device);
  Teller teller{.story = &story, .id = engine.begin(parse_policy("none | near=0,sinks=4,recent=20"))};
  prefill(engine, rig, teller, kPrompt);
  engine.watch(teller.id, std::vector<std::uint32_t>{280, 42, 79, 280, 116, 999});  // In any order, twice, too far.
  (void)decode(engine, rig, teller);
  const AuditReport report = engine.audit(teller.id);
  std::uint64_t wanted = 0;
  for (std::uint32_t layer = 0; layer < kShape.layers; ++layer) {
    for (std::uint32_t head = 0; head < kShape.q_heads; ++head) {
      CAPTURE(layer, head);
      const std::vector<double> w = weights(story, layer, head, kPrompt);
      const double mass = w[42] + w[79] + w[116] + w[280];
      const HeadAudit& audit = report.at(layer, head);
      REQUIRE(audit.watched_steps == (mass >= 0.01 ? 1 : 0));
      if (mass < 0.01) continue;
      ++wanted;
      REQUIRE(audit.watched_mass == Approx(mass).margin(1e-3));
      REQUIRE(audit.watched_kept == Approx(w[280] / mass).margin(1e-3));
    }
  }
  REQUIRE(wanted > 0);
  REQUIRE(report.watched.count() == wanted);
}

TEST_CASE("audits of policies of the CPU and of pages say what they attend by themselves", "[engine]") {
  constexpr std::array kPolicies{"history+pages:quest,pages=2 | int4 | top_k=24 | near=0,sinks=4,recent=9",
                                 "magicpig | dense=0",
                                 "snapkv:budget=60,window=16",
                                 "exact | verified=0.2,heavy=16 | near=0,sinks=4,recent=9",
                                 "tactic:least=64,size=4",
                                 "pages:quest | progressive=0.8,microbatch=2 | near=0,sinks=4,recent=9",
                                 "history | top_k=20 | near=0,sinks=4,recent=9 | bypass=0.7 | dense=1",
                                 "exact | top_k=9 | near=0,sinks=4,recent=9 | bypass=0.5,check=on",
                                 "lfps",
                                 "pages:quest,budget=64 | top_k=all | near=0,sinks=4,recent=0 | bypass=0.5"};
  const auto [text, near] = GENERATE_COPY(grid(few<5>(kPolicies), std::array{0u, 9u}));
  CAPTURE(text, near);
  const EngineRig rig = engine_rig();
  Story story(kShape, kPrompt + 8, 78);
  story.lean_on_sinks();
  if (rig.kv_dtype != DType::f32) story.round_queries();
  const PolicySpec policy = parse_policy(text);
  Reference reference(rig, story, kShape, policy);
  Engine engine(audited(rig, 1, near), rig.device);
  Teller teller{.story = &story, .id = engine.begin(policy)};
  reference.prefill(kPrompt);
  prefill(engine, rig, teller, kPrompt);
  const std::vector<std::uint32_t> watched = {1, 42, 79, 116, 280};
  reference.watch(watched);
  engine.watch(teller.id, watched);
  while (teller.at < story.tokens()) {
    (void)reference.decode();
    (void)decode(engine, rig, teller);
  }
  const AuditReport report = engine.audit(teller.id);
  require_alike(report, reference.audit(), margin(rig));
  REQUIRE(report.bypassed_heads == reference.audit().bypassed_heads);
  REQUIRE(report.attended_tokens == reference.audit().attended_tokens);
}

TEST_CASE("each row of a batch is audited for its own sequence, drafts too", "[engine]") {
  const EngineRig rig = engine_rig();
  const Story story(kShape, 150, 82), other(kShape, 150, 83);
  const PolicySpec policy = parse_policy("exact | int4 | top_k=16 | near=0,sinks=3,recent=9");
  const auto alone = [&](const Story& of, std::uint32_t from) {
    Engine engine(audited(rig, 4, 0), rig.device);
    Teller teller{.story = &of, .id = engine.begin(policy)};
    prefill(engine, rig, teller, from);
    for (int step = 0; step < 3; ++step) (void)decode(engine, rig, teller);
    return engine.audit(teller.id);
  };
  Engine engine(audited(rig, 4, 20), rig.device);
  Teller drafts{.story = &story, .id = engine.begin(policy)};
  Teller mate{.story = &other, .id = engine.begin(policy)};
  prefill(engine, rig, drafts, 120);
  prefill(engine, rig, mate, 70);
  (void)run(engine, rig, {&mate, &drafts}, {1, 3}, false);
  for (int step = 0; step < 2; ++step) (void)run(engine, rig, {&mate}, {1}, false);
  require_alike(engine.audit(drafts.id), alone(story, 120), margin(rig));
  require_alike(engine.audit(mate.id), alone(other, 70), margin(rig));
}

TEST_CASE("only audited forwards are reported, and they run alone", "[engine]") {
  const EngineRig rig = engine_rig();
  const Story story(kShape, 100, 84);
  EngineOptions options = audited(rig, 1, 0);
  options.in_flight = 3;
  Engine engine(options, rig.device);
  Teller teller{.story = &story, .id = engine.begin(parse_policy("exact | int4 | top_k=16 | near=0"))};
  prefill(engine, rig, teller, 50);
  Bucket plain = options.largest;
  plain.audit = false;
  ForwardTensors tensors(*rig.device, kShape, options.largest.rows());
  const PlanItem item{.sequence = teller.id};
  const auto start = [&](const Bucket& bucket) {
    tensors.set(0, story, teller.at);
    const Batch batch = engine.plan({&item, 1}, bucket, rig.stream);
    tensors.attend(engine, bucket, rig.stream);
    return batch;
  };
  const auto finish = [&](const Batch& batch) {
    engine.finish(batch);
    ++teller.at;
  };
  finish(start(plain));
  REQUIRE(engine.audit(teller.id).heads.empty());
  const Batch first = start(plain);
  const auto refused = [&](const Bucket& bucket) {
    return code_of([&] { (void)engine.plan({&item, 1}, bucket, rig.stream); }) == Errc::invalid_argument;
  };
  REQUIRE(refused(options.largest));
  finish(first);
  const Batch second = start(options.largest);
  REQUIRE(refused(plain));
  engine.cancel(second);
  REQUIRE(engine.audit(teller.id).heads.empty());
  finish(start(options.largest));
  REQUIRE(engine.audit(teller.id).tokens == 1);
  REQUIRE(engine.audit(engine.fork(teller.id, 40)).heads.empty());
  REQUIRE(code_of([&] { (void)engine.audit(SequenceId{99}); }) == Errc::not_found);
  REQUIRE(code_of([&] { engine.watch(SequenceId{99}, {}); }) == Errc::not_found);
  Engine without(options_for(rig, 1, 0), rig.device);
  REQUIRE(code_of([&] { (void)without.plan({}, options.largest, rig.stream); }) == Errc::invalid_argument);
}
