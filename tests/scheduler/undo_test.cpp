// Policies that are copied, and steps that are taken back: what is chosen next is, bit by bit, what is chosen where
// these steps never were.
#include <new>
#include <optional>
#include <string>
#include <thread>

#include "sluice/error.hpp"
#include "tests/scheduler/policy_step.hpp"
#include "tests/support/failing_new.hpp"
#include "tests/support/random.hpp"

using namespace sluice;
using namespace sluice::scheduler;
using namespace sluice::scheduler::test;
using sluice::test::Random;

namespace {

/// What one step chooses.
struct Choice {
  SelectionRow row;
  std::uint32_t bypassed = 0;
  std::vector<float> bypass_lse;
  std::uint64_t candidates = 0;

  friend bool operator==(const Choice& a, const Choice& b) {
    return a.row.runs == b.row.runs && a.row.tokens == b.row.tokens && a.row.members == b.row.members &&
           a.row.scores == b.row.scores && a.bypassed == b.bypassed && a.bypass_lse == b.bypass_lse &&
           a.candidates == b.candidates;
  }
};

/// One policy and the keys that it reads. Token n of tale t has keys and queries of its own; those of the prompt are of
/// tale 0.
class Walker {
 public:
  Walker(const std::string& text, std::uint32_t prompt, std::uint32_t most)
      : spec_(parse_policy(text)), most_(most), kv_(most, kDim, kGroup), policy_(make(text)), n_(prompt) {
    for (std::uint32_t token = 0; token < prompt; ++token) write(token, 0);
    const std::uint32_t queries = std::min(prompt, 40u);
    std::vector<float> last_q;
    for (std::uint32_t token = prompt - queries; token < prompt; ++token) {
      const std::vector<float> q = query(token, 0);
      last_q.insert(last_q.end(), q.begin(), q.end());
    }
    policy_->begin({.kv_head = 0, .tokens = prompt, .queries = queries, .last_q = last_q, .kv = &kv_});
    forecast();
  }
  Walker(const Walker& other)
      : spec_(other.spec_), most_(other.most_), kv_(other.kv_), policy_(other.policy_->clone()), n_(other.n_) {}
  Walker& operator=(const Walker&) = delete;

  /// Of the next token. A forward that fails, and comes again, has it chosen `times`.
  Choice select(std::uint32_t tale, int times = 1) {
    write(n_++, tale);
    Choice choice;
    for (; times > 0; --times) choice = select_once(tale);
    return choice;
  }
  /// The same, if the `which`-th allocation of the first try fails.
  Choice select_when_memory_is_back(long which) {
    write(n_++, 0);
    try {
      return select_once(0, which);
    } catch (const std::bad_alloc&) {
      sluice::test::fail_allocation(-1);
      return select_once(0);
    }
  }
  void learn() {
    if (policy_->wants_observation(0)) {
      policy_->observe(0, kv_);
      forecast();
    }
    REQUIRE(policy_->heap_bytes(0) <= policy_state_bytes(spec_, kOneLayer, n_ + 1));
  }
  Choice step(std::uint32_t tale, int times = 1) {
    const Choice choice = select(tale, times);
    learn();
    return choice;
  }
  [[nodiscard]] bool can_truncate(std::uint32_t tokens) const { return policy_->can_truncate(0, tokens); }
  void truncate(std::uint32_t tokens) {
    policy_->truncate(0, tokens);
    n_ = tokens;
    REQUIRE(policy_->heap_bytes(0) <= policy_state_bytes(spec_, kOneLayer, n_ + 1));
  }
  [[nodiscard]] std::uint32_t tokens() const { return n_; }

 private:
  inline static const AttentionShape kOneLayer{.layers = 1, .q_heads = kGroup, .kv_heads = 1, .head_dim = kDim};

  void write(std::uint32_t token, std::uint32_t tale) {
    const std::vector<float> key = random_queries(1, kDim, 7 * token + 100'000 * tale, token % 31 == 5 ? 3.f : 1.f);
    std::ranges::copy(key, kv_.k.begin() + token * kDim);
  }
  /// Queries of neighbours are alike, as a history expects.
  static std::vector<float> query(std::uint32_t token, std::uint32_t tale) {
    std::vector<float> q = random_queries(kGroup, kDim, 999, 1.5f);
    const std::vector<float> own = random_queries(kGroup, kDim, 7 * token + 3 + 100'000 * tale);
    for (std::size_t i = 0; i < q.size(); ++i) q[i] += own[i];
    return q;
  }
  void forecast() { policy_->forecast(0, n_ + 1); }
  /// `failing`: the number of an allocation of the policy that fails; below 0: none does.
  Choice select_once(std::uint32_t tale, long failing = -1) {
    const FakeNear near(n_, spec_.near.sink_tokens, spec_.near.recent_tokens);
    const std::vector<float> q = query(n_ - 1, tale);
    const std::uint32_t pages = (n_ - 1) / kPageTokens;
    std::vector<std::uint32_t> ranked;
    std::vector<float> scores;
    for (std::uint32_t h = 0; h < kGroup; ++h) {
      for (std::uint32_t page = h % 2; page < std::min(pages, 4u); page += 2) ranked.push_back(page);
      if (h % 2 != 0 && pages % 2 != 0 && pages < 4) ranked.push_back(0);
      for (std::uint32_t page = 0; page < pages; ++page) scores.push_back(q[h] * static_cast<float>(page % 5));
    }
    if (pages < 4) ranked.clear();
    const bool progressive = spec_.budget.kind == BudgetKind::progressive;
    Choice choice;
    Bypass bypass;
    SelectCounters counters;
    sluice::test::fail_allocation(failing);
    policy_->select({.kv_head = 0,
                     .tokens = n_,
                     .q = q.data(),
                     .ranked_pages = spec_.uses(Source::pages) ? ranked : std::vector<std::uint32_t>(),
                     .page_scores = progressive ? scores : std::vector<float>(),
                     .near = &near.set,
                     .kv = &kv_},
                    choice.row, bypass, counters);
    sluice::test::fail_allocation(-1);
    choice.bypassed = bypass.heads;
    for (std::uint32_t h = 0; h < kGroup; ++h)
      if ((bypass.heads >> h & 1) != 0) choice.bypass_lse.push_back(bypass.lse[h]);
    choice.candidates = counters.candidates;
    return choice;
  }

  PolicySpec spec_;
  std::uint32_t most_;
  FakeKv kv_;
  std::unique_ptr<LayerPolicy> policy_;
  std::uint32_t n_;
};

/// Policies whose heads observe at most max(64, 2%): what they learnt from the newest 32 tokens can be taken back.
constexpr const char* kUndoable[] = {"lfps",
                                     "lfps:decay=0.85",
                                     "lfps:decay=0.998,local=1",
                                     "lfps:observe_every=4,share_group=on",
                                     "history:observe_every=3 | top_k=24 | near=0,sinks=4,recent=16",
                                     "history:observe_every=64 | top_k=9 | near=0,sinks=4,recent=2",
                                     "history+pages | top_k=32 | near=0,sinks=4,recent=16",
                                     "history | top_k=24 | near=0,sinks=0,recent=0 | bypass=sink:0.5",
                                     "clusters:recluster=64,least=64,size=8,candidates=64+history:observe_every=4 | "
                                     "top_k=48 | near=0,sinks=4,recent=16"};

/// Policies that have no history: any number of tokens can be.
constexpr const char* kForgetful[] = {
    "tactic:least=64,size=4,recluster=64",
    "tactic:least=512,size=4,recluster=64",
    "magicpig:recent_prompt=8 | dense=0,every=0",
    "clusters:recluster=64,least=64,size=8,candidates=64+lsh:bits=4,tables=20 | top_k=48 | near=0,sinks=4,recent=16",
    "pages | progressive=0.8,microbatch=2 | near=0,sinks=4,recent=20",
    "exact | top_k=20 | near=0",
    "exact | top_k=20 | near=0 | bypass=sink:0.3",
    "exact | channels=4 | top_k=20 | near=0,sinks=0,recent=3",
    "exact | hadamard | top_k=20 | near=0",
    "pages+lsh:bits=4,tables=20 | channels=3 | top_k=20 | near=0",
    "snapkv:budget=40,window=16",
    "adakv:budget=60,window=16,pyramid=20",
    "exact | verified=0.2,heavy=16 | near=0,sinks=4,recent=20",
    "topk",
    "full",
    "streaming"};

std::vector<Choice> undisturbed(const std::string& text, std::uint32_t prompt, std::uint32_t tokens) {
  Walker walker(text, prompt, tokens);
  std::vector<Choice> choices(tokens + 1);
  while (walker.tokens() < tokens) {
    const std::uint32_t n = walker.tokens() + 1;
    choices[n] = walker.step(0);
  }
  return choices;
}

/// Decodes tale 0 with detours into others, which are taken back, `reach` tokens at most; nothing but `want` comes out.
void wander(const std::string& text, std::uint32_t prompt, std::uint32_t tokens, std::uint32_t reach,
            std::uint64_t seed, const std::vector<Choice>& want) {
  Random random(seed);
  auto walker = std::make_unique<Walker>(text, prompt, tokens + 200);
  std::uint32_t told = prompt;   // Tokens of tale 0.
  std::uint32_t floor = prompt;  // Fewer are out of reach.
  for (std::uint32_t tale = 1; told < tokens;) {
    CAPTURE(seed, told, walker->tokens());
    floor = std::max(floor, walker->tokens() - std::min(walker->tokens(), reach));
    const bool lost = walker->tokens() != told;
    switch (random.below(40)) {
      case 0: {
        const std::uint32_t count = 1 + random.below(std::min(reach, 40u));
        ++tale;
        for (std::uint32_t i = 0; i < count && walker->tokens() < tokens + 200; ++i) (void)walker->step(tale);
        // The newest one may not have been learnt yet.
        if (random.below(3) == 0 && walker->tokens() < tokens + 200) (void)walker->select(tale);
        break;
      }
      case 1: {  // Also of tale 0.
        const std::uint32_t least = std::max(floor, walker->tokens() - std::min(walker->tokens(), 40u));
        const std::uint32_t to = least + random.below(walker->tokens() - least + 1);
        REQUIRE(walker->can_truncate(to));
        walker->truncate(to);
        told = std::min(told, to);
        break;
      }
      case 2: {
        auto other = std::make_unique<Walker>(*walker);
        if (random.below(2) == 0) std::swap(walker, other);
        for (std::uint32_t i = 0; i < 5 && other->tokens() < tokens + 200; ++i) (void)other->step(77);
        break;
      }
      default:
        if (lost) {
          const std::uint32_t to = std::max(floor, std::min(told, walker->tokens()));
          if (to > told) return;  // The way back is too long.
          REQUIRE(walker->can_truncate(to));
          walker->truncate(to);
          told = to;
        }
        REQUIRE(walker->step(0, random.below(8) == 0 ? 2 : 1) == want[++told]);
    }
  }
}

}  // namespace

TEST_CASE("policies choose as if steps that were taken back had never been", "[undo]") {
  const std::uint32_t prompt = GENERATE(0u, 1u, 5u, 70u, 500u);
  for (const std::string policy : kUndoable) {
    CAPTURE(policy, prompt);
    // Far enough that what is forgotten is, at last.
    const std::uint32_t tokens = prompt + 330;
    const std::vector<Choice> want = undisturbed(policy, prompt, tokens);
    for (std::uint64_t seed = 1; seed <= 4; ++seed) wander(policy, prompt, tokens, kUndoTokens, seed, want);
  }
}

TEST_CASE("policies without a history take any number of steps back", "[undo]") {
  const std::uint32_t prompt = GENERATE(0u, 1u, 70u, 500u);
  for (const std::string policy : kForgetful) {
    CAPTURE(policy, prompt);
    const std::uint32_t tokens = prompt + 200;
    const std::vector<Choice> want = undisturbed(policy, prompt, tokens);
    for (std::uint64_t seed = 1; seed <= 2; ++seed) wander(policy, prompt, tokens, 10'000, seed, want);
  }
}

TEST_CASE("a history goes back as many tokens as its journal keeps, and to its prompt before it is full", "[undo]") {
  const std::uint32_t prompt = GENERATE(0u, 1u, 6u, 100u);
  const std::uint32_t steps = GENERATE(1u, 2u, 31u, 32u, 33u, 34u, 64u, 65u, 100u);
  CAPTURE(prompt, steps);
  const std::uint32_t tokens = prompt + steps;
  const std::vector<Choice> want = undisturbed("lfps", prompt, tokens + 10);
  Walker walker("lfps", prompt, tokens + 10);
  while (walker.tokens() < tokens) (void)walker.step(0);
  for (std::uint32_t back = 1; back <= std::min(steps, kUndoTokens); ++back) {
    CAPTURE(back);
    Walker other(walker);
    REQUIRE(other.can_truncate(tokens - back));
    other.truncate(tokens - back);
    for (std::uint32_t n = tokens - back + 1; n <= tokens - back + 10; ++n) REQUIRE(other.step(0) == want[n]);
  }
  // Where nothing was observed, nothing is to be kept: positions before the sinks end.
  if (tokens > prompt + kUndoTokens && tokens - kUndoTokens > 5)
    REQUIRE_FALSE(walker.can_truncate(tokens - kUndoTokens - 1));
  // What a copy has does not make the other one forget.
  while (walker.tokens() < tokens + 10) {
    const std::uint32_t n = walker.tokens() + 1;
    REQUIRE(walker.step(0) == want[n]);
  }
}

TEST_CASE("where heads observe more than the journal holds, it says how far it goes back", "[undo]") {
  const char* const text =
      GENERATE("history | top_k=300 | near=0,sinks=4,recent=0", "history:init=1 | top_k=all | near=0,sinks=4,recent=0",
               "lfps:decay=0.3", "lfps:decay=0.01");
  CAPTURE(text);
  constexpr std::uint32_t kPrompt = 2000;
  constexpr std::uint32_t kTokens = kPrompt + 45;
  const std::vector<Choice> want = undisturbed(text, kPrompt, kTokens + 6);
  Walker walker(text, kPrompt, kTokens + 6);
  while (walker.tokens() < kTokens) (void)walker.step(0);
  std::uint32_t reached = 0;
  for (std::uint32_t back = 1; back <= 45; ++back) {
    if (!walker.can_truncate(kTokens - back)) continue;
    CAPTURE(back);
    REQUIRE(reached == back - 1);  // None in between is left out.
    reached = back;
    Walker other(walker);
    other.truncate(kTokens - back);
    for (std::uint32_t n = kTokens - back + 1; n <= kTokens - back + 6; ++n) REQUIRE(other.step(0) == want[n]);
  }
  REQUIRE(reached < kUndoTokens);
}

TEST_CASE("a choice that found no memory behind steps that were taken back is what it would have been", "[undo]") {
  const std::string text = "history:observe_every=16 | top_k=24 | near=0,sinks=4,recent=16";
  constexpr std::uint32_t kPrompt = 500;
  const std::vector<Choice> want = undisturbed(text, kPrompt, kPrompt + 60);
  for (std::uint32_t at = 12; at < 44; at += 3) {
    for (long which = 0; which < 4; ++which) {
      Walker walker(text, kPrompt, kPrompt + 70);
      while (walker.tokens() < kPrompt + at) (void)walker.step(0);
      for (int i = 0; i < 6; ++i) (void)walker.step(3);
      walker.truncate(kPrompt + at);
      Choice choice;
      // Of a thread whose scratch memory is still to come, as those that answer begin.
      std::thread([&] { choice = walker.select_when_memory_is_back(which); }).join();
      CAPTURE(at, which);
      REQUIRE(choice == want[kPrompt + at + 1]);
    }
  }
}
