// The attention of the prompt phase: in the host pool, over a prefix that is all on the device, or over windows of it.
#include <algorithm>
#include <array>
#include <string>

#include "runtime/grow.hpp"
#include "runtime/host_kv.hpp"
#include "runtime/prompt.hpp"
#include "sluice/error.hpp"

namespace sluice::runtime {
namespace {

bool same(const PrefillShape& a, const PrefillShape& b) {
  return a.q_dtype == b.q_dtype && a.out_dtype == b.out_dtype && a.q_token_stride == b.q_token_stride &&
         a.q_head_stride == b.q_head_stride && a.out_token_stride == b.out_token_stride &&
         a.out_head_stride == b.out_head_stride;
}

}  // namespace

void Prompt::attend(Pass& pass, std::size_t half, std::span<Piece> group) {
  const bool attends = group.front().chunk->q.tokens != 0;  // All of a call attend, or none.
  for (Piece& piece : group) piece.sparse = attends && wants_sparse(piece);
  if (!parts_.device.info().separate_memory) return attend_in_place(pass, group);
  for (std::size_t i = 0; i < group.size(); ++i) pass.legacies[i].loaded_bytes += load_tail(group[i], half);
  parts_.link.stream().record(*pass.loaded);
  pass.device_marks.mark(parts_.device_stream);
  parts_.device_stream.wait(*pass.loaded);
  pass.device_marks.mark(parts_.device_stream, &PromptStats::load_wait_ns);
  build_indices(pass, half, group);
  if (!attends) return;
  const std::uint64_t prefixes = prefix_pages(group);
  if (prefixes <= memory_.half(half).pages) return attend_resident(pass, half, memory_.half(half), group);
  pass.spread = true;
  collect(passes_[half ^ 1]);    // It may still read its half.
  Piece& piece = group.front();  // `run` sees to it that there is no other.
  if (piece.sparse && prefixes > memory_.whole().pages) {
    throw Error(Errc::out_of_capacity,
                "flexprefill chooses among all keys of a layer at once, and those of " + std::to_string(piece.keys()) +
                    " tokens do not fit the free near memory; raise near_bytes to " +
                    std::to_string(prefixes * layout_.page_bytes()) + " or more, or prefill with auto or full");
  }
  piece.sparse ? attend_resident(pass, half, memory_.whole(), group) : attend_windows(pass, half, piece);
}

std::uint64_t Prompt::prefix_pages(std::span<const Piece> group) const noexcept {
  std::uint64_t pages = 0;
  for (const Piece& piece : group) pages += std::uint64_t{piece.prefix} * shape_.kv_heads;
  return pages;
}

bool Prompt::wants_sparse(const Piece& piece) {
  Sequence& sequence = *piece.chunk->sequence;
  const PrefillSpec& spec = sequence.prefill;
  if (piece.chunk->q.tokens == 0 || spec.mode == PrefillMode::full) return false;
  if (piece.keys() <= std::max(2 * kPrefillBlock, spec.flex.min_budget)) return false;
  if (spec.mode == PrefillMode::flexprefill) return true;
  const bool here = !parts_.device.info().separate_memory || prefix_pages({&piece, 1}) <= memory_.whole().pages;
  LayerState& layer = *piece.chunk->layer;
  return here && sequence.bets.bet({.first = piece.first, .count = piece.count},
                                   static_cast<std::uint32_t>(&layer - sequence.layers.data()), shape_.layers,
                                   parts_.device.backend().prefill_costs(), layer.prefill_rest);
}

PrefillShape Prompt::strides(const Piece& piece) const {
  const TensorView& q = piece.chunk->q;
  const MutableTensorView& out = piece.chunk->out;
  return {.q_dtype = q.dtype,
          .out_dtype = out.dtype,
          .q_token_stride = q.token_stride,
          .q_head_stride = q.head_stride,
          .out_token_stride = out.token_stride,
          .out_head_stride = out.head_stride};
}

PrefillTask Prompt::task(const Piece& piece, std::uint32_t kv) const {
  const std::uint32_t head = kv * shape_.group();
  return {.q = piece.chunk->q.row(piece.done, head),
          .kv = {.base = parts_.memory, .frames = nullptr, .layout = layout_},
          .first = piece.first,
          .count = piece.count,
          .out = piece.chunk->out.row(piece.done, head)};
}

void Prompt::attend_in_place(Pass& pass, std::span<const Piece> group) {
  if (group.front().chunk->q.tokens == 0) return;
  for (const Piece& piece : group) {
    parts_.device_stream.wait(*piece.chunk->layer->flushed);
    for (std::uint32_t kv = 0; kv < shape_.kv_heads; ++kv) {
      pass.prefills.push_back(task(piece, kv));
      pass.prefills.back().kv = far_view(parts_.pool, piece.chunk->layer->heads[kv]);
    }
  }
  pass.device_marks.mark(parts_.device_stream);
  attend_tasks(pass, group);
}

void Prompt::attend_resident(Pass& pass, std::size_t half, PromptMemory::Area prefixes, std::span<const Piece> group) {
  std::size_t entries = 0;
  for (const Piece& piece : group) entries += std::size_t{shape_.kv_heads} * (piece.prefix + piece.pages);
  pass.frames.reserve(entries);  // Queued work refers to the entries.
  plan_sums(pass, group);
  std::uint32_t at = prefixes.first;
  for (std::size_t i = 0; i < group.size(); ++i) {
    const Piece& piece = group[i];
    for (std::uint32_t kv = 0; kv < shape_.kv_heads; ++kv) {
      pass.prefills.push_back(task(piece, kv));
      pass.prefills.back().kv.frames = pass.frames.data() + pass.frames.size();
      load(piece, kv, 0, piece.prefix, at);
      for (std::uint32_t page = 0; page < piece.prefix; ++page) pass.frames.push_back(at++);
      for (std::uint32_t page = 0; page < piece.pages; ++page)
        pass.frames.push_back(chunk_page(piece, half, kv) + page);
    }
    pass.legacies[i].loaded_bytes += std::uint64_t{piece.prefix} * shape_.kv_heads * layout_.page_bytes();
  }
  parts_.link.stream().record(*pass.loaded);
  pass.device_marks.mark(parts_.device_stream);
  parts_.device_stream.wait(*pass.loaded);
  pass.device_marks.mark(parts_.device_stream, &PromptStats::load_wait_ns);
  attend_tasks(pass, group);
  sum_attention(pass, group);
}

/// One verb for consecutive pieces of one kind. The pass's tasks are those of the pieces, kv_heads each.
void Prompt::attend_tasks(Pass& pass, std::span<const Piece> group) {
  reserve_scratch(pass, group);
  select(pass, group);
  Backend& device = parts_.device.backend();
  for (std::size_t begin = 0; begin < group.size();) {
    std::size_t end = begin + 1;
    while (end < group.size() && group[end].sparse == group[begin].sparse &&
           same(strides(group[end]), strides(group[begin]))) {
      ++end;
    }
    const auto tasks = std::span(pass.prefills).subspan(begin * shape_.kv_heads, (end - begin) * shape_.kv_heads);
    device.prefill(tasks, strides(group[begin]), shape_, &parts_.device_stream);
    begin = end;
  }
  pass.device_marks.mark(parts_.device_stream, &PromptStats::attend_ns);
}

/// The chunk's own keys first, while the first windows of the prefix are on their way.
void Prompt::attend_windows(Pass& pass, std::size_t half, const Piece& piece) {
  const std::uint32_t kv_heads = shape_.kv_heads;
  const std::uint32_t unit = std::max(1u, kPrefillBlock / layout_.page_tokens);  // No block of keys in two windows.
  const std::uint32_t room = memory_.half(0).pages / kv_heads / unit * unit;
  const auto windows = static_cast<std::uint32_t>(div_up(piece.prefix, room));
  const std::uint64_t rows = std::uint64_t{piece.count} * shape_.group();
  grow(so_far_, rows * kv_heads * (shape_.head_dim + 1) * sizeof(float),
       [this](std::uint64_t bytes) { return parts_.device.allocate(bytes); });
  auto* const so_far = reinterpret_cast<float*>(so_far_->data());
  float* const lse = so_far + rows * kv_heads * shape_.head_dim;
  pass.frames.reserve(std::size_t{kv_heads} * (piece.pages + 2 * room));
  pass.prefills.reserve(std::size_t{kv_heads} * (1 + windows));
  const auto list = [&](std::uint32_t first, std::uint32_t pages) {
    const std::uint32_t* const listed = pass.frames.data() + pass.frames.size();
    for (std::uint32_t i = 0; i < pages; ++i) pass.frames.push_back(first + i);
    return listed;
  };
  const auto attend_window = [&](std::uint32_t begin, std::uint32_t end, bool last, auto&& frames_of) {
    const std::size_t first = pass.prefills.size();
    for (std::uint32_t kv = 0; kv < kv_heads; ++kv) {
      PrefillTask window = task(piece, kv);
      window.kv.frames = frames_of(kv);
      window.key_begin = begin;
      window.key_end = end;
      window.so_far = so_far + kv * rows * shape_.head_dim;
      window.lse = lse + kv * rows;
      window.first_window = first == 0;
      window.last_window = last;
      pass.prefills.push_back(window);
    }
    parts_.device.backend().prefill(std::span(pass.prefills).subspan(first), strides(piece), shape_,
                                    &parts_.device_stream);
    pass.device_marks.mark(parts_.device_stream, &PromptStats::attend_ns);
  };

  pass.device_marks.mark(parts_.device_stream);
  attend_window(piece.prefix * layout_.page_tokens, kNone, windows == 0,
                [&](std::uint32_t kv) { return list(chunk_page(piece, half, kv), piece.pages); });
  std::array<const std::uint32_t*, 2> listed{};
  for (std::uint32_t i = 0; i < windows; ++i) {
    const std::uint32_t begin = i * room;
    const std::uint32_t end = std::min(begin + room, piece.prefix);
    const std::size_t side = i % 2;
    const std::uint32_t at = memory_.half(side).first;
    if (i < 2) listed[side] = list(at, kv_heads * room);
    parts_.link.stream().wait(*freed_[side]);
    for (std::uint32_t kv = 0; kv < kv_heads; ++kv) load(piece, kv, begin, end, at + kv * room);
    parts_.link.stream().record(*filled_[side]);
    parts_.device_stream.wait(*filled_[side]);
    pass.device_marks.mark(parts_.device_stream, &PromptStats::load_wait_ns);
    attend_window(begin * layout_.page_tokens, end * layout_.page_tokens, i + 1 == windows,
                  [&](std::uint32_t kv) { return listed[side] + kv * room; });
    parts_.device_stream.record(*freed_[side]);
  }
  pass.legacies.front().loaded_bytes += std::uint64_t{piece.prefix} * kv_heads * layout_.page_bytes();
}

void Prompt::load(const Piece& piece, std::uint32_t kv, std::uint32_t begin, std::uint32_t end, std::uint32_t to) {
  if (begin == end) return;
  const HeadPages& head = piece.chunk->layer->heads[kv];
  moves_.clear();
  for (std::uint32_t page = begin; page < end; ++page) {
    moves_.push_back({.page = head.refs[page], .slot = to + page - begin});
  }
  parts_.link.fetch_ahead(moves_, parts_.memory);
}

/// Rows of the chunk's first page that an earlier chunk wrote. Returns their bytes.
std::uint64_t Prompt::load_tail(const Piece& piece, std::size_t half) {
  const std::uint32_t rows = piece.first % layout_.page_tokens;
  if (rows == 0) return 0;
  copies_.clear();
  for (std::uint32_t kv = 0; kv < shape_.kv_heads; ++kv) {
    const std::byte* const from = parts_.pool.frame(piece.chunk->layer->heads[kv].frames[piece.prefix]);
    std::byte* const to = page(chunk_page(piece, half, kv));
    for (const std::uint64_t part : {std::uint64_t{0}, layout_.half_bytes()}) {
      copies_.push_back({.to = to + part, .from = from + part, .bytes = rows * layout_.row_bytes()});
    }
  }
  parts_.link.copy(copies_);
  return 2 * rows * layout_.row_bytes() * shape_.kv_heads;
}

}  // namespace sluice::runtime
