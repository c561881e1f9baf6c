#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <new>
#include <string>
#include <vector>

#include "tests/scheduler/policy_step.hpp"
#include "tests/support/failing_new.hpp"

/// A policy that decodes, is copied and taken back. For executables that link failing_new.cpp.
namespace sluice::scheduler::test {

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
      : spec_(parse_policy(text)), kv_(most, kDim, kGroup), policy_(make(text)), n_(prompt) {
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
  Walker(const Walker& other) : spec_(other.spec_), kv_(other.kv_), policy_(other.policy_->clone()), n_(other.n_) {}
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
    Choice choice;
    Bypass bypass;
    SelectCounters counters;
    sluice::test::fail_allocation(failing);
    policy_->select({.kv_head = 0,
                     .tokens = n_,
                     .q = q.data(),
                     .ranked_pages = spec_.uses(Source::pages) ? ranked : std::vector<std::uint32_t>(),
                     .page_scores = ranks_itself(spec_) ? scores : std::vector<float>(),
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
  FakeKv kv_;
  std::unique_ptr<LayerPolicy> policy_;
  std::uint32_t n_;
};

}  // namespace sluice::scheduler::test
