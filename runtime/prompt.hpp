#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "cpu/host_pool.hpp"
#include "runtime/marks.hpp"
#include "runtime/prompt_memory.hpp"
#include "runtime/sequence.hpp"
#include "runtime/transfer_engine.hpp"
#include "scheduler/layer_policy.hpp"
#include "sluice/options.hpp"
#include "sluice/runtime.hpp"

namespace sluice::runtime {

/// What is to be built of the pages of a prompt while they are on the device, by frame of the host pool.
struct PromptIndices {
  std::optional<DigestKind> digest;
  std::byte* digests = nullptr;    ///< device, [frames, 2, head_dim]
  std::byte* int4 = nullptr;       ///< [frames, Int4Layout::page_bytes()] or null
  std::byte* int4_host = nullptr;  ///< likewise; receives a copy. Null: there is no other, or `int4` is pinned memory
};

/// Decoding, as far as a prompt prepares it. Called on the caller's thread.
class PromptHeir {
 public:
  virtual ~PromptHeir() = default;
  [[nodiscard]] virtual PromptIndices indices(const Sequence& sequence, const LayerState& layer) = 0;
  /// Which sums over the attention of a prompt's last queries it begins with.
  [[nodiscard]] virtual scheduler::SumRequest sums(const Sequence& sequence, const LayerState& layer,
                                                   std::uint32_t tokens) = 0;
  /// They now have the layer's pages [begin, end).
  virtual void indexed(const Sequence& sequence, LayerState& layer, std::uint32_t begin, std::uint32_t end) = 0;
  /// The layer's prompt of `tokens` tokens is in the host pool, its last queries are known, and no more will come.
  /// `sums` are what was asked for, [kv_heads, (by_position, by_distance)] as in PromptSums, or empty if the device did
  /// not have all keys.
  virtual void complete(Sequence& sequence, LayerState& layer, std::uint32_t tokens, std::vector<float> sums) = 0;
};

/// One layer of one chunk.
struct PromptChunk {
  Sequence* sequence = nullptr;
  LayerState* layer = nullptr;
  TensorView q;  ///< no tokens: nothing is attended
  TensorView k;
  TensorView v;
  TensorView last_q;  ///< of the chunk's last tokens
  MutableTensorView out;
  bool last = false;
};

/// The parts that the prompt phase works with. All outlive it.
struct PromptParts {
  const RuntimeOptions& options;
  Device& device;
  cpu::HostPool& pool;
  TransferEngine& link;
  NearPool& near;
  std::byte* memory = nullptr;       ///< device memory [near slots, then staging pages]
  std::uint32_t chunk_pages = 0;     ///< of an area of staging, see PromptMemory
  std::uint32_t window_pages = 0;
  Stream& device_stream;
  PromptHeir& heir;
};

/// The prompt phase. A chunk's K and V are laid out as pages in device memory, attended there, and flushed to the host
/// pool beside that on a stream of their own. The prefix comes over the link: all of it, where device memory has room,
/// loaded while the layer before is attended; else in windows, whose partial results are merged. The embedded device
/// attends everything in the host pool, which is as near as anything.
///
/// Two passes, one layer of one group of chunks each, are under way at most; the caller's thread waits for the one
/// before last. With `ordered` nothing else waits, and a failure shows when its pass is collected: then the sequences of
/// that pass are lost, and no others.
class Prompt {
 public:
  explicit Prompt(const PromptParts& parts);
  ~Prompt();

  /// All of one layer. Raises no `tokens`: a call that failed left nothing behind and may be repeated.
  void run(std::span<const PromptChunk> chunks, bool ordered);
  /// Waits for everything under way and returns borrowed memory.
  /// @throws Error{Errc::device} if any of it failed, Error{Errc::timeout}
  void settle();
  /// The end of the layer's prompt is still under way.
  [[nodiscard]] bool completes(const LayerState& layer) const noexcept;
  /// Destroys the stream, see TransferEngine::stop.
  void stop() noexcept { flush_.reset(); }

 private:
  /// Part of a chunk that passes through the device at once.
  struct Piece {
    const PromptChunk* chunk = nullptr;
    std::uint32_t done = 0;   ///< of the chunk's tokens, before this piece
    std::uint32_t count = 0;
    std::uint32_t first = 0;  ///< position of its first token
    std::uint32_t prefix = 0; ///< whole pages before the one that `first` is in
    std::uint32_t pages = 0;  ///< that it touches, per KV head
    std::uint32_t at = 0;     ///< where its pages lie in the pass's chunk area
    bool sparse = false;
    [[nodiscard]] std::uint32_t keys() const noexcept { return first + count; }
  };
  /// What is left to do when a piece's work is done.
  struct Legacy {
    Sequence* sequence = nullptr;
    LayerState* layer = nullptr;
    std::uint32_t tokens = 0;
    std::uint64_t loaded_bytes = 0; ///< over the link to the device
    std::uint32_t prefix = 0;       ///< whole pages before the piece
    std::uint32_t end = 0;          ///< of the piece, as a position
    std::uint32_t last_q_rows = 0;
    std::uint64_t last_q_at = 0;    ///< floats
    std::uint64_t choices = 0;      ///< first of its heads' choices, if `sparse`
    std::uint64_t sums_at = 0;      ///< floats
    std::uint64_t sums = 0;
    bool sparse = false;
    bool attended = false;
    bool indexed = false;
    bool complete = false;
  };
  /// A piece that is done, and what it adds to its sequence's counters.
  struct Receipt {
    Legacy legacy;
    PromptStats stats;
    std::vector<float> sums;  ///< see PromptHeir::complete; its own, for the pass serves others before the call is booked
  };
  /// One layer of one group of pieces, from the first copy to the last. The arrays are what queued work refers to.
  struct Pass {
    explicit Pass(Device& device)
        : device_marks(device), flush_marks(device), loaded(device.create_event()), appended(device.create_event()) {}
    bool queued = false;  ///< or being queued
    std::uint64_t call = 0;
    bool spread = false;  ///< it uses all of the memory for prefixes, not its half
    std::vector<Legacy> legacies;
    std::vector<AppendTask> appends;
    std::vector<std::uint32_t> frames;
    std::vector<PrefillTask> prefills;
    std::vector<SelectBlocksTask> selects;
    std::vector<SumAttentionTask> sum_tasks;
    std::vector<DigestTask> digests;
    std::vector<QuantizeTask> quantized;
    Marks device_marks;
    Marks flush_marks;
    std::unique_ptr<Event> loaded;
    std::unique_ptr<Event> appended;
    std::unique_ptr<Buffer> last_q;   ///< pinned
    std::unique_ptr<Buffer> blocks;   ///< device
    std::unique_ptr<Buffer> choices;  ///< pinned
    std::unique_ptr<Buffer> sums;     ///< pinned
  };

  // prompt.cpp
  void allocate(const PromptChunk& chunk);
  void release_unused(const PromptChunk& chunk);
  void run_pieces(std::span<const PromptChunk> chunks);
  void run_group(std::vector<Piece>& group);
  void queue(Pass& pass, std::size_t half, std::span<Piece> group);
  void append(Pass& pass, std::size_t half, std::span<const Piece> group);
  void flush(Pass& pass, std::size_t half, std::span<const Piece> group);
  void remember(Pass& pass, std::span<const Piece> group);
  void build_indices(Pass& pass, std::size_t half, std::span<const Piece> group);

  // prompt_collect.cpp
  Pass& next();
  void collect(Pass& pass);
  void finish(Pass& pass, Clock::time_point asked);
  void keep_last_q(const Pass& pass, const Legacy& legacy);
  void count_choices(const Pass& pass, const Legacy& legacy, PromptStats& stats);
  void book(Receipt& receipt);
  /// Ends in an exception.
  [[noreturn]] void fail(const Pass& pass, const std::string& reason);
  /// False if the device did not finish with the pass: then what it refers to must stay.
  [[nodiscard]] bool abandon(Pass& pass) noexcept;
  [[nodiscard]] bool abandon_call() noexcept;
  void await(Marks& marks, const char* what);

  // prompt_attend.cpp
  void attend(Pass& pass, std::size_t half, std::span<Piece> group);
  void attend_in_place(Pass& pass, std::span<const Piece> group);
  void attend_resident(Pass& pass, std::size_t half, PromptMemory::Area prefixes, std::span<const Piece> group);
  void attend_windows(Pass& pass, std::size_t half, const Piece& piece);
  void attend_tasks(Pass& pass, std::span<const Piece> group);
  [[nodiscard]] bool wants_sparse(const Piece& piece);
  [[nodiscard]] PrefillTask task(const Piece& piece, std::uint32_t kv) const;
  [[nodiscard]] PrefillShape strides(const Piece& piece) const;

  // prompt_select.cpp
  void select(Pass& pass, std::span<const Piece> group);
  void plan_sums(Pass& pass, std::span<const Piece> group);
  void sum_attention(Pass& pass, std::span<const Piece> group);
  /// Device memory for the pass's choice of blocks and sums, one after the other. Before either is queued.
  void reserve_scratch(const Pass& pass, std::span<const Piece> group);

  [[nodiscard]] std::uint64_t prefix_pages(std::span<const Piece> group) const noexcept;
  [[nodiscard]] std::uint64_t mask_words(const Piece& piece) const noexcept;  ///< per KV head
  [[nodiscard]] std::uint64_t scratch_bytes(const Piece& piece) const;        ///< per KV head
  /// The first page of a piece's KV head in its pass's chunk area.
  [[nodiscard]] std::uint32_t chunk_page(const Piece& piece, std::size_t half, std::uint32_t kv) const noexcept {
    return memory_.chunk(half).first + piece.at + kv * piece.pages;
  }
  std::uint64_t load_tail(const Piece& piece, std::size_t half);
  /// Pages [begin, end) of one KV head to pages of device memory from `to` on.
  void load(const Piece& piece, std::uint32_t kv, std::uint32_t begin, std::uint32_t end, std::uint32_t to);

  [[nodiscard]] std::byte* page(std::uint32_t index) const noexcept { return parts_.memory + layout_.page_bytes() * index; }

  PromptParts parts_;
  AttentionShape shape_;
  PageLayout layout_;
  PromptMemory memory_;
  std::unique_ptr<Stream> flush_;
  std::array<Pass, 2> passes_;
  std::array<std::unique_ptr<Event>, 2> freed_;  ///< windows that may be loaded anew
  std::array<std::unique_ptr<Event>, 2> filled_;
  std::size_t newest_ = 0;                       ///< pass
  std::uint64_t call_ = 0;                       ///< of `run`, the newest
  bool running_ = false;                         ///< it has not returned yet
  std::vector<Receipt> receipts_;                ///< of its pieces: a call is booked as a whole or not at all
  std::unique_ptr<Buffer> so_far_;               ///< device, partial results of windows
  std::unique_ptr<Buffer> scratch_;              ///< device
  std::vector<PageMove> moves_;
  std::vector<Copy> copies_;
};

}  // namespace sluice::runtime
