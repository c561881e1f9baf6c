// Far pages that the device attends: they pass through the two halves of the staging memory, so that one
// half is copied while the other is attended.
#include <algorithm>

#include "runtime/pipeline.hpp"

namespace sluice::runtime {
namespace {

/// Logical pages that a selection touches, ascending.
void touched_pages(const SelectionRow& row, std::uint32_t page_tokens, std::vector<std::uint32_t>& out) {
  out.clear();
  for (const PageRun& run : row.runs) out.push_back(run.page);
  for (const std::uint32_t token : row.tokens) {
    const std::uint32_t page = token / page_tokens;
    if (out.empty() || out.back() != page) out.push_back(page);
  }
  if (!row.runs.empty() && !row.tokens.empty()) {
    std::sort(out.begin(), out.end());
    out.erase(std::unique(out.begin(), out.end()), out.end());
  }
}

/// The part of a selection that lies in pages [first, last].
AttendTask slice(const SelectionRow& row, std::uint32_t group, std::uint32_t page_tokens, std::uint32_t first,
                 std::uint32_t last) {
  const auto before = [](const PageRun& run, std::uint32_t page) { return run.page < page; };
  const auto run_begin = std::lower_bound(row.runs.begin(), row.runs.end(), first, before);
  const auto run_end = std::lower_bound(run_begin, row.runs.end(), last + 1, before);
  const auto begin = static_cast<std::size_t>(
      std::lower_bound(row.tokens.begin(), row.tokens.end(), first * page_tokens) - row.tokens.begin());
  const auto end = static_cast<std::size_t>(
      std::lower_bound(row.tokens.begin(), row.tokens.end(), (last + 1) * page_tokens) - row.tokens.begin());
  AttendTask task;
  task.runs = {run_begin, run_end};
  task.tokens = std::span(row.tokens).subspan(begin, end - begin);
  if (!row.members.empty()) task.members = std::span(row.members).subspan(begin, end - begin);
  if (!row.scores.empty()) task.scores = std::span(row.scores).subspan(begin * group, (end - begin) * group);
  return task;
}

}  // namespace

void Pipeline::fetch() {
  const std::uint32_t half = parts_.staging_pages / 2;
  const std::uint32_t group = shape_.group();
  std::uint32_t batches = 0;
  std::uint32_t used = half;  // Pages in the last batch; "full" opens the first.
  std::vector<std::uint32_t> touched;
  for (HeadWork& work : heads_) {
    touched_pages(work.placement.fetch, layout_.page_tokens, touched);
    if (touched.empty()) continue;
    work.sequence->stats.h2d_bytes += touched.size() * layout_.page_bytes();
    const HeadPages& pages = work.pages();
    work.staged.assign(pages.pages(), kNone);
    for (std::size_t i = 0; i < touched.size();) {
      if (used == half) {
        used = 0;
        buffers_.reserve_fetch(++batches);
        buffers_.late.fetches[batches - 1].moves.clear();
        buffers_.late.fetches[batches - 1].tasks.clear();
      }
      FetchBatch& batch = buffers_.late.fetches[batches - 1];
      const std::uint32_t base = (batches - 1) % 2 * half;
      const std::size_t stop = std::min(touched.size(), i + (half - used));
      AttendTask task = slice(work.placement.fetch, group, layout_.page_tokens, touched[i], touched[stop - 1]);
      for (; i < stop; ++i, ++used) {
        work.staged[touched[i]] = base + used;
        batch.moves.push_back({.page = pages.refs[touched[i]], .slot = base + used});
      }
      const std::uint32_t head = work.kv_head * group;
      task.q = buffers_.device_q(work.row, head);
      task.kv = {.base = parts_.staging, .frames = work.staged.data(), .layout = layout_};
      task.out = buffers_.fetched(batches - 1, work.row, head);
      work.parts.push_back(task.out);
      batch.tasks.push_back(task);
    }
  }
  fetch_batches_ = batches;
  for (std::uint32_t i = 0; i < std::min(2u, batches); ++i) copy_batch(i);
}

void Pipeline::copy_batch(std::uint32_t index) {
  parts_.link.fetch(buffers_.late.fetches[index].moves, parts_.staging);
  parts_.link.stream().record(*buffers_.copied[index]);
}

void Pipeline::attend_fetched() {
  Stream& device = executor_.device_stream();
  for (std::uint32_t i = 0; i < fetch_batches_; ++i) {
    device.wait(*buffers_.copied[i]);
    parts_.device.backend().attend(buffers_.late.fetches[i].tasks, shape_, &device);
    if (i + 2 >= fetch_batches_) continue;
    device.record(*buffers_.attended[i]);
    parts_.link.stream().wait(*buffers_.attended[i]);
    copy_batch(i + 2);
  }
}

}  // namespace sluice::runtime
