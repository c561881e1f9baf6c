#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <map>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include "scheduler/plan/layer_stacks.hpp"
#include "sluice/engine.hpp"
#include "tests/soak/ground.hpp"
#include "tests/support/engine_rig.hpp"

/// What an engine is held against: as plain as possible, and without a look at how an engine does it.
namespace sluice::test {

inline constexpr std::uint32_t kSoakTokens = 512;  ///< of a sequence, at most
inline constexpr std::uint32_t kSoakSlack = 64;    ///< EngineOptions::window_slack
inline constexpr std::uint32_t kMostDrafts = 4;    ///< tokens that a sequence decodes in a forward

inline constexpr std::uint32_t kPoolTokens = 2048;

/// All tokens that there are. Which of them a sequence has is drawn, so that every wrong key shows.
class Pool : public Story {
 public:
  Pool(const Terrain& terrain, std::uint64_t seed) : Story(terrain.shape, kPoolTokens, seed), terrain_(terrain) {
    if (terrain.rounds) round_queries();
  }
  [[nodiscard]] const AttentionShape& shape() const noexcept { return terrain_.shape; }
  [[nodiscard]] const Terrain& terrain() const noexcept { return terrain_; }
  /// Floats of a token's queries in a layer, or of its output.
  [[nodiscard]] std::size_t row() const noexcept { return std::size_t{shape().q_heads} * shape().head_dim; }

 private:
  Terrain terrain_;
};

/// Something went wrong that may not; the message says what.
class Failure : public std::runtime_error {
  using std::runtime_error::runtime_error;
};

/// What one round did.
struct RoundStats {
  std::uint64_t sequences = 0;  ///< that joined
  std::uint64_t forwards = 0;   ///< that got to their end
  std::uint64_t decoded = 0;    ///< tokens of them that were no prompt's
  std::uint64_t replayed = 0;   ///< forwards that were recorded, once for all tokens
  std::uint64_t delays = 0;     ///< of the device, between layers
  std::uint64_t holds = 0;      ///< likewise, long ones
  std::uint64_t checked = 0;    ///< rows of a layer that were compared with float64
  std::uint64_t alone = 0;      ///< rows of all layers that were compared with those of the sequence alone
  std::uint64_t rounded = 0;    ///< of them, those of which rounding decides what they attend, see Terrain
  std::uint64_t unlike = 0;     ///< of these, those that attended something else
  std::uint64_t late = 0;       ///< forwards that failed because a thread was too late
  std::uint64_t broken = 0;     ///< or the device could not do a part of them, or refused it
  std::uint64_t unchosen = 0;   ///< or a thread that chooses found no memory
  std::uint64_t slips = 0;      ///< that were not enqueued as they were planned
  std::uint64_t unbuilt = 0;    ///< engines that were not built, as the device had no memory
  std::uint64_t failed = 0;     ///< forwards that failed, stalls of threads and slips of the caller alike
  std::uint64_t cancelled = 0;  ///< and that were taken back
  std::uint64_t refused = 0;    ///< calls for which there was no room
  std::uint64_t resumed = 0;    ///< sequences that were parked and came back
  double seconds = 0.0;         ///< in calls of forwards

  void add(const RoundStats& other) noexcept;
};

/// What was asked of a sequence.
struct Call {
  enum class Kind { prompt, decode, import, truncate, fork, park };
  Kind kind;
  std::vector<std::uint32_t> tokens{};  ///< of the pool, that came
  std::uint32_t count = 0;              ///< queries that came with an import; tokens that are left
  std::string policy{};                 ///< of a fork; empty: its parent's
  std::uint32_t drafts = 1;             ///< of the bucket in which tokens were decoded
};

/// What was planned of a sequence and came to nothing.
struct Vain {
  std::size_t call = 0;  ///< that came next
  bool prefill = false;
  std::uint32_t tokens = 0;
};

/// Outputs of one row, all layers.
struct Said {
  std::size_t call = 0;
  std::uint32_t row = 0;  ///< of that call
  std::vector<float> out;
};

/// A sequence as it should be.
struct Sequence {
  SequenceId id;
  std::string policy;
  PolicySpec spec;
  std::vector<std::uint32_t> tokens{};  ///< of the pool, those of forwards in flight included
  std::uint32_t settled = 0;            ///< how many of them the engine says that it has
  std::uint32_t in_flight = 0;          ///< forwards
  std::uint32_t keep = kNone;           ///< what is left of it once it rests; kNone: everything
  std::uint32_t prompt_left = 0;
  std::uint32_t decode_left = 0;
  std::uint64_t audited = 0;  ///< tokens
  /// What its policy chooses depends on when threads did what, as something was taken back from which it may have
  /// learnt.
  bool uncertain = false;
  /// Tokens that there were when its policy began again behind a further prompt, while nothing is decoded behind them:
  /// cut to no more than these it has forgotten what, had that never been, it would know. kNone: it has not.
  std::uint32_t begun_again = kNone;
  /// Queries of tokens before this one may be lost: those of a chunk that failed took their place.
  std::uint32_t queries_from = 0;
  bool disturbed = false;       ///< something that it had planned came to nothing
  // For the same alone; `said` is empty unless it is one of a sample.
  bool sampled = false;
  std::string first_policy{};  ///< of the ancestor with which `calls` begin
  std::vector<Call> calls{};
  std::vector<Vain> vain{};  ///< in order; for messages
  std::vector<Said> said{};

  [[nodiscard]] std::uint32_t planned() const noexcept { return static_cast<std::uint32_t>(tokens.size()); }
  [[nodiscard]] bool rests() const noexcept { return in_flight == 0; }
  /// For messages.
  [[nodiscard]] std::string name() const;
  [[nodiscard]] std::string story() const;
};

/// Whether something was decoded, be it what is still in flight.
[[nodiscard]] bool has_decoded(const Sequence& sequence);

/// Whether what is decoded as call `call` comes first behind a further prompt, for which a policy begins again that has
/// learnt from tokens before it.
[[nodiscard]] bool begins_again(const Sequence& sequence, std::size_t call);

/// Which pages sequences hold, as lists of numbers. A page is a block of each stack of layers; of those with windows
/// sequences let go of the first ones.
class PageModel {
 public:
  explicit PageModel(const EngineOptions& options)
      : page_tokens_(options.page_tokens),
        stacks_(options),
        widest_(options.windows.empty() ? 0 : std::ranges::max(options.windows)) {}

  void begin(SequenceId id) { lists_[id.value] = {}; }
  void fork(SequenceId parent, SequenceId child, std::uint32_t tokens);
  void truncate(SequenceId id, std::uint32_t tokens);
  void end(SequenceId id) { lists_.erase(id.value); }
  /// `count` tokens come behind the first `planned`: a block of its own for the one that another one holds, too.
  void grow(SequenceId id, std::uint32_t planned, std::uint32_t count);
  /// So many tokens it has for good.
  void settle(SequenceId id, std::uint32_t tokens);
  /// Comes back with as many tokens, and without the first `passed` pages of windows.
  void resume(SequenceId id, std::uint32_t tokens, std::uint32_t passed);

  /// Blocks of all, and of one; and of one that is to be resumed.
  [[nodiscard]] std::uint64_t used() const;
  [[nodiscard]] std::uint64_t held(SequenceId id) const;
  [[nodiscard]] std::uint64_t resumed(std::uint32_t tokens, std::uint32_t passed) const;
  /// Pages that layers with windows have not any more.
  [[nodiscard]] std::uint32_t passed(SequenceId id) const { return lists_.at(id.value).passed; }
  /// The fewest tokens, but for none, to which it can be shortened.
  [[nodiscard]] std::uint32_t shortest(SequenceId id) const;
  [[nodiscard]] bool can_shorten(SequenceId id, std::uint32_t tokens) const {
    return tokens == 0 || tokens >= shortest(id);
  }
  [[nodiscard]] std::uint32_t pages_of(std::uint32_t tokens) const noexcept {
    return (tokens + page_tokens_ - 1) / page_tokens_;
  }
  [[nodiscard]] const scheduler::LayerStacks& stacks() const noexcept { return stacks_; }

 private:
  struct Pages {
    std::vector<std::uint64_t> all{};  ///< does not shrink by failing
    std::uint32_t passed = 0;
  };
  [[nodiscard]] std::size_t holders(std::uint64_t page) const;
  [[nodiscard]] std::uint64_t blocks(std::uint64_t pages, std::uint64_t in_windows) const noexcept {
    return (stacks_.count() - stacks_.windowed_stacks()) * pages + stacks_.windowed_stacks() * in_windows;
  }

  std::uint32_t page_tokens_;
  scheduler::LayerStacks stacks_;
  std::uint32_t widest_;
  std::map<std::uint64_t, Pages> lists_;  ///< of each sequence
  std::uint64_t next_ = 0;
};

/// Attention of the last of these tokens in float64, over the first `sinks` of them and the newest `recent`: [q_heads,
/// head_dim].
[[nodiscard]] std::vector<double> attended(const Pool& pool, std::span<const std::uint32_t> tokens, std::uint32_t layer,
                                           std::uint32_t sinks, std::uint32_t recent);

/// What a row attends in a layer, where that is no matter of choice.
struct Window {
  bool known = false;
  std::uint32_t sinks = std::numeric_limits<std::uint32_t>::max();
  std::uint32_t recent = 1;
};
[[nodiscard]] Window window_of(const PolicySpec& spec, std::uint32_t layer);

/// The output of a sequence's token in one layer is right, as far as that is known; finite otherwise.
/// @throws Failure
void require_right(const Pool& pool, const Sequence& sequence, std::uint32_t position, std::uint32_t layer,
                   const Window& window, std::span<const float> got, RoundStats& stats);

}  // namespace sluice::test
