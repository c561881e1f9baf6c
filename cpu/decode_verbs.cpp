#include "cpu/decode_verbs.hpp"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <limits>
#include <span>
#include <thread>
#include <utility>
#include <vector>

#include "cpu/host_stream.hpp"
#include "cpu/spin.hpp"
#include "cpu/verbs.hpp"
#include "sluice/error.hpp"
#include "sluice/int4.hpp"
#include "sluice/partial.hpp"

namespace sluice::cpu {
namespace {

constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

bool runs(const DecodeMemory& m) noexcept { return m.state->status == DecodeStatus::running; }

template <class T>
std::atomic_ref<T> shared(T& word) noexcept {
  return std::atomic_ref<T>(word);
}

/// body(row, KV head, index of both) for every row that is no padding.
template <class Body>
void for_each_head(const DecodeMemory& m, const Body& body) {
  for (std::uint32_t r = 0; r < m.bucket.rows; ++r) {
    if (m.rows[r].list == kNone) continue;
    for (std::uint32_t h = 0; h < m.shape.kv_heads; ++h) body(m.rows[r], h, r * m.shape.kv_heads + h);
  }
}

const std::uint32_t* list_of(const DecodeMemory& m, const DecodeRow& row) noexcept {
  return m.lists + std::uint64_t{row.list} * m.max_pages;
}

/// First of the group's query heads, over all rows.
std::uint64_t first_head(const DecodeMemory& m, std::uint32_t index) noexcept {
  return std::uint64_t{index} * m.shape.group();
}

void apply(const DecodeMemory& m) {
  const DecodeSlip& slip = *m.slip;
  std::copy_n(m.slip_rows, m.bucket.rows, m.rows);
  for (const DecodeListChange& change : std::span(m.slip_lists, slip.list_changes)) {
    m.lists[std::uint64_t{change.list} * m.max_pages + change.page] = change.block;
  }
  for (const DecodeNearChange& change : std::span(m.slip_near, slip.near_changes)) {
    m.near_of[change.block] = change.near;
  }
  m.state->planned = slip.forward;
}

void begin(const DecodeMemory& m) {
  DecodeState& state = *m.state;
  state.released = state.asked;
  state.status = state.planned > state.forward ? DecodeStatus::running : DecodeStatus::unplanned;
  state.forward = state.planned;
}

void cancel(const DecodeMemory& m) {
  DecodeState& state = *m.state;
  auto& outcome = m.mailbox->outcome;
  state.forward = state.planned;
  state.status = DecodeStatus::cancelled;
  shared(outcome.status).store(state.status, std::memory_order_relaxed);
  shared(outcome.forward).store(state.forward, std::memory_order_release);
  shared(outcome.cancelled).store(state.forward, std::memory_order_release);
}

void end(const DecodeMemory& m) {
  DecodeState& state = *m.state;
  auto& outcome = m.mailbox->outcome;
  if (state.status == DecodeStatus::cancelled) return;  // A part of a forward, without its beginning.
  if (state.status == DecodeStatus::unplanned) {
    shared(outcome.unplanned).store(++state.unplanned, std::memory_order_release);
    return;
  }
  if (state.status == DecodeStatus::running) state.status = DecodeStatus::done;
  shared(outcome.status).store(state.status, std::memory_order_relaxed);
  shared(outcome.near_tokens).store(state.near_tokens, std::memory_order_relaxed);
  shared(outcome.far_tokens).store(state.far_tokens, std::memory_order_relaxed);
  shared(outcome.waited_ns).store(state.waited_ns, std::memory_order_relaxed);
  shared(outcome.forward).store(state.forward, std::memory_order_release);
}

/// A row of K or V to its far page and, if there is one, its near page.
void put_row(const Kernels& kernels, const DecodeMemory& m, const TensorView& in, std::uint32_t row, std::uint32_t head,
             std::byte* far, std::byte* near) {
  float wide[kMaxHeadDim];
  kernels_for(kernels, in.dtype).widen(in.row(row, head), wide, m.shape.head_dim);
  kernels_for(kernels, m.layout.dtype).narrow(wide, far, m.shape.head_dim);
  if (near != nullptr) std::memcpy(near, far, m.layout.row_bytes());
}

void append(const Kernels& kernels, const DecodeMemory& m, const DecodeLayer& layer) {
  if (!runs(m)) return;
  if (layer.q.tokens != 0) {
    const std::uint64_t row_floats = std::uint64_t{m.shape.q_heads} * m.shape.head_dim;
    for (std::uint32_t r = 0; r < m.bucket.rows; ++r) {
      float* const q = m.q + r * row_floats;
      if (m.rows[r].list == kNone) std::fill_n(q, row_floats, 0.f);
      for (std::uint32_t h = 0; h < m.shape.q_heads && m.rows[r].list != kNone; ++h) {
        kernels_for(kernels, layer.q.dtype).widen(layer.q.row(r, h), q + h * m.shape.head_dim, m.shape.head_dim);
      }
      std::copy_n(q, row_floats, m.far_q + r * row_floats);
    }
  }
  const Int4Layout copy(m.layout);
  for_each_head(m, [&](const DecodeRow& row, std::uint32_t head, std::uint32_t index) {
    const std::uint32_t position = row.tokens - 1;
    const std::uint32_t at = position % m.layout.page_tokens;
    const std::uint32_t block = list_of(m, row)[position / m.layout.page_tokens];
    const std::uint32_t plane = m.plane(layer.layer, head);
    std::byte* const far = m.far + m.far_page(plane, block) * m.layout.page_bytes() + at * m.layout.row_bytes();
    std::byte* near = nullptr;
    if (m.near_of[block] != kNone) {
      near = m.near + m.near_page(plane, m.near_of[block]) * m.layout.page_bytes() + at * m.layout.row_bytes();
    }
    const std::uint64_t values = m.layout.half_bytes();
    const std::uint32_t r = index / m.shape.kv_heads;
    put_row(kernels, m, layer.k, r, head, far, near);
    put_row(kernels, m, layer.v, r, head, far + values, near == nullptr ? nullptr : near + values);
    std::byte* const codes = m.codes + m.far_page(plane, block) * copy.page_bytes();
    kernels_for(kernels, m.layout.dtype)
        .quantize({.k = far,
                   .codes = codes + at * copy.row_bytes(),
                   .params = codes + copy.params_offset() + at * Int4Layout::kParamBytes,
                   .rows = 1,
                   .head_dim = m.shape.head_dim});
  });
}

void score(const Kernels& kernels, const DecodeMemory& m, std::uint32_t layer) {
  if (!runs(m)) return;
  const Int4Layout copy(m.layout);
  std::vector<const std::byte*> codes, params;
  for_each_head(m, [&](const DecodeRow& row, std::uint32_t head, std::uint32_t index) {
    if (row.picks == 0) return;
    codes.clear();
    params.clear();
    for (std::uint32_t token = 0; token < row.tokens; ++token) {
      const std::uint32_t block = list_of(m, row)[token / m.layout.page_tokens];
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
                        .out = m.scores + first * m.bucket.max_tokens,
                        .token_stride = 1,
                        .head_stride = m.bucket.max_tokens});
  });
}

void choose(const DecodeMemory& m) {
  if (!runs(m)) return;
  for_each_head(m, [&](const DecodeRow& row, std::uint32_t, std::uint32_t index) {
    const std::uint64_t first = first_head(m, index);
    for (std::uint64_t h = first; h < first + m.shape.group() && row.picks != 0; ++h) {
      (void)select_top_k(m.scores + h * m.bucket.max_tokens + row.sink_end, row.recent_begin - row.sink_end, row.picks,
                         m.picks + h * m.bucket.max_picks);
    }
  });
}

/// Tokens that some head of the group attends.
void mark(const DecodeMemory& m, const DecodeRow& row, std::uint32_t index, std::vector<bool>& marks) {
  marks.assign(row.tokens, false);
  std::fill_n(marks.begin(), row.sink_end, true);
  std::fill(marks.begin() + row.recent_begin, marks.end(), true);
  const std::uint64_t first = first_head(m, index);
  for (std::uint64_t h = first; h < first + m.shape.group(); ++h) {
    for (std::uint32_t i = 0; i < row.picks; ++i) marks[row.sink_end + m.picks[h * m.bucket.max_picks + i]] = true;
  }
}

void split(const DecodeMemory& m, std::uint32_t layer) {
  if (!runs(m)) return;
  const std::uint64_t room = m.bucket.list_room(m.shape);
  std::vector<bool> marks;
  std::uint64_t all_far = 0;
  std::fill_n(m.near_counts, m.bucket.rows * m.shape.kv_heads, 0);
  const auto put_far_count = [&](std::uint32_t index, std::uint32_t count) {
    shared(m.far_counts[index]).store(count, std::memory_order_relaxed);  // A late worker may look.
  };
  for (std::uint32_t i = 0; i < m.bucket.rows * m.shape.kv_heads; ++i) put_far_count(i, 0);
  for_each_head(m, [&](const DecodeRow& row, std::uint32_t head, std::uint32_t index) {
    mark(m, row, index, marks);
    std::uint32_t near = 0;
    std::uint32_t far = 0;
    for (std::uint32_t token = 0; token < row.tokens; ++token) {
      if (!marks[token]) continue;
      const std::uint32_t block = list_of(m, row)[token / m.layout.page_tokens];
      const std::uint32_t at = token % m.layout.page_tokens;
      if (m.near_of[block] != kNone) {
        const std::uint64_t page = m.near_page(m.plane(layer, head), m.near_of[block]);
        m.near_rows[index * room + near++] = static_cast<std::uint32_t>(page * 2 * m.layout.page_tokens + at);
      } else {
        m.far_rows[index * room + far++] = block * m.layout.page_tokens + at;
      }
    }
    m.near_counts[index] = near;
    put_far_count(index, far);
    all_far += far;
    m.state->near_tokens += near;
  });
  m.state->far_tokens += all_far;
  if (all_far == 0) return;
  shared(m.mailbox->question.layer).store(layer, std::memory_order_relaxed);
  shared(m.mailbox->question.asked).store(++m.state->asked, std::memory_order_release);
}

void attend(const Kernels& kernels, const DecodeMemory& m) {
  if (!runs(m)) return;
  const std::uint64_t room = m.bucket.list_room(m.shape);
  std::vector<const std::byte*> rows;
  for_each_head(m, [&](const DecodeRow&, std::uint32_t, std::uint32_t index) {
    rows.clear();
    for (std::uint32_t i = 0; i < m.near_counts[index]; ++i) {
      rows.push_back(m.near + std::uint64_t{m.near_rows[index * room + i]} * m.layout.row_bytes());
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

/// By the clock of a process that runs: one that was suspended has not waited.
void await_answer(const DecodeMemory& m) {
  DecodeState& state = *m.state;
  if (state.released == state.asked) return;
  const auto begin = Clock::now();
  const Deadline deadline = deadline_after(std::chrono::nanoseconds(m.answer_ns));
  const auto answered = shared(m.mailbox->answer.answered);
  while (!spin_until([&] { return answered.load(std::memory_order_acquire) >= state.asked; })) {
    if (RunClock::now() >= deadline) {
      state.status = DecodeStatus::abandoned;
      break;
    }
    std::this_thread::yield();
  }
  state.released = state.asked;
  state.waited_ns +=
      static_cast<std::uint64_t>(std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now() - begin).count());
}

void put_out(const Kernels& kernels, const DecodeMemory& m, const DecodeLayer& layer, std::uint64_t h, const float* out,
             float lse) {
  const auto row = static_cast<std::uint32_t>(h / m.shape.q_heads);
  const auto head = static_cast<std::uint32_t>(h % m.shape.q_heads);
  kernels_for(kernels, layer.out.dtype).narrow(out, layer.out.row(row, head), m.shape.head_dim);
  if (layer.lse != nullptr) layer.lse[h] = lse;
}

void merge(const Kernels& kernels, const DecodeMemory& m, const DecodeLayer& layer) {
  if (runs(m)) await_answer(m);
  const bool valid = runs(m);
  float sum[kMaxHeadDim];
  for (std::uint64_t h = 0; h < std::uint64_t{m.bucket.rows} * m.shape.q_heads; ++h) {
    const std::uint64_t index = h / m.shape.group();
    const bool padding = m.rows[h / m.shape.q_heads].list == kNone;
    if (!valid || padding) {
      std::fill_n(sum, m.shape.head_dim, valid ? 0.f : kNaN);
      put_out(kernels, m, layer, h, sum, valid ? kEmptyLse : kNaN);
      continue;
    }
    const bool has_near = m.near_counts[index] != 0;
    const bool has_far = m.far_counts[index] != 0;
    const float near = has_near ? m.near_lse[h] : kEmptyLse;
    const float far = has_far ? m.far_lse[h] : kEmptyLse;
    if ((has_near && !(near > kEmptyLse)) || (has_far && !(far > kEmptyLse))) {
      // Keys were attended and weigh nothing that is a number.
      std::fill_n(sum, m.shape.head_dim, kNaN);
      put_out(kernels, m, layer, h, sum, kNaN);
      continue;
    }
    const MergeWeights weights = merge_weights(near, far);
    for (std::uint32_t c = 0; c < m.shape.head_dim; ++c) {
      const std::uint64_t at = h * m.shape.head_dim + c;
      sum[c] = (has_near ? weights.a * m.near_out[at] : 0.f) + (has_far ? weights.b * m.far_out[at] : 0.f);
    }
    put_out(kernels, m, layer, h, sum, weights.lse);
  }
}

}  // namespace

DecodeVerbs::DecodeVerbs(const Kernels* kernels) : kernels_(kernels != nullptr ? *kernels : fastest_kernels()) {}

void DecodeVerbs::apply(const DecodeMemory& memory, void* stream) {
  run_or_enqueue(static_cast<Stream*>(stream), "apply", [memory] { cpu::apply(memory); });
}
void DecodeVerbs::begin(const DecodeMemory& memory, void* stream) {
  run_or_enqueue(static_cast<Stream*>(stream), "begin", [memory] { cpu::begin(memory); });
}
void DecodeVerbs::append(const DecodeMemory& memory, const DecodeLayer& layer) {
  run_or_enqueue(static_cast<Stream*>(layer.stream), "append",
                 [this, memory, layer] { cpu::append(kernels_, memory, layer); });
}
void DecodeVerbs::score(const DecodeMemory& memory, const DecodeLayer& layer) {
  run_or_enqueue(static_cast<Stream*>(layer.stream), "score",
                 [this, memory, at = layer.layer] { cpu::score(kernels_, memory, at); });
}
void DecodeVerbs::choose(const DecodeMemory& memory, const DecodeLayer& layer) {
  run_or_enqueue(static_cast<Stream*>(layer.stream), "choose", [memory] { cpu::choose(memory); });
}
void DecodeVerbs::split(const DecodeMemory& memory, const DecodeLayer& layer) {
  run_or_enqueue(static_cast<Stream*>(layer.stream), "split", [memory, at = layer.layer] { cpu::split(memory, at); });
}
void DecodeVerbs::attend(const DecodeMemory& memory, const DecodeLayer& layer) {
  run_or_enqueue(static_cast<Stream*>(layer.stream), "attend", [this, memory] { cpu::attend(kernels_, memory); });
}
void DecodeVerbs::merge(const DecodeMemory& memory, const DecodeLayer& layer) {
  run_or_enqueue(static_cast<Stream*>(layer.stream), "merge",
                 [this, memory, layer] { cpu::merge(kernels_, memory, layer); });
}
void DecodeVerbs::cancel(const DecodeMemory& memory, void* stream) {
  run_or_enqueue(static_cast<Stream*>(stream), "cancel", [memory] { cpu::cancel(memory); });
}
void DecodeVerbs::end(const DecodeMemory& memory, void* stream) {
  run_or_enqueue(static_cast<Stream*>(stream), "end", [memory] { cpu::end(memory); });
}

}  // namespace sluice::cpu
