#pragma once

#include <cstddef>
#include <cstdint>

#include "sluice/page.hpp"
#include "sluice/shape.hpp"
#include "sluice/tensor.hpp"
#include "sluice/units.hpp"

/// Verbs of a decode forward whose descriptors lie in memory of the device. What a launch is given depends on a bucket
/// alone, never on lengths, so that a forward can be captured in a graph once and replayed for every token.
namespace sluice {

/// What a captured forward is made for. Everything that a verb launches follows from it.
struct DecodeBucket {
  std::uint32_t rows = 1;        ///< packed rows, padding included
  std::uint32_t max_tokens = 0;  ///< of the longest sequence, a multiple of page_tokens
  std::uint32_t max_picks = 0;   ///< tokens that a query head may choose
  std::uint32_t max_window = 0;  ///< sinks and recent tokens together

  /// Tokens that a KV head's rows may attend near or far.
  [[nodiscard]] constexpr std::uint32_t list_room(const AttentionShape& shape) const noexcept {
    const std::uint64_t room = std::uint64_t{shape.group()} * max_picks + max_window;
    return static_cast<std::uint32_t>(room < max_tokens ? room : max_tokens);
  }
  friend constexpr bool operator==(const DecodeBucket&, const DecodeBucket&) = default;
};

/// One packed row of a plan: a new token of a sequence, and what its query heads may choose from.
struct DecodeRow {
  std::uint32_t list = kNone;  ///< its sequence's block list; kNone: padding, whose output is 0
  std::uint32_t tokens = 0;    ///< visible, the new one included
  std::uint32_t sink_end = 0;  ///< tokens [0, sink_end) and [recent_begin, tokens) are attended by all heads
  std::uint32_t recent_begin = 0;
  std::uint32_t picks = 0;  ///< of the tokens between, each query head chooses as many, at most max_picks
};

/// Entry `page` of block list `list` becomes `block`.
struct DecodeListChange {
  std::uint32_t list = 0;
  std::uint32_t page = 0;
  std::uint32_t block = 0;
};

/// Pages of `block`, of every layer and KV head, lie near, too, from now on, in block `near`; kNone: no longer. What a
/// page held before does not come along. A slip names every block once at most.
struct DecodeNearChange {
  std::uint32_t block = 0;
  std::uint32_t near = kNone;
};

/// How a forward ended.
enum class DecodeStatus : std::uint32_t {
  running = 0,
  done = 1,
  unplanned = 2,  ///< replayed without a plan of its own; nothing was appended, outputs are NaN
  abandoned = 3,  ///< the far part's answer did not come in time; outputs from that layer on are NaN
  cancelled = 4,
};

/// What a plan tells the device, in pinned memory: read when the stream gets to `apply`. Arrays follow from the bucket.
struct DecodeSlip {
  std::uint64_t forward = 0;  ///< number of the forward that is planned; rises
  std::uint32_t list_changes = 0;
  std::uint32_t near_changes = 0;
};

/// The device's own memory of where it is.
struct DecodeState {
  std::uint64_t planned = 0;    ///< the newest plan that was applied
  std::uint64_t forward = 0;    ///< the newest forward that began
  std::uint64_t asked = 0;      ///< hand-overs so far
  std::uint64_t unplanned = 0;  ///< replays without a plan so far
  std::uint64_t released = 0;   ///< newest hand-over whose answer is known to be there, or to come no more
  DecodeStatus status = DecodeStatus::done;
  std::uint32_t layer_far_tokens = 0;  ///< while it is split
  std::uint32_t arrived = 0;           ///< parts of it that are split
  std::uint32_t merging = 0;           ///< parts of it whose merge has begun
  std::uint64_t near_tokens = 0;       ///< attended so far, by all rows, layers and KV heads
  std::uint64_t far_tokens = 0;
  std::uint64_t waited_ns = 0;  ///< for answers so far, by the device's clock
};

/// The meeting point of device and workers, in pinned memory. Each word has one writer and only rises; nobody adds to
/// one across the link, which not every link can.
struct DecodeMailbox {
  /// The device's: hand-over `asked` is there, of this layer.
  struct alignas(64) Question {
    std::uint64_t asked = 0;
    std::uint32_t layer = 0;
  } question;
  /// The workers': hand-over `answered` is answered.
  struct alignas(64) Answer {
    std::uint64_t answered = 0;
  } answer;
  /// The device's: how the newest forward that was planned ended.
  struct alignas(64) Outcome {
    std::uint64_t cancelled = 0;    ///< newest plan that was taken back
    std::uint64_t forward = 0;      ///< newest that ended; written after the status
    std::uint64_t unplanned = 0;    ///< replays without a plan so far
    std::uint64_t near_tokens = 0;  ///< as in DecodeState
    std::uint64_t far_tokens = 0;
    std::uint64_t waited_ns = 0;
    DecodeStatus status = DecodeStatus::done;
  } outcome;
};

/// Where everything lies that the verbs of one engine read and write. Pages of one layer and KV head form a plane;
/// block b of a plane is its page `b`, so that one block list serves all planes. Sizes in brackets.
struct DecodeMemory {
  AttentionShape shape;
  PageLayout layout;
  DecodeBucket bucket;
  std::uint32_t blocks = 0;       ///< far pages of a plane
  std::uint32_t near_blocks = 0;  ///< near pages of a plane
  std::uint32_t max_pages = 0;    ///< of a block list
  std::uint64_t answer_ns = 0;    ///< how long a layer waits for the far part

  // Memory of the device.
  std::byte* near = nullptr;         ///< [near_blocks, planes] pages
  std::byte* codes = nullptr;        ///< [planes, blocks] 4-bit copies, see Int4Layout
  std::uint32_t* lists = nullptr;    ///< [lists, max_pages] blocks
  std::uint32_t* near_of = nullptr;  ///< [blocks] near block or kNone
  DecodeRow* rows = nullptr;         ///< [rows]
  DecodeState* state = nullptr;
  float* q = nullptr;                    ///< [rows, q_heads, head_dim]
  float* scores = nullptr;               ///< [rows, q_heads, max_tokens]
  std::uint32_t* picks = nullptr;        ///< [rows, q_heads, max_picks] relative to sink_end
  std::uint32_t* near_rows = nullptr;    ///< [rows, kv_heads, list_room] K rows, counted in rows from `near`
  std::uint32_t* near_counts = nullptr;  ///< [rows, kv_heads]
  float* near_out = nullptr;             ///< [rows, q_heads, head_dim]
  float* near_lse = nullptr;             ///< [rows, q_heads]
  std::byte* scratch = nullptr;          ///< DecodeVerbs::scratch_bytes

  // Pinned memory of the host.
  std::byte* far = nullptr;  ///< [planes, blocks] pages
  DecodeSlip* slip = nullptr;
  DecodeRow* slip_rows = nullptr;          ///< [rows]
  DecodeListChange* slip_lists = nullptr;  ///< [DecodeSlip::list_changes]
  DecodeNearChange* slip_near = nullptr;   ///< [DecodeSlip::near_changes]
  DecodeMailbox* mailbox = nullptr;
  float* far_q = nullptr;               ///< [rows, q_heads, head_dim]
  std::uint32_t* far_rows = nullptr;    ///< [rows, kv_heads, list_room] block * page_tokens + row of the page
  std::uint32_t* far_counts = nullptr;  ///< [rows, kv_heads]
  float* far_out = nullptr;             ///< [rows, q_heads, head_dim]
  float* far_lse = nullptr;             ///< [rows, q_heads]

  [[nodiscard]] constexpr std::uint32_t planes() const noexcept { return shape.layers * shape.kv_heads; }
  [[nodiscard]] constexpr std::uint32_t plane(std::uint32_t layer, std::uint32_t kv_head) const noexcept {
    return layer * shape.kv_heads + kv_head;
  }
  /// A far page or its copy, counted in pages.
  [[nodiscard]] constexpr std::uint64_t far_page(std::uint32_t plane, std::uint32_t block) const noexcept {
    return std::uint64_t{plane} * blocks + block;
  }
  [[nodiscard]] constexpr std::uint64_t near_page(std::uint32_t plane, std::uint32_t near_block) const noexcept {
    return std::uint64_t{near_block} * planes() + plane;
  }
};

/// The tensors of one layer, packed [rows, heads, head_dim], and where to compute.
struct DecodeLayer {
  std::uint32_t layer = 0;
  TensorView q;
  TensorView k;
  TensorView v;
  MutableTensorView out;
  float* lse = nullptr;    ///< [rows, q_heads] natural log of the sum of exponentials; may be null
  void* stream = nullptr;  ///< the caller's: a cudaStream_t; a Stream* of a host device, or null: now
};

/// Enqueue and return; nothing is allocated, nothing waits. A forward is `begin`, then for every layer in order
/// `append`, `score`, `choose`, `split`, `attend` and `merge`, then `end`; `apply` comes before it and is not part of a
/// graph. One that only brings keys and values in is `begin`, `append` for every layer, `end`. Thread safety: one
/// thread at a time per DecodeMemory.
class DecodeVerbs {
 public:
  virtual ~DecodeVerbs() = default;
  /// Device memory that the verbs want for themselves, zero-filled at first.
  [[nodiscard]] virtual std::uint64_t scratch_bytes(const DecodeMemory& memory) const = 0;

  /// Takes the slip: rows, block lists, near blocks.
  virtual void apply(const DecodeMemory& memory, void* stream) = 0;
  /// Begins the forward that was planned last, unless it has begun before.
  virtual void begin(const DecodeMemory& memory, void* stream) = 0;
  /// New keys and values go to their far page, its 4-bit copy, and its near page if there is one; q, unless it has no
  /// rows, to both sides.
  virtual void append(const DecodeMemory& memory, const DecodeLayer& layer) = 0;
  /// Scores of all visible tokens by their copies: q.k / sqrt(head_dim).
  virtual void score(const DecodeMemory& memory, const DecodeLayer& layer) = 0;
  /// The `picks` largest of every query head between sinks and recent tokens, as TopKTask orders them.
  virtual void choose(const DecodeMemory& memory, const DecodeLayer& layer) = 0;
  /// Lists what a group attends, near rows here and far rows there, and asks the workers for the far part if there is
  /// one. What one head of a group chose all of them attend.
  virtual void split(const DecodeMemory& memory, const DecodeLayer& layer) = 0;
  virtual void attend(const DecodeMemory& memory, const DecodeLayer& layer) = 0;
  /// Waits for the far part, at most answer_ns by the device's clock, and merges.
  virtual void merge(const DecodeMemory& memory, const DecodeLayer& layer) = 0;
  /// Takes the newest plan back: a forward that comes later has none. Publishes that.
  virtual void cancel(const DecodeMemory& memory, void* stream) = 0;
  /// Publishes how the forward ended.
  virtual void end(const DecodeMemory& memory, void* stream) = 0;
};

}  // namespace sluice
