#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>

#include "sluice/error.hpp"
#include "sluice/shape.hpp"
#include "sluice/step/curve_fit.hpp"
#include "sluice/step/int4.hpp"
#include "sluice/step/page.hpp"
#include "sluice/step/progress.hpp"
#include "sluice/step/sample.hpp"
#include "sluice/units.hpp"

namespace sluice {

/// One (sequence, KV head) of a `score_pages`: out[h, p] = sum_c max(q[h,c]*hi[c], q[h,c]*lo[c]), raw (no
/// 1/sqrt(d)), for logical pages 0 <= p < pages. The digest of frame f lies at `digests + f * 2 * head_dim`
/// elements: hi[head_dim], then lo[head_dim].
struct ScorePagesTask {
  const float* q = nullptr;             ///< [group, head_dim]
  const std::byte* digests = nullptr;   ///< [frames, 2, head_dim], digest dtype
  const std::uint32_t* frames = nullptr;  ///< [pages], memory that the device's kernels read, unlike KvView::frames
  std::uint32_t pages = 0;
  float* out = nullptr;                 ///< [group, pages]
};

/// One (sequence, KV head) of a `score_int4`: scores before any soft-cap, as estimated from the copies in codes of
/// tokens [0, tokens), and exact for the `tail` behind them.
///
/// Without `lists` out[h, i] is token i's. With them a row is made of pages laid end to end: first the head's own,
/// lists[h]; then, the same for all heads, the pages of the tokens before `sinks` and those of the tokens from `recent`
/// on. Such a token has its value there and nowhere else, whether a list names its page or not; where a row of a page
/// is left out, the value is -infinity. The tail's rows come last.
struct ScoreInt4Task {
  const float* q = nullptr;               ///< [group, head_dim]
  const std::byte* copies = nullptr;      ///< [frames, CodeLayout::page_bytes()], 16-byte aligned; 64 GiB at most
  const float* mean = nullptr;            ///< [head_dim] that they were made with, see CodeLayout; null: 0
  const std::uint32_t* frames = nullptr;  ///< [pages], memory that the device's kernels read
  std::uint32_t tokens = 0;               ///< visible, of those that have copies
  const std::uint32_t* lists = nullptr;   ///< [group, listed] or null; memory that the kernels read, when they run
  std::uint32_t listed = 0;               ///< pages per query head
  /// Tokens before `sinks`, and from `recent` on, are attended, chosen or not; sinks is at most `recent`. Without
  /// lists they have values, too, and only are no candidates.
  std::uint32_t sinks = 0;
  std::uint32_t recent = kNone;
  const std::byte* tail = nullptr;        ///< page whose first K rows are the tail; 16-byte aligned
  std::uint32_t tail_rows = 0;            ///< at most page_tokens
  std::uint32_t bits = kCodeBits;         ///< of a code, as in CodesTask
  /// If there are any, values between `sinks` and `recent` are soft-capped logits, each perturbed by its draw. Without
  /// lists.
  HeadDraws draws{};
  float* out = nullptr;                   ///< [group, row(page_tokens)]

  [[nodiscard]] constexpr std::uint32_t sink_pages(std::uint32_t page_tokens) const noexcept {
    return lists == nullptr ? 0 : (std::min(sinks, tokens) + page_tokens - 1) / page_tokens;
  }
  [[nodiscard]] constexpr std::uint32_t recent_pages(std::uint32_t page_tokens) const noexcept {
    if (lists == nullptr || recent >= tokens) return 0;
    return (tokens + page_tokens - 1) / page_tokens - recent / page_tokens;
  }
  /// Values of a row before the tail.
  [[nodiscard]] constexpr std::uint32_t estimates(std::uint32_t page_tokens) const noexcept {
    if (lists == nullptr) return tokens;
    return (listed + sink_pages(page_tokens) + recent_pages(page_tokens)) * page_tokens;
  }
  /// Values of a row.
  [[nodiscard]] constexpr std::uint32_t row(std::uint32_t page_tokens) const noexcept {
    return estimates(page_tokens) + tail_rows;
  }
  /// The i-th page in the row of head `h`, and which of its rows are there.
  [[nodiscard]] constexpr PageRun run(std::uint32_t h, std::uint32_t i, std::uint32_t page_tokens) const noexcept {
    if (lists == nullptr) return clipped(i, 0, tokens, page_tokens);
    if (i < listed) return clipped(lists[std::uint64_t{h} * listed + i], sinks, recent, page_tokens);
    const std::uint32_t behind = i - listed;
    if (behind < sink_pages(page_tokens)) return clipped(behind, 0, sinks, page_tokens);
    return clipped(recent / page_tokens + behind - sink_pages(page_tokens), recent, tokens, page_tokens);
  }

 private:
  /// Rows of the visible tokens [begin, end) in `page`.
  [[nodiscard]] constexpr PageRun clipped(std::uint32_t page, std::uint32_t begin, std::uint32_t end,
                                          std::uint32_t page_tokens) const noexcept {
    const std::uint64_t first = std::uint64_t{page} * page_tokens;
    const std::uint64_t from = std::max<std::uint64_t>(begin, first);
    const std::uint64_t to = std::min<std::uint64_t>(std::min(end, tokens), first + page_tokens);
    if (from >= to) return {.page = page};
    return {.page = page,
            .begin = static_cast<std::uint16_t>(from - first),
            .end = static_cast<std::uint16_t>(to - first)};
  }
};

/// The k largest of one row. NaN ranks below every number; equal values rank by lowest index.
struct TopKTask {
  std::span<const float> values;
  std::uint32_t k = 0;             ///< clamped to the row's length
  std::uint32_t* out = nullptr;    ///< [min(k, values)], ascending by index
};

/// Top-p of one row of logits, as top_p.hpp describes it: values [begin, end) are to be chosen from, the others are
/// attended anyway. With p >= 1 all of the former are kept that have weight.
struct TopPTask {
  std::span<const float> values;
  float p = 1.f;                   ///< > 0
  float softcap = 0.f;             ///< of the values, before they are weighed; see AttentionShape
  std::uint32_t begin = 0;         ///< at most `end`
  std::uint32_t end = kNone;       ///< kNone: all from `begin` on
  std::uint32_t most = kNone;      ///< if more would be kept, the best that are no more; of equal ones all or none
  /// [ceil(values / 32)] bit i % 32 of word i / 32: value i is kept, and not attended anyway
  std::uint32_t* mask = nullptr;
  std::uint32_t* count = nullptr;  ///< how many are kept; may be null
};

/// K-means (Lloyd) over the keys of tokens [first, first + count) of one KV head. The centroids begin at the keys
/// permuted(i, count, seed), i < clusters; each iteration gives every key to the nearest centroid (ties: the lowest) and
/// moves every centroid to the mean of its keys, in a fixed order. It ends after `iterations`, or as soon as no key
/// changed hands: centroids are the means of what `assignment` says. A centroid without keys stays where it is.
/// A key with an element that is not finite counts as NaN: it goes to cluster 0 and into no mean, and a centroid that
/// begins at it is NaN and gets no other.
struct ClusterTask {
  KvView kv;
  std::uint32_t first = 0;
  std::uint32_t count = 0;       ///< 0: nothing is written
  std::uint32_t clusters = 0;    ///< at most `count`
  std::uint32_t iterations = 0;  ///< at least 1
  std::uint64_t seed = 0;
  float* centroids = nullptr;           ///< [clusters, head_dim]
  std::uint32_t* assignment = nullptr;  ///< [count]; may be null
  /// [count] the tokens, cluster by cluster, ascending in each; may be null
  std::uint32_t* members = nullptr;
  /// [clusters + 1] where a cluster's begin there, counted from `first`: so that tokens which are clustered behind
  /// others follow them in one list; may be null
  std::uint32_t* starts = nullptr;
  std::byte* scratch = nullptr;  ///< scratch memory of a device, 256-byte aligned
};

/// One (sequence, KV head) of a `choose_clusters`: Tactic's choice (arXiv 2502.12216, sections 4.3 to 4.5) for each
/// query head, by itself. Its clusters in descending order of q.centroid, equal ones by index and NaN last, list the
/// tokens [0, samples.tokens). Those of the list's `samples` are estimated by their 4-bit copies, as are those that are
/// attended anyway: tokens before `sinks` and from `recent` on. The head keeps the list's first k: the fewest with
/// which, and with what is attended anyway, the share `mass` of all is reached by the curve through the samples (see
/// curve_fit.hpp). In the list, too, what is attended anyway weighs nothing, as scores that are NaN or -infinity do; k
/// is all of them if mass is 1 or no score is a number, and 0 if what is attended anyway suffices.
struct ChooseClustersTask {
  const float* q = nullptr;                ///< [group, head_dim]
  const float* centroids = nullptr;        ///< [clusters, head_dim]
  const std::uint32_t* starts = nullptr;   ///< [clusters + 1] into `members`, ascending; some may be empty
  const std::uint32_t* members = nullptr;  ///< [samples.tokens] each token once
  std::uint32_t clusters = 0;              ///< 0: there is nothing to choose, and nothing is written
  FitSamples samples;
  const std::byte* copies = nullptr;      ///< [frames, CodeLayout::page_bytes()]
  const float* mean = nullptr;            ///< as in ScoreInt4Task
  const std::uint32_t* frames = nullptr;  ///< [pages], memory that the device's kernels read
  std::uint32_t tokens = 0;               ///< visible, all with copies; at least samples.tokens
  std::uint32_t sinks = 0;                ///< at most `recent`
  std::uint32_t recent = 0;               ///< at most samples.tokens
  float mass = 1.f;                       ///< (0, 1]
  /// [group, mask_words] bit i % 32 of word i / 32: token i is kept. The words of all visible tokens are written; bits
  /// of those that are attended anyway say nothing.
  std::uint32_t* masks = nullptr;
  std::uint64_t mask_words = 0;
  std::uint32_t* counts = nullptr;  ///< [group] k of each query head; may be null
  std::byte* scratch = nullptr;     ///< scratch memory of a device, 256-byte aligned

  /// Tokens whose scores are wanted of a query head: what is attended anyway, then the samples.
  [[nodiscard]] constexpr std::uint32_t anyway() const noexcept { return sinks + (tokens - recent); }
  [[nodiscard]] constexpr std::uint32_t scored() const noexcept { return anyway() + samples.size(); }
};

/// One (sequence, KV head) of a `choose_pages`: PSA's choice (arXiv 2503.00392, algorithm 1) by scores that are there.
/// Full pages [0, pages) come in descending order of what they score with all query heads together, equal ones the
/// newest first and NaN last, `microbatch` at a time, until every query head has attended the share `mass` by the rule,
/// see progress.hpp: the whole group attends what it took the last of them to have enough. What is attended anyway,
/// tokens before `sinks` and from `recent` on, counts first; of a page the others do, and one that has lost some to
/// these says nothing of pages to come. Pages without such tokens are passed over. With mass >= 1 all are taken.
struct ChoosePagesTask {
  const float* page_scores = nullptr;  ///< [group, pages] as `score_pages` makes them
  const float* scores = nullptr;       ///< [group, tokens] before any soft-cap; NaN and -infinity weigh nothing
  std::uint32_t pages = 0;             ///< 0: there is nothing to choose, and nothing is written
  std::uint32_t tokens = 0;            ///< visible, those of all pages at least
  std::uint32_t sinks = 0;             ///< at most `recent`
  std::uint32_t recent = 0;            ///< at most the tokens of all pages
  float mass = 1.f;                    ///< > 0
  std::uint32_t microbatch = 1;
  ProgressRule rule = ProgressRule::least;  ///< not `certified`
  /// [group, mask_words] bit i % 32 of word i / 32: token i is kept; the same for all query heads. The words of all
  /// visible tokens are written; bits of those that are attended anyway say nothing.
  std::uint32_t* masks = nullptr;
  std::uint64_t mask_words = 0;
  std::uint32_t* count = nullptr;    ///< how many pages are taken; may be null
  std::uint32_t* scratch = nullptr;  ///< scratch_words of memory

  [[nodiscard]] static constexpr std::uint64_t scratch_words(std::uint32_t group, std::uint32_t pages) noexcept {
    return (std::uint64_t{group} + 3) * pages;
  }
};

}  // namespace sluice
