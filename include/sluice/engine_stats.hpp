#pragma once

#include <cstdint>

namespace sluice {

/// What an engine has done so far.
struct EngineStats {
  std::uint64_t asked = 0;        ///< layers whose far part the CPU was asked for
  std::uint64_t unplanned = 0;    ///< replays without a plan of their own
  /// Attended in device memory, by all rows that choose, layers and KV heads; by draft groups once, without what only
  /// some of their rows see.
  std::uint64_t near_tokens = 0;
  std::uint64_t far_tokens = 0;      ///< and in place, by the CPU
  std::uint64_t fetched_tokens = 0;  ///< and by the device over the link
  std::uint64_t promoted = 0;     ///< tokens brought near, by layers and KV heads
  std::uint64_t scored = 0;       ///< keys that policies read to choose on the CPU
  /// In forwards that got to their end, by layers and KV heads: keys whose copies the device was to read to choose,
  /// and pages whose digests.
  std::uint64_t estimated = 0;
  std::uint64_t ranked_pages = 0;
  /// Choices of query heads for which all scores were read once more, as those put aside while keys were scored did not
  /// tell. What is chosen does not depend on it.
  std::uint64_t missed = 0;
  /// Choices of query heads that drew what they attend, see sample.hpp; the sum of their error bars in millionths, and
  /// how many of these were above 10%. A bar is the standard error of a head's sum of weights, relative to it, as far as
  /// the codes tell what tokens weigh: sqrt(M) exp(kappa - lse), M tokens drawn, kappa the largest score left.
  std::uint64_t drawn_heads = 0;
  std::uint64_t error_bars = 0;
  std::uint64_t wide_bars = 0;
  /// That the device waited for the CPU's answers. With Handover::host that the calling thread did, near attention
  /// included; with Handover::stream not known, 0.
  std::uint64_t waited_ns = 0;
  /// Layers whose choice had to wait for what histories propose; the time is part of waited_ns.
  std::uint64_t awaited = 0;
  std::uint64_t answer_ns = 0;    ///< from when a thread saw a question until it was answered
  // Of chunks of prompts, in forwards that got to their end:
  std::uint64_t sparse_chunks = 0;  ///< (layer, chunk) pairs where blocks were chosen
  std::uint64_t dense_chunks = 0;   ///< and the others
  std::uint64_t kept_blocks = 0;    ///< (query head, query block, key block) triples computed where they were chosen
  std::uint64_t causal_blocks = 0;  ///< and what dense attention would have computed there
  // Of prefixes:
  std::uint64_t matched_tokens = 0;  ///< that sequences began with
  std::uint64_t evicted_blocks = 0;  ///< that no sequence had, and something else needed
  std::uint64_t stalls = 0;          ///< looks at prompts that a plan had to wait for
};

/// Memory of an engine in bytes: all of it is reserved when the engine is built. Only what policies that choose on the
/// CPU have learnt grows with their sequences; it is as of the last call without a forward under way. And so do names
/// of tokens; what is known of pages by them is reserved with the first.
struct EngineMemoryUse {
  std::uint64_t far_pages = 0;        ///< host: keys and values
  std::uint64_t far_pages_used = 0;   ///< of these, in blocks that sequences hold; shared ones count once
  std::uint64_t far_pages_cached = 0;  ///< and in blocks that none holds, which are kept until they are needed
  /// host: plans, the mailbox, far lists, partial results, prompts' last queries, what audits and choices of blocks say
  std::uint64_t pinned = 0;
  std::uint64_t partials = 0;         ///< host: the threads' own
  std::uint64_t policies = 0;         ///< host, not reserved: what policies that choose on the CPU have learnt
  std::uint64_t prefixes = 0;         ///< host, not reserved: names of tokens, and what finds pages by them
  std::uint64_t near_pages = 0;       ///< device
  std::uint64_t near_pages_used = 0;  ///< of these, when the newest forward ended
  std::uint64_t codes = 0;            ///< device: copies of keys, of EngineSizes::code_bits a channel
  std::uint64_t digests = 0;          ///< device: of full pages
  std::uint64_t buffers = 0;          ///< device: tables, scores, choices, windows of prompts and scratch

  [[nodiscard]] std::uint64_t host() const noexcept { return far_pages + pinned + partials + policies + prefixes; }
  [[nodiscard]] std::uint64_t device() const noexcept { return near_pages + codes + digests + buffers; }
};

/// Memory of one sequence in bytes: of the host, but for what is near.
struct SequenceMemoryUse {
  std::uint64_t far_pages = 0;         ///< keys and values, in blocks that it holds
  std::uint64_t far_pages_shared = 0;  ///< of these, in blocks that others hold or names keep: they stay if it ends
  /// Of the device: rows of these blocks that lie near, as it has them when asked; of a forward under way perhaps only
  /// some have come and gone. Over all sequences, shared ones once, they are EngineMemoryUse::near_pages_used as soon
  /// as a forward has ended since the last sequence ended, let go of pages or was preempted: what was theirs goes then.
  std::uint64_t near_pages = 0;
  std::uint64_t near_pages_shared = 0;  ///< of these, in blocks that others hold or names keep
  std::uint64_t policy = 0;            ///< heap: what its policy has learnt, if that chooses on the CPU
  std::uint64_t names = 0;             ///< heap: names of its tokens
  std::uint64_t tail = 0;              ///< pinned: queries of its prompt's newest tokens, reserved with cpu_sequences
};

}  // namespace sluice
