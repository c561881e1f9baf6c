#include "tools/stages/host_stages.hpp"

#include <algorithm>
#include <cstring>
#include <vector>

#include "cpu/stages/rows.hpp"
#include "cpu/stages/shapes.hpp"

namespace sluice::tools {
namespace {

/// A row of any length to float32: whole units by the kernel, the rest by a unit of its own.
void widen_row(const cpu::Kernels& kernels, DType type, const std::byte* in, std::size_t count, float* out) {
  const std::size_t whole = count / cpu::kHeadDimUnit * cpu::kHeadDimUnit;
  cpu::kernels_for(kernels, type).widen(in, out, whole);
  if (whole == count) return;
  alignas(64) std::byte rest[cpu::kHeadDimUnit * sizeof(float)] = {};
  float wide[cpu::kHeadDimUnit];
  std::memcpy(rest, in + whole * bytes_of(type), (count - whole) * bytes_of(type));
  cpu::kernels_for(kernels, type).widen(rest, wide, cpu::kHeadDimUnit);
  std::copy_n(wide, count - whole, out + whole);
}

/// Rows of one half of a page; `scales`: the first row's, every second one, or null.
void append_half(const cpu::Kernels& kernels, const AppendTask& task, const PageLayout& layout, const std::byte* from,
                 std::byte* to, float* scales) {
  float wide[cpu::kMaxHeadDim];
  for (std::uint32_t r = 0; r < task.count; ++r, to += layout.row_bytes()) {
    const std::byte* const row = from + r * task.token_stride * bytes_of(task.dtype);
    if (task.dtype == layout.dtype) {
      std::memcpy(to, row, layout.row_bytes());
    } else {
      cpu::kernels_for(kernels, task.dtype).widen(row, wide, layout.head_dim);
      cpu::write_row(kernels, layout, wide, to, scales == nullptr ? nullptr : scales + 2 * r);
    }
  }
}

}  // namespace

std::vector<std::string> HostStages::unsupported_reasons(const AttentionShape& shape, const PageLayout& layout) const {
  return cpu::unsupported_reasons(shape, layout);
}

void HostStages::append(std::span<const AppendTask> tasks, const PageLayout& layout, Stream*) {
  if (tasks.empty()) return;
  cpu::check("append", layout);
  for (const AppendTask& task : tasks) cpu::check_tensor_type("append", task.dtype);
  for (const AppendTask& task : tasks) {
    std::byte* const k = task.page + task.first_row * layout.row_bytes();
    auto* const scales = const_cast<float*>(cpu::scales_in(layout, task.page, task.first_row));
    append_half(host_.kernels, task, layout, task.k, k, scales);
    if (layout.latent) continue;  // The value is a part of the key.
    append_half(host_.kernels, task, layout, task.v, k + layout.half_bytes(), scales == nullptr ? nullptr : scales + 1);
  }
}

void HostStages::to_f32(std::span<const ToF32Task> tasks, Stream*) {
  for (const ToF32Task& task : tasks) {
    cpu::check_tensor_type("to_f32", task.in.dtype);
    float* out = task.out;
    for (std::uint32_t token = 0; token < task.in.tokens; ++token) {
      for (std::uint32_t head = 0; head < task.in.heads; ++head, out += task.in.head_dim)
        widen_row(host_.kernels, task.in.dtype, task.in.row(token, head), task.in.head_dim, out);
    }
  }
}

void HostStages::attend(std::span<const AttendTask> tasks, const AttentionShape& shape, Stream*) {
  cpu::attend(host_, tasks, shape);
}

void HostStages::merge(std::span<const MergeTask> tasks, const AttentionShape& shape, DType out_dtype, Stream*) {
  if (tasks.empty()) return;
  cpu::check("merge", shape);
  cpu::check_tensor_type("merge", out_dtype);
  const std::uint32_t rows = shape.group();
  std::vector<float> out(std::size_t{rows} * shape.head_dim);
  std::vector<float> lse(rows);
  for (const MergeTask& task : tasks) {
    std::copy_n(task.parts.front().out, out.size(), out.data());
    std::copy_n(task.parts.front().lse, rows, lse.data());
    for (const Partial& part : task.parts.subspan(1))
      cpu::merge_into({.out = out.data(), .lse = lse.data()}, part, rows, shape.head_dim);
    for (std::uint32_t row = 0; row < rows; ++row)
      cpu::kernels_for(host_.kernels, out_dtype)
          .narrow(&out[std::size_t{row} * shape.head_dim],
                  task.out + std::size_t{row} * shape.out_dim() * bytes_of(out_dtype), shape.out_dim());
    if (task.lse != nullptr) std::copy_n(lse.data(), rows, task.lse);
  }
}

void HostStages::score_pages(std::span<const ScorePagesTask> tasks, const AttentionShape& shape, DType digest_dtype,
                             Stream*) {
  cpu::score_pages(host_, tasks, shape, digest_dtype);
}

void HostStages::score_int4(std::span<const ScoreInt4Task> tasks, const AttentionShape& shape, const PageLayout& layout,
                            Stream*) {
  cpu::score_int4(host_, tasks, shape, layout);
}

void HostStages::top_k(std::span<const TopKTask> tasks, Stream*) { cpu::top_k(host_, tasks); }

void HostStages::top_p(std::span<const TopPTask> tasks, Stream*) { cpu::top_p(host_, tasks); }

void HostStages::cluster(std::span<const ClusterTask> tasks, Stream*) { cpu::cluster(host_, tasks); }

std::uint64_t HostStages::cluster_scratch_bytes(const ClusterTask&) const { return 0; }

void HostStages::choose_clusters(std::span<const ChooseClustersTask> tasks, const AttentionShape& shape,
                                 const PageLayout& layout, Stream*) {
  cpu::choose_clusters(host_, tasks, shape, layout);
}

std::uint64_t HostStages::choose_clusters_scratch_bytes(const ChooseClustersTask&, const AttentionShape&) const {
  return 0;
}

void HostStages::choose_pages(std::span<const ChoosePagesTask> tasks, const AttentionShape& shape,
                              const PageLayout& layout, Stream*) {
  cpu::choose_pages(host_, tasks, shape, layout);
}

void HostStages::prefill(std::span<const PrefillTask> tasks, const PrefillShape& strides, const AttentionShape& shape,
                         Stream*) {
  cpu::prefill(host_, tasks, strides, shape);
}

void HostStages::select_blocks(std::span<const SelectBlocksTask> tasks, const PrefillSpec& spec,
                               const PrefillShape& strides, const AttentionShape& shape, Stream*) {
  cpu::select_blocks(host_, tasks, spec, strides, shape);
}

std::uint64_t HostStages::select_blocks_scratch_bytes(std::uint32_t, std::uint32_t, const AttentionShape&) const {
  return 0;
}

}  // namespace sluice::tools
