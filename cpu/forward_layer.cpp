#include "cpu/forward_layer.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <thread>
#include <vector>

#include "cpu/spin.hpp"
#include "cpu/verbs.hpp"
#include "sluice/int4.hpp"
#include "sluice/partial.hpp"

namespace sluice::cpu {
namespace {

constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

/// body(row, KV head, index of both) for every row that chooses, as it is in a layer.
template <class Body>
void for_each_head(const ForwardMemory& m, std::uint32_t layer, const Body& body) {
  for (std::uint32_t r = 0; r < m.bucket.decode_rows; ++r) {
    if (m.rows[r].list == kNone) continue;
    const ForwardRow row = m.rows[r].in(layer);
    for (std::uint32_t h = 0; h < m.shape.kv_heads; ++h) body(row, h, r * m.shape.kv_heads + h);
  }
}

const std::uint32_t* list_of(const ForwardMemory& m, std::uint32_t list) noexcept {
  return m.lists + std::uint64_t{list} * m.max_pages;
}

/// First of the group's query heads, over all rows that choose.
std::uint64_t first_head(const ForwardMemory& m, std::uint32_t index) noexcept {
  return std::uint64_t{index} * m.shape.group();
}

/// A row of K or V to its far page and, if there is one, its near page.
void put_row(const Kernels& kernels, const ForwardMemory& m, const TensorView& in, std::uint32_t row,
             std::uint32_t head, std::byte* far, std::byte* near) {
  float wide[kMaxHeadDim];
  kernels_for(kernels, in.dtype).widen(in.row(row, head), wide, m.shape.head_dim);
  kernels_for(kernels, m.layout.dtype).narrow(wide, far, m.shape.head_dim);
  if (near != nullptr) std::memcpy(near, far, m.layout.row_bytes());
}

/// All heads of a packed row.
void fill_out(const Kernels& kernels, const ForwardMemory& m, const ForwardLayer& layer, std::uint32_t at, float value,
              float lse) {
  float filled[kMaxHeadDim];
  std::fill_n(filled, m.shape.head_dim, value);
  for (std::uint32_t head = 0; head < m.shape.q_heads; ++head) {
    kernels_for(kernels, layer.out.dtype).narrow(filled, layer.out.row(at, head), m.shape.head_dim);
    if (layer.lse != nullptr) layer.lse[std::uint64_t{at} * m.shape.q_heads + head] = lse;
  }
}

void append_queries(const Kernels& kernels, const ForwardMemory& m, const ForwardLayer& layer) {
  const std::uint64_t floats = std::uint64_t{m.shape.q_heads} * m.shape.head_dim;
  for (std::uint32_t r = 0; r < m.bucket.decode_rows; ++r) {
    if (m.rows[r].list == kNone) continue;
    float* const q = m.q + r * floats;
    for (std::uint32_t h = 0; h < m.shape.q_heads; ++h) {
      kernels_for(kernels, layer.q.dtype)
          .widen(layer.q.row(m.rows[r].at, h), q + h * m.shape.head_dim, m.shape.head_dim);
    }
    std::copy_n(q, floats, m.far_q + r * floats);
  }
}

/// Queries of a prompt's last tokens, for the policies of the CPU.
void append_tail(const Kernels& kernels, const ForwardMemory& m, const ForwardLayer& layer, std::uint32_t r) {
  const std::uint64_t row = std::uint64_t{layer.layer} * m.tail_rows + m.tokens[r].tail;
  for (std::uint32_t h = 0; h < m.shape.q_heads; ++h) {
    kernels_for(kernels, layer.q.dtype)
        .widen(layer.q.row(r, h), m.tails + (row * m.shape.q_heads + h) * m.shape.head_dim, m.shape.head_dim);
  }
}

void append_token(const Kernels& kernels, const ForwardMemory& m, const ForwardLayer& layer, std::uint32_t r,
                  std::uint32_t head) {
  const Int4Layout copy(m.layout);
  const std::uint32_t position = m.tokens[r].position;
  const std::uint32_t at = position % m.layout.page_tokens;
  const std::uint32_t block = list_of(m, m.tokens[r].list)[position / m.layout.page_tokens];
  const std::uint32_t plane = m.plane(layer.layer, head);
  std::byte* const far = m.far + m.far_page(plane, block) * m.layout.page_bytes() + at * m.layout.row_bytes();
  const std::uint32_t place = m.near_row_of(plane, block * m.layout.page_tokens + at);
  std::byte* const near = place == kNone ? nullptr : m.near_key(plane, place);
  const std::uint64_t values = m.layout.half_bytes();
  put_row(kernels, m, layer.k, r, head, far, near);
  put_row(kernels, m, layer.v, r, head, far + values, near == nullptr ? nullptr : near + values);
  std::byte* const codes = m.codes + m.far_page(plane, block) * copy.page_bytes();
  kernels_for(kernels, m.layout.dtype)
      .quantize({.k = far,
                 .codes = codes + at * copy.row_bytes(),
                 .params = codes + copy.params_offset() + at * Int4Layout::kParamBytes,
                 .rows = 1,
                 .head_dim = m.shape.head_dim});
}

/// Tokens that some head of the group attends.
void mark(const ForwardMemory& m, const ForwardRow& row, std::uint32_t index, std::vector<bool>& marks) {
  marks.assign(row.tokens, false);
  std::fill_n(marks.begin(), row.sink_end, true);
  std::fill(marks.begin() + row.recent_begin, marks.end(), true);
  const std::uint64_t first = first_head(m, index);
  for (std::uint64_t h = first; h < first + m.shape.group(); ++h) {
    for (std::uint32_t i = 0; i < row.picks; ++i) marks[row.sink_end + m.picks[h * m.max_picks + i]] = true;
    for (std::uint32_t token = row.sink_end; token < row.recent_begin && row.mass > 0.f; ++token) {
      if ((m.masks[h * m.mask_words() + token / 32] >> token % 32 & 1) != 0) marks[token] = true;
    }
  }
}

/// By the clock of a process that runs: one that was suspended has not waited.
void await_answer(const ForwardMemory& m) {
  ForwardState& state = *m.state;
  if (state.released == state.asked) return;
  const auto begin = Clock::now();
  const Deadline deadline = deadline_after(std::chrono::nanoseconds(m.answer_ns));
  const auto answered = shared(m.mailbox->answer.answered);
  while (!spin_until([&] { return answered.load(std::memory_order_acquire) >= state.asked; })) {
    if (RunClock::now() >= deadline) {
      state.status = ForwardStatus::abandoned;
      break;
    }
    std::this_thread::yield();
  }
  state.released = state.asked;
  state.waited_ns +=
      static_cast<std::uint64_t>(std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now() - begin).count());
}

/// A head's output from its near and far parts, whose lse is what `sum` is given back with. `asks`: of its row.
float merge_head(const ForwardMemory& m, std::uint64_t h, bool asks, float* sum) {
  const std::uint64_t index = h / m.shape.group();
  const bool has_near = m.near_counts[index] != 0;
  const bool has_far = asks ? m.far_lse[h] != kEmptyLse : m.far_listed[index] != 0;
  const float near = has_near ? m.near_lse[h] : kEmptyLse;
  const float far = has_far ? m.far_lse[h] : kEmptyLse;
  if ((has_near && !(near > kEmptyLse)) || (has_far && !(far > kEmptyLse))) {
    // Keys were attended and weigh nothing that is a number.
    std::fill_n(sum, m.shape.head_dim, kNaN);
    return kNaN;
  }
  const MergeWeights weights = merge_weights(near, far);
  for (std::uint32_t c = 0; c < m.shape.head_dim; ++c) {
    const std::uint64_t at = h * m.shape.head_dim + c;
    sum[c] = (has_near ? weights.a * m.near_out[at] : 0.f) + (has_far ? weights.b * m.far_out[at] : 0.f);
  }
  return weights.lse;
}

}  // namespace

void append(const Kernels& kernels, const ForwardMemory& m, const ForwardLayer& layer) {
  const bool attends = layer.q.tokens != 0;
  for (std::uint32_t r = 0; r < m.bucket.rows(); ++r) {
    const bool padding = runs(m) && m.tokens[r].list == kNone;
    if (attends && (padding || !runs(m)))
      fill_out(kernels, m, layer, r, padding ? 0.f : kNaN, padding ? kEmptyLse : kNaN);
    if (padding || !runs(m)) continue;
    for (std::uint32_t h = 0; h < m.shape.kv_heads; ++h) append_token(kernels, m, layer, r, h);
    if (attends && m.tokens[r].tail != kNone) append_tail(kernels, m, layer, r);
  }
  if (attends && runs(m)) append_queries(kernels, m, layer);
}

void prefill(Backend& prompts, const ForwardMemory& m, const ForwardLayer& layer) {
  if (!runs(m)) return;
  const PrefillShape strides{.q_dtype = layer.q.dtype,
                             .out_dtype = layer.out.dtype,
                             .q_token_stride = layer.q.token_stride,
                             .q_head_stride = layer.q.head_stride,
                             .out_token_stride = layer.out.token_stride,
                             .out_head_stride = layer.out.head_stride};
  std::vector<float> lse;
  for (const ForwardChunk& chunk : std::span(m.chunks, m.bucket.prefills)) {
    for (std::uint32_t h = 0; h < m.shape.kv_heads && chunk.list != kNone; ++h) {
      const std::uint32_t head = h * m.shape.group();
      lse.resize(std::size_t{chunk.count} * m.shape.group());
      const PrefillTask task{.q = layer.q.row(chunk.at, head),
                             .kv = {.base = m.far + m.far_page(m.plane(layer.layer, h), 0) * m.layout.page_bytes(),
                                    .frames = list_of(m, chunk.list),
                                    .layout = m.layout},
                             .first = chunk.first,
                             .count = chunk.count,
                             .out = layer.out.row(chunk.at, head),
                             .lse = lse.data()};
      prompts.prefill({&task, 1}, strides, m.shape, nullptr);
      for (std::size_t i = 0; i < lse.size() && layer.lse != nullptr; ++i)
        layer.lse[(chunk.at + i / m.shape.group()) * m.shape.q_heads + head + i % m.shape.group()] = lse[i];
    }
  }
}

void score(const Kernels& kernels, const ForwardMemory& m, std::uint32_t layer) {
  if (!runs(m)) return;
  const Int4Layout copy(m.layout);
  std::vector<const std::byte*> codes, params;
  for_each_head(m, layer, [&](const ForwardRow& row, std::uint32_t head, std::uint32_t index) {
    if (!row.ranks()) return;
    codes.clear();
    params.clear();
    for (std::uint32_t token = 0; token < row.tokens; ++token) {
      const std::uint32_t block = list_of(m, row.list)[token / m.layout.page_tokens];
      const std::byte* const page = m.codes + m.far_page(m.plane(layer, head), block) * copy.page_bytes();
      codes.push_back(page + token % m.layout.page_tokens * copy.row_bytes());
      params.push_back(page + copy.params_offset() + token % m.layout.page_tokens * Int4Layout::kParamBytes);
    }
    const std::uint64_t first = first_head(m, index);
    kernels.score_int4({.q = m.q + first * m.shape.head_dim,
                        .codes = codes.data(),
                        .params = params.data(),
                        .count = row.tokens,
                        .group = m.shape.group(),
                        .head_dim = m.shape.head_dim,
                        .out = m.scores + first * m.largest.max_tokens,
                        .token_stride = 1,
                        .head_stride = m.largest.max_tokens});
  });
}

void choose(const Kernels& kernels, const ForwardMemory& m, std::uint32_t layer) {
  if (!runs(m)) return;
  for_each_head(m, layer, [&](const ForwardRow& row, std::uint32_t, std::uint32_t index) {
    const std::uint64_t first = first_head(m, index);
    for (std::uint64_t h = first; h < first + m.shape.group() && row.ranks(); ++h) {
      const float* const scores = m.scores + h * m.largest.max_tokens;
      if (row.mass > 0.f) {
        (void)select_top_p(kernels, {.values = {scores, row.tokens},
                                     .p = row.mass,
                                     .begin = row.sink_end,
                                     .end = row.recent_begin,
                                     .mask = m.masks + h * m.mask_words()});
      } else {
        (void)select_top_k(scores + row.sink_end, row.recent_begin - row.sink_end, row.picks,
                           m.picks + h * m.max_picks);
      }
    }
  });
}

void split(const ForwardMemory& m, std::uint32_t layer) {
  if (!runs(m)) return;
  const std::uint64_t room = m.list_room();
  std::vector<bool> marks;
  std::uint64_t all_far = 0;
  std::uint32_t choices = 0;
  const std::uint32_t lists = m.bucket.decode_rows * m.shape.kv_heads;
  std::fill_n(m.near_counts, lists, 0);
  std::fill_n(m.far_windows, lists, 0);
  const auto put_far_count = [&](std::uint32_t index, std::uint32_t count) {
    m.far_listed[index] = count;
    shared(m.far_counts[index]).store(count, std::memory_order_relaxed);  // A late worker may look.
  };
  for (std::uint32_t i = 0; i < lists; ++i) put_far_count(i, 0);
  for_each_head(m, layer, [&](const ForwardRow& row, std::uint32_t head, std::uint32_t index) {
    mark(m, row, index, marks);
    std::uint32_t near = 0;
    std::uint32_t far = 0;
    for (std::uint32_t token = 0; token < row.tokens; ++token) {
      if (!marks[token]) continue;
      const std::uint32_t block = list_of(m, row.list)[token / m.layout.page_tokens];
      const std::uint32_t at = token % m.layout.page_tokens;
      const std::uint32_t plane = m.plane(layer, head);
      if (const std::uint32_t place = m.near_row_of(plane, block * m.layout.page_tokens + at); place != kNone) {
        // Where everything is attended, that says nothing of what will be.
        if (!row.whole()) m.near_rows[m.near_row(plane, place)].used = static_cast<std::uint32_t>(m.state->forward);
        m.near_lists[index * room + near++] = m.near_entry(plane, place);
      } else {
        m.far_rows[index * room + far++] = block * m.layout.page_tokens + at;
        m.far_windows[index] |= row.in_window(token) ? 1 : 0;
      }
    }
    m.near_counts[index] = near;
    put_far_count(index, far);
    all_far += far;
    choices += row.asks;
    m.state->near_tokens += near;
  });
  m.state->far_tokens += all_far;
  if (all_far == 0 && choices == 0) return;
  shared(m.mailbox->question.forward).store(m.state->forward, std::memory_order_relaxed);
  shared(m.mailbox->question.layer).store(layer, std::memory_order_relaxed);
  shared(m.mailbox->question.choices).store(choices, std::memory_order_relaxed);
  shared(m.mailbox->question.lists).store(lists, std::memory_order_relaxed);
  shared(m.mailbox->question.asked).store(++m.state->asked, std::memory_order_release);
}

void attend(const Kernels& kernels, const ForwardMemory& m, std::uint32_t layer) {
  if (!runs(m)) return;
  const std::uint64_t room = m.list_room();
  std::vector<const std::byte*> rows;
  for_each_head(m, layer, [&](const ForwardRow&, std::uint32_t, std::uint32_t index) {
    rows.clear();
    for (std::uint32_t i = 0; i < m.near_counts[index]; ++i) {
      rows.push_back(m.near + std::uint64_t{m.near_lists[index * room + i]} * m.layout.row_bytes());
    }
    const std::uint64_t first = first_head(m, index);
    kernels_for(kernels, m.layout.dtype)
        .attend({.q = m.q + first * m.shape.head_dim,
                 .k = rows.data(),
                 .v_offset = m.layout.half_bytes(),
                 .count = m.near_counts[index],
                 .group = m.shape.group(),
                 .head_dim = m.shape.head_dim,
                 .out = m.near_out + first * m.shape.head_dim,
                 .lse = m.near_lse + first});
  });
}

void merge(const Kernels& kernels, const ForwardMemory& m, const ForwardLayer& layer) {
  if (!runs(m)) return;
  await_answer(m);
  float sum[kMaxHeadDim];
  for (std::uint32_t r = 0; r < m.bucket.decode_rows; ++r) {
    const ForwardRow& row = m.rows[r];
    if (row.list == kNone) continue;
    if (!runs(m)) fill_out(kernels, m, layer, row.at, kNaN, kNaN);
    const bool asks = row.in(layer.layer).asks != 0;
    for (std::uint32_t head = 0; head < m.shape.q_heads && runs(m); ++head) {
      const float lse = merge_head(m, std::uint64_t{r} * m.shape.q_heads + head, asks, sum);
      kernels_for(kernels, layer.out.dtype).narrow(sum, layer.out.row(row.at, head), m.shape.head_dim);
      if (layer.lse != nullptr) layer.lse[std::uint64_t{row.at} * m.shape.q_heads + head] = lse;
    }
  }
}

}  // namespace sluice::cpu
