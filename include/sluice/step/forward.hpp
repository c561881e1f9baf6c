#pragma once

#include <cstdint>

#include "sluice/bucket.hpp"
#include "sluice/step/curve_fit.hpp"
#include "sluice/step/progress.hpp"
#include "sluice/step/sample.hpp"
#include "sluice/units.hpp"

/// What describes a forward, in memory of the device. What a launch is given depends on a bucket alone, never on
/// lengths, so that a forward can be captured in a graph once and replayed for every token.
namespace sluice {

/// Where the token of a packed row goes; see ForwardMemory::tokens.
struct ForwardToken {
  std::uint32_t list = kNone;  ///< its sequence's block list; kNone: padding, whose output is 0
  std::uint32_t position = 0;
  std::uint32_t tail = kNone;  ///< row of ForwardMemory::tails that its queries go to, too; kNone: none
  std::uint32_t decoded = 0;   ///< not 0: it is of no prompt
};

/// Clusters of keys that a row's query heads choose among, see ChooseClustersTask.
struct ForwardClusters {
  std::uint32_t slot = kNone;  ///< of ForwardMemory::cluster_slots
  std::uint32_t count = 0;     ///< 0: the row does not
  FitSamples samples{};        ///< of the tokens in them: the sequence's first ones
};

/// Tokens [first, first + count) of a sequence, to be clustered by themselves.
struct ForwardClustering {
  std::uint32_t list = 0;  ///< its block list
  std::uint32_t slot = 0;  ///< of ForwardMemory::cluster_slots, where clusters before these are
  std::uint32_t first = 0;
  std::uint32_t count = 0;
  std::uint32_t first_cluster = 0;  ///< number of the first of them
  std::uint32_t clusters = 0;
  std::uint32_t iterations = 0;
  std::uint32_t dense_layers = 0;  ///< as in ForwardRow: no clusters there
  std::uint32_t dense_every = 0;
};

/// A row that chooses: what its query heads may choose from.
struct ForwardRow {
  std::uint32_t list = kNone;  ///< its sequence's block list; kNone: there is no such row
  std::uint32_t at = 0;        ///< its packed row
  /// Not 0: it is a team of as many packed rows from `at` on, whose tokens come behind `tokens`; these all of them see.
  std::uint32_t drafts = 0;
  std::uint32_t tokens = 0;    ///< visible, the new one included
  std::uint32_t sink_end = 0;  ///< tokens [0, sink_end) and [recent_begin, tokens) are attended by all heads
  std::uint32_t recent_begin = 0;
  std::uint32_t pages = 0;         ///< of its first full pages as many are ranked by digest, per query head
  std::uint32_t page_picks = 0;    ///< and as many of them chosen; 0: only their scores are wanted
  /// Of the tokens between, each query head chooses as many, at most max_picks; where they are drawn one fewer at most.
  std::uint32_t picks = 0;
  /// If there are any, `picks` are drawn: the scores of the tokens between are perturbed, the largest are attended, and
  /// what they weigh is divided by the chance that they were drawn.
  SampleDraws draws{};
  float mass = 0.f;                ///< or, if this is not 0, those that top-p keeps, see top_p.hpp
  /// Not 0: `mass` is a share by PSA's rule, for which its ranked pages are taken, as many at a time, see
  /// ChoosePagesTask; `page_picks` is 0.
  std::uint32_t microbatch = 0;
  ProgressRule rule = ProgressRule::least;
  std::uint32_t most = kNone;      ///< then, or if the CPU chooses, each query head keeps at most as many; kNone: all
  std::uint32_t dense_layers = 0;  ///< layers below it attend everything
  std::uint32_t dense_every = 0;   ///< and so does every such layer, the first included; 0: none
  std::uint32_t asks =
      0;  ///< not 0: the CPU is asked and chooses, in all layers but dense ones; `picks` and `mass` are 0 then
  ForwardClusters clusters{};  ///< with some of them, `mass` is a share by a curve, not by top-p
  /// Not 0: each query head chooses, by `picks` or `mass`, of what its history proposes, in slot `proposed` - 1 of
  /// ForwardMemory::proposals; `asks` is as ForwardVerbs::propose finds it in each layer.
  std::uint32_t proposed = 0;
  /// Its row of ForwardLayer::scores, by which it chooses; of a team that of its first packed row, the others follow.
  /// kNone: it chooses by copies of keys.
  std::uint32_t scores = kNone;

  [[nodiscard]] constexpr bool scored() const noexcept { return scores != kNone; }
  /// Whether the device chooses tokens by score: of all, or of those in the pages that it has chosen.
  [[nodiscard]] constexpr bool ranks() const noexcept { return (picks != 0 || mass > 0.f) && clusters.count == 0; }
  /// Whether what is chosen lies in chosen pages, all of whose tokens are attended unless tokens are ranked, too.
  [[nodiscard]] constexpr bool in_pages() const noexcept { return page_picks != 0 && asks == 0; }
  /// Whether a token is attended by all heads, chosen or not.
  [[nodiscard]] constexpr bool in_window(std::uint32_t token) const noexcept {
    return token < sink_end || token >= recent_begin;
  }
  /// Tokens that were there before: a new one's estimate may not be.
  [[nodiscard]] constexpr std::uint32_t old_tokens() const noexcept { return drafts == 0 ? tokens - 1 : tokens; }
  /// Whether all tokens are attended.
  [[nodiscard]] constexpr bool whole() const noexcept { return sink_end == tokens; }
  /// The row as it is in a layer whose rows see the newest `window` tokens, see EngineOptions::windows; there nothing
  /// is chosen.
  [[nodiscard]] constexpr ForwardRow in(std::uint32_t layer, std::uint32_t window) const noexcept {
    ForwardRow row = *this;
    row.draws = draws.in(layer);
    if (window == 0 && layer >= dense_layers && (dense_every == 0 || layer % dense_every != 0)) return row;
    const std::uint32_t newest = tokens + drafts;
    const bool cut = window != 0 && window < newest;
    row.sink_end = cut ? 0 : tokens;
    row.recent_begin = cut && newest - window < tokens ? newest - window : tokens;
    row.pages = row.page_picks = row.picks = 0;
    row.mass = 0.f;
    row.microbatch = 0;
    row.asks = 0;
    row.proposed = 0;
    row.draws = {};
    row.clusters = {};
    return row;
  }
};

/// Consecutive packed rows that are consecutive tokens of one sequence, each of which attends all tokens up to its own.
struct ForwardChunk {
  std::uint32_t list = kNone;  ///< kNone: there is no such chunk
  std::uint32_t at = 0;        ///< its first packed row
  std::uint32_t first = 0;     ///< position of its first token
  std::uint32_t count = 0;
  /// Bit l: in layer l blocks of keys are chosen for it, see ForwardMemory::flex.
  std::uint32_t sparse[4] = {};

  static constexpr std::uint32_t kMostSparseLayers = 128;
  [[nodiscard]] constexpr bool sparse_in(std::uint32_t layer) const noexcept {
    return (sparse[layer / 32] >> layer % 32 & 1) != 0;
  }
  [[nodiscard]] constexpr std::uint32_t keys() const noexcept { return first + count; }
};

/// Entries [page, page + count) of block list `list` become what lies from entry `from` of the slip's blocks on.
struct ForwardListChange {
  std::uint32_t list = 0;
  std::uint32_t page = 0;
  std::uint32_t count = 0;
  std::uint32_t from = 0;
};

/// A sequence whose mean key, see CodeLayout, a plan makes again from the tokens that it has before the forward: that
/// of its first page if this is full, else 0; and the codes of that page with it.
struct ForwardKeyMean {
  std::uint32_t list = 0;  ///< its block list
  std::uint32_t tokens = 0;
};

/// What a near row holds.
struct ForwardNearRow {
  std::uint32_t row = kNone;  ///< of the plane's far rows; kNone: nothing
  std::uint32_t used = 0;     ///< the newest forward that attended it
};

/// An entry of far_counts from here on is of a list that was drawn, see ForwardMemory::far_corrections.
inline constexpr std::uint32_t kDrawnBit = 0x8000'0000u;
/// An entry of near_of from here on is near.
inline constexpr std::uint32_t kNearBit = 0x8000'0000u;
/// A far row has a near one, which is not filled yet. Forwards are counted modulo this where near rows are concerned.
inline constexpr std::uint32_t kComingBit = 0x4000'0000u;
/// A far row that was attended twice within as many forwards is wanted near before others.
inline constexpr std::uint32_t kNearAgain = 8;
/// Near rows that were not attended in as many forwards give way first; those not attended in kNearAgain, then.
inline constexpr std::uint32_t kNearPatience = 32;
/// Of as many forwards, counted from a multiple of that on, one lists rows of a layer to come near, neighbouring layers
/// in turn: what is wanted now and then can wait.
inline constexpr std::uint32_t kNearTurn = 4;
/// Whether it is this one. Which of four that is changes, so that sequences of every other forward have turns in all
/// layers.
[[nodiscard]] constexpr bool near_turn(std::uint32_t forward, std::uint32_t layer) noexcept {
  const std::uint32_t mixed = (forward / kNearTurn * 0x9e37'79b1u) >> 30;
  return ((forward ^ mixed) + layer) % kNearTurn == 0;
}
/// Near rows of a plane that are looked at each time for some that give way.
inline constexpr std::uint32_t kNearLooks = 4096;
/// Rows that a plane may bring near in one forward, at most.
inline constexpr std::uint32_t kMostPromotions = 1024;

/// Far rows of a layer and KV head that are to come near, see ForwardVerbs::promote.
struct ForwardArrivals {
  enum class State : std::uint32_t {
    none = 0,
    listed = 1,  ///< in `forward`
    placed = 2,  ///< they have near rows, which are to be filled
    filled = 3,
  };
  State state = State::none;
  std::uint32_t forward = 0;
  /// Rows that wait for near ones. One behind the other in ForwardMemory::arriving, each with room for as many as a
  /// plane may bring near: of sinks and recent tokens; attended far not long before, too; the others.
  std::uint32_t always = 0;
  std::uint32_t again = 0;
  std::uint32_t first = 0;
};

/// What the CPU has chosen for a list whose far part the device attends over the link.
struct ForwardChosen {
  std::uint64_t asked = 0;    ///< for this question; written behind all else, so that no list waits for another
  std::uint32_t count = 0;    ///< rows
  std::uint32_t heads = 0;    ///< bit h: query head h of the group attends some of them
  std::uint32_t members = 0;  ///< not 0: which heads attend each row stands behind the rows
};

/// What the history of a KV head proposes in a layer, which lies in ForwardMemory::proposed.
struct ForwardProposal {
  std::uint64_t forward = 0;  ///< that it is for; written behind all else
  std::uint32_t asks = 0;     ///< not 0: it says nothing, and the CPU chooses
  std::uint32_t shared = 0;   ///< not 0: what is proposed to the first query head is proposed to all of the group
};

/// The copies in codes of `from` become those of `to`, too. Its digest does not: it is of a page that is full.
struct ForwardBlockCopy {
  std::uint32_t from = 0;
  std::uint32_t to = 0;
};

/// When something happened in a forward, by the clock of the part that did it.
struct ForwardStamp {
  std::uint64_t forward = 0;
  std::uint64_t ns = 0;
};

/// How a forward ended.
enum class ForwardStatus : std::uint32_t {
  running = 0,
  done = 1,
  unplanned = 2,  ///< replayed without a plan of its own; nothing was appended, outputs are NaN
  abandoned = 3,  ///< the far part's answer did not come in time; outputs from that layer on are NaN
  cancelled = 4,
  orphaned = 5,    ///< the forward that it builds on did not get to its end; as unplanned
  mismatched = 6,  ///< what ran was made for another bucket than the plan's; as unplanned
  skipped = 7,     ///< it had not ended when the plan behind it came, or began twice
  broken = 8,      ///< a verb of it could not be done; outputs from the next layer on are NaN
};

/// What a plan tells the device, in pinned memory: read when the stream gets to `apply`. Arrays are in ForwardMemory.
struct ForwardSlip {
  std::uint64_t forward = 0;  ///< number of the forward that is planned; rises
  std::uint64_t after = 0;    ///< the forward it builds on, which must have been the last to get to its end
  Bucket bucket;
  std::uint32_t list_changes = 0;
  std::uint32_t freed_blocks = 0;
  std::uint32_t block_copies = 0;
  std::uint32_t key_means = 0;
  std::uint64_t read = 0;  ///< by the device: ForwardVerbs::tell_read's forward, if that was called
};

/// The device's own memory of where it is.
struct ForwardState {
  std::uint64_t planned = 0;    ///< the newest plan that was applied
  std::uint64_t after = 0;      ///< of that plan
  Bucket bucket{};              ///< of that plan
  std::uint64_t kept = 0;       ///< the newest plan that kept all tokens of whole rows near, see ForwardVerbs::apply
  std::uint64_t forward = 0;    ///< the newest forward that began
  std::uint64_t told = 0;       ///< the newest whose end was published
  std::uint64_t good = 0;       ///< the newest that got to its end
  std::uint64_t asked = 0;      ///< questions so far
  std::uint64_t unplanned = 0;  ///< replays without a plan so far
  std::uint64_t released =
      0;                      ///< newest question whose answer is known to be there, or that a forward before this left
  std::uint64_t claimed = 0;  ///< newest question whose answer some thread block looks for
  ForwardStatus status = ForwardStatus::done;
  std::uint32_t layer_far_tokens = 0;  ///< while it is split
  std::uint32_t layer_choices = 0;     ///< lists of it for which the CPU chooses
  std::uint32_t arrived = 0;           ///< parts of it that are split
  std::uint64_t fetching_ns = 0;       ///< when it began to wait for what the CPU chooses, by the device's clock
  std::uint32_t near_rows = 0;         ///< that hold something, of all planes
  std::uint64_t promoted = 0;          ///< rows brought near so far
  std::uint64_t drawn_heads = 0;       ///< as in EngineStats
  std::uint64_t error_bars = 0;
  std::uint64_t wide_bars = 0;
  std::uint64_t near_tokens = 0;       ///< attended so far, by all rows that choose, layers and KV heads
  std::uint64_t far_tokens = 0;        ///< likewise, that the CPU was told of
  std::uint64_t fetched_tokens = 0;    ///< likewise, over the link, by the device
  std::uint64_t waited_ns = 0;         ///< for answers so far, by the device's clock
  std::uint64_t missed = 0;            ///< choices of query heads so far that candidates did not foretell
  std::uint64_t awaited = 0;           ///< layers so far that had to wait for what histories propose
};

/// Forwards that may be planned and not finished at once, at most.
inline constexpr std::uint32_t kMostForwards = 8;

/// The word that a stream waits for, see Handover::stream: a bit of it says whether it is open, so that a graph can
/// wait for the same value whenever it is replayed. Behind that it has the number of a question.
struct ForwardGate {
  static constexpr std::uint64_t kOpen = std::uint64_t{1} << 63;
  static constexpr std::uint64_t kGivenUp = std::uint64_t{1} << 62;
  [[nodiscard]] static constexpr std::uint64_t closed(std::uint64_t asked) noexcept { return asked; }
  [[nodiscard]] static constexpr std::uint64_t answered(std::uint64_t asked) noexcept { return asked | kOpen; }
  /// The answer did not come in time, and what comes behind finds none.
  [[nodiscard]] static constexpr std::uint64_t given_up(std::uint64_t asked) noexcept {
    return asked | kOpen | kGivenUp;
  }
};

/// The meeting point of device and workers, in pinned memory. Each word has one writer and only rises, but for what is
/// good, which may be taken back, and the gate; no word is added to across the link, as not every link can do that.
struct ForwardMailbox {
  /// The device's: question `asked` is there, of this forward and layer.
  struct alignas(64) Question {
    std::uint64_t asked = 0;
    std::uint64_t forward = 0;
    std::uint32_t layer = 0;
    std::uint32_t drafts = 1;   ///< of the bucket: lists have as many times the query heads of a KV head
    std::uint32_t lists = 0;    ///< of far rows
    std::uint32_t choices = 0;  ///< lists that the CPU is to add to, as its policies choose; see ForwardRow::asks
    std::uint64_t passed = 0;   ///< newest ticket of ForwardVerbs::signal, see Handover::host
  } question;
  /// The workers': question `answered` is answered.
  struct alignas(64) Answer {
    std::uint64_t answered = 0;
  } answer;
  /// See ForwardGate. The device closes it before it asks; the host thread that opens it replaces the question that
  /// it was closed for.
  struct alignas(64) Gate {
    std::uint64_t word = ForwardGate::kOpen;
  } gate;
  /// The device's: how the newest forwards that were planned ended.
  struct alignas(64) Outcome {
    std::uint64_t cancelled = 0;    ///< newest plan that was taken back
    std::uint64_t forward = 0;      ///< newest that ended; written after everything else
    std::uint64_t good = 0;         ///< newest that got to its end
    std::uint64_t unplanned = 0;    ///< replays without a plan so far
    std::uint64_t drawn_heads = 0;  ///< as in EngineStats
    std::uint64_t error_bars = 0;
    std::uint64_t wide_bars = 0;
    std::uint64_t near_tokens = 0;  ///< as in ForwardState
    std::uint64_t far_tokens = 0;
    std::uint64_t fetched_tokens = 0;
    std::uint64_t waited_ns = 0;
    std::uint64_t promoted = 0;
    std::uint64_t near_rows = 0;
    std::uint64_t missed = 0;
    std::uint64_t awaited = 0;
    ForwardStatus status[kMostForwards] = {};  ///< of forward f at f % kMostForwards
  } outcome;
};

}  // namespace sluice
