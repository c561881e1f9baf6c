#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "scheduler/heap_bytes.hpp"
#include "scheduler/layer_policy.hpp"
#include "scheduler/token_set.hpp"
#include "sluice/step/top_p.hpp"

namespace sluice::scheduler {

/// As order_key, but 1 for NaN: 0 is left for "not a candidate".
[[nodiscard]] std::uint32_t candidate_key(float score) noexcept;

/// Who may be scored for whom.
struct CandidateSets {
  std::span<const TokenSet> sets;  ///< [group]; those of heads that are not active are not read
  std::uint32_t active = 0;        ///< bit h: query head h takes part
  bool shared = false;             ///< the first set holds the candidates of all active heads, the others are not read
  bool keep_near = false;          ///< near candidates are scored, to be observed; else they are dropped
  const TokenSet* weighed = nullptr;  ///< scored beside the candidates, for top-p to weigh; may be null
};

/// What top-p counts first (see sluice/top_p.hpp): tokens before `sink_end` and from `recent_begin` on and, of a head's
/// candidates, those from `open` on.
struct AttendedAnyway {
  std::uint32_t sink_end = 0;
  std::uint32_t recent_begin = 0;
  std::uint32_t open = 0;
};

/// Who attends a token that some head chose.
enum class Membership : std::uint8_t {
  own,     ///< the heads that chose it
  united,  ///< every active head; `members` stays empty if that is the whole group
};

/// The candidates of one KV head in one step, united over its query heads and scored: the middle of every
/// scored policy. Between steps a sequence keeps none: see `release`.
class ScoredSet {
 public:
  /// Unites the candidates, ascending.
  void collect(const CandidateSets& candidates, const NearSet& near);
  /// Writes the far candidates for all heads of the group straight to `row`, for a step that neither scores nor observes.
  void emit_far(const TokenSet& candidates, const NearSet& near, SelectionRow& row);
  /// Reads every K row once.
  void score(KvReader& kv, const float* q, std::uint32_t group);
  /// Reads their 4-bit copies instead.
  void estimate(KvReader& kv, const float* q, std::uint32_t group);
  /// Reads what `kept` keeps of every key instead.
  template <class Kept>
  void estimate(const Kept& kept, KvReader& kv, const float* q, std::uint32_t group) {
    estimated_ = true;
    scores_.resize(tokens_.size() * group);
    kept.estimate(q, tokens_, kv, scores_.data());
  }
  /// Each query head takes its k best: among the far candidates to attend, among all to observe. Ties go to
  /// the lowest position.
  void choose(std::uint32_t k, std::uint32_t group, KvReader& kv);
  /// Each query head takes what it attends anyway, and the fewest others of its candidates, near ones among them, with
  /// which that holds `share` of the weight (see sluice/top_p.hpp); of what it takes it attends the far ones.
  void choose_mass(float share, const AttendedAnyway& anyway, std::uint32_t group);
  /// Of what it has chosen to attend each query head keeps its k best. Ties as in `choose`.
  void keep_best(std::uint32_t k, std::uint32_t group, KvReader& kv);
  /// Takes everything for its heads; nothing is cut.
  void choose_all();
  /// Writes what is attended; with scores, unless they were estimated.
  void emit(std::uint32_t group, Membership membership, SelectionRow& row) const;
  /// The tokens and scores that head `h` observes, ascending; valid until the next call.
  struct Observed {
    std::span<const std::uint32_t> tokens;
    std::span<const float> scores;
  };
  [[nodiscard]] Observed observed(std::uint32_t h, std::uint32_t group);

  [[nodiscard]] std::size_t size() const noexcept { return tokens_.size(); }
  [[nodiscard]] std::span<const std::uint32_t> tokens() const noexcept { return tokens_; }
  [[nodiscard]] std::span<const float> scores() const noexcept { return scores_; }  ///< [tokens, group]
  /// These heads take no part any more, whatever was collected for them.
  void drop(std::uint32_t heads) noexcept;
  /// Scores of the same tokens, read or estimated as the set's own were, by other queries; written to `out`.
  std::span<const float> scores_by(const float* q, KvReader& kv, std::uint32_t group, std::vector<float>& out) const;
  /// Log-sum-exp of every query head's scores, written to `out`.
  std::span<const float> log_sums(std::uint32_t group, std::vector<float>& out) const;
  /// United candidates, and how many of them were near; near ones count even if they were dropped.
  [[nodiscard]] std::uint64_t united() const noexcept { return united_; }
  [[nodiscard]] std::uint64_t near_hits() const noexcept { return near_hits_; }
  void clear() noexcept;
  /// Frees what a step needed whose choice is done with.
  void release() noexcept { *this = ScoredSet(); }
  [[nodiscard]] std::uint64_t heap_bytes() const noexcept {
    return scheduler::heap_bytes(tokens_, heads_, far_, scores_, attended_, observed_, best_, keys_, weighed_,
                                 observed_tokens_, observed_scores_);
  }

 private:
  void grow(std::size_t kept);
  void choose_head_mass(std::uint32_t h, std::uint32_t group, float share, const AttendedAnyway& anyway);
  /// Marks in `chosen` the k best of each head's candidates, which `allowed` has.
  void choose_best(std::uint32_t k, std::uint32_t group, const std::vector<std::uint32_t>& allowed, KvReader& kv,
                   std::vector<std::uint32_t>& chosen);
  /// Of one head: to best_[h].
  void find_best(std::uint32_t h, std::uint32_t k, std::uint32_t group, const std::vector<std::uint32_t>& allowed);

  bool estimated_ = false;
  std::uint32_t active_ = 0;             ///< bit h: query head h takes part
  std::vector<std::uint32_t> tokens_;    ///< ascending
  std::vector<std::uint32_t> heads_;     ///< [tokens] bit h: candidate of head h
  std::vector<std::uint32_t> far_;       ///< [tokens] the same; 0 if the token is near
  std::vector<float> scores_;            ///< [tokens, group]
  std::vector<std::uint32_t> attended_;  ///< [tokens] bit h: head h attends it
  std::vector<std::uint32_t> observed_;  ///< [tokens] bit h: head h observes it
  std::uint64_t united_ = 0;
  std::uint64_t near_hits_ = 0;
  struct Best {
    bool whole = false;                 ///< all of its candidates
    std::vector<std::uint32_t> places;  ///< else these of the tokens
    std::vector<float> values;
    std::vector<std::uint32_t> candidates;
    [[nodiscard]] std::uint64_t heap_bytes() const noexcept {
      return scheduler::heap_bytes(places, values, candidates);
    }
  };
  std::vector<Best> best_;                      // scratch
  std::vector<std::uint32_t> keys_;             // scratch
  std::vector<Weighed> weighed_;                // scratch
  std::vector<std::uint32_t> observed_tokens_;  // scratch
  std::vector<float> observed_scores_;          // scratch
};

}  // namespace sluice::scheduler
