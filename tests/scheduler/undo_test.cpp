// Policies that are copied, and steps that are taken back: what is chosen next is, bit by bit, what is chosen where
// these steps never were.
#include <algorithm>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "scheduler/history/group_history.hpp"
#include "tests/scheduler/walker.hpp"
#include "tests/support/random.hpp"

using namespace sluice;
using namespace sluice::scheduler;
using namespace sluice::scheduler::test;
using sluice::test::Random;

namespace {

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
    "pages:rank=layer,pages=2 | top_k=all | near=0,sinks=4,recent=20",
    "exact | top_k=20 | near=0",
    "exact | top_k=20 | near=0 | bypass=sink:0.3",
    "labels:channels=4,budget=20 | top_k=max(1, 100%) | near=0,sinks=0,recent=3",
    "exact | hadamard | top_k=20 | near=0",
    "exact | skewed=30% | within=2,most=25% | near=0,sinks=0,recent=1",
    "pages+labels:channels=3,budget=9+lsh:bits=4,tables=20 | hadamard | top_k=20 | near=0",
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

TEST_CASE("a forecast that found no memory to be carried on is carried on when there is some", "[undo]") {
  constexpr std::uint32_t kHeads = 2, kSinks = 4, kTokens = kSinks + 32;  // Tables of a whole block.
  const long which = GENERATE(0L, 1L, 2L, 3L);
  CAPTURE(which);
  GroupHistory history({.observe_every = 4}, kHeads, kSinks);
  history.begin({.tokens = kTokens});
  history.forecast(kTokens);
  sluice::test::fail_own_allocation(which);
  bool failed = false;
  try {
    history.follow(kTokens + 1);
  } catch (const std::bad_alloc&) {
    failed = true;
  }
  sluice::test::fail_own_allocation(-1);
  REQUIRE(failed);
  history.follow(kTokens + 1);
  for (std::uint32_t h = 0; h < kHeads; ++h) {
    REQUIRE(history.vertical(h).size() == 33);
    REQUIRE(history.slash(h).size() == 33);
  }
}
