// Prefixes through a long random life, against a model that knows them by the tokens themselves, on every device.
#include <cmath>
#include <map>
#include <set>

#include "tests/support/catch.hpp"
#include "tests/support/engine_prefix.hpp"
#include "tests/support/random.hpp"
#include "tests/support/sanitized.hpp"

using namespace sluice;
using namespace sluice::test;
using namespace sluice::test::prefixes;

namespace {

constexpr AttentionShape kTiny{.layers = 1, .q_heads = 2, .kv_heads = 1, .head_dim = 64};
constexpr std::uint32_t kPage = 8;
constexpr std::uint32_t kLength = 72;
constexpr std::uint32_t kTexts = 20;

EngineOptions history_options(const EngineRig& rig, std::uint32_t blocks, std::uint32_t near) {
  EngineOptions options{
      .shape = kTiny,
      .page_tokens = kPage,
      .kv_dtype = rig.kv_dtype,
      .policies = {parse_policy(kFull)},
      .largest = {.decode_rows = 3, .prefill_rows = 40, .prefills = 3, .max_tokens = kLength, .unbounded = true},
      .threads = 2,
      .pin_threads = false};
  options.host_bytes = blocks * block_bytes(options);
  options.near_bytes = near * near_block_bytes(options);
  options.sequences = 7;
  options.import_rows = kLength;
  return options;
}

/// Texts, each of which goes its own way somewhere in an earlier one. The id of a token says what comes before it.
struct Library {
  explicit Library(const EngineRig& rig, Random& random) {
    for (std::uint32_t t = 0; t < kTexts; ++t) {
      const std::uint32_t from = t == 0 ? 0 : random.below(t);
      const std::uint32_t first = t == 0 ? 0 : random.below(kLength);
      stories.emplace_back(kTiny, kLength, 300 + t);
      if (rig.kv_dtype != DType::f32) stories.back().round_queries();
      ids.push_back(ids_of(kLength, t));
      if (t == 0) continue;
      stories.back().begin_as(stories[from], first);
      std::copy_n(ids[from].begin(), first, ids.back().begin());
    }
  }
  /// A text that begins as this one does.
  [[nodiscard]] std::uint32_t sibling(std::uint32_t text, std::uint32_t tokens, Random& random) const {
    for (int tries = 0; tries < 8; ++tries) {
      const std::uint32_t other = random.below(kTexts);
      if (std::equal(ids[text].begin(), ids[text].begin() + tokens, ids[other].begin())) return other;
    }
    return text;
  }
  const std::vector<double>& attended(std::uint32_t text, std::uint32_t token) {
    auto& known = seen[ids[text][token]];
    if (known.empty()) known = stories[text].attended(0, token, kLength, 0, 0);
    return known;
  }

  std::vector<Story> stories;
  std::vector<Ids> ids;
  std::map<std::int32_t, std::vector<double>> seen;
};

struct Actor {
  SequenceId id;
  std::uint32_t text = 0;
  std::uint32_t tokens = 0;
  std::uint32_t named = 0;
  std::uint64_t salt = 0;
};

class History {
 public:
  History(const EngineRig& rig, std::uint32_t blocks, std::uint32_t near, std::uint64_t seed)
      : rig_(rig),
        random_(seed),
        library_(rig, random_),
        engine_(history_options(rig, blocks, near), rig.device),
        tensors_(*rig.device, kTiny, engine_.options().largest.rows()),
        blocks_(blocks) {}

  void turn() {
    const std::uint32_t what = random_.below(20);
    if (what < 3 || actors_.empty()) return begin();
    Actor& actor = actors_[random_.below(static_cast<std::uint32_t>(actors_.size()))];
    if (what < 13) return forward();
    if (what == 13) return import(actor);
    if (what == 14) return fork(actor);
    if (what == 15) return truncate(actor);
    if (what == 16) return name(actor, random_.below(kLength + 1));
    if (what == 17) return engine_.preempt(actor.id);
    engine_.end(actor.id);
    std::swap(actor, actors_.back());
    actors_.pop_back();
  }

  /// Everything that is known is found, if there was always room, and nothing else.
  void check() {
    const std::uint32_t text = random_.below(kTexts);
    const std::uint32_t tokens = random_.below(kLength + 1);
    const std::uint64_t salt = random_.below(2);
    const std::uint32_t found =
        engine_.match_prefix(parse_policy(kFull), std::span(library_.ids[text]).first(tokens), salt);
    const std::uint32_t most = expected(text, tokens, salt);
    REQUIRE(found <= most);
    REQUIRE(found % kPage == 0);
    if (engine_.stats().evicted_blocks == 0) REQUIRE(found == most);
    hits_ += found != 0 ? 1 : 0;
    const EngineMemoryUse use = engine_.memory();
    const auto left = static_cast<std::uint32_t>(blocks_ - use.far_pages_used / block_bytes(engine_.options()));
    REQUIRE(use.far_pages_used + use.far_pages_cached <= use.far_pages);
    const bool place = actors_.size() < engine_.options().sequences;
    REQUIRE(engine_.can_admit(std::min(left * kPage, kLength)) == place);
    if (left * kPage < kLength) REQUIRE_FALSE(engine_.can_admit(left * kPage + 1));
  }
  [[nodiscard]] std::uint64_t hits() const { return hits_; }
  [[nodiscard]] std::uint64_t refused() const { return refused_; }
  [[nodiscard]] EngineStats stats() const { return engine_.stats(); }

 private:
  [[nodiscard]] std::uint32_t expected(std::uint32_t text, std::uint32_t tokens, std::uint64_t salt) const {
    std::uint32_t pages = 0;
    while ((pages + 1) * kPage < tokens && known_.contains({salt, library_.ids[text][(pages + 1) * kPage - 1]}))
      ++pages;
    return pages * kPage;
  }
  void learn(const Actor& actor) {
    for (std::uint32_t end = kPage; end <= std::min(actor.tokens, actor.named); end += kPage)
      known_.insert({actor.salt, library_.ids[actor.text][end - 1]});
  }

  void begin() {
    if (actors_.size() == engine_.options().sequences) return;
    Actor actor{.id = {}, .text = random_.below(kTexts), .named = random_.below(kLength + 1), .salt = random_.below(2)};
    const std::span<const std::int32_t> prompt = std::span(library_.ids[actor.text]).first(actor.named);
    const std::uint32_t found = engine_.match_prefix(parse_policy(kFull), prompt, actor.salt);
    actor.id = engine_.begin(parse_policy(kFull), prompt, actor.salt);
    actor.tokens = engine_.tokens(actor.id);
    REQUIRE(actor.tokens == found);
    actors_.push_back(actor);
  }

  void name(Actor& actor, std::uint32_t tokens) {
    if (tokens <= actor.named) return;
    const std::uint32_t first = random_.below(actor.named + 1);
    engine_.name_tokens(actor.id, first, std::span(library_.ids[actor.text]).subspan(first, tokens - first));
    actor.named = tokens;
    learn(actor);
  }

  void fork(const Actor& parent) {
    if (actors_.size() == engine_.options().sequences) return;
    Actor child = parent;
    child.tokens = random_.below(parent.tokens + 1);
    child.named = std::min(parent.named, child.tokens);
    child.id = engine_.fork(parent.id, child.tokens);
    child.text = library_.sibling(parent.text, child.tokens, random_);
    actors_.push_back(child);
  }

  void truncate(Actor& actor) {
    const std::uint32_t tokens = random_.below(actor.tokens + 1);
    engine_.truncate(actor.id, tokens);
    if (tokens == actor.tokens) return;  // Names of tokens to come stay, and so does what comes.
    actor.tokens = tokens;
    actor.named = std::min(actor.named, actor.tokens);
    actor.text = library_.sibling(actor.text, actor.tokens, random_);
  }

  void import(Actor& actor) {
    const std::uint32_t tokens = actor.tokens + random_.below(kLength - actor.tokens + 1);
    Teller teller{.story = &library_.stories[actor.text], .id = actor.id, .at = actor.tokens};
    try {
      import_story(engine_, rig_, teller, tokens);
    } catch (const Error& error) {
      return refused(error);
    }
    actor.tokens = tokens;
    learn(actor);
  }

  void refused(const Error& error) {
    REQUIRE(error.code() == Errc::out_of_capacity);
    ++refused_;
  }

  void forward() {
    std::vector<PlanItem> items;
    std::vector<Actor*> who;
    std::uint32_t rows = 0;
    const std::uint32_t from = random_.below(static_cast<std::uint32_t>(actors_.size()));
    for (std::uint32_t i = 0; i < std::min<std::size_t>(3, actors_.size()); ++i) {
      Actor& actor = actors_[(from + i) % actors_.size()];
      if (actor.tokens == kLength) continue;
      const bool prompt = random_.below(2) == 0;
      const std::uint32_t count = prompt ? 1 + random_.below(std::min(kLength - actor.tokens, 13u)) : 1;
      items.push_back({.sequence = actor.id, .tokens = count, .prefill = prompt});
      for (std::uint32_t t = 0; t < count; ++t) tensors_.set(rows++, library_.stories[actor.text], actor.tokens + t);
      who.push_back(&actor);
    }
    try {
      run(items, who, random_.below(8) == 0);
    } catch (const Error& error) {
      refused(error);
    }
  }

  void run(const std::vector<PlanItem>& items, const std::vector<Actor*>& who, bool cancelled) {
    const Batch batch = engine_.plan(items, engine_.options().largest, rig_.stream);
    tensors_.attend(engine_, rig_.stream);
    cancelled ? engine_.cancel(batch) : engine_.finish(batch);
    rig_.synchronize();
    std::uint32_t row = 0;
    for (std::size_t i = 0; i < items.size(); ++i) {
      for (std::uint32_t t = 0; t < items[i].tokens && !cancelled; ++t, ++row) {
        const auto out = tensors_.out(row);
        const auto& want = library_.attended(who[i]->text, who[i]->tokens + t);
        for (std::size_t c = 0; c < want.size(); ++c) REQUIRE(std::abs(out[c] - want[c]) < 1e-3);
      }
      if (cancelled) {
        who[i]->named = std::min(who[i]->named, who[i]->tokens);
        if (random_.below(2) == 0) who[i]->text = library_.sibling(who[i]->text, who[i]->tokens, random_);
      } else {
        who[i]->tokens += items[i].tokens;
        learn(*who[i]);
      }
    }
  }

  const EngineRig& rig_;
  Random random_;
  Library library_;
  Engine engine_;
  ForwardTensors tensors_;
  std::uint32_t blocks_;
  std::vector<Actor> actors_;
  std::set<std::pair<std::uint64_t, std::int32_t>> known_;
  std::uint64_t hits_ = 0;
  std::uint64_t refused_ = 0;
};

}  // namespace

TEST_CASE("through a long life sequences find what is theirs, and nothing else", "[engine][prefix]") {
  struct Case {
    std::uint32_t blocks;  ///< of 63 that sequences may want
    std::uint32_t near;
  };
  const auto& [blocks, near] = GENERATE(values<Case>({{1'000, 0}, {30, 0}, {30, 6}, {64, 64}}));
  CAPTURE(blocks, near);
  const EngineRig rig = engine_rig();
  const int turns = kSanitized ? 500 : 10'000;
  History history(rig, blocks, near, 77 + blocks + near);
  for (int turn = 0; turn < turns; ++turn) {
    CAPTURE(turn);
    history.turn();
    history.check();
  }
  REQUIRE(history.hits() > static_cast<std::uint64_t>(turns / 10));
  REQUIRE(history.stats().matched_tokens > static_cast<std::uint64_t>(turns / 2));
  REQUIRE((history.stats().evicted_blocks != 0) == (blocks < 1'000));
  REQUIRE((history.refused() != 0) == (blocks == 30));
}
