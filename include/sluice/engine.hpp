#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "sluice/audit.hpp"
#include "sluice/bucket.hpp"
#include "sluice/device.hpp"
#include "sluice/engine_options.hpp"
#include "sluice/engine_stats.hpp"
#include "sluice/error.hpp"
#include "sluice/policy.hpp"
#include "sluice/prefill.hpp"
#include "sluice/shape.hpp"
#include "sluice/tensor.hpp"
#include "sluice/trace.hpp"
#include "sluice/units.hpp"

namespace sluice {

/// New tokens of one sequence, consecutive rows of a forward.
struct PlanItem {
  SequenceId sequence;
  std::uint32_t tokens = 1;
  /// A chunk of a prompt: its rows attend all that comes before them. Otherwise each row chooses as its sequence's
  /// policy says, as if the tokens before it had been decoded one by one: new tokens, and drafts that are to be
  /// verified. In a bucket with drafts they choose together; those of a policy that chooses on the CPU only there, and
  /// no more of them than Bucket::drafts.
  bool prefill = false;
};

/// One forward that was planned.
struct Batch {
  std::uint64_t forward = 0;
  Bucket bucket{};
};

/// One layer of a forward, in memory of the device, touched on `stream` alone. With rows = Bucket::rows():
struct AttendArgs {
  TensorView q;            ///< [rows, q_heads, head_dim] after RoPE
  TensorView k;            ///< [rows, kv_heads, head_dim] likewise
  TensorView v{};          ///< as k; none with AttentionShape::value_dim
  MutableTensorView out;   ///< as q; with AttentionShape::value_dim [rows, q_heads, value_dim]
  float* lse = nullptr;    ///< [rows, q_heads] natural log of the sum of exponentials; may be null
  void* stream = nullptr;  ///< a cudaStream_t with the CUDA device; a Stream* with a host device, or null: at once
  /// As q: what the attention input of the layer before, as that layer normalised it, gives with this layer's query
  /// weights, after RoPE. Wanted in all layers but the first of buckets with Bucket::rehearsed, for policies that
  /// choose by it, and ignored otherwise.
  TensorView rehearsed{};
  /// [decode_rows or more, kv_heads or 1, max_tokens of the bucket or more] f32: element t of a row is the score of the
  /// sequence's token t for one of its KV heads, or for all of them. Row i is of the forward's i-th token that is
  /// decoded, in the order of the plan's items, prompts left out; padding has rows of any values. Wanted in all layers
  /// without a window of buckets with Bucket::scores, for policies with the source `scores`, and ignored otherwise, as
  /// are rows of other policies, what a layer attends anyway, and tokens that a row does not see. Larger scores are
  /// chosen first, of equal ones the earlier token; -infinity comes behind all numbers, NaN behind that. Budget
  /// `top_p` takes scores as natural logarithms of weights, as they are: EngineOptions::scale and ::softcap are not
  /// applied.
  TensorView scores{};
};

/// Attention for a batch of sequences whose keys and values lie in host memory, driven by the device: `plan` once per
/// forward, `attend` per layer on the caller's stream. A forward mixes tokens that are decoded, drafts that are
/// verified and chunks of prompts. What `attend` launches depends on the bucket alone, so that a forward, `attend` for
/// every layer in order, can be captured in a CUDA graph once per bucket and replayed after every `plan`. The far part
/// is answered by threads that watch for the device's questions while a planned forward is under way, and sleep
/// otherwise.
///
/// Prompts attend densely, or in blocks that FlexPrefill chooses per chunk, see EngineOptions::prefill. `automatic`
/// goes by what earlier chunks of the sequence kept, as far as their forwards were finished when one is planned.
///
/// Serves every policy with near=0, dense layers and bypass. On the device choose `full`, `none` (sinks and recent
/// tokens), `scores` (those that the caller brings), `exact | int4` and `pages | int4` with `top_k` or `top_p`,
/// `clusters | int4` with `fitted`, and `pages | top_k=all` (Quest, ArkVale), these without bypass. All others choose
/// on the CPU, between a layer's question and its answer; pages are ranked on the device for them, too. What a row
/// attends depends on policy, sequence and its draft group alone, neither on what else is in the batch nor on what is
/// near.
///
/// Drafts are verified one by one or, in a bucket with drafts, together (Bucket::drafts): each query head of each of a
/// draft group's rows chooses among the tokens before the group, and all its rows attend what any of them chose, and
/// of the group's own tokens those up to their own. So a row attends at least what it would alone, where everything is
/// attended or there is a window the same, and where heads choose by mass as large a share of it. Keys, values and
/// their copies are read once for it, near, far and over the link. An item's rows are groups of Bucket::drafts in
/// their order, the last of them with what is left. Rejected ones are taken back by `truncate`; where layers have
/// windows, as many as EngineOptions::window_slack says.
///
/// A policy that chooses on the CPU chooses once for a group, by its first row, which is new and no draft: that attends
/// what it would alone, and its own token, should the policy have no recent tokens. The rows behind it attend what any
/// of its query heads chose. It learns from the first row alone, so that rejecting drafts takes nothing back. A query
/// head is bypassed only if all rows would bypass it. `sampled` (magicpig) is not served: its sample stands for what
/// one query would attend.
///
/// A policy that chooses on the CPU looks at its sequence's prompt before the first token behind it is decoded. Threads
/// that have nothing to answer do so from when the forward with the prompt's end is finished, or its import, if the
/// sequence's tokens have names up to there and no further; else from the `plan` of that token. That waits for forwards
/// with the prompt, and for the look if it is not done (EngineStats::stalls); what other sequences have under way goes
/// on meanwhile. A prompt that goes on, `truncate` and `end` take a look back: they wait, for EngineOptions::timeout at
/// most, until no thread reads what they change. A policy learns from a token once the forward has got to its end. What
/// it has learnt goes along with forks, and what it has learnt from tokens that are taken back is taken back, too, so
/// that the sequence goes on as if these had never been:
/// - for any number of tokens, if the policy has no history;
/// - up to 32 of the newest tokens with history, if no query head observes more than max(64, 2%) of the tokens, as with
///   lfps, and history decays by 0.85 or more; where heads observe more, as many as there is room for in a journal of
///   that size.
/// Beyond that the policy begins again, as it does with a further prompt or an import: it looks at all there is once
/// more, with the queries of a prompt that ends there; what it had learnt is forgotten. With history, and without such
/// queries, the next token attends everything, and history begins with that. Imports may bring queries.
///
/// Forwards that are planned and not finished run in the order of their plans, each on top of the one before: their
/// streams must be the same, or ordered by the caller. Enqueue all layers of one, or replay its graph, before the next
/// is planned; finish them in any order. One that fails takes those behind it along.
///
/// Thread safety: calls on one Engine must not overlap; none may be made on the caller's stream while it is captured
/// but `attend`. Errors: Error, and nothing was changed unless the function says otherwise.
class Engine {
 public:
  /// @throws Error{Errc::invalid_argument}, Error{Errc::out_of_capacity}, Error{Errc::unsupported} with the reason if
  /// the device cannot serve the shape or has no verbs of a forward. `device` null: an embedded host device.
  explicit Engine(const EngineOptions& options, std::shared_ptr<Device> device = nullptr);
  /// What was enqueued on streams of the caller must have run. A thread of the engine that does not come back within
  /// EngineOptions::timeout is left behind, with the device and all else that it may use.
  ~Engine();
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  /// @throws Error{Errc::unsupported} naming what the policy wants, and there is no room for: name it in
  /// EngineOptions::policies; Error{Errc::out_of_capacity} if as many live as may, or policy_bytes are spent.
  [[nodiscard]] SequenceId begin(const PolicySpec& policy);
  /// A new sequence that begins with what is known of a prompt: it has the first tokens(sequence) tokens of it, whole
  /// pages, in blocks that it shares; the others are to come as they would without. All of `prompt` is named, see
  /// name_tokens. The last token is not among those that are found, as its output is wanted, nor are those whose
  /// queries the policy begins with. `salt`: what else keys and values depend on besides the ids, such as an adapter or
  /// an image; what has another one is not found.
  /// @throws as the other; Error{Errc::out_of_capacity} if the prompt is longer than a sequence may be
  [[nodiscard]] SequenceId begin(const PolicySpec& policy, std::span<const std::int32_t> prompt,
                                 std::uint64_t salt = 0);
  /// How many tokens a sequence would have that began like that now.
  [[nodiscard]] std::uint32_t match_prefix(const PolicySpec& policy, std::span<const std::int32_t> prompt,
                                           std::uint64_t salt = 0) const noexcept;
  /// Says what tokens [first, first + ids) of a sequence are, which it has or which come next. Sequences that begin
  /// with the same ids find its full pages then, with their digests and copies: from when their forwards are finished,
  /// and after it has ended until something else needs the memory. What was let go of first gives way first, but no
  /// page before what continues it. May be called while forwards are under way.
  ///
  /// A sequence attends the same whether pages were found for it or not, with the keys and values that they were given
  /// first. Therefore
  /// - names are forgotten, for all tokens behind those that remain, when tokens are taken back, or a forward or an
  ///   import of the sequence fails or is cancelled: name what comes instead;
  /// - pages are not found from the first on with a token that was decoded and did not attend everything, unless
  ///   EngineOptions::prefix_decoded says so: as part of a prompt it would have other keys and values;
  /// - where prompts choose blocks (EngineOptions::prefill), a prompt of which a part was found attends as one that was
  ///   cut into chunks there. What a chunk chooses depends on where it begins, and PrefillMode::automatic on those
  ///   before it; to get the same for all, cut all where pages may end.
  /// A fork has its parent's names of the tokens it begins with. Those of a page have to be right: others believe them.
  /// @throws Error{Errc::invalid_argument} if tokens before `first` have no names, or one that it has, or that is
  /// planned, has another; Error{Errc::out_of_capacity} if they are more than a sequence may have
  void name_tokens(SequenceId sequence, std::uint32_t first, std::span<const std::int32_t> ids);
  /// Of a sequence that is to rest: gives up its near memory when the next forward is planned, but for blocks that
  /// others share. Its keys and values stay, and what is attended again comes near again; changes no token. May be
  /// called at any time.
  void preempt(SequenceId sequence);
  /// A new sequence of the first `tokens` tokens of another one, under its policy. Its blocks are shared; the one in
  /// which either of them goes on is copied then. If the policy chooses on the CPU, what it has learnt is copied, all
  /// that memory(sequence).policy says but hash tables, and as the class says the fork goes on as its parent would
  /// have; beyond what can be taken back, its policy begins again.
  /// @throws Error{Errc::invalid_argument} if a forward with the sequence is under way, or it has fewer tokens;
  /// Error{Errc::unsupported} if layers with windows have let go of what is seen behind as many tokens, see
  /// EngineOptions::window_slack; Error{Errc::out_of_capacity} if as many live as may, or policy_bytes are spent;
  /// Error{Errc::timeout} if a thread in which policies learn does not come back
  [[nodiscard]] SequenceId fork(SequenceId sequence, std::uint32_t tokens);
  /// Under a policy of its own, which begins without what the other's has learnt. One that begins with queries of the
  /// prompt finds them if the other's policy chooses on the CPU, too.
  /// @throws as `begin` and `fork` do
  [[nodiscard]] SequenceId fork(SequenceId sequence, std::uint32_t tokens, const PolicySpec& policy);
  /// Takes the newest tokens back, until there are `tokens`: drafts that were not accepted. What a policy that chooses
  /// on the CPU has learnt from them is taken back as the class says, or the policy begins again. The next token that
  /// is decoded pays for that, about as much as was spent on learning. If there are as many, nothing changes.
  /// @throws Error{Errc::invalid_argument}, Error{Errc::unsupported}, Error{Errc::timeout} as in `fork`
  void truncate(SequenceId sequence, std::uint32_t tokens);
  /// Writes all that a sequence is to memory of the caller, which a sequence begins with that is resumed from it: keys
  /// and values, policy, names of tokens with their salt, and the queries of its prompt's newest tokens. The sequence
  /// stays as it is, until it is ended. `area` has park_bytes at least; returns how many were written. `model`: what
  /// keys and values are of, such as name and revision of a model and its adapter, 4 KiB at most; resuming it takes
  /// the same text. Forwards of others may be under way. Threads of the engine that have nothing to answer copy,
  /// beside the caller, and touch nothing of the caller's any more when it returns.
  /// @throws Error{Errc::invalid_argument} if a forward with the sequence is under way, `model` is longer, or no
  /// engine could resume the sequence: policy and its name take more than 60 KiB, or the policy was built of what no words
  /// say; Error{Errc::not_found} if there is no such sequence; Error{Errc::out_of_capacity} if the area is too short,
  /// and nothing was written; Error{Errc::timeout} if a thread does not come back
  std::uint64_t park(SequenceId sequence, std::span<std::byte> area, std::string_view model = {}) const;
  /// To a file that only its owner may read. It takes its name, and the place of one that had it, once all of it is on
  /// the disk; until then one is beside it, called .sluice-XXXXXX. A symbolic link of that name is replaced, and what
  /// it leads to stays.
  /// @throws Error{Errc::invalid_argument}, Error{Errc::not_found} likewise, or the former if what has that name, or
  /// where a link of that name leads, is no ordinary file; Error{Errc::io} if the operating system refuses: what had
  /// that name stays as it was, or, where only the directory could not be brought to the disk, which the message says,
  /// the new file is there but may not survive a power cut
  void park(SequenceId sequence, const std::string& file, std::string_view model = {}) const;
  /// Bytes that a sequence takes that is parked now.  @throws as `park`
  [[nodiscard]] std::uint64_t park_bytes(SequenceId sequence, std::string_view model = {}) const;
  /// A new sequence with all that was parked, in this engine or another one, which may have pages of another size and
  /// other budgets of memory, for the same `model`. It goes on as the one that was parked would have. Nothing of it is
  /// near; if the engine has near memory, outputs may round differently until it is. Digests and copies are made
  /// of its keys. A policy that chooses on the CPU begins again when the next token is planned to be decoded, as after
  /// an import: it looks at all there is, with the queries of a prompt that ends there; what it had learnt from decoded
  /// tokens is forgotten. Audits and watched tokens stay behind. Forwards of others may be under way. Its names are
  /// found by prompts to come; but if prompts attend otherwise in this engine (EngineOptions::prefill), its pages are
  /// taken for decoded from the first on, see name_tokens.
  ///
  /// `area`: what was written, all of it and nothing else. Checksums find damage, not intent: a process that can write
  /// to it decides what the sequence attends, and what others find under its names.
  /// @throws Error{Errc::corrupt} if it is no parked sequence or damaged; Error{Errc::invalid_argument} naming what
  /// differs: the version of the format, shape, kv_dtype or model, or of the policy what this library does not know;
  /// Error{Errc::unsupported} and Error{Errc::out_of_capacity} as `begin`, or if the sequence is longer than one may
  /// be, or the host pool has no room; Error{Errc::device} and Error{Errc::timeout} if the device fails, the latter
  /// also if a thread that copies does not come back. Nothing has changed then, but that cached pages may have given
  /// way if the device or a file failed. A GPU that is late for much longer than the timeout has to be taken for lost,
  /// and the engine with it.
  [[nodiscard]] SequenceId resume(std::span<const std::byte> area, std::string_view model = {});
  /// @throws likewise; Error{Errc::not_found} if there is no such file, Error{Errc::io} if it cannot be read,
  /// Error{Errc::invalid_argument} if it is no ordinary one
  [[nodiscard]] SequenceId resume(const std::string& file, std::string_view model = {});
  /// Appends tokens whose attention was computed elsewhere, one layer after the other in order, on one stream as in
  /// `plan`; the last layer's call returns when they are in. k, v [tokens, kv_heads, head_dim] in device memory, after
  /// RoPE, v none as in AttendArgs, at most import_rows tokens; q [n, q_heads, head_dim] likewise, n <= tokens: queries
  /// of the newest, for a policy that begins with some; every layer has as many. One that does not get to its last layer
  /// is begun again with layer 0, or ends with the sequence; until then no forward can be planned, and the sequence
  /// neither forked nor truncated.
  /// @throws Error{Errc::invalid_argument} if a forward is under way
  void import_prefix(SequenceId sequence, LayerId layer, const TensorView& k, const TensorView& v, void* stream,
                     const TensorView& q = {});
  /// Plans a forward. The items' rows are packed in their order, each item's sequence is another one; rows behind them
  /// are padding. Enqueues on `stream`, which is not being captured: a cudaStream_t with the CUDA device; a Stream*
  /// with a host device, or null: at once.
  /// @throws Error{Errc::invalid_argument} naming what does not fit the bucket, or if `in_flight` forwards are not
  /// finished, or one failed with a prompt that a policy is to look at; Error{Errc::out_of_capacity};
  /// Error{Errc::unsupported} if `stream` is captured, or a policy is to choose on the CPU for more tokens than the
  /// bucket has drafts, or is `sampled` in a bucket with drafts; Error{Errc::timeout} if a prompt's forwards take too
  /// long, or a thread does that looks at one: it is left behind, and the next plan begins that look again, by other
  /// threads
  [[nodiscard]] Batch plan(std::span<const PlanItem> items, const Bucket& bucket, void* stream);
  /// One layer of a forward of this bucket: enqueues and returns. q, k, v and out as in AttendArgs, all of bucket.rows()
  /// rows, in device memory; they are touched on `stream` only. `lse` [rows, q_heads] may be null. Layers in order. Rows
  /// of padding get 0. While `stream` is captured nothing runs; a replay is the forward that was planned last, and one
  /// without a plan of its own gets NaN and changes nothing. After Error{Errc::device} the forward can only be
  /// cancelled.
  /// @throws Error{Errc::invalid_argument} naming the tensor that does not fit, or is missing
  void attend(const Bucket& bucket, LayerId layer, const AttendArgs& args);
  /// The same of a bucket that wants neither rehearsed queries nor scores.
  void attend(const Bucket& bucket, LayerId layer, const TensorView& q, const TensorView& k, const TensorView& v,
              const MutableTensorView& out, void* stream, float* lse = nullptr) {
    attend(bucket, layer, {.q = q, .k = k, .v = v, .out = out, .lse = lse, .stream = stream});
  }
  /// Waits until the forward has run; then its sequences have their new tokens. One that is audited is held against
  /// exact attention before it returns, by the threads that look at prompts; if that takes longer than `timeout`, that
  /// is an Error{Errc::timeout}, too.
  /// @throws Error{Errc::device} if it did not get to its end, with the reason: the far part was not answered in time,
  /// the forward before failed, what ran was not what was planned, the device failed, or a policy could not choose; the
  /// latter takes it back, and all behind it, as `cancel` does. Outputs of layers that ran
  /// after that are NaN, no sequence has its new tokens, and the forward can be planned again. Error{Errc::timeout} if
  /// it does not end: was every layer enqueued, or the graph replayed? It can be waited for again, or cancelled.
  void finish(const Batch& batch);
  /// Takes a plan back and all behind it, on the stream of the newest; no sequence has its new tokens. A forward of
  /// them that comes later, such as a replay, has no plan. Errors as in `finish`; Error{Errc::invalid_argument} if one
  /// behind it was finished.
  void cancel(const Batch& batch);
  /// @throws Error{Errc::invalid_argument} if a forward with the sequence is under way; Error{Errc::timeout} if its
  /// policy chooses on the CPU and a thread in which policies learn does not come back: the sequence lives, and can be
  /// ended later
  void end(SequenceId sequence);

  /// Tokens whose attendance audits report apart, such as those that hold the answer to a question. Positions, which
  /// need not exist yet; replaces those of an earlier call. Forks have none.
  void watch(SequenceId sequence, std::span<const std::uint32_t> tokens);
  /// What the sequence's rows attended in audited forwards (Bucket::audit), against exact attention of all keys. Such a
  /// forward runs alone. Drafts that were taken back count, too.
  [[nodiscard]] AuditReport audit(SequenceId sequence) const;

  /// When the stages of a forward with Bucket::trace ran, beside what was planned of them: of the one that was finished
  /// or taken back last, whether it got to its end or not. A stamp costs what a verb costs, on a GPU a launch of one
  /// thread, so that a traced forward takes longer than others; those pay nothing. Stages that run between two stamps
  /// are not told apart: where a GPU attends near and fetched rows in one launch, `attend` has both. On a GPU stamps
  /// are as exact as its global timer, 32 ns to 1 us; ForwardTrace::clock_error_us says how they lie to the CPU's.
  /// @throws Error{Errc::not_found} for any other. What it returns is good until the next traced one is finished or
  /// taken back.
  [[nodiscard]] const ForwardTrace& trace(const Batch& batch) const;

  /// That all layers have.
  [[nodiscard]] std::uint32_t tokens(SequenceId sequence) const;
  /// Whether there is room for a new sequence of as many tokens, beside what lives; what is cached gives way.
  /// Those whose policies choose on the CPU count apart, see EngineOptions::cpu_sequences.
  [[nodiscard]] bool can_admit(std::uint32_t tokens) const noexcept;
  /// The same, and whether the engine serves the policy, one of cpu_sequences is left if it chooses on the CPU, and
  /// policy_bytes allow for what it keeps of as many tokens.
  [[nodiscard]] bool can_admit(std::uint32_t tokens, const PolicySpec& policy) const noexcept;
  [[nodiscard]] EngineMemoryUse memory() const noexcept;
  /// Of a sequence that lives; `policy` is as of what its threads have learnt so far. Asks the device what is near,
  /// once for all sequences between two forwards.
  /// @throws Error{Errc::not_found}; Error{Errc::timeout}, Error{Errc::device} if the device does not say
  [[nodiscard]] SequenceMemoryUse memory(SequenceId sequence) const;
  /// Bytes of host memory in blocks that the sequence holds, shared ones included.
  [[nodiscard]] std::uint64_t far_bytes(SequenceId sequence) const;
  /// May be called at any time, also while forwards run.
  [[nodiscard]] EngineStats stats() const noexcept;
  /// Binds the calling thread to the core that the engine's threads leave to the caller, so that the system does not
  /// put it in the way of one of them: for a thread that does nothing but drive the engine. Threads that it starts from
  /// then on are bound with it, and engines that are built may take that core to be all there is: do both before. Call
  /// it again when engines have come or gone, which share the cores.
  /// @throws Error{Errc::unsupported} if there is no core for the caller, or the system does not let it be bound
  void pin_caller();
  /// The calling thread may run where it could before `pin_caller`; nothing if it has not called that. To be called by
  /// each thread that has, before the engine goes; of several engines in the reverse order.
  void unpin_caller() noexcept;
  /// As it was built with, and what the device made of it: max_tokens of the largest bucket are those that there is
  /// room for, its features those that `policies` want, too, and what was left to the engine is as it has chosen.
  /// cpu_sequences and cluster_sequences stay the bounds that they were; sizes() says how many there are.
  [[nodiscard]] const EngineOptions& options() const noexcept;
  [[nodiscard]] const EngineSizes& sizes() const noexcept;
  /// Whether `attend` may be called for a stream that is captured: the device has graphs, and the wait for the CPU's
  /// part of a layer can be captured, see Handover.
  [[nodiscard]] bool captures() const noexcept;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace sluice
