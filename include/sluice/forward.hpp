#pragma once

#include <cstddef>
#include <cstdint>

#include "sluice/page.hpp"
#include "sluice/shape.hpp"
#include "sluice/tensor.hpp"
#include "sluice/units.hpp"

/// Verbs of a forward whose descriptors lie in memory of the device. What a launch is given depends on a bucket alone,
/// never on lengths, so that a forward can be captured in a graph once and replayed for every token.
namespace sluice {

/// What a forward is made for, padding included. Everything that a verb launches follows from it.
struct Bucket {
  std::uint32_t decode_rows = 1;   ///< rows whose heads choose what they attend: new tokens, and drafts to verify
  std::uint32_t prefill_rows = 0;  ///< rows of chunks of prompts, which attend all that comes before them
  std::uint32_t prefills = 0;      ///< how many chunks these are
  std::uint32_t max_tokens = 0;  ///< of the longest sequence, a multiple of page_tokens; 0: all that there is room for
  bool top_k = true;             ///< of these rows some choose a number of tokens
  bool unbounded = false;        ///< of these rows some choose a share of the mass, or attend everything

  [[nodiscard]] constexpr std::uint32_t rows() const noexcept { return decode_rows + prefill_rows; }
  friend constexpr bool operator==(const Bucket&, const Bucket&) = default;
};

/// Where the token of a packed row goes; see ForwardMemory::tokens.
struct ForwardToken {
  std::uint32_t list = kNone;  ///< its sequence's block list; kNone: padding, whose output is 0
  std::uint32_t position = 0;
  std::uint32_t tail = kNone;  ///< row of ForwardMemory::tails that its queries go to, too; kNone: none
  std::uint32_t decoded = 0;   ///< not 0: it is of no prompt
};

/// A row that chooses: what its query heads may choose from.
struct ForwardRow {
  std::uint32_t list = kNone;  ///< its sequence's block list; kNone: there is no such row
  std::uint32_t at = 0;        ///< its packed row
  std::uint32_t tokens = 0;    ///< visible, the new one included
  std::uint32_t sink_end = 0;  ///< tokens [0, sink_end) and [recent_begin, tokens) are attended by all heads
  std::uint32_t recent_begin = 0;
  std::uint32_t picks = 0;         ///< of the tokens between, each query head chooses as many, at most max_picks
  float mass = 0.f;                ///< or, if this is not 0, those that top-p keeps, see top_p.hpp
  std::uint32_t dense_layers = 0;  ///< layers below it attend everything
  std::uint32_t dense_every = 0;   ///< and so does every such layer, the first included; 0: none
  std::uint32_t asks =
      0;  ///< not 0: the CPU is asked and chooses, in all layers but dense ones; `picks` and `mass` are 0 then

  /// Whether the device chooses anything by score.
  [[nodiscard]] constexpr bool ranks() const noexcept { return picks != 0 || mass > 0.f; }
  /// Whether a token is attended by all heads, whatever is chosen.
  [[nodiscard]] constexpr bool in_window(std::uint32_t token) const noexcept {
    return token < sink_end || token >= recent_begin;
  }
  /// Whether all tokens are attended.
  [[nodiscard]] constexpr bool whole() const noexcept { return sink_end == tokens; }
  /// The row as it is in a layer.
  [[nodiscard]] constexpr ForwardRow in(std::uint32_t layer) const noexcept {
    ForwardRow row = *this;
    if (layer >= dense_layers && (dense_every == 0 || layer % dense_every != 0)) return row;
    row.sink_end = row.recent_begin = tokens;
    row.picks = 0;
    row.mass = 0.f;
    row.asks = 0;
    return row;
  }
};

/// Consecutive packed rows that are consecutive tokens of one sequence, each of which attends all tokens up to its own.
struct ForwardChunk {
  std::uint32_t list = kNone;  ///< kNone: there is no such chunk
  std::uint32_t at = 0;        ///< its first packed row
  std::uint32_t first = 0;     ///< position of its first token
  std::uint32_t count = 0;
};

/// Entries [page, page + count) of block list `list` become what lies from entry `from` of the slip's blocks on.
struct ForwardListChange {
  std::uint32_t list = 0;
  std::uint32_t page = 0;
  std::uint32_t count = 0;
  std::uint32_t from = 0;
};

/// What a near row holds.
struct ForwardNearRow {
  std::uint32_t row = kNone;  ///< of the plane's far rows; kNone: nothing
  std::uint32_t used = 0;     ///< the newest forward that attended it
};

/// Forwards are counted modulo this where near rows are concerned; an entry of near_of from here on is near.
inline constexpr std::uint32_t kNearBit = 0x8000'0000u;
/// A far row that was attended twice within as many forwards is wanted near.
inline constexpr std::uint32_t kNearAgain = 8;
/// Near rows that were not attended in as many forwards give way first; those not attended in kNearAgain, then.
inline constexpr std::uint32_t kNearPatience = 32;
/// Of as many forwards one brings rows of a layer near, neighbouring layers in turn: what is wanted now and then can
/// wait.
inline constexpr std::uint32_t kNearTurn = 4;
/// Near rows of a plane that are looked at each time for some that give way.
inline constexpr std::uint32_t kNearLooks = 4096;
/// Rows that a plane may bring near in one forward, at most.
inline constexpr std::uint32_t kMostPromotions = 256;

/// The 4-bit copies of `from` become those of `to`, too.
struct ForwardBlockCopy {
  std::uint32_t from = 0;
  std::uint32_t to = 0;
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
};

/// What a plan tells the device, in pinned memory: read when the stream gets to `apply`. Arrays are in ForwardMemory.
struct ForwardSlip {
  std::uint64_t forward = 0;  ///< number of the forward that is planned; rises
  std::uint64_t after = 0;    ///< the forward it builds on, which must have been the last to get to its end
  Bucket bucket;
  std::uint32_t list_changes = 0;
  std::uint32_t freed_blocks = 0;
  std::uint32_t block_copies = 0;
};

/// The device's own memory of where it is.
struct ForwardState {
  std::uint64_t planned = 0;    ///< the newest plan that was applied
  std::uint64_t after = 0;      ///< of that plan
  Bucket bucket{};              ///< of that plan
  std::uint64_t forward = 0;    ///< the newest forward that began
  std::uint64_t good = 0;       ///< the newest that got to its end
  std::uint64_t asked = 0;      ///< hand-overs so far
  std::uint64_t unplanned = 0;  ///< replays without a plan so far
  std::uint64_t released = 0;   ///< newest hand-over whose answer is known to be there, or to come no more
  ForwardStatus status = ForwardStatus::done;
  std::uint32_t layer_far_tokens = 0;  ///< while it is split
  std::uint32_t layer_choices = 0;     ///< lists of it for which the CPU chooses
  std::uint32_t arrived = 0;           ///< parts of it that are split
  std::uint32_t merging = 0;           ///< parts of it whose merge has begun
  std::uint32_t near_rows = 0;         ///< that hold something, of all planes
  std::uint64_t promoted = 0;          ///< rows brought near so far
  std::uint64_t near_tokens = 0;       ///< attended so far, by all rows that choose, layers and KV heads
  std::uint64_t far_tokens = 0;
  std::uint64_t waited_ns = 0;  ///< for answers so far, by the device's clock
};

/// Forwards that may be planned and not finished at once, at most.
inline constexpr std::uint32_t kMostForwards = 8;

/// The meeting point of device and workers, in pinned memory. Each word has one writer and only rises, but for what is
/// good, which may be taken back; nobody adds to one across the link, which not every link can.
struct ForwardMailbox {
  /// The device's: hand-over `asked` is there, of this forward and layer.
  struct alignas(64) Question {
    std::uint64_t asked = 0;
    std::uint64_t forward = 0;
    std::uint32_t layer = 0;
    std::uint32_t lists = 0;    ///< of far rows
    std::uint32_t choices = 0;  ///< lists that the CPU is to add to, as its policies choose; see ForwardRow::asks
  } question;
  /// The workers': hand-over `answered` is answered.
  struct alignas(64) Answer {
    std::uint64_t answered = 0;
  } answer;
  /// The device's: how the newest forwards that were planned ended.
  struct alignas(64) Outcome {
    std::uint64_t cancelled = 0;    ///< newest plan that was taken back
    std::uint64_t forward = 0;      ///< newest that ended; written after everything else
    std::uint64_t good = 0;         ///< newest that got to its end
    std::uint64_t unplanned = 0;    ///< replays without a plan so far
    std::uint64_t near_tokens = 0;  ///< as in ForwardState
    std::uint64_t far_tokens = 0;
    std::uint64_t waited_ns = 0;
    std::uint64_t promoted = 0;
    std::uint64_t near_rows = 0;
    ForwardStatus status[kMostForwards] = {};  ///< of forward f at f % kMostForwards
  } outcome;
};

/// Where everything lies that the verbs of one engine read and write. Pages of one layer and KV head form a plane;
/// block b of a plane is its page `b`, so that one block list serves all planes. Sizes in brackets: of `largest`, in
/// whose first rows a forward of a smaller bucket works.
struct ForwardMemory {
  AttentionShape shape;
  PageLayout layout;
  Bucket largest{};                  ///< what there is room for; its max_tokens is that of every array
  Bucket bucket{};                   ///< of the forward
  std::uint32_t append_rows = 0;     ///< of a forward that only brings tokens in, at least largest.rows()
  std::uint32_t max_picks = 0;       ///< tokens that a query head may choose
  std::uint32_t max_window = 0;      ///< sinks and recent tokens together
  std::uint32_t blocks = 0;          ///< far pages of a plane
  std::uint32_t near_pages = 0;      ///< near pages of a plane
  std::uint32_t promotions = 0;      ///< rows that a plane brings near in one forward, at most
  std::uint32_t max_pages = 0;       ///< of a block list
  std::uint32_t prefill_window = 0;  ///< tokens of keys that a chunk attends at a time, a multiple of page_tokens
  std::uint32_t tail_rows = 0;       ///< of `tails`
  std::uint64_t answer_ns = 0;       ///< how long a layer waits for the far part

  // Memory of the device.
  std::byte* near = nullptr;       ///< [planes, near_pages] pages, whose rows hold any tokens of their plane
  std::byte* codes = nullptr;      ///< [planes, blocks] 4-bit copies, see Int4Layout
  std::uint32_t* lists = nullptr;  ///< [lists, max_pages] blocks
  /// [planes, blocks * page_tokens] near row of the plane | kNearBit, or the newest forward that attended the row far,
  /// 0 if there was none. Not there if near_pages is 0.
  std::uint32_t* near_of = nullptr;
  ForwardNearRow* near_rows = nullptr;  ///< [planes, near_pages * page_tokens]
  std::uint32_t* near_hands = nullptr;  ///< [planes] near row that is looked at next for one to give way
  ForwardToken* tokens = nullptr;       ///< [append_rows]
  ForwardRow* rows = nullptr;           ///< [decode_rows]
  ForwardChunk* chunks = nullptr;       ///< [prefills]
  ForwardState* state = nullptr;
  float* q = nullptr;                    ///< [decode_rows, q_heads, head_dim]
  float* scores = nullptr;               ///< [decode_rows, q_heads, max_tokens]
  std::uint32_t* picks = nullptr;        ///< [decode_rows, q_heads, max_picks] relative to sink_end
  std::uint32_t* masks = nullptr;        ///< [decode_rows, q_heads, mask_words] if the largest bucket is unbounded
  std::uint32_t* near_lists = nullptr;   ///< [decode_rows, kv_heads, list_room] K rows, counted in rows from `near`
  std::uint32_t* near_counts = nullptr;  ///< [decode_rows, kv_heads]
  std::uint32_t* far_listed = nullptr;   ///< [decode_rows, kv_heads] far rows that `split` listed
  std::uint32_t* far_windows = nullptr;  ///< [decode_rows, kv_heads] not 0: sinks or recent tokens are among them
  float* near_out = nullptr;             ///< [decode_rows, q_heads, head_dim]
  float* near_lse = nullptr;             ///< [decode_rows, q_heads]
  std::byte* scratch = nullptr;          ///< ForwardVerbs::scratch_bytes

  // Pinned memory of the host.
  std::byte* far = nullptr;  ///< [planes, blocks] pages
  ForwardSlip* slip = nullptr;
  ForwardToken* slip_tokens = nullptr;      ///< [append_rows]
  ForwardRow* slip_rows = nullptr;          ///< [decode_rows]
  ForwardChunk* slip_chunks = nullptr;      ///< [prefills]
  ForwardListChange* slip_lists = nullptr;  ///< [ForwardSlip::list_changes]
  std::uint32_t* slip_blocks = nullptr;     ///< what they refer to
  std::uint32_t* slip_freed = nullptr;      ///< [ForwardSlip::freed_blocks] that hold nothing any more, each once
  ForwardBlockCopy* slip_copies = nullptr;  ///< [ForwardSlip::block_copies]
  ForwardMailbox* mailbox = nullptr;
  float* far_q = nullptr;               ///< [decode_rows, q_heads, head_dim]
  std::uint32_t* far_rows = nullptr;    ///< [decode_rows, kv_heads, list_room] block * page_tokens + row of the page
  std::uint32_t* far_counts = nullptr;  ///< [decode_rows, kv_heads] as far_listed, until the CPU adds what it chose
  float* far_out = nullptr;             ///< [decode_rows, q_heads, head_dim]
  float* far_lse = nullptr;  ///< [decode_rows, q_heads] of a list that was chosen for: kEmptyLse if it is empty
  float* tails = nullptr;    ///< [layers, tail_rows, q_heads, head_dim] queries of prompts' last tokens

  [[nodiscard]] constexpr std::uint32_t planes() const noexcept { return shape.layers * shape.kv_heads; }
  [[nodiscard]] constexpr std::uint32_t plane(std::uint32_t layer, std::uint32_t kv_head) const noexcept {
    return layer * shape.kv_heads + kv_head;
  }
  [[nodiscard]] constexpr std::uint32_t mask_words() const noexcept { return (largest.max_tokens + 31) / 32; }
  /// Tokens that a KV head's rows may attend near or far.
  [[nodiscard]] constexpr std::uint32_t list_room() const noexcept {
    if (largest.unbounded) return largest.max_tokens;
    const std::uint64_t room = std::uint64_t{shape.group()} * max_picks + max_window;
    return static_cast<std::uint32_t>(room < largest.max_tokens ? room : largest.max_tokens);
  }
  /// A far page or its copy, counted in pages.
  [[nodiscard]] constexpr std::uint64_t far_page(std::uint32_t plane, std::uint32_t block) const noexcept {
    return std::uint64_t{plane} * blocks + block;
  }
  /// A far row of a plane, as far_rows names it: its key. Its value comes PageLayout::half_bytes() behind that.
  [[nodiscard]] constexpr const std::byte* far_key(std::uint32_t plane, std::uint32_t row) const noexcept {
    return far + far_page(plane, row / layout.page_tokens) * layout.page_bytes() +
           row % layout.page_tokens * layout.row_bytes();
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
  /// Its key; the value comes PageLayout::half_bytes() behind.
  [[nodiscard]] constexpr std::byte* near_key(std::uint32_t plane, std::uint32_t row) const noexcept {
    return near + std::uint64_t{near_entry(plane, row)} * layout.row_bytes();
  }
};

/// The tensors of one layer, packed [rows, heads, head_dim], and where to compute.
struct ForwardLayer {
  std::uint32_t layer = 0;
  TensorView q;
  TensorView k;
  TensorView v;
  MutableTensorView out;
  float* lse = nullptr;    ///< [rows, q_heads] natural log of the sum of exponentials; may be null
  void* stream = nullptr;  ///< the caller's: a cudaStream_t; a Stream* of a host device, or null: now
};

/// Enqueue and return; nothing is allocated, nothing waits. A forward is `begin`, then for every layer in order
/// `append`, `prefill` if the bucket has such rows, and if it has rows that choose, `score`, `choose`, `split`,
/// `attend`, `promote` and `merge`; then `end`. `apply` comes before it and is not part of a graph. One that only
/// brings keys and values in is `begin`, `append` for every layer, `end`. Forwards and plans run in the order in which
/// they are numbered. Thread safety: one thread at a time per ForwardMemory.
class ForwardVerbs {
 public:
  virtual ~ForwardVerbs() = default;
  /// Device memory that the verbs want for themselves, zero-filled at first, for every bucket up to the largest.
  [[nodiscard]] virtual std::uint64_t scratch_bytes(const ForwardMemory& memory) const = 0;

  /// Takes the slip: rows, block lists, freed blocks, copies. Not captured. Tokens that come get near rows, so that
  /// they are written there, too: rows that are free, or have not been attended for long, see kNearPatience. Those that
  /// are decoded come first, and count as attended; of those of prompts, which do not, the newest, if not all find one.
  virtual void apply(const ForwardMemory& memory, void* stream) = 0;
  /// Begins the forward that was planned last, unless it has begun before.
  virtual void begin(const ForwardMemory& memory, void* stream) = 0;
  /// New keys and values go to their far page, its 4-bit copy, and its near page if there is one; queries of rows that
  /// choose, unless q has no rows, to both sides, and those of tokens with a tail there. Outputs of padding become 0,
  /// and all outputs NaN if the forward does not run.
  virtual void append(const ForwardMemory& memory, const ForwardLayer& layer) = 0;
  /// Causal attention of the chunks' rows to all tokens up to their own.
  virtual void prefill(const ForwardMemory& memory, const ForwardLayer& layer) = 0;
  /// Scores of all visible tokens by their copies: q.k / sqrt(head_dim).
  virtual void score(const ForwardMemory& memory, const ForwardLayer& layer) = 0;
  /// The `picks` largest of every query head between sinks and recent tokens, as TopKTask orders them, or those that
  /// top-p keeps.
  virtual void choose(const ForwardMemory& memory, const ForwardLayer& layer) = 0;
  /// Lists what a group attends, near rows here and far rows there, and asks the workers for the far part if there is
  /// one, or something to choose. What one head of a group chose all of them attend.
  virtual void split(const ForwardMemory& memory, const ForwardLayer& layer) = 0;
  virtual void attend(const ForwardMemory& memory, const ForwardLayer& layer) = 0;
  /// Brings rows near that were attended far, while their answer is awaited, in every kNearTurn-th forward: those of
  /// sinks and recent tokens, then those that were attended far before, not longer than kNearAgain forwards ago. They
  /// take places as tokens that come do; the former also of any row that this forward has not attended.
  virtual void promote(const ForwardMemory& memory, const ForwardLayer& layer) = 0;
  /// Waits for the far part, at most answer_ns by the device's clock, and merges.
  virtual void merge(const ForwardMemory& memory, const ForwardLayer& layer) = 0;
  /// Takes all plans behind forward `before` back: what comes later of them has no plan, and what is planned next
  /// continues that one, if it got to its end. Publishes that.
  virtual void cancel(const ForwardMemory& memory, std::uint64_t before, void* stream) = 0;
  /// @throws Error{Errc::device} with the reason if what was enqueued on `stream` has failed. It is not being captured.
  virtual void require_alive(void* stream) = 0;
  /// Publishes how the forward ended.
  virtual void end(const ForwardMemory& memory, void* stream) = 0;
};

}  // namespace sluice
