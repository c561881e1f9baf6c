// Scores as estimated by copies of keys in codes (Twilight).

#include <algorithm>
#include <limits>
#include <vector>

#include "cpu/stages/code_rows.hpp"
#include "cpu/stages/rows.hpp"
#include "cpu/stages/shapes.hpp"
#include "cpu/stages/sharing.hpp"
#include "cpu/stages/stages.hpp"

namespace sluice::cpu {
namespace {

/// Pages that one thread scores at a time for one query head, or for all of them; or a tail.
struct PageSlice {
  const ScoreInt4Task* task = nullptr;
  std::uint32_t head = 0;
  std::uint32_t begin = 0;  ///< of the row's pages
  std::uint32_t end = 0;
  bool tail = false;
};

struct ScoreInt4Call {
  std::vector<ScoreInt4Task> tasks;
  std::vector<PageSlice> slices;
};

/// Rows of one slice, scored in batches; in a row of listed pages -infinity where one has no row for it.
void score_slice(const Kernels& kernels, const PageSlice& slice, const AttentionShape& shape,
                 const CodeLayout& layout) {
  const ScoreInt4Task& task = *slice.task;
  const bool lists = task.lists != nullptr;
  const std::uint32_t page_tokens = layout.page_tokens;
  const std::uint64_t stride = task.row(page_tokens);
  const float* const q = task.q + std::size_t{slice.head} * shape.head_dim;
  float* const out = task.out + slice.head * stride;
  CodeRows batch(layout);
  std::uint64_t done = std::uint64_t{slice.begin} * page_tokens;
  std::uint64_t next = done;
  const auto flush = [&] {
    batch.flush(kernels, q, task.mean, shape.score_scale(), lists ? 1 : shape.group(), out + done, 1, stride);
    done = next;
  };
  const auto skip = [&](std::uint32_t count) {
    if (count == 0) return;
    flush();
    std::fill_n(out + next, count, -std::numeric_limits<float>::infinity());
    done = next += count;
  };
  for (std::uint32_t i = slice.begin; i < slice.end; ++i) {
    const PageRun run = task.run(slice.head, i, page_tokens);
    const std::byte* const copy =
        run.tokens() == 0 ? nullptr : task.copies + task.frames[run.page] * layout.page_bytes();
    skip(run.begin);
    for (std::uint32_t row = run.begin; row < run.end; ++row) {
      batch.add(copy, row);
      ++next;
      if (batch.full()) flush();
    }
    if (lists) skip(page_tokens - run.end);
  }
  flush();
}

/// Exact scores of the newest page for all heads.
void score_tail(const Kernels& kernels, const ScoreInt4Task& task, const AttentionShape& shape,
                const PageLayout& layout) {
  constexpr std::uint32_t kRows = 32;
  const std::byte* rows[kRows];
  const float* scales[kRows];
  float scores[kRows * kMaxGroup];
  const std::uint64_t stride = task.row(layout.page_tokens);
  float* const out = task.out + task.estimates(layout.page_tokens);
  for (std::uint32_t first = 0; first < task.tail_rows; first += kRows) {
    const std::uint32_t count = std::min(kRows, task.tail_rows - first);
    for (std::uint32_t i = 0; i < count; ++i) {
      rows[i] = task.tail + (first + i) * layout.row_bytes();
      scales[i] = scales_in(layout, task.tail, first + i);
    }
    kernels_for(kernels, layout.dtype)
        .score({.q = task.q,
                .scale = shape.score_scale(),
                .k = rows,
                .scales = scales,
                .count = count,
                .group = shape.group(),
                .head_dim = shape.head_dim,
                .out = scores});
    for (std::uint32_t i = 0; i < count; ++i) {
      for (std::uint32_t h = 0; h < shape.group(); ++h) out[h * stride + first + i] = scores[i * shape.group() + h];
    }
  }
}

}  // namespace

void score_int4(const Host& host, std::span<const ScoreInt4Task> tasks, const AttentionShape& shape,
                const PageLayout& layout) {
  if (tasks.empty()) return;
  check("score_int4", shape, layout);
  const auto call = Lent<ScoreInt4Call>::reused(host.workers);
  call->tasks.assign(tasks.begin(), tasks.end());
  call->slices.clear();
  const std::uint32_t step = std::max(1u, CodeRows::kMost / layout.page_tokens);
  std::uint64_t pages = 0;
  for (const ScoreInt4Task& task : call->tasks) {
    const bool lists = task.lists != nullptr;
    const auto all = static_cast<std::uint32_t>(div_up(task.estimates(layout.page_tokens), layout.page_tokens));
    if (task.tail_rows != 0) call->slices.push_back({.task = &task, .tail = true});
    for (std::uint32_t head = 0; head < (lists ? shape.group() : 1); ++head) {
      pages += all;
      for (std::uint32_t begin = 0; begin < all; begin += step) {
        call->slices.push_back({.task = &task, .head = head, .begin = begin, .end = std::min(begin + step, all)});
      }
    }
  }
  const CodeLayout copy(layout, call->tasks.front().bits);
  for_each_unit(host.workers, call->slices.size(), pages * copy.page_bytes(),
                [all = call.get(), &kernels = host.kernels, shape, layout, copy](std::uint32_t i) {
                  const PageSlice& slice = all->slices[i];
                  if (slice.tail) return score_tail(kernels, *slice.task, shape, layout);
                  score_slice(kernels, slice, shape, copy);
                });
}

}  // namespace sluice::cpu
