// Verbs that estimate attention by 4-bit copies of keys, and keep what is heavy (Twilight).

#include <algorithm>
#include <limits>
#include <vector>

#include "cpu/backend.hpp"
#include "cpu/verbs.hpp"

namespace sluice::cpu {
namespace {

/// Pages that one thread scores at a time for one query head, or for all of them.
struct PageSlice {
  const ScoreInt4Task* task = nullptr;
  std::uint32_t head = 0;
  std::uint32_t begin = 0;  ///< of the task's pages, or of the head's list
  std::uint32_t end = 0;
};

constexpr std::uint32_t kSliceRows = 1024;

/// Addresses of a few rows on their way to the kernel.
class RowBatch {
 public:
  explicit RowBatch(const Int4Layout& layout) : layout_(layout) {}
  [[nodiscard]] bool full() const noexcept { return count_ == kSliceRows; }
  void add(const std::byte* copy, std::uint32_t row) noexcept {
    codes_[count_] = copy + row * layout_.row_bytes();
    params_[count_++] = copy + layout_.params_offset() + row * Int4Layout::kParamBytes;
  }
  /// Scores the rows for heads [0, group) of `q` and starts again.
  void flush(const Kernels& kernels, const float* q, std::uint32_t group, float* out, std::uint64_t token_stride,
             std::uint64_t head_stride) noexcept {
    kernels.score_int4({.q = q,
                        .codes = codes_,
                        .params = params_,
                        .count = count_,
                        .group = group,
                        .head_dim = layout_.head_dim,
                        .out = out,
                        .token_stride = token_stride,
                        .head_stride = head_stride});
    count_ = 0;
  }

 private:
  Int4Layout layout_;
  std::uint32_t count_ = 0;
  const std::byte* codes_[kSliceRows];
  const std::byte* params_[kSliceRows];
};

/// Rows of one slice, scored in batches; what is not visible becomes -infinity.
void score_slice(const Kernels& kernels, const PageSlice& slice, const AttentionShape& shape,
                 const Int4Layout& layout) {
  const ScoreInt4Task& task = *slice.task;
  const bool lists = task.lists != nullptr;
  const std::uint32_t page_tokens = layout.page_tokens;
  const std::uint64_t stride = lists ? std::uint64_t{task.listed} * page_tokens : task.tokens;
  const float* const q = task.q + std::size_t{slice.head} * shape.head_dim;
  float* const out = task.out + slice.head * stride;
  RowBatch batch(layout);
  std::uint64_t done = std::uint64_t{slice.begin} * page_tokens;
  std::uint64_t next = done;
  const auto flush = [&] {
    batch.flush(kernels, q, lists ? 1 : shape.group(), out + done, 1, stride);
    done = next;
  };
  for (std::uint32_t i = slice.begin; i < slice.end; ++i) {
    const std::uint32_t page = lists ? task.lists[slice.head * task.listed + i] : i;
    const std::uint64_t first = std::uint64_t{page} * page_tokens;
    const auto visible = first < task.tokens ? std::min<std::uint64_t>(page_tokens, task.tokens - first) : 0;
    const std::byte* const copy = visible == 0 ? nullptr : task.copies + task.frames[page] * layout.page_bytes();
    for (std::uint32_t row = 0; row < visible; ++row) {
      batch.add(copy, row);
      ++next;
      if (batch.full()) flush();
    }
    if (!lists || visible == page_tokens) continue;
    flush();
    std::fill_n(out + next, page_tokens - visible, -std::numeric_limits<float>::infinity());
    next += page_tokens - visible;
    done = next;
  }
  flush();
}

}  // namespace

void Backend::quantize(std::span<const QuantizeTask> tasks, const PageLayout& layout, Stream*) {
  if (tasks.empty()) return;
  check("quantize", layout);
  const Int4Layout copy(layout);
  for_each_unit(workers_, tasks.size(), tasks.size() * layout.half_bytes(), [&](std::uint32_t i) {
    kernels_for(kernels_, layout.dtype)
        .quantize({.k = tasks[i].page,
                   .codes = tasks[i].out,
                   .params = tasks[i].out + copy.params_offset(),
                   .rows = tasks[i].rows,
                   .head_dim = layout.head_dim});
  });
}

void Backend::score_int4(std::span<const ScoreInt4Task> tasks, const AttentionShape& shape, const PageLayout& layout,
                         Stream*) {
  if (tasks.empty()) return;
  check("score_int4", shape, layout);
  thread_local std::vector<PageSlice> own_slices;
  std::vector<PageSlice>& slices = own_slices;
  slices.clear();
  const std::uint32_t step = std::max(1u, kSliceRows / layout.page_tokens);
  std::uint64_t pages = 0;
  for (const ScoreInt4Task& task : tasks) {
    const bool lists = task.lists != nullptr;
    const auto all = lists ? task.listed : static_cast<std::uint32_t>(div_up(task.tokens, layout.page_tokens));
    for (std::uint32_t head = 0; head < (lists ? shape.group() : 1); ++head) {
      pages += all;
      for (std::uint32_t begin = 0; begin < all; begin += step) {
        slices.push_back({.task = &task, .head = head, .begin = begin, .end = std::min(begin + step, all)});
      }
    }
  }
  const Int4Layout copy(layout);
  for_each_unit(workers_, slices.size(), pages * copy.page_bytes(),
                [&](std::uint32_t i) { score_slice(kernels_, slices[i], shape, copy); });
}

void Backend::estimate_tokens(const EstimateTask& task, const AttentionShape& shape, const PageLayout& layout) {
  check("estimate_tokens", shape, layout);
  const Int4Layout copy(layout);
  const std::uint32_t group = shape.group();
  const std::uint64_t slices = div_up(task.tokens.size(), kSliceRows);
  for_each_unit(workers_, slices, task.tokens.size() * copy.row_bytes(), [&](std::uint32_t i) {
    const std::size_t begin = std::size_t{i} * kSliceRows;
    RowBatch batch(copy);
    for (const std::uint32_t token :
         task.tokens.subspan(begin, std::min<std::size_t>(kSliceRows, task.tokens.size() - begin))) {
      batch.add(task.copies + task.frames[token / copy.page_tokens] * copy.page_bytes(), token % copy.page_tokens);
    }
    batch.flush(kernels_, task.q, group, task.out + begin * group, group, 1);
  });
}

void Backend::top_p(std::span<const TopPTask> tasks, Stream*) {
  if (tasks.empty()) return;
  std::uint64_t bytes = 0;
  for (const TopPTask& task : tasks) bytes += task.values.size_bytes();
  for_each_unit(workers_, tasks.size(), bytes, [&](std::uint32_t i) {
    const TopPTask& task = tasks[i];
    const std::uint32_t kept = select_top_p(kernels_, task.values, task.p, task.mask);
    if (task.count != nullptr) *task.count = kept;
  });
}

}  // namespace sluice::cpu
