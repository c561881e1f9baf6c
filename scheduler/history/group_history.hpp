#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "scheduler/history/history_journal.hpp"
#include "scheduler/history/score_table.hpp"
#include "scheduler/layer_policy.hpp"
#include "scheduler/token_set.hpp"

namespace sluice::scheduler {

/// Attention history of one KV head: the vertical and slash tables of its query heads, and the candidates that
/// they propose (LFPS sections 3, 4.1, 4.2, 4.4, 4.5). Positions below `sinks` are in no table and never proposed.
///
/// Position j is entry j - sinks of the vertical table and entry n - 1 - j of the slash table while n tokens
/// are visible: indexed by distance, the slash pattern needs no shift as n grows. Both have n - sinks entries.
class GroupHistory {
 public:
  GroupHistory(const HistoryOptions& options, std::uint32_t group, std::uint32_t sinks);

  /// Fills the tables from the prompt's last queries, eq. (4). A prompt without queries leaves them empty.
  void begin(const PromptContext& prompt);

  /// Thresholds and expands, eq. (7)-(9), for the step in which `tokens` will be visible. Costs
  /// O(candidates + tokens / 32). A repeated call for the same step returns at once.
  void forecast(std::uint32_t tokens);

  /// Whether `follow` may carry the last forecast on to this step: nothing was observed since, and it was for an
  /// earlier one.
  [[nodiscard]] bool can_follow(std::uint32_t tokens) const noexcept { return fresh_ && !blank_ && forecast_ < tokens; }
  /// That the last forecast or `follow` was for.
  [[nodiscard]] std::uint32_t tokens() const noexcept { return tokens_; }
  /// Carries the last forecast on to a later step without looking at the tables, which nothing was added to since:
  /// vertical candidates stay where they are, slash candidates move with the query. Costs O(1); `unite_followed` costs
  /// O(tokens / 64).
  void follow(std::uint32_t tokens);
  /// Adds the followed candidates, which belong to the whole group, to a set with room for the step's tokens.
  void unite_followed(TokenSet& set) const;

  /// Makes a token that just proved heavy a candidate of the steps until the next forecast: at its position and at its
  /// distance, each widened as a forecast would. For the group; the tables learn of it when they are next fed.
  void note(std::uint32_t token);

  /// Some head's tables are uniform, so that nothing can be told from them: attend densely, then observe.
  [[nodiscard]] bool blank() const noexcept { return blank_; }
  /// EXP of query head `h` for the forecast step, without the forced local tokens.
  [[nodiscard]] const TokenSet& expanded(std::uint32_t h) const noexcept { return heads_[h].expanded; }
  /// EXP of all query heads together, if the options share candidates in the group.
  [[nodiscard]] const TokenSet& united() const noexcept { return united_; }

  /// The step that was forecast or followed last is observed by the `observe` that come before `end_lesson`, on this
  /// thread: it can be taken back. One that is observed without cannot, nor those before it.
  void begin_lesson() noexcept;
  void end_lesson() noexcept;
  /// Decays head `h` and adds weights, eq. (10): half the softmax of `scores` over `tokens`, which ascend, rounded to
  /// codes (see WeightCode). Nothing happens if `tokens` is empty or no score is finite. Non-finite scores weigh
  /// nothing.
  void observe(std::uint32_t h, std::span<const std::uint32_t> tokens, std::span<const float> scores);

  /// Whether `truncate` can go back to that many tokens, not below those of the prompt: within kUndoTokens as a
  /// rule, if no head observes more than max(64, 2%) of the tokens and options_.decay is 0.85 or more; less far if what
  /// there is to take back does not fit in `most_heap_bytes`.
  [[nodiscard]] bool can_truncate(std::uint32_t tokens) const noexcept { return journal_.reaches(tokens); }
  /// As if no step had had more than `tokens` visible tokens. Costs what observing the others has cost; `catch_up` must
  /// come before anything else.
  void truncate(std::uint32_t tokens) noexcept;
  /// After `truncate` to `tokens` tokens: finds the candidates again that the steps until then had. Otherwise nothing.
  void catch_up(std::uint32_t tokens);

  [[nodiscard]] const ScoreTable& vertical(std::uint32_t h) const noexcept { return heads_[h].vertical; }
  [[nodiscard]] const ScoreTable& slash(std::uint32_t h) const noexcept { return heads_[h].slash; }
  [[nodiscard]] std::uint64_t heap_bytes() const noexcept;
  /// What the history of a KV head with `group` query heads holds at most, with `tokens` tokens visible.
  [[nodiscard]] static std::uint64_t most_heap_bytes(const HistoryOptions& options, std::uint32_t group,
                                                     std::uint32_t tokens) noexcept;

 private:
  struct Head {
    ScoreTable vertical, slash;
    ScoreTable::Cut vertical_cut, slash_cut;  ///< of the last forecast
    TokenSet expanded;
    [[nodiscard]] std::uint64_t heap_bytes() const noexcept;
  };

  /// Whether the options let forecasts be carried on.
  [[nodiscard]] bool follows() const noexcept { return options_.observe_every > 1; }
  /// What lessons may hold together, with `tokens` tokens.
  [[nodiscard]] static std::uint64_t most_lesson_bytes(std::uint32_t group, std::uint32_t tokens) noexcept;
  void widen(std::uint32_t token);
  void take_back(const Lesson& lesson) noexcept;
  void forget_candidates();
  void find_candidates(const Head& head, TokenSet& found) const;
  void expand(Head& head, const TokenSet& found);

  HistoryOptions options_;
  std::uint32_t sinks_ = 0;
  std::uint32_t tokens_ = 0;    ///< visible in the step that was forecast or followed last
  std::uint32_t forecast_ = 0;  ///< visible in the step that was forecast last
  bool fresh_ = false;          ///< nothing was observed since
  bool blank_ = true;
  bool stale_ = false;  ///< steps were taken back, and candidates are not what they are to be
  bool in_lesson_ = false;
  bool lossy_ = false;       ///< the lesson cannot be taken back
  std::vector<Head> heads_;  ///< [group]
  TokenSet united_;
  TokenSet by_position_, by_distance_;  ///< EXP of all heads, by the table that spoke for it; if it can be followed
  HistoryJournal journal_;
};

}  // namespace sluice::scheduler
