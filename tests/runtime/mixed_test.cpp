// Sequences of all policies in one batch, which get prompts after they decoded, end and begin: what each attends is
// what it attends alone, and what an audit marks as attended is what the output says of itself.
#include <algorithm>
#include <random>
#include <string>
#include <utility>

#include "sluice/error.hpp"
#include "tests/runtime/toy.hpp"
#include "tests/support/catch.hpp"

using namespace sluice;
using namespace sluice::test;

namespace {

constexpr AttentionShape kShape{.layers = 2, .q_heads = 4, .kv_heads = 2, .head_dim = 16};
constexpr std::uint32_t kTokens = 900;

const std::vector<std::string> kPolicies = {
    "full | near=0,sinks=4,recent=20",
    "pages:box | progressive=0.8,microbatch=2 | near=0,sinks=4,recent=20",
    "pages:box | progressive=0.9,microbatch=1,rule=certified | near=0,sinks=0,recent=0 | dense=0,every=2",
    "pages | progressive=0.7,microbatch=3,rule=median | near=20%,sinks=4,recent=20",
    "pages:box,pages=4 | int4 | top_p=0.9 | near=0,sinks=4,recent=0",
    "exact | int4 | top_p=0.7 | near=0,sinks=0,recent=9",
    "exact | top_p=0.7 | near=20%,sinks=3,recent=9",
    "clusters:recluster=64,least=64,size=4 | fitted=0.8 | near=0,sinks=0,recent=0",
    "clusters:recluster=64,least=64,size=4 | fitted=0.8 | near=20%,sinks=3,recent=18",
    "clusters:recluster=64,least=200,size=8,candidates=64 | int4 | top_p=0.8 | near=0,sinks=2,recent=5",
    "clusters:recluster=64,least=64,size=8,candidates=64+history:observe_every=4 | top_k=48 | "
    "near=10%,sinks=4,recent=16",
    "clusters:recluster=64,least=64,size=8,candidates=64+lsh:bits=4,tables=20 | top_k=48 | near=0,sinks=4,recent=16",
    "lsh:bits=5,tables=30 | sampled | near=0,sinks=4,recent=64 | dense=0,every=2",
    "lsh:bits=5,tables=30,recent_prompt=0,collisions=1 | sampled | near=20%,sinks=4,recent=16",
    "history+pages | int4 | top_k=32 | near=10%,sinks=4,recent=16",
    "history:share_group=on+pages | top_p=0.9 | near=0,sinks=4,recent=16",
    "none | near=0,sinks=4,recent=40",
};

bool alone_is_the_same(const std::string& policy) { return policy.find("near=0") != std::string::npos; }

/// One conversation: chunks of prompt and decode, in turn.
struct Talk {
  std::string policy;
  std::uint32_t seed = 0;
  std::vector<std::uint32_t> lengths;  // prompt, decode, prompt, decode
};

RuntimeOptions options_of(PlacementMode mode, std::uint32_t sequences, std::uint32_t near_pages) {
  RuntimeOptions options = toy_options(kShape, sequences * kTokens);
  options.placement = mode;
  options.near_bytes = near_pages * options.layout().page_bytes();
  options.audit_every = 1;
  return options;
}

void prompt(Runtime& runtime, SequenceId id, const Toy& toy, std::uint32_t at, std::uint32_t count) {
  for (const std::uint32_t end = at + count; at < end;) {
    const std::uint32_t now = std::min(64u, end - at);
    std::vector<float> out(std::size_t{now} * kShape.q_heads * kShape.head_dim);
    for (std::uint32_t layer = 0; layer < kShape.layers; ++layer) {
      runtime.prefill({.sequence = id,
                       .layer = LayerId{layer},
                       .q = toy.q(layer, at, now),
                       .k = toy.k(layer, at, now),
                       .v = toy.v(layer, at, now),
                       .out = dense_view(out.data(), DType::f32, now, kShape.q_heads, kShape.head_dim)});
    }
    at += now;
  }
}

struct Member {
  SequenceId id;
  const Toy* toy = nullptr;
  std::uint32_t at = 0;
  std::vector<float> out;
};

void step_all(Runtime& runtime, std::vector<Member*>& members) {
  const auto batch = static_cast<std::uint32_t>(members.size());
  const std::size_t q_size = std::size_t{kShape.q_heads} * kShape.head_dim;
  const std::size_t kv_size = std::size_t{kShape.kv_heads} * kShape.head_dim;
  std::vector<SequenceId> ids;
  for (const Member* m : members) ids.push_back(m->id);
  for (std::uint32_t layer = 0; layer < kShape.layers; ++layer) {
    std::vector<float> q, k, v, out(batch * q_size);
    for (const Member* m : members) {
      const auto add = [](std::vector<float>& to, const TensorView& from, std::size_t size) {
        const auto* row = reinterpret_cast<const float*>(from.row(0, 0));
        to.insert(to.end(), row, row + size);
      };
      add(q, m->toy->q(layer, m->at, 1), q_size);
      add(k, m->toy->k(layer, m->at, 1), kv_size);
      add(v, m->toy->v(layer, m->at, 1), kv_size);
    }
    runtime.step({.layer = LayerId{layer},
                  .sequences = ids,
                  .q = dense_view(std::as_const(q).data(), DType::f32, batch, kShape.q_heads, kShape.head_dim),
                  .k = dense_view(std::as_const(k).data(), DType::f32, batch, kShape.kv_heads, kShape.head_dim),
                  .v = dense_view(std::as_const(v).data(), DType::f32, batch, kShape.kv_heads, kShape.head_dim),
                  .out = dense_view(out.data(), DType::f32, batch, kShape.q_heads, kShape.head_dim)});
    for (std::uint32_t i = 0; i < batch; ++i)
      members[i]->out.insert(members[i]->out.end(), out.begin() + static_cast<std::ptrdiff_t>(i * q_size),
                             out.begin() + static_cast<std::ptrdiff_t>((i + 1) * q_size));
  }
  for (Member* m : members) ++m->at;
}

void watch_all(Runtime& runtime, SequenceId id) {
  std::vector<std::uint32_t> all(kTokens);
  for (std::uint32_t t = 0; t < kTokens; ++t) all[t] = t;
  runtime.watch(id, all);
}

/// Without a word of its own on coverage (a sample corrected for its chance), an audit only marks.
void check(const Runtime& runtime, SequenceId id, const std::string& policy) {
  CAPTURE(policy);
  const Stats stats = runtime.stats(id);
  CHECK(stats.attended_tokens == stats.near_tokens + stats.far_tokens + stats.fetched_tokens);
  CHECK(stats.attended_tokens <= stats.dense_tokens);
  for (const HeadAudit& audit : runtime.audit(id).heads) {
    CHECK(audit.coverage <= 1.0 + 1e-5);
    CHECK(audit.watched_steps == audit.steps);
    CHECK(audit.watched_kept == Approx(audit.coverage).margin(2e-5));
    if (policy.find("sampled") == std::string::npos) CHECK(audit.bound_broken == 0);
  }
}

std::vector<float> talk_alone(const Talk& talk, PlacementMode mode) {
  const Toy toy(kShape, kTokens, talk.seed);
  Runtime runtime(options_of(mode, 1, 400));
  Member member{.id = runtime.begin(parse_policy(talk.policy)), .toy = &toy, .at = 0, .out = {}};
  std::vector<Member*> one{&member};
  for (std::size_t i = 0; i < talk.lengths.size(); i += 2) {
    prompt(runtime, member.id, toy, member.at, talk.lengths[i]);
    member.at += talk.lengths[i];
    for (std::uint32_t s = 0; s < talk.lengths[i + 1]; ++s) step_all(runtime, one);
  }
  return member.out;
}

}  // namespace

TEST_CASE("sequences of all policies in one batch attend what they attend alone, and audits agree", "[mixed]") {
  const auto mode =
      GENERATE(PlacementMode::hybrid, PlacementMode::stream, PlacementMode::automatic, PlacementMode::near);
  const std::uint32_t seed = GENERATE(range(0u, 6u));
  CAPTURE(to_string(mode), seed);
  std::mt19937 rng(seed);
  const auto pick = [&rng](std::uint32_t low, std::uint32_t high) {
    return low + static_cast<std::uint32_t>(rng() % (high - low + 1));
  };
  const std::uint32_t near_pages = mode == PlacementMode::near ? 1000 : pick(80, 200);
  Runtime runtime(options_of(mode, 4, near_pages));
  std::vector<Talk> talks;
  std::vector<Toy> toys;
  for (std::uint32_t i = 0; i < 3; ++i) {
    talks.push_back({.policy = kPolicies[(seed * 3 + i) % kPolicies.size()],
                     .seed = 100 + seed * 3 + i,
                     .lengths = {pick(1, 400), 90, pick(1, 100), 20}});
    toys.emplace_back(kShape, kTokens, talks.back().seed);
  }
  CAPTURE(talks[0].policy, talks[1].policy, talks[2].policy, near_pages);
  std::vector<Member> members;
  for (std::uint32_t i = 0; i < 3; ++i) {
    members.push_back({.id = runtime.begin(parse_policy(talks[i].policy)), .toy = &toys[i], .at = 0, .out = {}});
    watch_all(runtime, members[i].id);
  }
  for (std::size_t part = 0; part < 4; part += 2) {
    for (std::uint32_t i = 0; i < 3; ++i) {
      prompt(runtime, members[i].id, toys[i], members[i].at, talks[i].lengths[part]);
      members[i].at += talks[i].lengths[part];
    }
    for (std::uint32_t s = 0; s < talks[0].lengths[part + 1]; ++s) {
      std::vector<Member*> batch;
      for (Member& m : members) batch.push_back(&m);
      std::rotate(batch.begin(), batch.begin() + s % 3, batch.end());
      step_all(runtime, batch);
    }
  }
  for (std::uint32_t i = 0; i < 3; ++i) check(runtime, members[i].id, talks[i].policy);
  for (std::uint32_t i = 0; i < 3; ++i) {
    if (mode == PlacementMode::near || !alone_is_the_same(talks[i].policy)) continue;
    CAPTURE(talks[i].policy);
    CHECK(worst_difference(talk_alone(talks[i], mode), members[i].out) < 1e-4);
  }
  for (const Member& m : members) runtime.end(m.id);
  REQUIRE(runtime.info().near_slots_free == runtime.info().near_slots);
  REQUIRE(runtime.info().host_pages_free == runtime.info().host_pages);
}
