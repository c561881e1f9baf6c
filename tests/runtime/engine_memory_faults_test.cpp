// An engine in a process that runs short of memory: every allocation of a sequence may be the one that fails, also of
// the threads that choose and learn. The caller gets an Error, and others go on as if nothing had been.
#include <numeric>
#include <utility>

#include "sluice/engine.hpp"
#include "sluice/error.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/engine_named.hpp"
#include "tests/support/failing_new.hpp"
#include "tests/support/reference.hpp"
#include "tests/support/sanitized.hpp"
#include "tests/support/story.hpp"

using namespace sluice;
using namespace sluice::test;

namespace {

constexpr AttentionShape kShape{.layers = 2, .q_heads = 4, .kv_heads = 2, .head_dim = 16};
constexpr std::uint32_t kPrompt = 80;
constexpr std::uint32_t kTokens = 86;
const Bucket kPromptBucket{.decode_rows = 0, .prefill_rows = kPrompt, .prefills = 1};
const Bucket kTokenBucket{.decode_rows = 1, .unbounded = true};

EngineOptions options() {
  EngineOptions options{.shape = kShape,
                        .kv_dtype = DType::f32,
                        .host_bytes = 1 * MiB,
                        .near_bytes = 64 * KiB,
                        .largest = {.decode_rows = 1, .prefill_rows = kPrompt, .prefills = 1, .unbounded = true},
                        .sequences = 3,
                        .cpu_sequences = 1,
                        .threads = 2,
                        .pin_threads = false};
  options.prefill_window = 64;
  return named(options, {kManyTokens, kOnCpu});
}

/// How many allocations of a long list are passed over: the more the later, as those of decoding are much alike.
constexpr long step_after(long which) { return 1 + which / (kThreadSanitized ? 2 : 12); }

/// One sequence, whose outputs lie in memory that was there before anything may fail.
class Session {
 public:
  Session(Engine& engine, const Story& story, SequenceId id = {}) : engine_(engine), story_(story), id_(id) {}

  void begin(const PolicySpec& policy) { id_ = engine_.begin(policy); }
  void begin(const PolicySpec& policy, std::span<const std::int32_t> prompt) { id_ = engine_.begin(policy, prompt); }
  void prefill() { forward(kPromptBucket, kPrompt - tokens(), true); }
  void decode() { forward(kTokenBucket, 1, false); }
  void end() { engine_.end(std::exchange(id_, {})); }
  [[nodiscard]] std::uint32_t tokens() const { return engine_.tokens(id_); }
  [[nodiscard]] SequenceId id() const { return id_; }
  /// Of the newest token's last layer.
  [[nodiscard]] std::span<const float> out() const { return {out_.data(), out_.size() / kPrompt}; }

 private:
  void forward(const Bucket& bucket, std::uint32_t count, bool prefill) {
    const std::uint32_t at = engine_.tokens(id_);
    const PlanItem item{.sequence = id_, .tokens = count, .prefill = prefill};
    const Batch batch = engine_.plan({&item, 1}, bucket, nullptr);
    try {
      for (std::uint32_t layer = 0; layer < kShape.layers; ++layer) {
        const auto view = [&](auto* rows, std::uint32_t heads) {
          return dense_view(rows, DType::f32, bucket.rows(), heads, kShape.head_dim);
        };
        engine_.attend(bucket, LayerId{layer}, view(story_.q(layer, at), kShape.q_heads),
                       view(story_.k(layer, at), kShape.kv_heads), view(story_.v(layer, at), kShape.kv_heads),
                       view(out_.data(), kShape.q_heads), nullptr);
      }
    } catch (const Error&) {
      fail_allocation(-1);
      engine_.cancel(batch);
      throw;
    }
    engine_.finish(batch);
  }

  Engine& engine_;
  const Story& story_;
  SequenceId id_;
  std::vector<float> out_ = std::vector<float>(std::size_t{kPrompt} * kShape.q_heads * kShape.head_dim);
};

void tell(Session& session, const PolicySpec& policy) {
  session.begin(policy);
  session.prefill();
  while (session.tokens() < kTokens - 1) session.decode();
}

/// Up to the last token. What could not be learnt from the one told last shows with the next.
void tell_again(Session& session) {
  for (int failures = 0; session.tokens() < kTokens;) {
    try {
      session.decode();
    } catch (const Error& error) {
      if (++failures > 1 || std::string(error.what()).find("could not choose") == std::string::npos) throw;
    }
  }
}

std::vector<std::int32_t> names(std::uint32_t tokens) {
  std::vector<std::int32_t> ids(tokens);
  std::iota(ids.begin(), ids.end(), 1);
  return ids;
}

/// A sequence whose tokens have names, a fork of it, and one that begins with what is known of it then.
void tell_twice(Engine& engine, Session (&sessions)[2], std::span<const std::int32_t> ids, const PolicySpec& policy,
                const PolicySpec& beside) {
  for (Session& session : sessions) {
    session.begin(policy, ids.first(kPrompt));
    session.prefill();
    while (session.tokens() < kTokens - 1) {
      engine.name_tokens(session.id(), session.tokens(), ids.subspan(session.tokens(), 1));
      session.decode();
    }
    if (&session != &sessions[0]) continue;
    const SequenceId child = engine.fork(session.id(), 40, beside);
    try {
      engine.name_tokens(child, 40, ids.first(9));
      engine.preempt(child);
    } catch (const Error&) {
      engine.end(child);
      throw;
    }
    engine.end(child);
    session.end();
  }
}

}  // namespace

TEST_CASE("every allocation of sequences that share a prefix may fail", "[memory_faults][engine][prefix]") {
  const char* const policy = GENERATE("lfps", "exact | int4 | top_k=20 | near=0,sinks=4,recent=8");
  CAPTURE(policy);
  const Story story(kShape, kTokens + kPrompt, 79);
  const PolicySpec spec = parse_policy(policy);
  const PolicySpec beside = parse_policy("exact | int4 | top_p=0.9 | near=0,sinks=4,recent=8");
  const auto all = names(kTokens);
  const auto ids = std::span(all).first(kPrompt);
  std::vector<float> want;
  int reports = 0;
  bool reached = true;
  for (long which = -1; reached || which == 0; which += step_after(which)) {
    CAPTURE(which);
    Engine engine(options());
    Session sessions[2] = {{engine, story}, {engine, story}};
    fail_allocation(which);
    try {
      tell_twice(engine, sessions, all, spec, beside);
      reached = one_failed() && which >= 0;
    } catch (const Error& error) {
      (void)one_failed();
      INFO(error.what());
      REQUIRE(error.code() != Errc::timeout);
      reached = true;
      ++reports;
    }
    for (Session& session : sessions) {
      if (session.id().value != 0) session.end();
    }
    // Nothing is held, what is known is what was told, and all places are free.
    REQUIRE(engine.memory().far_pages_used == 0);
    const std::uint32_t known = engine.match_prefix(spec, ids);
    REQUIRE(known <= kPrompt - 1);
    Session last(engine, story);
    last.begin(spec, ids);
    REQUIRE(last.tokens() == known);
    last.prefill();
    REQUIRE(engine.match_prefix(beside, ids) == kPrompt - 16);
    while (last.tokens() < kTokens) last.decode();
    if (which < 0) want.assign(last.out().begin(), last.out().end());
    REQUIRE(max_abs_diff(last.out(), want) < 1e-5);
    const SequenceId forks[] = {engine.fork(last.id(), 20, beside), engine.fork(last.id(), 80, beside)};
    for (const SequenceId each : forks) engine.end(each);
    REQUIRE(which < 1'000'000);
  }
  REQUIRE(reports > 5);
}

TEST_CASE("every allocation of a sequence that is parked and resumed may fail", "[memory_faults][engine][park]") {
  const char* const policy = GENERATE("lfps", "exact | int4 | top_k=20 | near=0,sinks=4,recent=8");
  CAPTURE(policy);
  const Story story(kShape, kTokens + kPrompt, 80);
  const PolicySpec spec = parse_policy(policy);
  const auto ids = names(kPrompt);
  Engine engine(options());
  Session session(engine, story);
  session.begin(spec, ids);
  session.prefill();
  std::vector<std::byte> area(engine.park_bytes(session.id()));
  (void)engine.park(session.id(), area);
  session.end();
  std::vector<std::byte> again(area.size());
  int reports = 0;
  bool reached = true;
  for (long which = 0; reached; which += kThreadSanitized ? 5 : 1) {
    CAPTURE(which);
    Engine other(options());
    const EngineMemoryUse before = other.memory();
    SequenceId id{};
    fail_allocation(which);
    try {
      id = other.resume(area);
      (void)other.park(id, again);
      reached = one_failed();
    } catch (const Error& error) {
      (void)one_failed();
      REQUIRE((error.code() == Errc::out_of_capacity || error.code() == Errc::device));
      ++reports;
    }
    // Either all of it is there, or nothing.
    if (id.value != 0) {
      REQUIRE(other.match_prefix(spec, names(kPrompt + 33)) == kPrompt);
      other.end(id);
    } else {
      REQUIRE(other.memory().host() == before.host());
    }
    REQUIRE(other.memory().far_pages_used == 0);
    (void)other.begin(spec);
  }
  REQUIRE(reports > 5);
}

TEST_CASE("every allocation of a sequence of an engine may fail", "[memory_faults][engine]") {
  const char* const policy = GENERATE(
      "lfps", "magicpig:recent_prompt=8", "tactic:least=16,size=4,recluster=64", "topk",
      "labels:channels=8,budget=20 | top_k=max(1, 100%) | near=0,sinks=4,recent=8", "adakv:budget=40,window=16",
      "exact | verified=0.2,heavy=9 | near=0,sinks=4,recent=8", "exact | int4 | top_k=20 | near=0,sinks=4,recent=8");
  CAPTURE(policy);
  const Story story(kShape, kTokens, 78);
  const PolicySpec spec = parse_policy(policy);
  const PolicySpec beside = parse_policy("exact | int4 | top_p=0.9 | near=0,sinks=4,recent=8");
  std::vector<float> want;
  {
    Engine engine(options());
    Session other(engine, story);
    tell(other, beside);
    other.decode();
    want.assign(other.out().begin(), other.out().end());
  }
  int reports = 0;
  int choices = 0;
  bool reached = true;
  for (long which = 0; reached; which += step_after(which)) {
    CAPTURE(which);
    Engine engine(options());
    Session other(engine, story);
    tell(other, beside);
    Session session(engine, story);
    fail_allocation(which);
    try {
      tell(session, spec);
      reached = one_failed();
    } catch (const Error& error) {
      (void)one_failed();
      INFO(error.what());
      REQUIRE(std::string(error.what()).size() > 20);
      REQUIRE(error.code() != Errc::timeout);
      reached = true;
      ++reports;
      choices += std::string(error.what()).find("could not choose") != std::string::npos ? 1 : 0;
    }
    // What failed can be told again, or ended; the other one goes on.
    if (session.id().value != 0) {
      if (session.tokens() >= kPrompt) tell_again(session);
      session.end();
    }
    other.decode();
    REQUIRE(max_abs_diff(other.out(), want) < 1e-5);
    REQUIRE(which < 1'000'000);
  }
  REQUIRE(reports > 5);
  // Of the threads that choose, if few enough allocations were passed over.
  if (spec.estimate == Estimate::exact && !kThreadSanitized) REQUIRE(choices > 0);
}

TEST_CASE("every allocation of a fork whose policy has learnt, and of what it says then, may fail",
          "[memory_faults][engine][undo]") {
  const char* const policy = GENERATE("lfps", "history:observe_every=2 | top_k=20 | near=0,sinks=4,recent=8",
                                      "magicpig:recent_prompt=8", "tactic:least=16,size=4,recluster=64",
                                      "exact | hadamard | top_k=20 | near=0", "adakv:budget=40,window=16");
  CAPTURE(policy);
  const Story story(kShape, kTokens + kPrompt, 80);
  EngineOptions two = options();
  two.cpu_sequences = 2;
  two.threads = 1;
  Engine engine(two);
  Session parent(engine, story);
  tell(parent, parse_policy(policy));
  const EngineMemoryUse before = engine.memory();
  std::vector<float> want;
  int refusals = 0;
  bool reached = true;
  for (long which = -1; reached || which == 0; which += kThreadSanitized && which >= 0 ? 5 : 1) {
    CAPTURE(which);
    // As long as its parent, or shorter.
    const std::uint32_t tokens = kTokens - 1 - static_cast<std::uint32_t>(which + 4) % 4;
    SequenceId child{};
    fail_allocation(which);
    try {
      child = engine.fork(parent.id(), tokens);
      reached = one_failed() && which >= 0;
    } catch (const Error& error) {
      (void)one_failed();
      REQUIRE(error.code() == Errc::out_of_capacity);
      reached = true;
      ++refusals;
      // Nothing was changed.
      REQUIRE(engine.memory().far_pages_used == before.far_pages_used);
      REQUIRE(engine.can_admit(1));
      child = engine.fork(parent.id(), tokens);
    }
    Session other(engine, story, child);
    while (other.tokens() < kTokens) other.decode();
    if (which < 0) want.assign(other.out().begin(), other.out().end());
    REQUIRE(max_abs_diff(other.out(), want) < 1e-5);
    other.end();
    REQUIRE(which < 100'000);
  }
  REQUIRE(refusals > (kThreadSanitized ? 0 : 3));  // There only every fifth allocation fails.
}
