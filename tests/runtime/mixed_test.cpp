// Sequences of all policies in one batch, which get prompts after they decoded, end and begin: what each attends is
// what it attends alone, and what an audit marks as attended is what the output says of itself.
#include <algorithm>
#include <deque>
#include <random>
#include <span>
#include <string>
#include <utility>

#include "sluice/error.hpp"
#include "tests/runtime/toy.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/sanitized.hpp"

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

/// An audit looks at every step's output, so that steps are queued without one only.
RuntimeOptions options_of(PlacementMode mode, std::uint32_t sequences, std::uint32_t near_pages, Drive drive) {
  RuntimeOptions options = toy_options(kShape, sequences * kTokens);
  options.placement = mode;
  options.near_bytes = near_pages * options.layout().page_bytes();
  options.audit_every = drive == Drive::waiting ? 1 : 0;
  return options;
}

struct Member {
  SequenceId id;
  const Toy* toy = nullptr;
  std::uint32_t at = 0;
  std::vector<float> out;
};

/// Tensors of calls, which stay until the calls have been waited for.
class Tape {
 public:
  Tape(Runtime& runtime, Drive drive) : runtime_(runtime), drive_(drive) {}

  void step(std::span<Member* const> members) {
    std::vector<SequenceId> ids;
    for (const Member* m : members) ids.push_back(m->id);
    const auto batch = static_cast<std::uint32_t>(members.size());
    for (std::uint32_t layer = 0; layer < kShape.layers; ++layer) {
      Call& call = calls_.emplace_back();
      for (const Member* m : members) {
        add(call.q, m->toy->q(layer, m->at, 1));
        add(call.k, m->toy->k(layer, m->at, 1));
        add(call.v, m->toy->v(layer, m->at, 1));
      }
      call.out.resize(call.q.size());
      call.members.assign(members.begin(), members.end());
      runtime_.step({.layer = LayerId{layer},
                     .sequences = ids,
                     .q = dense_view(std::as_const(call.q).data(), DType::f32, batch, kShape.q_heads, kShape.head_dim),
                     .k = dense_view(std::as_const(call.k).data(), DType::f32, batch, kShape.kv_heads, kShape.head_dim),
                     .v = dense_view(std::as_const(call.v).data(), DType::f32, batch, kShape.kv_heads, kShape.head_dim),
                     .out = dense_view(call.out.data(), DType::f32, batch, kShape.q_heads, kShape.head_dim),
                     .ordered = drive_ == Drive::queued});
    }
    for (Member* m : members) ++m->at;
    if (drive_ == Drive::waiting) collect();
  }

  /// Waits, and gives every member what it attended.
  void collect() {
    runtime_.synchronize();
    const std::size_t size = std::size_t{kShape.q_heads} * kShape.head_dim;
    for (const Call& call : calls_) {
      for (std::size_t i = 0; i < call.members.size(); ++i) {
        const auto first = call.out.begin() + static_cast<std::ptrdiff_t>(i * size);
        call.members[i]->out.insert(call.members[i]->out.end(), first, first + static_cast<std::ptrdiff_t>(size));
      }
    }
    calls_.clear();
  }

 private:
  struct Call {
    std::vector<float> q, k, v, out;
    std::vector<Member*> members;
  };
  static void add(std::vector<float>& to, const TensorView& from) {
    const auto* row = reinterpret_cast<const float*>(from.row(0, 0));
    to.insert(to.end(), row, row + std::size_t{from.heads} * from.head_dim);
  }

  Runtime& runtime_;
  Drive drive_;
  std::deque<Call> calls_;
};

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
  Runtime runtime(options_of(mode, 1, 400, Drive::waiting));
  Tape tape(runtime, Drive::waiting);
  Member member{.id = runtime.begin(parse_policy(talk.policy)), .toy = &toy, .at = 0, .out = {}};
  Member* const one[] = {&member};
  for (std::size_t i = 0; i < talk.lengths.size(); i += 2) {
    prefill_range(runtime, member.id, toy, member.at, member.at + talk.lengths[i], 64);
    member.at += talk.lengths[i];
    for (std::uint32_t s = 0; s < talk.lengths[i + 1]; ++s) tape.step(one);
  }
  return member.out;
}

}  // namespace

TEST_CASE("sequences of all policies in one batch attend what they attend alone, and audits agree", "[mixed]") {
  const auto mode =
      GENERATE(PlacementMode::hybrid, PlacementMode::stream, PlacementMode::automatic, PlacementMode::near);
  const Drive drive = GENERATE(Drive::waiting, Drive::queued);
  const std::uint32_t seed = GENERATE(range(0u, kSanitized ? 2u : 6u));
  CAPTURE(to_string(mode), to_string(drive), seed);
  std::mt19937 rng(seed);
  const auto pick = [&rng](std::uint32_t low, std::uint32_t high) {
    return low + static_cast<std::uint32_t>(rng() % (high - low + 1));
  };
  const std::uint32_t near_pages = mode == PlacementMode::near ? 1000 : pick(80, 200);
  Runtime runtime(options_of(mode, 4, near_pages, drive), device_of(drive));
  Tape tape(runtime, drive);
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
      const std::uint32_t end = members[i].at + talks[i].lengths[part];
      prefill_range(runtime, members[i].id, toys[i], members[i].at, end, 64, drive);
      members[i].at = end;
    }
    for (std::uint32_t s = 0; s < talks[0].lengths[part + 1]; ++s) {
      std::vector<Member*> batch;
      for (Member& m : members) batch.push_back(&m);
      std::rotate(batch.begin(), batch.begin() + s % 3, batch.end());
      tape.step(batch);
    }
  }
  tape.collect();
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
