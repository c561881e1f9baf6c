#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <forward_list>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "cpu/machine/topology.hpp"
#include "cpu/threads/kept.hpp"
#include "cpu/threads/workers.hpp"
#include "runtime/background/job.hpp"
#include "runtime/call.hpp"
#include "runtime/engine/caller_pins.hpp"
#include "runtime/engine/engine_memory.hpp"
#include "runtime/engine/engine_options.hpp"
#include "runtime/engine/programs.hpp"
#include "runtime/engine/sequence.hpp"
#include "runtime/far/answer_watchdog.hpp"
#include "runtime/far/far_choice.hpp"
#include "runtime/far/far_workers.hpp"
#include "runtime/far/mailbox.hpp"
#include "runtime/kv/block_table.hpp"
#include "runtime/kv/prefix_cache.hpp"
#include "scheduler/plan/task_graph.hpp"
#include "scheduler/prefill_auto.hpp"
#include "sluice/engine.hpp"
#include "sluice/error.hpp"

namespace sluice {

struct Engine::Impl : cpu::Kept {
  using Sequence = runtime::Sequence;
  /// What a plan asks for, checked.
  struct Wanted {
    Sequence* sequence = nullptr;
    PlanItem item;
  };

  Impl(runtime::ResolvedOptions chosen, std::shared_ptr<Device> given);

  // As Engine's.
  [[nodiscard]] SequenceId begin(const PolicySpec& policy);
  /// `policy` null: the parent's.
  [[nodiscard]] SequenceId fork(SequenceId id, std::uint32_t tokens, const PolicySpec* policy);
  void truncate(SequenceId id, std::uint32_t tokens);
  void import_prefix(SequenceId id, LayerId layer, const TensorView& k, const TensorView& v, void* stream,
                     const TensorView& q);
  [[nodiscard]] Batch plan(std::span<const PlanItem> items, const Bucket& asked, void* stream);
  void attend(const Bucket& asked, LayerId layer, const AttendArgs& args);
  /// Values of a call are there, and fit; of latent attention there are none.
  void require_values(const TensorView& v, std::uint32_t rows) const;
  /// What a bucket with rehearsed queries wants of a layer is there, and fits.
  void require_rehearsed(const Bucket& bucket, LayerId layer, const TensorView& rehearsed) const;
  /// Likewise of one with scores; whether the layer wants some.
  bool require_scores(const Bucket& bucket, LayerId layer, const TensorView& scores) const;
  /// The tasks of a forward of this memory's bucket, as the verbs of its rows see that.
  [[nodiscard]] const scheduler::TaskGraph& graph_of(const ForwardMemory& teams);
  /// Those of a layer, and of the forward before its first and behind its last one. `forward`: of its bucket.
  void enqueue_layer(const ForwardMemory& forward, const ForwardLayer& call);
  /// One of them; where the calling thread does it, until that is done.
  void enqueue(scheduler::Verb verb, const ForwardMemory& memory, const ForwardLayer& layer);
  /// Of calls that a graph is not to repeat: throws if what they enqueue would be captured.
  void require_uncaptured(const char* what, void* stream) const;
  /// Whether layers on this stream can be enqueued as they are: throws if it is captured, and that cannot be.
  void require_capturable(const Bucket& bucket, void* stream) const;
  void finish(const Batch& batch);
  void cancel(const Batch& batch);
  [[nodiscard]] const ForwardTrace& trace(const Batch& batch) const;
  void end(SequenceId id);
  [[nodiscard]] SequenceId begin(const PolicySpec& policy, std::span<const std::int32_t> prompt, std::uint64_t salt);
  [[nodiscard]] std::uint32_t match_prefix(const PolicySpec& policy, std::span<const std::int32_t> prompt,
                                           std::uint64_t salt) const noexcept;
  void name_tokens(SequenceId id, std::uint32_t first, std::span<const std::int32_t> ids);
  void preempt(SequenceId id);
  void watch(SequenceId id, std::span<const std::uint32_t> tokens);

  // Sequences.
  [[nodiscard]] Sequence& at(SequenceId id);
  /// One that no forward in flight refers to, an import included.
  [[nodiscard]] Sequence& resting(SequenceId id, const char* what);
  [[nodiscard]] bool imports(SequenceId id) const noexcept;
  /// @throws Error{Errc::out_of_capacity} if there is no room for a sequence that begins with `tokens` tokens of others
  void require_place(const PolicySpec& spec, std::uint32_t tokens) const;
  /// A sequence that begins so.
  [[nodiscard]] SequenceId add(const PolicySpec& spec, std::uint32_t tokens = 0);
  /// One without a policy that threads may learn for; what it has is free, or idle.
  void remove(SequenceId id) noexcept;
  [[nodiscard]] std::uint32_t pages_of(std::uint32_t tokens) const noexcept;
  /// First token of which layers with windows still have rows.
  [[nodiscard]] std::uint32_t kept_from(const Sequence& sequence) const noexcept;
  /// The block whose mean key, see CodeLayout, the codes of a sequence with so many tokens are made with; kNone: 0.
  [[nodiscard]] std::uint32_t mean_block(const runtime::PageList& list, std::uint32_t tokens) const noexcept;
  /// The same of the sequence that writes to `block`.
  [[nodiscard]] std::uint32_t mean_block_of(std::uint32_t block) const noexcept;
  /// Lets go of pages that no row of the sequence will see again, though it be shortened by window_slack.
  void pass_windows(Sequence& sequence) noexcept;
  /// @throws Error{Errc::unsupported} if layers with windows have let go of what is seen behind as many tokens
  void require_windows(SequenceId id, const Sequence& sequence, std::uint32_t tokens, const char* what) const;
  /// Lets go of everything behind as many tokens.
  void shrink(Sequence& sequence, std::uint32_t tokens) noexcept;

  // Prefixes.
  /// The cache, which is there from the first name on.
  runtime::PrefixCache& prefix_cache();
  /// Pages that a sequence with this prompt can begin with: those that are known, as far as layers with windows have
  /// what is seen behind them.
  [[nodiscard]] std::uint32_t known_pages(const PolicySpec& policy, std::span<const std::int32_t> prompt,
                                          std::uint64_t salt) const noexcept;
  /// A new one gets as many, which are known.
  void begin_with(Sequence& sequence, std::uint32_t pages, std::span<const std::int32_t> prompt) noexcept;
  [[nodiscard]] std::span<const std::int32_t> page_ids(std::span<const std::int32_t> ids,
                                                       std::uint32_t page) const noexcept;
  /// Pages of which all tokens are there and have names become known.
  void publish(Sequence& sequence) noexcept;
  /// Names are forgotten but for those of the first `tokens` tokens, which the sequence has, or is planned to have.
  void forget_names(Sequence& sequence, std::uint32_t tokens) noexcept;
  /// What a fork knows of its tokens.
  [[nodiscard]] Sequence::Names names_of(const Sequence& parent, std::uint32_t tokens) const;
  /// A block that no sequence holds; one must be free or idle.
  [[nodiscard]] std::uint32_t take_block() noexcept;
  /// What is kept of sequences that let go of it, no more than may be.
  void trim_prefixes() noexcept;
  [[nodiscard]] std::uint64_t names_bytes() const noexcept;

  // Policies that choose among clusters on the device.
  /// @throws Error{Errc::out_of_capacity} if clusters of as many tokens of a sequence would be too many
  void require_clusters(SequenceId id, const Sequence& sequence, std::uint32_t tokens) const;
  /// What is to be clustered before tokens of these are decoded.
  [[nodiscard]] std::vector<ForwardClustering> due_clusterings(std::span<const Wanted> wanted) const;
  /// That is enqueued.
  void note_clustered(std::span<const Wanted> wanted) noexcept;

  // Policies that choose on the CPU.
  /// Before a sequence that rests is cut: likewise, waiting for threads that learn only if there is something to take
  /// back.  @throws Error{Errc::timeout}
  void take_back_choices(Sequence& sequence, std::uint32_t tokens);
  /// Whether all that its policy chose for lies before, and all that it is still to learn from stays where it is.
  [[nodiscard]] bool learns_on(const Sequence& sequence, std::uint32_t tokens) const noexcept;
  /// Before a fork of `tokens` tokens. Where it shares the page in which the sequence goes on, the next plan replaces
  /// that in the list of blocks, which threads that learn read: nothing may be left to be learnt.
  /// @throws Error{Errc::timeout} if a thread that learns does not come back
  void learn_before_sharing(const Sequence& parent, std::uint32_t tokens);
  /// What a fork of `tokens` tokens knows: what the sequence's policy knew then. Null if it is to look at its tokens.
  /// @throws Error{Errc::timeout} if a thread that learns does not come back
  [[nodiscard]] std::shared_ptr<runtime::SequencePolicy> policy_of(const Sequence& parent, std::uint32_t tokens);
  void copy_tail(const Sequence& from, Sequence& to) noexcept;
  /// Those of sequences whose first token behind the prompt is planned have looked at it then.
  /// @throws Error{Errc::timeout}
  void begin_policies(std::span<const Wanted> wanted);
  /// Whether a sequence has tokens, or is planned to have, that its policy has not seen as a prompt's.
  [[nodiscard]] bool outdated(SequenceId id, const Sequence& sequence) const noexcept;
  /// All forwards with tokens of it have ended.
  void await_prompt(SequenceId id);
  /// Of all that it has: in the background.
  void begin_look(Sequence& sequence);
  /// Of prompts whose names say that they end with this forward, which has got to its end.
  void look_ahead(const runtime::Program& program) noexcept;
  /// What it reads is about to change: waits for threads that look, or leaves them behind.
  void drop_look(Sequence& sequence) noexcept;
  /// Its policy chooses from now on.  @throws Error{Errc::timeout}
  void end_look(SequenceId id, Sequence& sequence);
  [[nodiscard]] std::vector<runtime::ChoosingRow> choosing_rows(const ForwardMemory& memory,
                                                                std::span<const Wanted> wanted,
                                                                const runtime::Program& program) const;
  /// Of the heap, that policies of the CPU hold: as it was when no forward was under way.
  [[nodiscard]] std::uint64_t policy_bytes() noexcept;
  /// What a sequence with `tokens` tokens counts for against EngineOptions::policy_bytes.
  [[nodiscard]] std::uint64_t policy_share(const PolicySpec& spec, std::uint32_t tokens) const noexcept;
  /// What all that live count for.
  [[nodiscard]] std::uint64_t policy_shares() const noexcept;
  /// Whether `more` beside that keeps to the bound.
  [[nodiscard]] bool has_policy_room(std::uint64_t more) const noexcept;
  /// @throws Error{Errc::out_of_capacity} if it does not
  void require_policy_room(std::uint64_t more) const;
  [[nodiscard]] bool admits(std::uint32_t tokens, const PolicySpec& policy) const noexcept;
  /// What lies near is as the device has it.  @throws Error{Errc::timeout}, Error{Errc::device}
  void see_near();
  [[nodiscard]] SequenceMemoryUse use_of(const Sequence& sequence);
  /// A policy could not choose: the forward comes to nothing, and all behind it.
  void require_chosen(std::uint64_t forward);

  // Planning.
  [[nodiscard]] Bucket resolved(const Bucket& bucket, const char* what) const;
  /// What the item's rows may choose, and list, there is room for.
  void require_choosable(const Sequence& sequence, const PlanItem& item, const Bucket& bucket) const;
  [[nodiscard]] std::vector<Wanted> checked(std::span<const PlanItem> items, const Bucket& bucket);
  void require_room(std::span<const Wanted> wanted, std::uint32_t max_tokens) const;
  /// The block that its next token goes to, if it has one already; else kNone.
  [[nodiscard]] std::uint32_t open_block(const Sequence& sequence, const runtime::PageList& list) const noexcept;
  /// Blocks for the new tokens, and one of its own for each that would write into a shared one.
  void grow(std::span<const Wanted> wanted) noexcept;
  /// The block that its next token goes to becomes its own.
  void own_open_block(const Sequence& sequence, runtime::PageList& list) noexcept;
  void write_rows(const ForwardMemory& memory, std::span<const Wanted> wanted);
  /// What the device reads to choose for a row of the newest program.
  void count_reads(const Sequence& sequence, const ForwardRow& row) noexcept;
  void write_lists(const ForwardMemory& memory, std::span<const Wanted> wanted) const noexcept;
  /// The forward that the next one continues.
  [[nodiscard]] std::uint64_t builds_on() const noexcept;
  /// Hands the plan to the device, and counts its tokens as planned.
  /// `queries`: that come with prompts of a bucket without chunks, of the newest tokens.
  std::uint64_t send(std::vector<Wanted> wanted, const Bucket& bucket, void* stream, std::uint32_t queries = 0);
  /// Behind a plan that failed when the device may have begun to read it: until it has, or its slip is lost.
  void await_read(const ForwardMemory& m, const runtime::Program& failed);

  // Prompts.
  /// What a forward that came to nothing has bet for item `item`, of a sequence, never was.
  static void give_back(Sequence& sequence, runtime::Program& program, std::size_t item) noexcept;
  /// Decides in which layers a chunk is sparse.
  void bet(Sequence& sequence, ForwardChunk& chunk);
  /// What was chosen in a forward that got to its end, before forwards to come take its place.
  void tally(runtime::Program& program) const noexcept;
  void settle(const runtime::Program& program);

  // Audits.
  /// Whether a forward of this bucket may be planned now, as far as audits are concerned; throws if not.
  void require_auditable(const Bucket& bucket) const;
  [[nodiscard]] std::shared_ptr<runtime::ForwardAudit> audit_of(std::span<const Wanted> wanted,
                                                                const Bucket& bucket) const;
  /// @throws Error{Errc::timeout}
  void compare(const std::shared_ptr<runtime::ForwardAudit>& audit);
  /// Whether a thread still does.
  [[nodiscard]] bool compares() const noexcept { return comparison && !comparison->idle(); }

  // Traces.
  /// The newest program is traced: from now on what its stages do is written down.
  void begin_trace(const ForwardMemory& memory);
  /// Of a program that has ended or was taken back, what was written down, before forwards to come take its place.
  /// No worker answers it any more.
  void note_trace(runtime::Program& program) const noexcept;
  /// What becomes of that. Should there be no memory left for it, there is no trace.
  void keep_trace(runtime::Program& program, bool done) noexcept;
  [[nodiscard]] EngineStats stats() const noexcept;

  /// Threads begin to work for it.
  [[nodiscard]] std::shared_ptr<runtime::Job> begin_job(std::uint32_t pieces, std::function<void(std::uint32_t)> piece);

  // Waiting.
  /// How it ended; it must be in flight.
  [[nodiscard]] ForwardStatus await_end(std::uint64_t forward);
  /// How those in flight ended that have: the mailbox keeps it for kMostForwards only.
  void note_ended() noexcept;
  /// The mailbox has a place for the next forward.
  void require_noted();
  /// Until the device has passed where it was to signal ticket `signalled`, and what it has asked by then is answered;
  /// or until that is late, which the layer then finds out. For the calling thread.
  void await_answer(std::uint64_t signalled, void* stream);
  /// No thread works for a forward that failed, and none does as long as the result lives.
  [[nodiscard]] runtime::Rest await_idle();
  /// Its sequences have what it planned for them, if it got to its end, or never will: then while no thread learns.
  runtime::Program retire(std::uint64_t forward, bool done);
  /// Its policies learn from it, if it was done, before they take it back. While no thread learns.
  void learn_in_vain(const runtime::Program& program) noexcept;
  /// Takes back this forward and all behind it.
  void take_back(std::uint64_t forward);

  [[nodiscard]] scheduler::ForwardLimits limits() const noexcept { return runtime::limits_of(options, sizes); }
  /// @throws Error{Errc::unsupported} naming what the engine lacks to serve the policy
  void require_served(const PolicySpec& policy) const { runtime::require_served(policy, options, sizes); }

  [[nodiscard]] bool captures() const noexcept { return device->info().captures_forwards(options.handover); }

  [[nodiscard]] ForwardMailbox& mailbox() const noexcept { return *memory.largest().mailbox; }

  EngineOptions options;
  cpu::Topology topology;
  std::shared_ptr<cpu::Workers> embedded;  ///< of an embedded device; null if there is none
  std::shared_ptr<Device> device;
  ForwardVerbs& verbs;
  EngineSizes sizes;
  runtime::EngineMemory memory;
  std::unique_ptr<ForwardSide> side;  ///< of `memory`, which it uses
  runtime::FarChoice choice;
  runtime::FarNotes far_notes;

  runtime::BlockTable table;
  std::unique_ptr<runtime::PrefixCache> prefixes;  ///< null as long as nobody has named a token
  std::atomic<const runtime::PrefixCache*> seen_prefixes{nullptr};  ///< the same, for whoever asks for figures
  std::vector<ForwardBlockCopy> copies;  ///< of codes, that the device does not know of yet
  /// Sequences that leave for files or memory of the caller, and come back: see parking.hpp.
  class Parking;
  std::unique_ptr<Parking> parking;
  std::vector<std::uint32_t> free_lists;
  std::vector<std::uint32_t> free_tails;
  std::vector<std::uint32_t> free_clusters;
  std::uint64_t known_policy_bytes = 0;
  static constexpr std::uint64_t kUnseen = ~std::uint64_t{0};
  std::uint64_t near_seen = kUnseen;  ///< the newest forward when it was asked what is near, and none was under way
  std::unordered_map<std::uint64_t, Sequence> sequences;
  std::uint64_t next_id = 1;

  std::shared_ptr<runtime::Job> comparison;  ///< of the audited forward that was finished last; or null
  EngineStats counted{};  ///< what is counted here, not by the device
  std::vector<runtime::LookNote> looked;         ///< that the newest plan has waited for, or found done
  std::unique_ptr<const ForwardTrace> traced{};  ///< of the forward that was finished or taken back last; or null

  runtime::Programs programs;
  std::uint64_t planned = 0;     ///< the newest forward
  std::uint64_t good = 0;        ///< the newest that is known to have got to its end
  std::forward_list<scheduler::TaskGraph> graphs;  ///< one of each kind of forward so far
  std::uint32_t next_layer = 0;  ///< of what is enqueued; kNone: one could not be
  std::uint64_t importing = 0;   ///< the forward that an import under way is; 0: there is none
  std::uint32_t importing_queries = 0;

  runtime::CallerPins pins;

  std::uint64_t ticket = 0;  ///< newest that ForwardVerbs::signal was given
  std::uint64_t heard = 0;   ///< newest question that the calling thread has waited for, Handover::host
  std::unique_ptr<runtime::AnswerWatchdog> watchdog;  ///< null unless streams of the device wait

  runtime::FarWorkers far;  ///< last: its threads use all of the above
};

}  // namespace sluice
