#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "sluice/page_rules.hpp"
#include "sluice/shape.hpp"
#include "sluice/step/page.hpp"

namespace sluice::test {

/// A key as its copy has it, in codes of so many bits, turned back, see CodeLayout. `mean`: [head_dim] the mean key.
[[nodiscard]] std::vector<double> decoded(const float* key, const float* mean, std::uint32_t head_dim,
                                          std::uint32_t bits);

/// Queries, keys and values of one sequence, the latter two on a grid that every dtype holds exactly, with a few keys
/// that stand out.
class Story {
 public:
  /// `page_tokens`: of the engine that has it; its copies in codes depend on that.
  Story(const AttentionShape& shape, std::uint32_t tokens, std::uint64_t seed, std::uint32_t page_tokens = 16);

  [[nodiscard]] std::uint32_t tokens() const noexcept { return tokens_; }
  [[nodiscard]] const float* q(std::uint32_t layer, std::uint32_t token) const;  ///< [q_heads, head_dim]
  [[nodiscard]] const float* k(std::uint32_t layer, std::uint32_t token) const;  ///< [kv_heads, head_dim]
  [[nodiscard]] const float* v(std::uint32_t layer, std::uint32_t token) const;

  /// The mean key of a KV head of a sequence with so many tokens: [head_dim].
  [[nodiscard]] std::vector<float> mean_key(std::uint32_t layer, std::uint32_t kv, std::uint32_t tokens) const;

  /// The key of a token is not a number from now on.
  void poison(std::uint32_t layer, std::uint32_t token);

  /// All tokens of a layer have the first one's queries from now on.
  void repeat_query();

  /// The queries of a token are this many times as long from now on.
  void scale_queries(std::uint32_t token, float factor);

  /// All keys are larger by this along one channel from now on: a query gives all of them something alike.
  void lean_along(std::uint32_t channel, float size);

  /// All keys have something of this size in every channel from now on, larger or smaller than they were, which gives
  /// all of a head's scores the same.
  void lift_keys(float size, std::uint64_t seed);

  /// Every token has the key of the token `period` before it from now on: scores tie.
  void repeat_keys(std::uint32_t period);

  /// In tokens whose number is odd, every query asks for the first four tokens more than for anything, from now on.
  void lean_on_sinks();

  /// Tokens before `first` are those of another story of this shape from now on.
  void begin_as(const Story& other, std::uint32_t first);

  /// Queries are numbers of bf16 from now on.
  void round_queries();

  /// Keys and values are any numbers from now on, a few of their elements many times as large as the others.
  void leave_grid(std::uint64_t seed);

  /// They are what far rows of this type make of them from now on.
  void round_rows(DType type);

  /// Of a layer whose window is not 0 rows attend the newest so many tokens from now on, whatever the policy.
  void see(std::vector<std::uint32_t> windows) { windows_ = std::move(windows); }

  /// Copies of keys have codes of so many bits from now on.
  void code_in(std::uint32_t bits) {
    code_bits_ = bits;
    copies_.clear();
  }
  [[nodiscard]] std::uint32_t code_bits() const noexcept { return code_bits_; }

  /// What a policy of sinks, recent tokens and `picks` per query head attends at `token`, in float64: [q_heads,
  /// head_dim]. Estimates are those of the copies in codes; a group attends what any of its heads chose. `lse`, unless
  /// null, receives the natural logs of the sums of exponentials.
  [[nodiscard]] std::vector<double> attended(std::uint32_t layer, std::uint32_t token, std::uint32_t sinks,
                                             std::uint32_t recent, std::uint32_t picks,
                                             std::vector<double>* lse = nullptr) const;
  /// The outputs of `attended` that are right as well, as the estimates of a query head's last pick and of the next
  /// token differ by less than sums of float32 do. One at a time: that two heads are as close is not to be expected.
  [[nodiscard]] std::vector<std::vector<double>> attended_by_ties(std::uint32_t layer, std::uint32_t token,
                                                                  std::uint32_t sinks, std::uint32_t recent,
                                                                  std::uint32_t picks) const;
  /// The same of a policy whose query heads each choose the fewest tokens that hold `mass`, with sinks and recent
  /// tokens, by the estimates of all visible tokens; the first `most` of these, if they are more.
  [[nodiscard]] std::vector<double> attended_by_mass(std::uint32_t layer, std::uint32_t token, std::uint32_t sinks,
                                                     std::uint32_t recent, double mass,
                                                     std::uint32_t most = kNone) const;

  /// A policy whose query heads each choose the best pages by digest, and of their tokens the fewest that hold `mass`
  /// with what is attended anyway, the newest page among it.
  struct InPages {
    std::uint32_t page_tokens = 16;
    DigestKind digest = DigestKind::box;
    std::uint32_t pages = 0;
    std::uint32_t sinks = 0;
    std::uint32_t recent = 1;
    double mass = 1.0;
  };
  [[nodiscard]] std::vector<double> attended_in_pages(std::uint32_t layer, std::uint32_t token,
                                                      const InPages& policy) const;

  /// A row of a team whose rows attend what any of their query heads chose, before the team's tokens, and of these all
  /// up to their own; each head chooses as in `attended`.
  struct Together {
    std::uint32_t first = 0;   ///< token of the team
    std::uint32_t drafts = 1;
    std::uint32_t draft = 0;   ///< whose output this is
    std::uint32_t sinks = 0;
    std::uint32_t recent = 1;
    std::uint32_t picks = 0;
  };
  [[nodiscard]] std::vector<double> attended_together(std::uint32_t layer, const Together& team) const;

 private:
  /// A key as its copy has it, kept with what it was made of.
  struct Copy {
    std::vector<float> key, mean;
    std::vector<double> decoded;
  };
  [[nodiscard]] const std::vector<double>& copy_of(std::uint32_t layer, std::uint32_t token, std::uint32_t kv,
                                                   const std::vector<float>& mean) const;
  /// The score of a page's digest, in float64.
  [[nodiscard]] double page_score(std::uint32_t layer, std::uint32_t token, std::uint32_t head, std::uint32_t page,
                                  const InPages& policy) const;
  /// Estimates of tokens [begin, end), largest first.
  using Ranked = std::vector<std::pair<double, std::uint32_t>>;
  [[nodiscard]] Ranked ranked(std::uint32_t layer, std::uint32_t token, std::uint32_t head, std::uint32_t begin,
                              std::uint32_t end) const;
  /// Adds the outputs of a KV head's query heads at `token` that attend what is marked.
  void attend_marked(std::uint32_t layer, std::uint32_t token, std::uint32_t kv, const std::vector<bool>& marked,
                     std::vector<double>& out, std::vector<double>* lse) const;
  /// `choose(head, sink_end, recent_begin, marks)` sets the marks of what a query head chooses.
  template <class Choose>
  [[nodiscard]] std::vector<double> attended_as(std::uint32_t layer, std::uint32_t token, std::uint32_t sinks,
                                                std::uint32_t recent, const Choose& choose,
                                                std::vector<double>* lse) const;

  AttentionShape shape_;
  std::uint32_t tokens_;
  std::uint32_t page_tokens_;
  std::uint32_t code_bits_ = 4;
  std::vector<std::uint32_t> windows_;  ///< [layers] or empty
  std::vector<float> q_, k_, v_;  ///< [layers, tokens, heads, head_dim]
  mutable std::vector<Copy> copies_;  ///< [layers, tokens, kv_heads], made when they are asked for: not by two threads
};

}  // namespace sluice::test
