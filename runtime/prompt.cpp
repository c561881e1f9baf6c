#include "runtime/prompt.hpp"

#include <algorithm>
#include <exception>
#include <string>
#include <utility>

#include "runtime/marked_range.hpp"
#include "runtime/wait.hpp"
#include "scheduler/plan/forward_rows.hpp"
#include "sluice/error.hpp"
#include "sluice/int4.hpp"

namespace sluice::runtime {
namespace {

/// Appends a copy, to the one before it if the two are neighbours on both sides.
void add_copy(std::vector<Copy>& copies, const Copy& copy, bool together) {
  if (together && !copies.empty() && copies.back().to + copies.back().bytes == copy.to &&
      copies.back().from + copies.back().bytes == copy.from) {
    copies.back().bytes += copy.bytes;
  } else {
    copies.push_back(copy);
  }
}

}  // namespace

Prompt::Prompt(const PromptParts& parts)
    : parts_(parts),
      shape_(parts.options.shape),
      layout_(parts.options.layout()),
      memory_(parts.near, parts.near.slots(), parts.chunk_pages, parts.window_pages),
      flush_(parts.device.create_stream("write-through")),
      passes_{Pass(parts.device), Pass(parts.device)},
      freed_{parts.device.create_event(), parts.device.create_event()},
      filled_{parts.device.create_event(), parts.device.create_event()} {}

Prompt::~Prompt() = default;

void Prompt::run(std::span<const PromptChunk> chunks, bool ordered) {
  const bool now = !ordered || !parts_.device.info().own_processor;
  ++call_;
  running_ = true;
  receipts_.clear();
  try {
    for (const PromptChunk& chunk : chunks) allocate(chunk);
    run_pieces(chunks);
    if (now) collect(passes_[newest_ ^ 1]);
    if (now) collect(passes_[newest_]);
  } catch (const std::exception& error) {
    const bool quiet = abandon_call();
    running_ = false;
    if (!quiet) throw Error(Errc::timeout, std::string(error.what()) + "; nor did the queued work finish in time");
    for (const PromptChunk& chunk : chunks) release_unused(chunk);
    throw;
  }
  running_ = false;
  for (Receipt& receipt : receipts_) book(receipt);
}

void Prompt::run_pieces(std::span<const PromptChunk> chunks) {
  // Pieces that fit an area for chunks wherever in a page they begin, as many at a time as fit together.
  const std::uint32_t page_tokens = layout_.page_tokens;
  const std::uint32_t room = (parts_.chunk_pages / shape_.kv_heads - 1) * page_tokens;
  std::vector<Piece> group;
  std::uint32_t used = 0;
  const bool separate = parts_.device.info().separate_memory;
  // What comes over the link lands where a step that returned queued may still read.
  const auto loads = [&](const PromptChunk& chunk) { return chunk.layer->tokens != 0 || chunk.k.tokens > page_tokens; };
  if (separate && std::any_of(chunks.begin(), chunks.end(), loads) && memory_.borrow()) parts_.link.wait_for_device();
  for (const PromptChunk& chunk : chunks) {
    for (std::uint32_t done = 0; done < chunk.k.tokens;) {
      Piece piece{.chunk = &chunk, .done = done, .count = std::min(room, chunk.k.tokens - done)};
      piece.first = chunk.layer->tokens + done;
      piece.prefix = piece.first / page_tokens;
      piece.pages = static_cast<std::uint32_t>(div_up(piece.keys(), page_tokens)) - piece.prefix;
      const std::uint32_t needed = piece.pages * shape_.kv_heads;
      const std::uint64_t prefixes = prefix_pages(group) + std::uint64_t{piece.prefix} * shape_.kv_heads;
      const bool fits = used + needed <= parts_.chunk_pages && (!separate || prefixes <= memory_.half(0).pages);
      if (!group.empty() && (group.back().chunk == &chunk || !fits)) {
        run_group(group);
        used = 0;
      }
      piece.at = used;
      used += needed;
      done += piece.count;
      group.push_back(piece);
    }
  }
  if (!group.empty()) run_group(group);
}

void Prompt::settle() {
  std::exception_ptr failure;
  for (Pass* pass : {&passes_[newest_ ^ 1], &passes_[newest_]}) {
    try {
      collect(*pass);
    } catch (...) {
      if (!failure) failure = std::current_exception();
    }
  }
  memory_.give_back();
  if (failure) std::rethrow_exception(failure);
}

bool Prompt::completes(const LayerState& layer) const noexcept {
  return std::any_of(passes_.begin(), passes_.end(), [&](const Pass& pass) {
    return pass.queued && std::any_of(pass.legacies.begin(), pass.legacies.end(),
                                      [&](const Legacy& legacy) { return legacy.layer == &layer && legacy.complete; });
  });
}

void Prompt::allocate(const PromptChunk& chunk) {
  LayerState& layer = *chunk.layer;
  const auto pages = static_cast<std::uint32_t>(div_up(layer.tokens + chunk.k.tokens, layout_.page_tokens));
  if (pages <= layer.pages()) return;
  const std::uint32_t missing = pages - layer.pages();
  for (HeadPages& head : layer.heads) head.make_room(missing);
  const std::vector<PageRef> refs = parts_.pool.allocate(missing * shape_.kv_heads);
  for (std::uint32_t kv = 0; kv < shape_.kv_heads; ++kv) {
    for (std::uint32_t i = 0; i < missing; ++i) layer.heads[kv].push(refs[kv * missing + i]);
  }
}

/// Pages of a call that failed, on which nothing works any more.
void Prompt::release_unused(const PromptChunk& chunk) {
  const std::uint64_t used = div_up(chunk.layer->tokens, layout_.page_tokens);
  for (HeadPages& head : chunk.layer->heads) {
    while (head.pages() > used) parts_.pool.release(head.pop());
  }
}

void Prompt::run_group(std::vector<Piece>& group) {
  const MarkedRange range(parts_.device, "prompt chunk");
  Pass& pass = next();
  pass.call = call_;
  pass.queued = true;  // If it ends half-way, `run` waits for that half.
  queue(pass, newest_, group);
  group.clear();
}

void Prompt::queue(Pass& pass, std::size_t half, std::span<Piece> group) {
  for (const Piece& piece : group) {
    const PromptChunk& chunk = *piece.chunk;
    pass.legacies.push_back({.sequence = chunk.sequence,
                             .layer = chunk.layer,
                             .tokens = piece.count,
                             .prefix = piece.prefix,
                             .end = piece.keys(),
                             .attended = chunk.q.tokens != 0,
                             .complete = chunk.last && piece.done + piece.count == chunk.k.tokens});
  }
  // The prefix is in the host pool when the chunks before have been flushed; this one's flush is another.
  for (const Piece& piece : group) parts_.link.stream().wait(*piece.chunk->layer->flushed);
  append(pass, half, group);
  flush(pass, half, group);
  attend(pass, half, group);
  remember(pass, group);
  pass.device_marks.mark(parts_.device_stream);
}

void Prompt::append(Pass& pass, std::size_t half, std::span<const Piece> group) {
  for (const Piece& piece : group) {
    const PromptChunk& chunk = *piece.chunk;
    for (std::uint32_t kv = 0; kv < shape_.kv_heads; ++kv) {
      for (std::uint32_t token = piece.first; token < piece.keys();) {
        const std::uint32_t row = token % layout_.page_tokens;
        const std::uint32_t rows = std::min(layout_.page_tokens - row, piece.keys() - token);
        const std::uint32_t index = chunk_page(piece, half, kv) + token / layout_.page_tokens - piece.prefix;
        const std::uint32_t from = piece.done + token - piece.first;
        pass.appends.push_back({.k = chunk.k.row(from, kv),
                                .v = chunk.v.row(from, kv),
                                .dtype = chunk.k.dtype,
                                .token_stride = chunk.k.token_stride,
                                .page = page(index),
                                .first_row = row,
                                .count = rows});
        token += rows;
      }
    }
  }
  const bool traced = parts_.options.trace != nullptr;
  if (traced) pass.device_marks.mark(parts_.device_stream);
  parts_.device.backend().append(pass.appends, layout_, &parts_.device_stream);
  parts_.device_stream.record(*pass.appended);
  if (traced) pass.device_marks.mark(parts_.device_stream);
}

void Prompt::flush(Pass& pass, std::size_t half, std::span<const Piece> group) {
  copies_.clear();
  for (const Piece& piece : group) {
    for (std::uint32_t kv = 0; kv < shape_.kv_heads; ++kv) {
      const std::vector<std::uint32_t>& frames = piece.chunk->layer->heads[kv].frames;
      const std::uint32_t first_index = chunk_page(piece, half, kv);
      for (std::uint32_t i = 0; i < piece.pages; ++i) {
        const std::uint32_t begin = (piece.prefix + i) * layout_.page_tokens;
        const std::uint32_t row = std::max(piece.first, begin) - begin;
        const std::uint32_t end_row = std::min(piece.keys() - begin, layout_.page_tokens);
        const std::uint32_t frame = frames[piece.prefix + i];
        const Copy whole{.to = parts_.pool.frame(frame), .from = page(first_index + i), .bytes = layout_.page_bytes()};
        if (row == 0 && end_row == layout_.page_tokens) {
          add_copy(copies_, whole, i != 0 && parts_.pool.pinned_together(frames[piece.prefix + i - 1], frame));
          continue;
        }
        for (const std::uint64_t part : {std::uint64_t{0}, layout_.half_bytes()}) {  // Rows of K, then of V.
          const std::uint64_t offset = part + row * layout_.row_bytes();
          copies_.push_back(
              {.to = whole.to + offset, .from = whole.from + offset, .bytes = (end_row - row) * layout_.row_bytes()});
        }
      }
    }
  }
  flush_->wait(*pass.appended);
  pass.flush_marks.mark(*flush_);
  flush_->copy_in_background(copies_);
  pass.flush_marks.mark(*flush_, &PromptStats::flush_ns);
  for (const Piece& piece : group) flush_->record(*piece.chunk->layer->flushed);
}

/// Digests and 4-bit copies of the pages that these pieces filled.
void Prompt::build_indices(Pass& pass, std::size_t half, std::span<const Piece> group) {
  Backend& device = parts_.device.backend();
  const Int4Layout int4(layout_);
  copies_.clear();
  std::size_t pages = 0;
  for (const Piece& piece : group) pages += std::size_t{shape_.kv_heads} * piece.pages;
  pass.digests.reserve(pages);  // Queued work refers to the tasks.
  pass.quantized.reserve(pages);
  for (const Piece& piece : group) {
    LayerState& layer = *piece.chunk->layer;
    const PromptIndices wanted = parts_.heir.indices(*piece.chunk->sequence, layer);
    if (!wanted.digest && wanted.int4 == nullptr) continue;
    pass.legacies[static_cast<std::size_t>(&piece - group.data())].indexed = true;
    const std::uint32_t end = piece.keys() / layout_.page_tokens;
    const std::size_t first_digest = pass.digests.size();
    for (std::uint32_t kv = 0; kv < shape_.kv_heads; ++kv) {
      for (std::uint32_t at = piece.prefix; at < end; ++at) {
        const std::byte* const from = page(chunk_page(piece, half, kv) + at - piece.prefix);
        const std::uint64_t frame = layer.heads[kv].frames[at];
        if (wanted.digest)
          pass.digests.push_back({.page = from, .out = wanted.digests + frame * 2 * layout_.row_bytes()});
        if (wanted.int4 == nullptr) continue;
        std::byte* const copy = wanted.int4 + frame * int4.page_bytes();
        pass.quantized.push_back({.page = from, .rows = layout_.page_tokens, .out = copy});
        if (wanted.int4_host == nullptr) continue;
        const bool together = at != piece.prefix;
        add_copy(copies_,
                 {.to = wanted.int4_host + frame * int4.page_bytes(), .from = copy, .bytes = int4.page_bytes()},
                 together);
      }
    }
    if (pass.digests.size() == first_digest) continue;
    device.digest(std::span(pass.digests).subspan(first_digest), *wanted.digest, layout_, &parts_.device_stream);
    pass.device_marks.mark(parts_.device_stream, &PromptStats::digests_ns);
  }
  if (pass.quantized.empty()) return;
  device.quantize(pass.quantized, layout_, &parts_.device_stream);
  flush_->wait(pass.device_marks.mark(parts_.device_stream, &PromptStats::int4_ns));
  if (!copies_.empty()) flush_->copy_in_background(copies_);
  pass.flush_marks.mark(*flush_);
  for (const Piece& piece : group) flush_->record(*piece.chunk->layer->flushed);
}

void Prompt::remember(Pass& pass, std::span<const Piece> group) {
  const std::uint64_t row = std::uint64_t{shape_.q_heads} * shape_.head_dim;
  std::uint64_t floats = 0;
  for (std::size_t i = 0; i < group.size(); ++i) {
    const PromptChunk& chunk = *group[i].chunk;
    if (group[i].done + group[i].count != chunk.k.tokens) continue;  // A later piece has the last queries.
    Legacy& legacy = pass.legacies[i];
    legacy.last_q_rows = std::min(scheduler::prompt_queries(chunk.sequence->spec), chunk.last_q.tokens);
    legacy.last_q_at = floats;
    floats += legacy.last_q_rows * row;
  }
  if (floats == 0) return;
  if (!pass.last_q || pass.last_q->bytes() < floats * sizeof(float)) {
    pass.last_q = parts_.device.allocate_pinned(floats * sizeof(float));
  }
  std::vector<ToF32Task> tasks;
  for (std::size_t i = 0; i < group.size(); ++i) {
    const Legacy& legacy = pass.legacies[i];
    if (legacy.last_q_rows == 0) continue;
    const TensorView& last_q = group[i].chunk->last_q;
    TensorView tail = last_q;
    tail.data = last_q.row(last_q.tokens - legacy.last_q_rows, 0);
    tail.tokens = legacy.last_q_rows;
    tasks.push_back({.in = tail, .out = reinterpret_cast<float*>(pass.last_q->data()) + legacy.last_q_at});
  }
  parts_.device.backend().to_f32(tasks, &parts_.device_stream);
}

}  // namespace sluice::runtime
