// Rows that attend everything, page by page.
#include <algorithm>
#include <vector>

#include "cpu/forward/forward_layer.hpp"
#include "cpu/threads/lent.hpp"
#include "sluice/step/partial.hpp"

namespace sluice::cpu {
namespace {

/// How many of a row's tokens lie near, by its index.
std::vector<std::uint32_t> count_near(const Workers& workers, const ForwardMemory& m, std::uint32_t layer) {
  const Lent<std::vector<std::uint32_t>> counts(workers, m.bucket.decode_rows * m.shape.kv_heads);
  for_each_plane(
      workers, m, layer,
      [all = counts->data()](const ForwardMemory& of, const ForwardRow& row, std::uint32_t plane, std::uint32_t index) {
        for (std::uint32_t token = 0; token < row.tokens; ++token)
          all[index] += of.near_row_of(plane, of.row_of(row.list, token)) != kNone ? 1 : 0;
      });
  return *counts;
}

/// All of a row's pages.
void append_runs(const ForwardMemory& m, std::uint32_t tokens, std::vector<PageRun>& runs) {
  const std::uint32_t page_tokens = m.layout.page_tokens;
  for (std::uint32_t page = 0; page * page_tokens < tokens; ++page) {
    const std::uint32_t end = std::min(page_tokens, tokens - page * page_tokens);
    runs.push_back({.page = page, .begin = 0, .end = static_cast<std::uint16_t>(end)});
  }
}

/// A query head's part of all keys to its output.
void put_whole(const Kernels& kernels, const ForwardMemory& m, const ForwardLayer& layer, const ForwardRow& row,
               std::uint32_t h, float* out, float lse) {
  if (!(lse > kEmptyLse)) {  // Keys were attended and weigh nothing that is a number.
    std::fill_n(out, m.shape.head_dim, kNaN);
    lse = kNaN;
  }
  kernels_for(kernels, layer.out.dtype).narrow(out, layer.out.row(row.at, h), m.shape.out_dim());
  if (layer.lse != nullptr) layer.lse[std::uint64_t{row.at} * layer.out.heads + h] = lse;
}

}  // namespace

// What lies near lies in far memory, too, here as fast and page by page.
void attend_whole(const Host& host, const ForwardMemory& m, const ForwardLayer& layer) {
  if (!runs(m)) return;
  std::vector<std::uint32_t> near;
  if (m.near_pages != 0) near = count_near(host.workers, m, layer.layer);
  struct Pages {
    std::vector<std::vector<PageRun>> runs;
  };
  const Lent<Pages> pages(host.workers);
  pages->runs.resize(m.bucket.decode_rows);
  std::vector<AttendTask> tasks;
  for_each_head(m, layer.layer, [&](const ForwardRow& row, std::uint32_t head, std::uint32_t index) {
    std::vector<PageRun>& runs = pages->runs[index / m.shape.kv_heads];
    if (runs.empty()) append_runs(m, row.tokens, runs);
    const std::uint64_t first = first_head(m, index);
    AttendTask& task = tasks.emplace_back();
    task.q = m.q + first * m.shape.head_dim;
    task.kv = {
        .base = m.far_block(m.plane(layer.layer, head), 0), .frames = m.list_of(row.list), .layout = m.far_layout};
    task.runs = runs;
    task.out = {.out = m.near_out + first * m.shape.head_dim, .lse = m.near_lse + first};
    const std::uint32_t here = near.empty() ? 0 : near[index];
    m.state->near_tokens += here;
    m.state->fetched_tokens += row.tokens - here;
  });
  attend(host, tasks, m.shape);
  for_each_head(m, layer.layer, [&](const ForwardRow& row, std::uint32_t head, std::uint32_t index) {
    for (std::uint32_t g = 0; g < m.shape.group(); ++g) {
      const std::uint64_t h = first_head(m, index) + g;
      put_whole(host.kernels, m, layer, row, head * m.shape.group() + g, m.near_out + h * m.shape.head_dim,
                m.near_lse[h]);
    }
  });
}

}  // namespace sluice::cpu
