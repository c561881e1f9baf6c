#include "cpu/backend/backend.hpp"

#include <algorithm>
#include <cstring>
#include <vector>

#include "cpu/backend/row_list.hpp"
#include "cpu/backend/verbs.hpp"
#include "cpu/float16.hpp"

namespace sluice::cpu {
namespace {

/// Part of one task that one thread does.
struct Slice {
  std::uint32_t task = 0;
  std::uint32_t begin = 0;
  std::uint32_t end = 0;
};

constexpr std::uint32_t kSliceRows = 1024;

/// A verb's tasks, cut into slices of some of their items.
template <class Task>
struct SlicedTasks {
  std::vector<Task> tasks;
  std::vector<Slice> slices;

  /// Each task has size(task) items.
  template <class Size>
  void cut(std::span<const Task> from, const Size& size) {
    tasks.assign(from.begin(), from.end());
    slices.clear();
    for (std::uint32_t task = 0; task < tasks.size(); ++task) {
      const auto items = static_cast<std::uint32_t>(size(tasks[task]));
      for (std::uint32_t begin = 0; begin < items; begin += kSliceRows) {
        slices.push_back({.task = task, .begin = begin, .end = std::min(begin + kSliceRows, items)});
      }
    }
  }
};

template <class Task, class Size>
std::uint64_t total(std::span<const Task> tasks, const Size& size) {
  std::uint64_t sum = 0;
  for (const Task& task : tasks) sum += size(task);
  return sum;
}

/// A row of any length in any dtype to float32: whole units by the kernel, the rest one by one.
void widen_row(const Kernels& kernels, DType type, const std::byte* in, std::size_t count, float* out) {
  const std::size_t whole = count / kHeadDimUnit * kHeadDimUnit;
  kernels_for(kernels, type).widen(in, out, whole);
  for (std::size_t i = whole; i < count; ++i) {
    if (type == DType::f32) {
      std::memcpy(out + i, in + i * sizeof(float), sizeof(float));
      continue;
    }
    std::uint16_t bits = 0;
    std::memcpy(&bits, in + i * sizeof bits, sizeof bits);
    out[i] = type == DType::bf16 ? bf16_to_float(bits) : f16_to_float(bits);
  }
}

/// Rows of one half (K or V) of a page.
struct RowCopy {
  const std::byte* from = nullptr;
  std::uint64_t stride_bytes = 0;
  std::byte* to = nullptr;
  std::uint32_t rows = 0;
};

void append_half(const Kernels& kernels, DType from_type, const PageLayout& layout, const RowCopy& copy) {
  float wide[kMaxHeadDim];
  for (std::uint32_t r = 0; r < copy.rows; ++r) {
    const std::byte* const from = copy.from + r * copy.stride_bytes;
    std::byte* const to = copy.to + r * layout.row_bytes();
    if (from_type == layout.dtype) {
      std::memcpy(to, from, layout.row_bytes());
    } else {
      kernels_for(kernels, from_type).widen(from, wide, layout.head_dim);
      kernels_for(kernels, layout.dtype).narrow(wide, to, layout.head_dim);
    }
  }
}

}  // namespace

Backend::Backend(const Workers& workers, const Kernels* kernels)
    : workers_(workers), kernels_(kernels != nullptr ? *kernels : fastest_kernels()) {}

std::string Backend::isa() const { return kernels_.name; }

std::vector<std::string> Backend::unsupported_reasons(const AttentionShape& shape, const PageLayout& layout) const {
  return cpu::unsupported_reasons(shape, layout);
}

void Backend::append(std::span<const AppendTask> tasks, const PageLayout& layout, Stream*) {
  if (tasks.empty()) return;
  check("append", layout);
  const std::uint64_t rows = total(tasks, [](const AppendTask& task) { return task.count; });
  for_each_task(workers_, tasks, rows * 2 * layout.row_bytes(), [&kernels = kernels_, layout](const AppendTask& task) {
    const std::uint64_t stride = task.token_stride * bytes_of(task.dtype);
    std::byte* const k = task.page + task.first_row * layout.row_bytes();
    append_half(kernels, task.dtype, layout, {.from = task.k, .stride_bytes = stride, .to = k, .rows = task.count});
    append_half(kernels, task.dtype, layout,
                {.from = task.v, .stride_bytes = stride, .to = k + layout.half_bytes(), .rows = task.count});
  });
}

void Backend::digest(std::span<const DigestTask> tasks, DigestKind kind, const PageLayout& layout, Stream*) {
  if (tasks.empty()) return;
  check("digest", layout);
  const ElementKernels& kernels = kernels_for(kernels_, layout.dtype);
  const auto run = kind == DigestKind::box ? kernels.digest_box : kernels.digest_cuboid_mean;
  for_each_task(workers_, tasks, tasks.size() * layout.half_bytes(), [run, layout](const DigestTask& task) {
    run({.k = task.page, .out = task.out, .rows = layout.page_tokens, .head_dim = layout.head_dim});
  });
}

void Backend::score_pages(std::span<const ScorePagesTask> tasks, const AttentionShape& shape, DType digest_dtype, Stream*) {
  if (tasks.empty()) return;
  check("score_pages", shape);
  const auto pages = [](const ScorePagesTask& task) { return task.pages; };
  const auto lent = Lent<SlicedTasks<ScorePagesTask>>::reused(workers_);
  lent->cut(tasks, pages);
  const std::uint64_t digest_bytes = std::uint64_t{2} * shape.head_dim * bytes_of(digest_dtype);
  const ElementKernels& kernels = kernels_for(kernels_, digest_dtype);
  for_each_unit(workers_, lent->slices.size(), total(tasks, pages) * digest_bytes,
                [all = lent.get(), &kernels, shape](std::uint32_t i) {
                  const Slice& slice = all->slices[i];
                  const ScorePagesTask& task = all->tasks[slice.task];
                  kernels.score_digests({.q = task.q,
                                         .digests = task.digests,
                                         .frames = task.frames + slice.begin,
                                         .count = slice.end - slice.begin,
                                         .group = shape.group(),
                                         .head_dim = shape.head_dim,
                                         .out = task.out + slice.begin,
                                         .out_stride = task.pages});
                });
}

void Backend::score_tokens(std::span<const ScoreTokensTask> tasks, const AttentionShape& shape, Stream*) {
  if (tasks.empty()) return;
  for (const ScoreTokensTask& task : tasks) check("score_tokens", shape, task.kv.layout);
  const auto tokens = [](const ScoreTokensTask& task) { return task.tokens.size(); };
  const auto lent = Lent<SlicedTasks<ScoreTokensTask>>::reused(workers_);
  lent->cut(tasks, tokens);
  const std::uint64_t row_bytes = tasks.front().kv.layout.row_bytes();
  for_each_unit(workers_, lent->slices.size(), total(tasks, tokens) * row_bytes,
                [all = lent.get(), &kernels = kernels_, shape](std::uint32_t i) {
                  const Slice& slice = all->slices[i];
                  const ScoreTokensTask& task = all->tasks[slice.task];
                  const std::byte* rows[kSliceRows];
                  list_rows(task.kv, task.tokens.subspan(slice.begin, slice.end - slice.begin), rows);
                  kernels_for(kernels, task.kv.layout.dtype)
                      .score({.q = task.q,
                              .k = rows,
                              .count = slice.end - slice.begin,
                              .group = shape.group(),
                              .head_dim = shape.head_dim,
                              .out = task.out + std::size_t{slice.begin} * shape.group()});
                });
}

void Backend::top_k(std::span<const TopKTask> tasks, Stream*) {
  const std::uint64_t values = total(tasks, [](const TopKTask& task) { return task.values.size(); });
  for_each_task(workers_, tasks, values * sizeof(float), [](const TopKTask& task) {
    select_top_k(task.values.data(), static_cast<std::uint32_t>(task.values.size()), task.k, task.out);
  });
}

void Backend::to_f32(std::span<const ToF32Task> tasks, Stream*) {
  for (const auto& [in, out] : tasks) {
    const std::uint64_t row = std::uint64_t{in.heads} * in.head_dim;
    for_each_unit(workers_, in.tokens, in.tokens * row * sizeof(float),
                  [&kernels = kernels_, in = in, out = out, row](std::uint32_t token) {
                    for (std::uint32_t head = 0; head < in.heads; ++head) {
                      float* const to = out + token * row + std::uint64_t{head} * in.head_dim;
                      widen_row(kernels, in.dtype, in.row(token, head), in.head_dim, to);
                    }
                  });
  }
}

}  // namespace sluice::cpu
