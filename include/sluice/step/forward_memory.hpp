#pragma once

#include <cstddef>
#include <cstdint>

#include "sluice/device.hpp"
#include "sluice/page_rules.hpp"
#include "sluice/prefill.hpp"
#include "sluice/shape.hpp"
#include "sluice/step/fetch_share.hpp"
#include "sluice/step/forward.hpp"
#include "sluice/step/int4.hpp"
#include "sluice/step/page.hpp"
#include "sluice/step/prefill_choice.hpp"
#include "sluice/step/sample.hpp"
#include "sluice/trace.hpp"

namespace sluice {

/// A layer among those that share blocks with it.
struct ForwardLayerPlace {
  std::uint32_t stack = 0;
  std::uint32_t at = 0;  ///< in the stack
};

/// Where everything lies that the verbs of one engine read and write. Pages of one layer and KV head form a plane;
/// block b of a plane is its page `b`, so that one block list serves all planes. Layers with windows may be in *stacks*
/// of their own, each with a block list for every sequence: then a plane is of one layer of each stack, whose blocks
/// are different ones. Sizes in brackets: of `largest`, in whose first rows a forward of a smaller bucket works.
struct ForwardMemory {
  AttentionShape shape;                 ///< an attended_shape: what is said of its KV heads holds of groups, too
  PageLayout layout;                    ///< of near pages; digests have its dtype
  PageLayout far_layout;                ///< the same but for the dtype, whose rows have the same values
  Bucket largest{};                     ///< what there is room for; its max_tokens is that of every array
  Bucket bucket{};                      ///< of the forward
  std::uint32_t drafts = 1;             ///< of a row that chooses, see `teams`
  DigestKind digest = DigestKind::box;  ///< of pages, if there are digests
  std::uint32_t page_shift = 0;         ///< log2 of page_tokens
  std::uint32_t code_bits = kCodeBits;  ///< of a channel of a key's copy, see CodeLayout; 0: there are no copies
  std::uint32_t append_rows = 0;        ///< of a forward that only brings tokens in, at least largest.rows()
  std::uint32_t max_picks = 0;          ///< tokens that a query head may choose
  std::uint32_t max_ranked = 0;         ///< pages that a query head may choose
  std::uint32_t max_window = 0;         ///< sinks and recent tokens together
  std::uint32_t max_clusters = 0;       ///< of a KV head of a sequence
  std::uint32_t cluster_slots = 0;      ///< sequences that have some
  std::uint32_t blocks = 0;             ///< far pages of a plane
  std::uint32_t near_pages = 0;         ///< near pages of a plane
  std::uint32_t promotions = 0;         ///< rows that a plane brings near in one forward, at most
  std::uint32_t max_pages = 0;          ///< of a block list
  std::uint32_t prefill_window = 0;     ///< tokens of keys that a chunk attends at a time, a multiple of page_tokens
  /// Chunks may choose blocks of keys, see ForwardChunk::sparse; then a window holds the longest sequence.
  bool sparse_prefill = false;
  PrefillSpec prefill{};  ///< how they do
  /// Of the far rows of a list that the device chose, those that it attends itself, over the link, of kWholeFetchShare;
  /// the CPU attends the others in place. The list's last ones, see fetched_of.
  std::uint32_t fetch_share = 0;
  std::uint32_t fetch_lists = 0;  ///< a forward of fewer lists leaves all of them to the CPU
  /// Policies may choose on the CPU, and all rows of such a list are the device's, too, unless they come with scores;
  /// see keeps_chosen.
  bool fetches_chosen = false;
  std::uint32_t tail_rows = 0;  ///< of `tails`
  std::uint32_t proposal_slots = 0;  ///< sequences whose histories may propose ahead of time
  /// How long a layer's kernels wait for the far part: not at all unless `handover` is Handover::device.
  std::uint64_t answer_ns = 0;
  Handover handover = Handover::device;  ///< never automatic
  /// [layers] EngineOptions::windows, memory of the host that devices do not read; null: there are none.
  const std::uint32_t* windows = nullptr;
  std::uint32_t dense_tokens = 0;  ///< of a row of a bucket that is whole, at most
  std::uint32_t widest = 0;  ///< tokens that a row attends all of, by its layer's window or EngineOptions::dense_tokens
  std::uint32_t window = 0;  ///< of the layer that the verbs of a layer are called for; 0: its rows see all tokens
  std::uint32_t first_plane = kNone;  ///< of that layer
  std::uint32_t stacks = 1;
  std::uint32_t stack_layers = 0;  ///< layers of a stack
  std::uint32_t last_layers = 0;   ///< of the last one, which may have fewer
  std::uint32_t list_count = 0;    ///< block lists of a stack
  /// [layers] memory of the host that devices do not read; null: all layers are one stack.
  const ForwardLayerPlace* places = nullptr;

  // Memory of the device.
  std::byte* near = nullptr;       ///< [planes, near_pages] pages, whose rows hold any tokens of their plane
  std::byte* codes = nullptr;      ///< [planes, blocks] copies of keys, see code_layout; null: none
  std::byte* digests = nullptr;    ///< [planes, blocks, 2, head_dim] of full pages, as the dtype; null: none
  std::uint32_t* lists = nullptr;  ///< [stacks, list_count, max_pages] blocks; for the verbs of a layer its stack's
  float* key_means = nullptr;      ///< [list_count, planes, head_dim] of layers without windows, see CodeLayout
  /// [planes, blocks * page_tokens] near row of the plane | kNearBit, or | kComingBit while it is being filled, or the
  /// newest forward that attended the row far, 0 if there was none. Not there if near_pages is 0.
  std::uint32_t* near_of = nullptr;
  ForwardNearRow* near_rows = nullptr;  ///< [planes, near_pages * page_tokens]
  std::uint32_t* near_hands = nullptr;  ///< [planes] near row that is looked at next for one to give way
  std::uint32_t* near_held = nullptr;   ///< [blocks] near rows of a block, of all planes; not there likewise
  // Rows that are to come near, for the verbs of a layer of its stack; not there likewise:
  ForwardArrivals* arrivals = nullptr;  ///< [stacks, planes]
  std::uint32_t* arriving = nullptr;    ///< [stacks, planes, arriving_room]
  ForwardToken* tokens = nullptr;       ///< [append_rows]
  ForwardRow* rows = nullptr;           ///< [decode_rows]
  ForwardChunk* chunks = nullptr;       ///< [prefills]
  ForwardState* state = nullptr;
  float* q = nullptr;                    ///< [decode_rows, q_heads, head_dim]
  float* page_scores = nullptr;          ///< [decode_rows, q_heads, max_pages] if the largest bucket has pages
  std::uint32_t* ranked = nullptr;       ///< [decode_rows, q_heads, max_ranked] likewise
  /// Clusters of keys, [cluster_slots, planes] of each; see ForwardClusters and ClusterTask.
  float* centroids = nullptr;                ///< [max_clusters, head_dim]
  std::uint32_t* cluster_starts = nullptr;   ///< [max_clusters + 1]
  std::uint32_t* cluster_members = nullptr;  ///< [max_tokens of the largest bucket]
  float* scores = nullptr;               ///< [decode_rows, q_heads, score_room] see ForwardVerbs::score
  std::uint32_t* picks = nullptr;        ///< [decode_rows, q_heads, max_picks] as ForwardVerbs::choose has them
  std::uint32_t* masks = nullptr;        ///< [decode_rows, q_heads, mask_words] if the largest bucket is unbounded
  std::uint32_t* near_lists = nullptr;   ///< [decode_rows, kv_heads, list_room] K rows, counted in rows from `near`
  std::uint32_t* near_counts = nullptr;  ///< [decode_rows, kv_heads]
  // Of rows that draw, if the largest bucket has rows that choose a number of tokens:
  DrawThresholds* thresholds = nullptr;  ///< [decode_rows, q_heads]
  float* near_corrections = nullptr;     ///< [decode_rows, kv_heads, draw_room] by near_lists, see draw_correction
  std::uint32_t* far_listed = nullptr;   ///< [decode_rows, kv_heads] far rows that `split` listed
  std::uint32_t* far_windows = nullptr;  ///< [decode_rows, kv_heads] not 0: sinks or recent tokens are among them
  float* near_out = nullptr;             ///< [decode_rows, q_heads, head_dim]
  float* near_lse = nullptr;             ///< [decode_rows, q_heads]
  // As near_out and near_lse, of far rows that the device attends over the link, if it may_fetch().
  std::uint32_t* fetch_heads = nullptr;  ///< [decode_rows, kv_heads] bit h: query head h attends some
  float* fetched_out = nullptr;          ///< [decode_rows, q_heads, head_dim]
  float* fetched_lse = nullptr;          ///< [decode_rows, q_heads]
  float* audit_sums = nullptr;           ///< [rows, q_heads] lse of an audited forward whose caller wants none
  std::byte* scratch = nullptr;          ///< ForwardVerbs::scratch_bytes

  // Pinned memory of the host.
  std::byte* far = nullptr;  ///< [planes, blocks] pages
  ForwardSlip* slip = nullptr;
  ForwardToken* slip_tokens = nullptr;      ///< [append_rows]
  ForwardRow* slip_rows = nullptr;          ///< [decode_rows]
  ForwardChunk* slip_chunks = nullptr;      ///< [prefills]
  ForwardListChange* slip_lists = nullptr;  ///< [ForwardSlip::list_changes]
  std::uint32_t* slip_blocks = nullptr;     ///< what they refer to
  std::uint32_t* slip_freed = nullptr;      ///< [ForwardSlip::freed_blocks] that nothing of is to be near, each once
  ForwardBlockCopy* slip_copies = nullptr;  ///< [ForwardSlip::block_copies]
  ForwardKeyMean* slip_key_means = nullptr;  ///< [ForwardSlip::key_means] of layers without windows
  std::uint32_t* near_seen = nullptr;       ///< [blocks] near_held as ForwardVerbs::see_near found it
  ForwardMailbox* mailbox = nullptr;
  /// [kMostForwards, layers, prefills, q_heads] if chunks may choose; of forward f at f % kMostForwards.
  PrefillChoice* choices = nullptr;
  float* far_q = nullptr;               ///< [decode_rows, q_heads, head_dim]
  float* rehearsed_q = nullptr;         ///< likewise, of ForwardLayer::rehearsed, if the largest bucket has such rows
  float* far_page_scores = nullptr;     ///< as page_scores, of rows that ask; if there are any sequences of the CPU
  std::uint32_t* far_ranked = nullptr;  ///< as ranked, likewise
  std::uint32_t* far_rows = nullptr;    ///< [decode_rows, kv_heads, list_room] block * page_tokens + row of the page
  /// [decode_rows, kv_heads] as far_listed, without those that the device fetches, until the CPU adds what it chose; with
  /// kDrawnBit if the list has corrections
  std::uint32_t* far_counts = nullptr;
  /// [decode_rows, kv_heads, draw_room] by far_rows, of rows that draw: what is added to the logits of each.
  float* far_corrections = nullptr;
  float* far_out = nullptr;  ///< [decode_rows, q_heads, head_dim]
  float* far_lse = nullptr;  ///< [decode_rows, q_heads] of a list that was chosen for: kEmptyLse if it is empty
  // Likewise, if `fetches_chosen`.
  ForwardChosen* chosen = nullptr;       ///< [decode_rows, kv_heads]
  std::uint32_t* chosen_rows = nullptr;  ///< [decode_rows, kv_heads, chosen_room] as far_entry has them, then members
  float* tails = nullptr;                ///< [layers, tail_rows, q_heads, head_dim] queries of prompts' last tokens
  // Of each sequence whose history may propose, for its next forward; [proposal_slots, layers] of each:
  ForwardProposal* proposals = nullptr;  ///< [kv_heads]
  std::uint32_t* proposed = nullptr;     ///< [q_heads, proposed_words] bit per token
  float* proposed_q = nullptr;           ///< [q_heads, head_dim] queries of that forward, for the history to learn from
  /// [kMostForwards, layers, kStampedStages] if the largest bucket has traces; of forward f at f % kMostForwards.
  ForwardStamp* stamps = nullptr;
  // Likewise, if the largest bucket has audits; see ForwardVerbs::audit.
  float* audit_q = nullptr;               ///< [layers, decode_rows, q_heads, head_dim]
  float* audit_out = nullptr;             ///< likewise
  float* audit_lse = nullptr;             ///< [layers, decode_rows, q_heads]
  std::uint32_t* audit_rows = nullptr;    ///< [layers, decode_rows, kv_heads, list_room] far rows, wherever they lay
  std::uint32_t* audit_counts = nullptr;  ///< [layers, decode_rows, kv_heads]

  /// Whether the device attends far rows over the link in some forward, and of how many in one of this bucket.
  [[nodiscard]] constexpr bool may_fetch() const noexcept { return fetch_share != 0; }
  [[nodiscard]] constexpr bool fetches() const noexcept { return fetched_share() != 0; }
  [[nodiscard]] constexpr std::uint32_t fetched_share() const noexcept {
    return bucket.decode_rows * shape.kv_heads < fetch_lists ? 0 : fetch_share;
  }
  /// Whether rows that the CPU chooses are attended near where they lie there, and come near like others. Rows with
  /// scales do not: near ones have another dtype, and those of a list are attended together.
  [[nodiscard]] constexpr bool keeps_chosen() const noexcept {
    return fetches_chosen && near_pages != 0 && !far_layout.scaled();
  }
  /// Whether the CPU may be asked for anything: to attend far rows, or to choose.
  [[nodiscard]] constexpr bool asks() const noexcept { return fetch_share != kWholeFetchShare || tail_rows != 0; }
  /// Of a list of so many far rows that the device chose, how many it attends itself: the last ones.
  [[nodiscard]] constexpr std::uint32_t fetched_of(std::uint32_t listed) const noexcept {
    return fetched_rows(listed, fetched_share());
  }
  [[nodiscard]] constexpr std::uint32_t window_in(std::uint32_t layer) const noexcept {
    return windows == nullptr ? 0 : windows[layer];
  }
  /// The same for the verbs of a layer.
  [[nodiscard]] constexpr ForwardMemory in(std::uint32_t layer) const noexcept {
    const ForwardLayerPlace place = place_of(layer);
    ForwardMemory memory = of_stack(place.stack);
    memory.window = window_in(layer);
    memory.first_plane = place.at * layer_planes();
    return memory;
  }
  [[nodiscard]] constexpr ForwardLayerPlace place_of(std::uint32_t layer) const noexcept {
    return places == nullptr ? ForwardLayerPlace{.at = layer} : places[layer];
  }
  /// The same with the block lists of a stack.
  [[nodiscard]] constexpr ForwardMemory of_stack(std::uint32_t stack) const noexcept {
    ForwardMemory memory = *this;
    memory.lists += std::uint64_t{stack} * list_count * max_pages;
    if (arrivals != nullptr) {
      memory.arrivals += std::uint64_t{stack} * planes();
      memory.arriving += std::uint64_t{stack} * planes() * arriving_room();
    }
    return memory;
  }
  /// The same as verbs see it whose rows are teams of `of` packed rows each: a row has as many times the query heads.
  /// What has room for packed rows has room for teams.
  [[nodiscard]] constexpr ForwardMemory teams(std::uint32_t of) const noexcept {
    ForwardMemory memory = *this;
    memory.drafts = of;
    memory.shape.q_heads *= of;
    memory.bucket.decode_rows /= of;
    return memory;
  }
  [[nodiscard]] constexpr ForwardMemory teams() const noexcept { return teams(bucket.drafts); }
  /// Query heads of the model for a KV head.
  [[nodiscard]] constexpr std::uint32_t own_group() const noexcept { return shape.group() / drafts; }
  /// Whose query is query head `head` of a row that chooses.
  struct Asker {
    std::uint32_t draft = 0;  ///< packed row, counted from the team's first
    std::uint32_t head = 0;   ///< of the model
  };
  [[nodiscard]] constexpr Asker asker(std::uint32_t head) const noexcept {
    const std::uint32_t own = own_group();
    return {.draft = head % shape.group() / own, .head = head / shape.group() * own + head % own};
  }
  /// Of a layer; all groups of latent attention read the same one.
  [[nodiscard]] constexpr std::uint32_t layer_planes() const noexcept { return shape.latent() ? 1 : shape.kv_heads; }
  [[nodiscard]] constexpr std::uint32_t planes() const noexcept { return stack_layers * layer_planes(); }
  [[nodiscard]] constexpr std::uint32_t plane(std::uint32_t layer, std::uint32_t kv_head) const noexcept {
    const std::uint32_t first = first_plane != kNone ? first_plane : place_of(layer).at * layer_planes();
    return shape.latent() ? first : first + kv_head;
  }
  /// Of a plane: as many for each of the kinds of ForwardArrivals.
  [[nodiscard]] constexpr std::uint32_t arriving_room() const noexcept { return 3 * promotions; }
  [[nodiscard]] constexpr std::uint32_t* arriving_of(std::uint32_t plane) const noexcept {
    return arriving + std::uint64_t{plane} * arriving_room();
  }
  /// Whether a stack has a layer in this plane.
  [[nodiscard]] constexpr bool has_layer(std::uint32_t stack, std::uint32_t plane) const noexcept {
    return stack + 1 != stacks || plane < last_layers * layer_planes();
  }
  /// KV heads of all layers, counted layer by layer.
  [[nodiscard]] constexpr std::uint32_t layer_heads() const noexcept { return shape.layers * shape.kv_heads; }
  [[nodiscard]] constexpr std::uint32_t layer_head(std::uint32_t layer, std::uint32_t kv_head) const noexcept {
    return layer * shape.kv_heads + kv_head;
  }
  /// Scores of a query head in a forward of this bucket: of all tokens, or of those in its pages and of the pages of
  /// sinks and recent tokens.
  [[nodiscard]] constexpr std::uint32_t scores_in(const Bucket& of) const noexcept {
    return of.max_tokens + (of.pages ? max_window + 3 * layout.page_tokens : 0);
  }
  [[nodiscard]] constexpr std::uint32_t score_room() const noexcept { return scores_in(largest); }
  [[nodiscard]] constexpr std::uint32_t mask_words() const noexcept { return (score_room() + 31) / 32; }
  /// Whether rows of a bucket may take pages until they have a share, see ForwardRow::microbatch: they may take all.
  [[nodiscard]] constexpr bool takes_pages(const Bucket& of) const noexcept {
    return of.pages && of.unbounded && max_ranked == max_pages;
  }
  /// Whole vectors of four words.
  [[nodiscard]] constexpr std::uint32_t proposed_words() const noexcept { return (largest.max_tokens + 127) / 128 * 4; }
  [[nodiscard]] constexpr std::uint64_t proposal_layer(std::uint32_t slot, std::uint32_t layer) const noexcept {
    return std::uint64_t{slot} * shape.layers + layer;
  }
  [[nodiscard]] constexpr ForwardProposal& proposal_of(std::uint32_t slot, std::uint32_t layer,
                                                       std::uint32_t kv_head) const noexcept {
    return proposals[proposal_layer(slot, layer) * shape.kv_heads + kv_head];
  }
  /// Of the first query head of a group.
  [[nodiscard]] constexpr std::uint32_t* proposed_of(std::uint32_t slot, std::uint32_t layer,
                                                     std::uint32_t kv_head) const noexcept {
    return proposed + (proposal_layer(slot, layer) * shape.q_heads + kv_head * shape.group()) * proposed_words();
  }
  [[nodiscard]] constexpr float* proposed_q_of(std::uint32_t slot, std::uint32_t layer,
                                               std::uint32_t kv_head) const noexcept {
    return proposed_q + (proposal_layer(slot, layer) * shape.q_heads + kv_head * shape.group()) * shape.head_dim;
  }
  /// Whether rows of this bucket may choose of what histories propose.
  [[nodiscard]] constexpr bool proposes() const noexcept {
    return proposal_slots != 0 && bucket.top_k && bucket.drafts == 1 && !bucket.whole;
  }
  /// Whether what a row attends near stays there, and what it attends far may come: where everything is attended, that
  /// says nothing of what will be, unless there is room for all of it.
  [[nodiscard]] constexpr bool keeps_near(const ForwardRow& row) const noexcept {
    return !row.whole() || row.tokens <= near_pages * layout.page_tokens;
  }
  /// Tokens that a KV head's rows may attend near or far.
  [[nodiscard]] constexpr std::uint32_t list_room() const noexcept {
    if (largest.unbounded) return largest.max_tokens;
    const std::uint64_t in_pages = largest.pages ? std::uint64_t{max_ranked} * layout.page_tokens : 0;
    const std::uint64_t picked = max_picks > in_pages ? max_picks : in_pages;
    const std::uint64_t most = shape.group() * picked + max_window;
    const std::uint64_t room = most > widest ? most : widest;
    return static_cast<std::uint32_t>(room < largest.max_tokens ? room : largest.max_tokens);
  }
  /// Tokens that a KV head's rows may attend of what they draw, and beside it: a part of list_room().
  [[nodiscard]] constexpr std::uint32_t draw_room() const noexcept {
    if (!largest.top_k || max_picks == 0) return 0;
    const std::uint64_t most = std::uint64_t{shape.group()} * max_picks + max_window;
    return static_cast<std::uint32_t>(most < largest.max_tokens ? most : largest.max_tokens);
  }
  /// Of a list that draws.
  [[nodiscard]] constexpr float* near_corrections_of(std::uint32_t list) const noexcept {
    return near_corrections + std::uint64_t{list} * draw_room();
  }
  [[nodiscard]] constexpr float* far_corrections_of(std::uint32_t list) const noexcept {
    return far_corrections + std::uint64_t{list} * draw_room();
  }
  /// Of a list: a policy of the CPU may choose every token.
  [[nodiscard]] constexpr std::uint64_t chosen_room() const noexcept { return std::uint64_t{2} * largest.max_tokens; }
  /// The pages that the query heads of list row * kv_heads + KV head have chosen: [group, page_picks], ascending each.
  [[nodiscard]] constexpr std::uint32_t* ranked_of(std::uint32_t list, bool asks) const noexcept {
    return (asks ? far_ranked : ranked) + std::uint64_t{list} * shape.group() * max_ranked;
  }
  /// Their scores: [group, pages].
  [[nodiscard]] constexpr float* page_scores_of(std::uint32_t list, bool asks) const noexcept {
    return (asks ? far_page_scores : page_scores) + std::uint64_t{list} * shape.group() * max_pages;
  }
  /// The blocks of a sequence.
  [[nodiscard]] constexpr std::uint32_t* list_of(std::uint32_t list) const noexcept {
    return lists + std::uint64_t{list} * max_pages;
  }
  /// The mean key of a sequence, of a layer without a window.
  [[nodiscard]] constexpr float* key_mean_of(std::uint32_t list, std::uint32_t plane) const noexcept {
    return key_means + (std::uint64_t{list} * planes() + plane) * shape.head_dim;
  }
  /// The far row of a sequence's token, the same in every plane, of the layers of a stack.
  [[nodiscard]] constexpr std::uint32_t row_of(std::uint32_t list, std::uint32_t token) const noexcept {
    const std::uint32_t block = list_of(list)[token >> page_shift];
    return (block << page_shift) | (token & (layout.page_tokens - 1));
  }
  /// A far page or its copy, counted in pages.
  [[nodiscard]] constexpr std::uint64_t far_page(std::uint32_t plane, std::uint32_t block) const noexcept {
    return std::uint64_t{plane} * blocks + block;
  }
  /// The far page of a plane's block.
  [[nodiscard]] constexpr std::byte* far_block(std::uint32_t plane, std::uint32_t block) const noexcept {
    return far + far_page(plane, block) * far_layout.page_bytes();
  }
  /// A far row of a plane, as far_rows names it: its key. Its value comes far_layout.values_offset() behind that.
  [[nodiscard]] constexpr const std::byte* far_key(std::uint32_t plane, std::uint32_t row) const noexcept {
    return far_block(plane, row >> page_shift) + (row & (layout.page_tokens - 1)) * far_layout.row_bytes();
  }
  /// Its scales, if far rows have some, float32: of the key, of the value.
  [[nodiscard]] constexpr const std::byte* far_scale_bytes(std::uint32_t plane, std::uint32_t row) const noexcept {
    return far_block(plane, row >> page_shift) + far_layout.scales_offset() +
           (row & (layout.page_tokens - 1)) * far_layout.scale_bytes();
  }
  [[nodiscard]] const float* far_scales(std::uint32_t plane, std::uint32_t row) const noexcept {
    return reinterpret_cast<const float*>(far_scale_bytes(plane, row));
  }
  /// Its key, counted in rows from the plane's first far page: K and V rows of pages, one after the other.
  [[nodiscard]] constexpr std::uint32_t far_entry(std::uint32_t row) const noexcept {
    return (row >> page_shift << (page_shift + 1)) | (row & (layout.page_tokens - 1));
  }
  /// The far row that is counted so.
  [[nodiscard]] constexpr std::uint32_t row_of_entry(std::uint32_t entry) const noexcept {
    return (entry >> (page_shift + 1) << page_shift) | (entry & (layout.page_tokens - 1));
  }
  /// The first far page of a plane.
  [[nodiscard]] constexpr const std::byte* far_plane(std::uint32_t plane) const noexcept { return far_block(plane, 0); }
  /// A KV head's clusters, counted in KV heads.
  [[nodiscard]] constexpr std::uint64_t cluster_head(std::uint32_t slot, std::uint32_t plane) const noexcept {
    return std::uint64_t{slot} * planes() + plane;
  }
  [[nodiscard]] constexpr float* centroids_of(std::uint32_t slot, std::uint32_t plane) const noexcept {
    return centroids + cluster_head(slot, plane) * max_clusters * shape.head_dim;
  }
  [[nodiscard]] constexpr std::uint32_t* cluster_starts_of(std::uint32_t slot, std::uint32_t plane) const noexcept {
    return cluster_starts + cluster_head(slot, plane) * (max_clusters + 1);
  }
  [[nodiscard]] constexpr std::uint32_t* cluster_members_of(std::uint32_t slot, std::uint32_t plane) const noexcept {
    return cluster_members + cluster_head(slot, plane) * largest.max_tokens;
  }
  /// Whether a clustering is of this layer.
  [[nodiscard]] constexpr bool clusters_in(std::uint32_t layer, const ForwardClustering& clustering) const noexcept {
    return window_in(layer) == 0 && layer >= clustering.dense_layers &&
           (clustering.dense_every == 0 || layer % clustering.dense_every != 0);
  }
  [[nodiscard]] constexpr bool has_codes() const noexcept { return code_bits != 0; }
  /// Of keys' copies, if there are any.
  [[nodiscard]] constexpr CodeLayout code_layout() const noexcept { return CodeLayout(layout, code_bits); }
  /// Of a page's copy; 0: there are none.
  [[nodiscard]] constexpr std::uint64_t code_page_bytes() const noexcept {
    return has_codes() ? code_layout().page_bytes() : 0;
  }
  /// The digest of a block of a plane: hi, then lo.
  [[nodiscard]] constexpr std::byte* digest_of(std::uint32_t plane, std::uint32_t block) const noexcept {
    return digests + far_page(plane, block) * 2 * layout.row_bytes();
  }
  /// What query head 0 found out about a chunk of a forward in a layer; the other heads follow.
  [[nodiscard]] constexpr PrefillChoice* choices_of(std::uint64_t forward, std::uint32_t layer,
                                                    std::uint32_t chunk) const noexcept {
    const std::uint64_t turn = forward % kMostForwards * shape.layers + layer;
    return choices + (turn * largest.prefills + chunk) * shape.q_heads;
  }
  /// The stamps of a layer of a forward, by stage.
  [[nodiscard]] constexpr ForwardStamp* stamps_of(std::uint64_t forward, std::uint32_t layer) const noexcept {
    return stamps + (forward % kMostForwards * shape.layers + layer) * kStampedStages;
  }
  /// Rows of a plane.
  [[nodiscard]] constexpr std::uint64_t far_row(std::uint32_t plane, std::uint32_t row) const noexcept {
    return far_page(plane, 0) * layout.page_tokens + row;
  }
  [[nodiscard]] constexpr std::uint64_t near_row(std::uint32_t plane, std::uint32_t row) const noexcept {
    return std::uint64_t{plane} * near_pages * layout.page_tokens + row;
  }
  /// The near row of a far one, or kNone.
  [[nodiscard]] constexpr std::uint32_t near_row_of(std::uint32_t plane, std::uint32_t row) const noexcept {
    if (near_pages == 0) return kNone;
    const std::uint32_t entry = near_of[far_row(plane, row)];
    return (entry & kNearBit) != 0 ? entry & ~kNearBit : kNone;
  }
  /// As near_lists counts it: K and V rows of pages, one after the other.
  [[nodiscard]] constexpr std::uint32_t near_entry(std::uint32_t plane, std::uint32_t row) const noexcept {
    const std::uint64_t page = std::uint64_t{plane} * near_pages + row / layout.page_tokens;
    return static_cast<std::uint32_t>(page * 2 * layout.page_tokens + row % layout.page_tokens);
  }
  /// The far row of what such an entry of a plane holds.
  [[nodiscard]] constexpr std::uint32_t far_row_of_near(std::uint32_t plane, std::uint32_t entry) const noexcept {
    const std::uint32_t local = entry - near_entry(plane, 0);
    const std::uint32_t row = local / (2 * layout.page_tokens) * layout.page_tokens + local % layout.page_tokens;
    return near_rows[near_row(plane, row)].row;
  }
  /// Where what a row that chooses attended in a layer is written down: list `list` of audit_rows and audit_counts.
  [[nodiscard]] constexpr std::uint64_t audit_list(std::uint32_t layer, std::uint32_t list) const noexcept {
    return std::uint64_t{layer} * (largest.decode_rows / drafts) * shape.kv_heads + list;
  }
  /// Its key; the value comes PageLayout::values_offset() behind.
  [[nodiscard]] constexpr std::byte* near_key(std::uint32_t plane, std::uint32_t row) const noexcept {
    return near + std::uint64_t{near_entry(plane, row)} * layout.row_bytes();
  }
};

}  // namespace sluice
