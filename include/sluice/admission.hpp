#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "sluice/error.hpp"
#include "sluice/units.hpp"

namespace sluice {

struct EngineOptions;

/// The caller's number of a request.
using RequestId = Id<struct RequestTag, std::uint64_t>;

/// What an Admission shares out.
struct AdmissionOptions {
  std::uint32_t decode_rows = 1;     ///< of a forward; as many requests run at once, at most. At least 1
  std::uint32_t prefill_rows = 512;  ///< rows of chunks of prompts in a forward. At least 1
  std::uint32_t prefills = 1;        ///< chunks of prompts in a forward. At least 1
  std::uint32_t sequences = 16;      ///< requests that run at once, at most. At least 1
  std::uint32_t cpu_sequences = 0;   ///< of them, those whose policies choose on the CPU
  std::uint32_t page_tokens = 16;    ///< at least 1
  std::uint32_t max_tokens = 0;      ///< keys and values of a sequence, at most; 0: all that `pages` hold
  /// Host memory for keys and values: pages of page_tokens tokens of all layers and KV heads. Required, [1, 2^32].
  std::uint64_t pages = 0;
  /// Pages that the admission of a request leaves free while others run, so that they can grow.
  std::uint64_t watermark_pages = 0;
  /// Device memory that all that run share, in pages; 0: no bound.
  std::uint64_t near_pages = 0;
  /// Of these, what a request that runs takes, however long it is: with progressive attention (PSA) what one iteration
  /// needs, its pages of a turn and the open one. One that has fewer pages takes as many as it has. 0: all that it has.
  std::uint64_t near_pages_per_sequence = 0;
  /// Beside chunks of prompts, rows that decode come this many times as slowly as alone on the average, as far as
  /// `complete` was told how long forwards take. Where a chunk costs much by its being there, several forwards without
  /// one come before a longer one; a forward with a chunk takes 8 times as much at most, unless a page takes longer. 0:
  /// all rows of prefill_rows in every forward; else in [1, 1000].
  double slowdown = 0.0;
  /// What a page takes of `pages`, if layers with windows keep only the newest ones: then `pages`, watermark_pages and
  /// held pages count blocks, of which each page of a sequence takes page_blocks, and each of its newest window_pages
  /// window_blocks beside these. At least one of both is not 0.
  std::uint32_t page_blocks = 1;
  std::uint32_t window_blocks = 0;
  std::uint64_t window_pages = 0;
  /// Of these, what a sequence of which no forward is under way holds at least, once it has as many: what its next
  /// token sees. Held pages say by it how many are shared; 0: none of layers with windows are taken for shared.
  std::uint64_t window_resting_pages = 0;
};

/// For an engine that is built with these options: its largest bucket, sequences, and the pages that host_bytes hold.
/// @throws Error{Errc::invalid_argument} if they hold none, or its largest bucket has no rows to decode or to prefill
[[nodiscard]] AdmissionOptions admission_options(const EngineOptions& options);

struct AdmissionRequest {
  RequestId id{};
  std::uint32_t prompt_tokens = 1;   ///< at least 1
  std::uint32_t max_new_tokens = 1;  ///< tokens that it may be given; 0: its prompt is computed, and that is all
  bool on_cpu = false;               ///< its policy chooses on the CPU, see AdmissionOptions::cpu_sequences
};

/// Which requests lose their memory, and which get some. No request is in both.
struct AdmissionChanges {
  std::vector<RequestId> preempt;  ///< youngest first: end their sequences before others begin
  std::vector<RequestId> admit;    ///< oldest first: begin a sequence for each
};

/// Tokens of one request, consecutive rows of a forward.
struct TurnItem {
  RequestId request{};
  std::uint32_t tokens = 1;
  std::uint32_t first = 0;  ///< position of the first one among all tokens of the request, the prompt's and its own
  bool prefill = false;     ///< a chunk of a prompt
  bool output = false;      ///< the last row's output is the request's next token
};

/// What is shared out now.
struct AdmissionUse {
  std::uint64_t waiting = 0;
  std::uint64_t running = 0;
  std::uint64_t pages = 0;  ///< of those that run; shared ones count for each of them
  std::uint64_t near_pages = 0;
};

/// Decides what the next forward has: which requests run, and which of their tokens. First come, first
/// served: those that run are always the oldest of all that live, and one that lost its memory keeps its place. Pure: no
/// threads, no clocks, no engine, and the same calls have the same answers.
///
///   changes = admit()    end the sequences that are preempted, begin those that are admitted; `begun` for each that
///                        found a part of its prompt
///   items   = next()     plan and attend them in their order; none: nothing to do until a request is submitted
///   ended   = complete() end their sequences; or fail(), if the forward came to nothing
///
/// Rows. Every request that runs and has its prompt has one decode row in every forward. The rows for prompts go to
/// those that run in order: the oldest takes as many as it can use, the next what is left. A chunk ends where a page
/// does or where the prompt does; only if the rows of a forward do not reach a page's end, the oldest prompt's chunk
/// ends before. So prompts do not keep others from decoding, nor the other way round.
///
/// Memory. A request is admitted if its prompt and one page more have room beside what those that run need for the next
/// forward; its prompt's pages are its own from then on. A request that decodes takes a page when it needs one. If
/// there is none, the youngest that runs is preempted: its pages are given up, and it comes again with all its tokens
/// so far as its prompt. The oldest never is, so that every request ends. Pages that a prefix cache keeps and no
/// sequence holds are free, as they give way. Pages that sequences share count for each of them, unless `admit` is told
/// how many there are.
///
/// Thread safety: calls must not overlap. Errors: Error, and nothing was changed.
class Admission {
 public:
  /// @throws Error{Errc::invalid_argument} naming the first field that breaks its range
  explicit Admission(const AdmissionOptions& options);
  Admission(Admission&&) noexcept;
  Admission& operator=(Admission&&) noexcept;
  ~Admission();

  /// A request that waits from now on. It needs room for prompt_tokens + max_new_tokens - 1 tokens in the end: its last
  /// token's keys and values are of no use.
  /// @throws Error{Errc::invalid_argument} if the number is that of one that lives, or the prompt is empty;
  /// Error{Errc::out_of_capacity} if it could not run to its end though it were alone
  void submit(const AdmissionRequest& request);

  /// Makes room for the next forward of those that run, then admits those that wait, as many as there is room for.
  /// `held_pages`: pages that the sequences of those that run hold by the engine's count, where shared ones count once
  /// (EngineMemoryUse::far_pages_used over the bytes of one), if no others are alive. Where it is less than all
  /// would hold that share none, the difference can be given to others. It needs `begun` to be right.
  /// @throws Error{Errc::invalid_argument} if a turn is open
  [[nodiscard]] AdmissionChanges admit(std::optional<std::uint64_t> held_pages = {});

  /// The sequence of a request that was admitted began with as many tokens of its prompt, which need not be computed.
  /// @throws Error{Errc::not_found}; Error{Errc::invalid_argument} if it does not run, has computed some already, or
  /// these are not fewer than its prompt, whose last token's output is wanted
  void begun(RequestId request, std::uint32_t cached_tokens);

  /// Preempts a request and all younger ones that run, for a reason that is not counted here: the engine had no room
  /// for it. They are returned, youngest first; none if it waits. Nothing is admitted until one of those that still run
  /// has ended. If it is the oldest, it waits for no other request: end it, or it is admitted again at once.
  /// @throws Error{Errc::not_found}; Error{Errc::invalid_argument} if a turn is open
  std::vector<RequestId> preempt(RequestId request);

  /// The next forward: rows that decode, oldest first, then chunks of prompts, oldest first. If there are any, a turn
  /// is open until it is completed or has failed. `chunk_tokens`: rows of prompts in this forward, at most; 0: as
  /// AdmissionOptions::slowdown has it.
  /// @throws Error{Errc::invalid_argument} if a turn is open, or `admit` was not called since the last was completed
  [[nodiscard]] std::vector<TurnItem> next(std::uint32_t chunk_tokens = 0);
  /// The turn's forward has been finished. Requests that have all their tokens are returned, and are gone. `seconds`:
  /// that it took, a model's own work included; 0 if it was not measured.
  /// @throws Error{Errc::invalid_argument} if no turn is open
  std::vector<RequestId> complete(double seconds = 0.0);
  /// It came to nothing: the same rows are to come again.
  /// @throws Error{Errc::invalid_argument} if no turn is open
  void fail();

  /// A request has all that it wants, or is wanted no longer. May be called while a turn is open; its pages count as
  /// free when the turn is over, so end its sequence before the next `admit`.
  /// @throws Error{Errc::not_found}
  void end(RequestId request);

  [[nodiscard]] std::vector<RequestId> running() const;  ///< oldest first
  [[nodiscard]] AdmissionUse use() const noexcept;
  /// As it was built with, max_tokens being what there is room for.
  [[nodiscard]] const AdmissionOptions& options() const noexcept;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace sluice
