#pragma once

#include <cstdint>

namespace sluice {

/// What a forward is made for, padding included. Everything that a verb launches follows from it.
struct Bucket {
  std::uint32_t decode_rows = 1;  ///< rows whose heads choose what they attend: new tokens, and drafts to verify
  /// 1: each of these rows by itself, as if the tokens before it had been decoded one by one. Else as many new tokens
  /// of a sequence, or fewer, are a *draft group*: what one of their heads chooses all of them attend, as far as they
  /// see it, and keys and values are read once for all of them. decode_rows is a multiple of drafts, a group for each,
  /// and drafts times query heads per KV head are at most 32.
  std::uint32_t drafts = 1;
  std::uint32_t prefill_rows = 0;  ///< rows of chunks of prompts, which attend all that comes before them
  std::uint32_t prefills = 0;      ///< how many chunks these are
  std::uint32_t max_tokens = 0;  ///< of the longest sequence, a multiple of page_tokens; 0: all that there is room for
  bool top_k = true;             ///< of these rows some choose a number of tokens
  bool unbounded = false;        ///< of these rows some choose a share of the mass, or attend everything
  bool pages = false;            ///< of these rows some rank pages by their digests
  bool rehearsed = false;        ///< of these rows some choose by rehearsed queries, which `attend` is given
  bool scores = false;           ///< of these rows some choose by the caller's scores, which `attend` is given
  bool audit = false;            ///< what these rows attend is written down, see ForwardVerbs::audit
  bool trace = false;            ///< when its stages run is written down, see ForwardVerbs::stamp
  /// These rows attend everything, see ForwardVerbs::attend_whole: what an engine says of buckets of short sequences
  /// (EngineOptions::dense_tokens), also where a caller sets another value.
  bool whole = false;

  [[nodiscard]] constexpr std::uint32_t rows() const noexcept { return decode_rows + prefill_rows; }
  friend constexpr bool operator==(const Bucket&, const Bucket&) = default;
};

}  // namespace sluice
