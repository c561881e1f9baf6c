#include "cpu/forward/forward_layer.hpp"

#include <algorithm>
#include <cmath>
#include <vector>

#include "cpu/forward/forward_wait.hpp"
#include "cpu/threads/lent.hpp"
#include "sluice/step/partial.hpp"
#include "sluice/step/prefill_choice.hpp"

namespace sluice::cpu {
namespace {

/// When the layer began to wait in `fetch`.
RunClock::time_point fetching_since(const ForwardMemory& m) {
  return RunClock::time_point(std::chrono::nanoseconds(m.state->fetching_ns));
}

void await_answer(const ForwardMemory& m) {
  ForwardState& state = *m.state;
  if (state.released == state.asked) return;
  const auto answered = shared(m.mailbox->answer.answered);
  // Of one that fetched what the CPU chose, since it began to.
  const RunClock::time_point since = m.fetches_chosen ? fetching_since(m) : RunClock::now();
  await(m, answer_deadline(m, since), [&] { return answered.load(std::memory_order_acquire) >= state.asked; });
  state.released = state.asked;
}

/// A head's output, into `sum`, from what was attended near, over the link, and far; returns its lse.
float merge_head(const ForwardMemory& m, std::uint64_t h, const ForwardRow& row, float* sum) {
  const std::uint64_t index = h / m.shape.group();
  const std::uint64_t at = h * m.shape.head_dim;
  float lse = kEmptyLse;
  bool numbers = true;
  std::fill_n(sum, m.shape.head_dim, 0.f);
  const auto add = [&](const float* out, float mass) {
    numbers &= mass > kEmptyLse;
    const MergeWeights weights = merge_weights(lse, mass);
    for (std::uint32_t c = 0; c < m.shape.head_dim; ++c) sum[c] = weights.a * sum[c] + weights.b * out[c];
    lse = weights.lse;
  };
  if (m.near_counts[index] != 0 || row.drafts != 0) add(m.near_out + at, m.near_lse[h]);
  if (m.fetches() && (m.fetch_heads[index] >> h % m.shape.group() & 1) != 0) add(m.fetched_out + at, m.fetched_lse[h]);
  const bool listed = m.far_listed[index] != m.fetched_of(m.far_listed[index]);
  if (row.asks != 0 ? m.far_lse[h] != kEmptyLse : listed) add(m.far_out + at, m.far_lse[h]);
  if (numbers) return lse;
  // Keys were attended and weigh nothing that is a number.
  std::fill_n(sum, m.shape.head_dim, kNaN);
  return kNaN;
}

/// What a KV head of a row attends, of keys in the layout of near ones, into its near part.
void attend_rows(const Kernels& kernels, const ForwardMemory& m, const ForwardRow& row, std::uint32_t index,
                 const std::vector<const std::byte*>& keys) {
  const std::uint64_t first = first_head(m, index);
  kernels_for(kernels, m.layout.dtype)
      .attend({.q = m.q + first * m.shape.head_dim,
               .scale = m.shape.score_scale(),
               .softcap = m.shape.softcap,
               .k = keys.data(),
               .v_offset = m.layout.values_offset(),
               .corrections = row.draws.any() ? m.near_corrections_of(index) : nullptr,
               .count = static_cast<std::uint32_t>(keys.size()),
               .group = m.shape.group(),
               .head_dim = m.shape.head_dim,
               .out = m.near_out + first * m.shape.head_dim,
               .lse = m.near_lse + first});
}

}  // namespace

void prefill(const Host& host, const ForwardMemory& m, const ForwardLayer& layer) {
  if (!runs(m)) return;
  struct Parts {
    std::vector<float> lse;
    std::vector<std::uint32_t> blocks;
  };
  const Lent<Parts> lent(host.workers);  // A worker that is late still writes there.
  auto& [lse, blocks] = *lent;
  const PrefillShape strides{.q_dtype = layer.q.dtype,
                             .out_dtype = layer.out.dtype,
                             .q_token_stride = layer.q.token_stride,
                             .q_head_stride = layer.q.head_stride,
                             .out_token_stride = layer.out.token_stride,
                             .out_head_stride = layer.out.head_stride};
  for (std::uint32_t c = 0; c < m.bucket.prefills; ++c) {
    const ForwardChunk& chunk = m.chunks[c];
    for (std::uint32_t h = 0; h < m.shape.kv_heads && chunk.list != kNone; ++h) {
      const std::uint32_t head = h * m.shape.group();
      lse.resize(std::size_t{chunk.count} * m.shape.group());
      PrefillTask task{.q = layer.q.row(chunk.at, head),
                       .kv = {.base = m.far_block(m.plane(layer.layer, h), 0),
                              .frames = m.list_of(chunk.list),
                              .layout = m.far_layout},
                       .first = chunk.first,
                       .count = chunk.count,
                       .out = layer.out.row(chunk.at, head),
                       .reach = m.window,
                       .lse = lse.data()};
      if (m.sparse_prefill && chunk.sparse_in(layer.layer)) {
        const std::uint32_t query_blocks = prefill_blocks(chunk.first, chunk.count);
        blocks.resize(std::size_t{m.shape.group()} * query_blocks * prefill_mask_words(chunk.keys()));
        const SelectBlocksTask choice{.q = task.q,
                                      .kv = task.kv,
                                      .first = chunk.first,
                                      .count = chunk.count,
                                      .blocks = blocks.data(),
                                      .choices = m.choices_of(m.state->forward, layer.layer, c) + head};
        select_blocks(host, {&choice, 1}, m.prefill, strides, m.shape);
        task.blocks = blocks.data();
      }
      prefill(host, {&task, 1}, strides, m.shape);
      for (std::size_t i = 0; i < lse.size() && layer.lse != nullptr; ++i)
        layer.lse[(chunk.at + i / m.shape.group()) * m.shape.q_heads + head + i % m.shape.group()] = lse[i];
    }
  }
}

void attend(const Workers& workers, const Kernels& kernels, const ForwardMemory& m, std::uint32_t layer) {
  if (!runs(m)) return;
  for_each_plane(
      workers, m, layer,
      [&kernels](const ForwardMemory& of, const ForwardRow& row, std::uint32_t plane, std::uint32_t index) {
        thread_local std::vector<const std::byte*> rows;
        rows.clear();
        for (std::uint32_t i = 0; i < of.near_counts[index]; ++i)
          rows.push_back(of.near + std::uint64_t{of.near_lists[index * of.list_room() + i]} * of.layout.row_bytes());
        attend_rows(kernels, of, row, index, rows);
        if (row.drafts != 0) attend_edge(kernels, of, row, plane, index);
      });
}

void fetch(const Kernels& kernels, const ForwardMemory& m, std::uint32_t layer) {
  if (!runs(m)) return;
  const auto now = std::chrono::duration_cast<std::chrono::nanoseconds>(RunClock::now().time_since_epoch());
  m.state->fetching_ns = static_cast<std::uint64_t>(now.count());
  const Deadline deadline = answer_deadline(m, fetching_since(m));
  std::vector<const std::byte*> rows;
  std::vector<const float*> scales;
  for_each_head(m, layer, [&](const ForwardRow& row, std::uint32_t head, std::uint32_t index) {
    if (row.asks != 0 && !m.fetches_chosen) return;
    if (row.asks != 0) {
      const auto chosen_for = shared(m.chosen[index].asked);
      await(m, deadline, [&] { return chosen_for.load(std::memory_order_acquire) == m.state->asked; });
    }
    if (!runs(m)) return;
    const std::uint32_t plane = m.plane(layer, head);
    const std::uint32_t far = m.far_listed[index];
    const ForwardChosen chosen = row.asks != 0 ? m.chosen[index] : ForwardChosen{.count = m.fetched_of(far)};
    const std::uint32_t* const entries = row.asks != 0 ? m.chosen_rows + index * m.chosen_room() : nullptr;
    const std::uint32_t* const listed = m.far_rows + std::uint64_t{index} * m.list_room() + far - m.fetched_of(far);
    if (row.asks != 0) m.fetch_heads[index] = chosen.heads;
    rows.resize(chosen.count);
    if (m.far_layout.scaled()) scales.resize(chosen.count);
    std::uint32_t near = 0;
    for (std::uint32_t i = 0; i < chosen.count; ++i) {
      const std::uint32_t at = row.asks != 0 ? m.row_of_entry(entries[i]) : listed[i];
      const std::uint32_t place = row.asks != 0 && m.keeps_chosen() ? m.near_row_of(plane, at) : kNone;
      rows[i] = place != kNone ? m.near_key(plane, place) : m.far_key(plane, at);
      if (m.far_layout.scaled()) scales[i] = m.far_scales(plane, at);
      if (place == kNone) continue;
      ++near;
      m.near_rows[m.near_row(plane, place)].used = static_cast<std::uint32_t>(m.state->forward);
    }
    if (row.asks != 0 && chosen.count != 0) {
      m.state->near_tokens += near;
      m.state->fetched_tokens += chosen.count - far - near;  // Of those that it listed the device has told.
    }
    const std::uint64_t first = first_head(m, index);
    kernels_for(kernels, m.far_layout.dtype)
        .attend({.q = m.q + first * m.shape.head_dim,
                 .scale = m.shape.score_scale(),
                 .softcap = m.shape.softcap,
                 .k = rows.data(),
                 .v_offset = m.far_layout.values_offset(),
                 .scales = scales.data(),
                 .members = chosen.members != 0 ? entries + chosen.count : nullptr,
                 .corrections = row.draws.any() ? m.far_corrections_of(index) + far - m.fetched_of(far) : nullptr,
                 .count = chosen.count,
                 .group = m.shape.group(),
                 .head_dim = m.shape.head_dim,
                 .out = m.fetched_out + first * m.shape.head_dim,
                 .lse = m.fetched_lse + first});
  });
}

namespace {

/// A query head's error bar, see EngineStats.
void count_error(const ForwardMemory& m, std::uint64_t h, float lse) {
  const DrawThresholds& thresholds = m.thresholds[h];
  const float bar = std::sqrt(static_cast<float>(thresholds.drawn)) * std::exp(thresholds.largest_left - lse);
  const auto millionths = static_cast<std::uint64_t>(1e6f * (bar < ErrorBar::kMost ? bar : ErrorBar::kMost));
  ++m.state->drawn_heads;
  m.state->error_bars += millionths;
  m.state->wide_bars += millionths > ErrorBar::kWide ? 1 : 0;
}

}  // namespace

void merge(const Kernels& kernels, const ForwardMemory& m, const ForwardLayer& layer) {
  // Its rows are as they were planned; what is late may have been found out before.
  if (!runs(m) && m.state->status != ForwardStatus::abandoned) return;
  if (runs(m)) await_answer(m);
  float sum[kMaxHeadDim];
  for (std::uint32_t r = 0; r < m.bucket.decode_rows; ++r) {
    const ForwardRow& row = m.rows[r];
    if (row.list == kNone) continue;
    const std::uint32_t packed = std::max(row.drafts, 1u);
    for (std::uint32_t i = 0; i < packed && !runs(m); ++i) fill_out(kernels, m, layer, row.at + i, kNaN, kNaN);
    const ForwardRow here = row.in(layer.layer, m.window);
    for (std::uint32_t h = 0; h < m.shape.q_heads && runs(m); ++h) {
      const auto [draft, head] = m.asker(h);
      if (draft >= packed) continue;
      const float lse = merge_head(m, std::uint64_t{r} * m.shape.q_heads + h, here, sum);
      if (here.draws.any()) count_error(m, std::uint64_t{r} * m.shape.q_heads + h, lse);
      kernels_for(kernels, layer.out.dtype).narrow(sum, layer.out.row(row.at + draft, head), m.shape.out_dim());
      if (layer.lse != nullptr) layer.lse[std::uint64_t{row.at + draft} * layer.out.heads + head] = lse;
    }
  }
}

void audit(const Kernels& kernels, const ForwardMemory& m, const ForwardLayer& layer) {
  if (!runs(m)) return;
  const std::uint32_t group = m.shape.group();
  for_each_head(m, layer.layer, [&](const ForwardRow& row, std::uint32_t kv_head, std::uint32_t index) {
    const std::uint64_t list = m.audit_list(layer.layer, index);
    std::uint32_t* const rows = m.audit_rows + list * m.list_room();
    const std::uint32_t* const near = m.near_lists + std::uint64_t{index} * m.list_room();
    for (std::uint32_t i = 0; i < m.near_counts[index]; ++i)
      rows[i] = m.far_row_of_near(m.plane(layer.layer, kv_head), near[i]);
    std::copy_n(m.far_rows + std::uint64_t{index} * m.list_room(), m.far_listed[index], rows + m.near_counts[index]);
    m.audit_counts[list] = m.near_counts[index] + m.far_listed[index];
    for (std::uint32_t h = 0; h < group; ++h) {
      const std::uint64_t to = list * group + h;
      const auto [draft, head] = m.asker(kv_head * group + h);
      if (draft >= std::max(row.drafts, 1u)) continue;
      std::copy_n(m.q + (first_head(m, index) + h) * m.shape.head_dim, m.shape.head_dim,
                  m.audit_q + to * m.shape.head_dim);
      kernels_for(kernels, layer.out.dtype)
          .widen(layer.out.row(row.at + draft, head), m.audit_out + to * m.shape.head_dim, m.shape.head_dim);
      m.audit_lse[to] = layer.lse[std::uint64_t{row.at + draft} * layer.out.heads + head];
    }
  });
}

}  // namespace sluice::cpu
