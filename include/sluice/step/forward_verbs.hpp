#pragma once

#include <cstdint>
#include <memory>
#include <span>

#include "sluice/error.hpp"
#include "sluice/run_clock.hpp"
#include "sluice/step/forward_memory.hpp"
#include "sluice/step/prefill_choice.hpp"
#include "sluice/tensor.hpp"

namespace sluice {

/// The tensors of one layer, packed [rows, heads, head_dim], and where to compute.
struct ForwardLayer {
  std::uint32_t layer = 0;
  TensorView q;  ///< of the newest tokens alone, if there are fewer rows than in k
  TensorView k;
  TensorView v;
  TensorView rehearsed{};  ///< as q, of buckets with rehearsed queries, in layers but the first; else no rows
  /// [decode_rows, kv_heads or 1, tokens] f32, of buckets whose rows may choose by such scores; else no rows
  TensorView scores{};
  MutableTensorView out;   ///< without rows where tokens are only brought in
  float* lse = nullptr;    ///< [rows, q_heads] natural log of the sum of exponentials; may be null
  void* stream = nullptr;  ///< the caller's: a cudaStream_t; a Stream* of a host device, or null: now
};

/// A page of a plane in host memory, the first `rows` of whose tokens are there.
struct FarPage {
  std::uint32_t block = 0;
  std::uint32_t rows = 0;
};

/// What a device does beside the forwards of one ForwardMemory, which it leaves alone once this is destroyed.
class ForwardSide {
 public:
  virtual ~ForwardSide() = default;
};

/// Enqueue and return; nothing is allocated, nothing waits. A forward is `begin`, then for every layer in order
/// `append`, `prefill` if the bucket has such rows, `attend_whole` if its other rows are whole, and if they choose,
/// `rank` if some rank pages, `score` and `choose` if some choose tokens, with `propose` between if
/// ForwardMemory::proposes, `split`, `attend`, `promote`, `fetch` if the
/// device fetches (before `promote` if it alone attends what is far), and `merge`; then `end`. One that is audited
/// has `audit` behind `merge`, and `promote` behind that.
/// One that is traced has a `stamp` before `append` and behind each of these. `apply` and `fill` come before it and are
/// not part of a graph. One that only brings keys and values in is `begin`, `append` for every layer, `end`. Where
/// kernels do not wait for the CPU there is `await_answer` before the first of `fetch` and `merge` that wants what it
/// says, or `signal` behind `split`, for the caller to wait there; see Handover. Where a bucket has drafts, the verbs
/// from `rank` on are given ForwardMemory::teams(), and `append` describes and queues for those; rows are teams then,
/// whose query heads are those of all of their packed rows. Forwards and plans run in the order in which they are
/// numbered. Thread safety: one thread at a time per ForwardMemory.
class ForwardVerbs {
 public:
  virtual ~ForwardVerbs() = default;
  /// Whether prompts of this shape can attend in chosen blocks; where not, PrefillMode::automatic attends densely.
  [[nodiscard]] virtual bool sparse_prefill(const AttentionShape& shape) const noexcept {
    (void)shape;
    return true;
  }
  /// What choosing blocks of prompts costs here, for the choice between dense and sparse prefill.
  [[nodiscard]] virtual PrefillCosts prefill_costs() const noexcept = 0;
  /// Device memory that the verbs want for themselves, zero-filled at first, for every bucket up to the largest.
  [[nodiscard]] virtual std::uint64_t scratch_bytes(const ForwardMemory& memory) const = 0;

  [[nodiscard]] virtual std::unique_ptr<ForwardSide> make_side() { return std::make_unique<ForwardSide>(); }
  /// Takes the slip: rows, block lists, freed blocks, copies, mean keys. Not captured. Tokens that come get near rows, so that
  /// they are written there, too: rows that are free, or have not been attended for long, see kNearPatience. Those that
  /// are decoded come first, and count as attended; of those of prompts, which do not, the newest, if not all find one.
  /// Of a bucket that is whole, once in kNearTurn plans all tokens of its rows count as attended, and those that are
  /// far are brought near where others give way that have not been attended for long, if all of a row's have room; no
  /// more than `promotions` of a plane.
  /// Rows that `promote` has listed in the forward before get near rows likewise, for `fill`. Those of the plan before
  /// are near now if they were filled, and have given theirs back if they were not. `side`: of this memory.
  virtual void apply(const ForwardMemory& memory, ForwardSide& side, void* stream) = 0;
  /// Behind `apply`, if there are `promotions`: fills the near rows that it has found for what was listed, beside the
  /// forward that is planned. Not captured. Should it fail, they are as `apply` says.
  virtual void fill(const ForwardMemory& memory, ForwardSide& side, void* stream) = 0;
  /// K-means over tokens that forwards before this one have appended, in all layers that `clusters_in` names, as
  /// ClusterTask has it, with the first token's position as the seed. Not captured, and no part of a forward.
  virtual void cluster(const ForwardMemory& memory, std::span<const ForwardClustering> clusterings, void* stream) = 0;
  /// Of pages of a plane that no forward has written: their copies in codes, made with the mean key `mean` ([head_dim]
  /// float32; null: 0), and of full ones the digest, if the memory has digests. `pages` and `mean` are in pinned
  /// memory, and stay as they are until the stream has passed this. Not captured, and no part of a forward.
  virtual void derive(const ForwardMemory& memory, std::uint32_t plane, std::span<const FarPage> pages,
                      const float* mean, void* stream) = 0;
  /// Begins the forward that was planned last, unless it has begun before.
  virtual void begin(const ForwardMemory& memory, void* stream) = 0;
  /// New keys and values go to their far page, its copy in codes, and its near page if there is one; a sequence's first
  /// token behind its first page makes its mean key, and the page's copy again. Queries of rows that choose to both
  /// sides, rehearsed ones to the host, and those of tokens with a tail there. Pages that become full
  /// get their digest. Outputs, if there are any, of padding become 0, and all of them NaN if the forward does not run.
  virtual void append(const ForwardMemory& memory, const ForwardLayer& layer) = 0;
  /// Causal attention of the chunks' rows to all tokens up to their own; or to those in the blocks that FlexPrefill
  /// chooses for them, as SelectBlocksTask has it, where they are sparse.
  virtual void prefill(const ForwardMemory& memory, const ForwardLayer& layer) = 0;
  /// Scores of the rows' pages by their digests, as ScorePagesTask has them, and the page_picks best of every query
  /// head, as TopKTask orders them: to pinned memory, of rows that ask.
  virtual void rank(const ForwardMemory& memory, const ForwardLayer& layer) = 0;
  /// Scores of all visible tokens by their copies, before any soft-cap. Of rows that have chosen pages, of these: as
  /// ScoreInt4Task lays them out with `lists`. Of rows that are scored() ForwardLayer::scores, as they are.
  virtual void score(const ForwardMemory& memory, const ForwardLayer& layer) = 0;
  /// Of rows whose histories propose: waits for that, as `merge` waits for answers, and says in ForwardRow::asks
  /// whether the CPU chooses in this layer. If not, scores of what is not proposed to a query head become NaN, which
  /// `choose` and `split` then take for no candidate; and queries go to ForwardMemory::proposed_q.
  virtual void propose(const ForwardMemory& memory, const ForwardLayer& layer) = 0;
  /// The `picks` largest of every query head between sinks and recent tokens, or of its pages, by index from the first
  /// of them, as TopKTask orders them; or those that top-p keeps. A device may leave the former to `split`. Of rows
  /// with clusters what ChooseClustersTask keeps.
  virtual void choose(const ForwardMemory& memory, const ForwardLayer& layer) = 0;
  /// Lists what a group attends, near rows here and far rows there, and asks the workers for the far part if there is
  /// one that the device does not fetch, or something to choose. What one head of a group chose all of them attend.
  virtual void split(const ForwardMemory& memory, const ForwardLayer& layer) = 0;
  /// Attends near rows that `split` has not; of teams what some of their rows see and others do not, see ForwardEdge.
  virtual void attend(const ForwardMemory& memory, const ForwardLayer& layer) = 0;
  /// Of a bucket that is whole: its rows attend all tokens, near ones there and far ones over the link, and outputs are
  /// written. Without windows, audits, drafts, and rows with scales.
  virtual void attend_whole(const ForwardMemory& memory, const ForwardLayer& layer) = 0;
  /// Lists rows that were attended far, while their answer is awaited, in every kNearTurn-th forward, for the next
  /// `apply` to bring near: those of sinks and recent tokens, then those that were attended far before, not longer than
  /// kNearAgain forwards ago, then others if rows not attended in kNearPatience are left to give way; of lists that the
  /// CPU chose for only if ForwardMemory::keeps_chosen. The first take the place of any row that neither of the two
  /// forwards has attended.
  virtual void promote(const ForwardMemory& memory, const ForwardLayer& layer) = 0;
  /// What comes behind waits until ForwardMailbox::gate is open, which the host sees to in time.
  virtual void await_answer(const ForwardMemory& memory, void* stream) = 0;
  /// Writes `ticket` to ForwardMailbox::Question::passed when what was enqueued before is done, and can be seen.
  virtual void signal(const ForwardMemory& memory, std::uint64_t ticket, void* stream) = 0;
  /// Writes `forward` to ForwardSlip::read when what was enqueued before is done, for a plan that failed behind
  /// `apply`.
  virtual void tell_read(const ForwardMemory& memory, std::uint64_t forward, void* stream) = 0;
  /// Whether what is enqueued on `stream` is being captured instead of run.
  [[nodiscard]] virtual bool capturing(void* stream) const = 0;
  /// Attends far rows over the link: those that were listed, and what the CPU chooses (of which near rows where they
  /// lie, which then count as attended, if ForwardMemory::keeps_chosen), which is waited for as in
  /// `merge`, a few lists at a time, in their order: they are attended while the CPU chooses for those behind them.
  virtual void fetch(const ForwardMemory& memory, const ForwardLayer& layer) = 0;
  /// Waits for the far part, at most answer_ns by the device's clock, and merges. Where it has none to wait, an answer
  /// that is not there was given up.
  virtual void merge(const ForwardMemory& memory, const ForwardLayer& layer) = 0;
  /// Of each row that chooses: what it asked, what it got, and what the device listed for it, near or far, to pinned
  /// memory. The layer has an lse.
  virtual void audit(const ForwardMemory& memory, const ForwardLayer& layer) = 0;
  /// Writes down when what was enqueued before was done: `stage` of a layer, or what came before the layer. To pinned
  /// memory, and nothing of a forward that does not run. Of a bucket that is traced `prefill` stamps Stage::gather, if
  /// it gathers, with the end of what came before its first window and the time that all of them took.
  virtual void stamp(const ForwardMemory& memory, std::uint32_t layer, Stage stage, void* stream) = 0;
  /// Whether stamps are times of Clock; else they are of a clock of the device.
  [[nodiscard]] virtual bool stamps_by_clock() const noexcept = 0;
  /// Takes all plans behind forward `before` back: what comes later of them has no plan, and what is planned next
  /// continues that one, if it got to its end. Publishes that.
  virtual void cancel(const ForwardMemory& memory, std::uint64_t before, void* stream) = 0;
  /// @throws Error{Errc::device} with the reason if what was enqueued on `stream` has failed. It is not being captured.
  virtual void require_alive(void* stream) = 0;
  /// Writes ForwardMemory::near_held to near_seen, as it is now: a forward under way may be in the midst of changing
  /// it. Waits for that alone, not for forwards. There are near pages. Nothing of it breaks a capture elsewhere.
  /// @throws Error{Errc::timeout}, Error{Errc::device}
  virtual void see_near(const ForwardMemory& memory, Deadline deadline) = 0;
  /// Publishes how the forward ended.
  virtual void end(const ForwardMemory& memory, void* stream) = 0;
};

}  // namespace sluice
